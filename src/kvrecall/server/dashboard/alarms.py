"""The alarms of a running server: cause, count, time and cure. Their names are those of the alert
rules for Prometheus (deploy/alerts.yml)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from kvrecall.server.dashboard.sample import Sample

ENGINE_DOWN = "KvrecallReplicaDown"
POOL_AWAY = "KvrecallPoolServiceAway"
HELP = "docs/troubleshooting.md#"


class Severity(StrEnum):
    """The severity of an alarm."""

    ERROR = "error"  # something is broken, or was lost
    WARNING = "warning"  # recall is less effective than it could be


@dataclass(frozen=True, slots=True)
class Alarm:
    """``count``: how many ``unit`` since ``since``; None: it is a state that lasts. Times are
    wall-clock seconds; ``last`` is when it was last seen. ``page``: where the documentation says
    more."""

    name: str
    severity: Severity
    title: str
    count: int | None
    unit: str
    since: float
    last: float
    detail: str
    cure: str
    page: str


@dataclass(frozen=True, slots=True)
class Rule:
    """``value``: a counter of ``unit``, or with ``state`` not 0 while it lasts; None: it is set by
    ``note``. ``page``: the section of HELP. ``lasts``: once counted, it stays until the server
    ends."""

    name: str
    severity: Severity
    title: str
    cure: str
    page: str
    value: Callable[[Sample], float] | None
    unit: str = "blocks"
    state: bool = False
    lasts: bool = False


def _count(name: str) -> Callable[[Sample], float]:
    return lambda sample: sample.counts[name]


def _of_tier(tier: str, figure: str) -> Callable[[Sample], float]:
    return lambda sample: sample.tiers.get(tier, {}).get(figure, 0.0)


RULES = (
    Rule(
        ENGINE_DOWN,
        Severity.ERROR,
        "An engine process has died",
        "All requests fail and the server stops. The traceback is in its log. Restart the server; "
        "it recalls the blocks on disk.",
        "a-server-is-down",
        None,
        state=True,
    ),
    Rule(
        POOL_AWAY,
        Severity.ERROR,
        "The pool does not answer",
        "Prompts are computed; nothing is recalled or saved. With a pool service: start `kvrecall "
        "pool serve` with this server's socket; engines reconnect automatically, which the next "
        "request shows. With an embedded pool: the server's log names the cause.",
        "the-pool-service-is-away",
        None,
        state=True,
    ),
    Rule(
        "KvrecallAuditFailed",
        Severity.ERROR,
        "Audits failed: the pool's blocks differ from what this engine computes",
        "The engine reads and writes no shared blocks of this namespace until it is restarted. "
        "Compare the namespaces in the logs of all engines of the pool (docs/identity.md).",
        "an-audit-failed",
        _count("audits_failed"),
        "audits",
        lasts=True,
    ),
    *(
        Rule(
            "KvrecallCorruptBlocks",
            Severity.ERROR,
            f"Corrupt blocks dropped from the {tier} tier",
            cure,
            "blocks-are-damaged",
            _of_tier(tier, "corrupt"),
        )
        for tier, cure in (
            (
                "disk",
                "Answers stay correct; the blocks are recomputed. Check the medium (dmesg, "
                "smartctl), then `kvrecall pool verify`.",
            ),
            (
                "remote",
                "Answers stay correct; the blocks are recomputed. Check the store, and that only "
                "kvrecall writes under its prefix.",
            ),
        )
    ),
    Rule(
        "KvrecallTierErrors",
        Severity.ERROR,
        "I/O errors of the disk tier",
        "The blocks are recomputed. The server's log names the file and the error; check mount, "
        "permissions and medium.",
        "the-disk-fails-or-is-full",
        _of_tier("disk", "errors"),
        "errors",
    ),
    Rule(
        "KvrecallRemoteStoreErrors",
        Severity.ERROR,
        "Errors of the remote store",
        "Calls to the store pause and are then retried. The server's log names the error; check "
        "address, credentials and network.",
        "mooncake-or-another-store-is-away",
        _of_tier("remote", "errors"),
        "errors",
    ),
    Rule(
        "KvrecallLoadsFailed",
        Severity.ERROR,
        "Loads failed: their prompts were recomputed",
        "The worker's log names the cause. Engines and a pool service must share a PID namespace "
        "and a user.",
        "workers-cannot-map-the-arena",
        _count("loads_failed"),
        "requests",
    ),
    Rule(
        "KvrecallSequencesLost",
        Severity.ERROR,
        "Sequences recomputed: their offloaded blocks were unreachable",
        "The pool was lost while retrieval attention used it. Keep the pool service running while "
        "engines run.",
        "the-pool-service-is-away",
        _count("sequences_lost"),
        "sequences",
    ),
    Rule(
        "KvrecallStoresFailed",
        Severity.ERROR,
        "Stores failed: blocks that a worker could not save",
        "The worker's log names the cause. Answers are not affected.",
        "workers-cannot-map-the-arena",
        _count("stores_failed"),
        "stores",
    ),
    Rule(
        "KvrecallDiskFull",
        Severity.ERROR,
        "The disk of the pool is full",
        "The tier evicts blocks to store new ones. Free space on its file system, or lower the "
        "limit with `kvrecall pool resize`.",
        "the-disk-fails-or-is-full",
        _of_tier("disk", "full"),
        state=True,
    ),
    *(
        Rule(
            "KvrecallTierDropsWrites",
            Severity.WARNING,
            f"Blocks not stored in the {tier} tier",
            cure,
            "the-disk-fails-or-is-full",
            _of_tier(tier, "dropped"),
        )
        for tier, cure in (
            (
                "host",
                "Host memory of the pool is full of blocks in use. Raise host_size.",
            ),
            (
                "disk",
                "The disk is too slow or full. Use a faster disk, or a write policy that stores "
                "fewer blocks.",
            ),
            (
                "remote",
                "The store is too slow or unreachable. Check its bandwidth.",
            ),
        )
    ),
    Rule(
        "KvrecallRepliesBeforeDurable",
        Severity.WARNING,
        "Replies sent before their blocks were durable",
        "async_write is off and the disk did not keep up. Use a faster disk.",
        "the-disk-fails-or-is-full",
        _count("flushes_missed"),
        "answers",
    ),
)


class _RuleState:
    """The state of one rule."""

    __slots__ = ("_before", "count", "detail", "last", "rule", "since", "wrong")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.since = self.last = 0.0
        self.count = 0
        self.detail = ""
        self.wrong = False
        self._before = 0.0

    def set(self, wrong: bool, at: float, detail: str = "") -> None:
        if wrong and not self.wrong:
            self.since = at
        if wrong:
            self.last, self.detail = at, detail
        self.wrong = wrong

    def counted(self, value: float, at: float, kept_s: float) -> None:
        grown, self._before = value - self._before, value
        if grown > 0:
            if not self.count or at - self.last > kept_s:
                self.since, self.count = at, 0
            self.count += int(grown)
            self.last = at

    def is_active(self, now: float, kept_s: float) -> bool:
        return self.wrong if self.rule.state else self.count > 0 and now - self.last <= kept_s


class Alarms:
    """A counter that grew raises an alarm for ``kept_s`` seconds, a state for as long as it
    lasts."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._watches = [_RuleState(rule) for rule in RULES]

    def see(self, sample: Sample) -> None:
        """Evaluates a sample. Samples come in chronological order."""
        for watch in self._watches:
            rule = watch.rule
            if rule.value is None:
                continue
            if rule.state:
                watch.set(rule.value(sample) > 0, sample.at)
            else:
                watch.counted(rule.value(sample), sample.at, self._kept(rule))

    def note(self, name: str, wrong: bool, at: float, detail: str = "") -> None:
        """Sets a state that is in no sample: ENGINE_DOWN or POOL_AWAY."""
        for watch in self._watches:
            if watch.rule.name == name:
                watch.set(wrong, at, detail)

    def active(self, now: float) -> Sequence[Alarm]:
        """The active alarms, the most severe first, then the latest."""
        alarms = [
            Alarm(
                watch.rule.name,
                watch.rule.severity,
                watch.rule.title,
                None if watch.rule.state else watch.count,
                watch.rule.unit,
                watch.since,
                watch.last,
                watch.detail,
                watch.rule.cure,
                HELP + watch.rule.page,
            )
            for watch in self._watches
            if watch.is_active(now, self._kept(watch.rule))
        ]
        return sorted(alarms, key=lambda each: (each.severity, -each.since))

    def _kept(self, rule: Rule) -> float:
        return inf if rule.lasts else self._kept_s
