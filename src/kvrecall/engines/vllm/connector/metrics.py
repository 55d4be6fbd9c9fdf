"""What the scheduler side tells of its work; the counters that hear of it, and their path to
vLLM's logs and Prometheus endpoint.

vLLM carries a ``KVConnectorStats`` payload from the engine to the API process once per step. The
payload holds increments of counters, current values of gauges, the latencies of loads, and for
requests that began the sources of their prompts (``serving/insight.py``).
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvrecall.engines.base import Miss
from kvrecall.engines.vllm.attention.activity import Activity, HeatTotals
from kvrecall.engines.vllm.connector.handover import Handover
from kvrecall.engines.vllm.connector.hit import Hit, Lookup
from kvrecall.engines.vllm.connector.load import LoadPlan, PrefixLoad
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import EngineFacts, StepReport
from kvrecall.nicety import niceties, nicety
from kvrecall.pool.base import PoolStats

SOURCES = ("device", "host", "disk", "remote", "computed")

COUNTERS = {
    "requests": "Requests finished.",
    "loaded_bytes": "Bytes copied from the arena to the device.",
    "load_seconds": "Seconds spent copying from the arena to the device.",
    "stored_bytes": "Bytes copied from the device to the arena.",
    "store_seconds": "Seconds spent copying from the device to the arena.",
    "blocks_refused": "Blocks not saved because the pool was full or shedding load.",
    "blocks_declined": "Blocks found but computed, because loading was expected to take longer.",
    "stores_failed": "Stores that failed on a worker.",
    "loads_given_up": "Loads abandoned because computing was faster than waiting longer.",
    "loads_failed": "Requests recomputed because their load failed.",
    "sequences_lost": "Sequences recomputed because their offloaded blocks were unreachable.",
    "audits": "Hits that were computed and compared with the pool's blocks.",
    "audits_failed": "Audits that found a difference: the engine's blocks became private.",
    "weights_changed": "Times that the weights of a running engine, or of an adapter, changed.",
    "handovers": "Requests with blocks promised by a prefill instance.",
    "handovers_late": "Handovers whose blocks did not arrive in time and were computed.",
    "handovers_foreign": "Handovers whose blocks do not fit this engine.",
    "traces_dropped": "Batches of a request's spans that were dropped, because too many waited.",
    "hints_invalid": "Hints of requests that were ignored, because their form is wrong.",
    "explain_seconds": "Seconds of the scheduler spent on the reasons of misses, before steps.",
    "explain_aside_seconds": "The same, while the workers computed.",
    "flushes_missed": "Replies sent before their blocks were durable (async_write off).",
    **{f"retrieval_{one.name}": one.metadata["text"] for one in fields(Activity)},
}
POOL_COUNTERS = {
    "hints": "Hints that clients gave about the return of their blocks.",
    "hints_believed": "Hints that were believed, because enough of the tenant's came true before.",
    "hints_true": "Hints that came true.",
    "hints_false": "Hints that did not come true.",
}
TIER_COUNTERS = {
    "hits": "Blocks found in the tier.",
    "reads": "Blocks read from the tier.",
    "read_bytes": "Bytes read from the tier.",
    "read_seconds": "Seconds spent reading.",
    "writes": "Blocks written to the tier.",
    "write_bytes": "Bytes written to the tier.",
    "write_seconds": "Seconds spent writing.",
    "evictions": "Blocks evicted from the tier.",
    "dropped": "Stores shed by the tier.",
    "errors": "I/O errors of the tier.",
    "corrupt": "Blocks dropped because their checksum or length was wrong.",
    "over_quota": "Blocks refused because of their tenant's limit.",
    "quota_evictions": "Blocks evicted because of their tenant's limit.",
    "given_bytes": "Bytes of blocks stored by a tier that compresses.",
    "compressed_bytes": "Bytes that those blocks take there.",
}
TIER_GAUGES = {
    "capacity_bytes": "Hard limit of the tier.",
    "used_bytes": "Bytes in use.",
    "blocks": "Blocks held.",
    "pinned_bytes": "Bytes of pinned blocks.",
    "full": "1 if the medium has no room though the tier is below its limit, else 0.",
}
POOL_GAUGES = {
    "leases": "Blocks leased by requests.",
    "reserved": "Slots being filled.",
    "queued_writes": "Blocks waiting to be written below the host.",
    "queued_reads": "Blocks waiting to be promoted.",
    "unwritten_bytes": "Bytes that the write policy has not yet written below the host.",
    "pool_up": "1 if the engine reaches its pool, 0 if the pool service is unreachable.",
}
LOAD_LATENCY = (
    "Seconds from requesting a prefix from the pool until it was on the device, by the lowest tier "
    "that held one of its blocks."
)
LOAD_BUCKETS = tuple(
    round(base * 10.0**power, 4) for power in range(-3, 2) for base in (1.0, 2.5, 5.0)
)  # 1 ms to 50 s

_REPORT_EVERY_S = 0.25
_SECTIONS = ("counts", "gauges", "splits", "misses", "heat", "loads")


class SchedulerEvents:
    """Observes the scheduler side, in its thread, changes nothing, and does not wait or raise."""

    def admitted(self, state: RequestState) -> None:
        """A request entered the engine."""

    def considered(self, state: RequestState) -> None:
        """vLLM asks what the pool has of it."""

    def waited(self, state: RequestState, outcome: Handover, tokens: int) -> None:
        """It looked for ``tokens`` tokens that a prefill instance promised."""

    def looked_up(self, state: RequestState, began: float, blocks: int, search: Lookup) -> None:
        """The pool was asked for ``blocks`` blocks of the chain since ``began``."""

    def lookup_late(self, state: RequestState, end: int) -> None:
        """A tier beyond this host did not answer in time: the hit ends at ``end``."""

    def declined(self, state: RequestState, hit: Hit, shorter: Hit | None, plan: LoadPlan) -> None:
        """Of a hit only the ``shorter`` one is loaded: the rest is faster to compute."""

    def load_over(self, state: RequestState, load: PrefixLoad) -> None:
        """Nothing more of the load is waited for; if ``load.offsets`` is None it was dropped."""

    def audited(self, state: RequestState, end: int) -> None:
        """Its hit ends at ``end``: the blocks behind are computed, to be compared."""

    def load_ordered(self, state: RequestState, copies: Sequence[Copy]) -> None:
        """The workers are to copy these blocks to the device."""

    def sources_known(self, state: RequestState) -> None:
        """The sources of its prompt are known."""

    def step_begins(self, is_idle: bool) -> None:
        """A step's orders are made next. ``is_idle``: it computes nothing."""

    def computes(self, states: Sequence[RequestState], scheduled: Mapping[str, int]) -> None:
        """The step computes so many tokens of each of these requests."""

    def store_ordered(self, state: RequestState, group: int, blocks: int) -> None:
        """The workers are to copy so many of its blocks of a KV group to the arena."""

    def changes(self) -> None:
        """What the pool or the engine has may change next."""

    def load_done(
        self, state: RequestState | None, load: PrefixLoad, failed: bool, copied_s: float | None
    ) -> None:
        """Every rank has reported a load. ``state``: None if the request has ended. ``copied_s``:
        seconds of the device, the slowest rank's."""

    def load_failed(self, state: RequestState) -> None:
        """Its blocks arrived, and the workers could not copy them."""

    def store_done(self, state: RequestState, failed: bool) -> None:
        """Every rank has reported a store of its blocks."""

    def finished(self, state: RequestState, final: int) -> None:
        """It is over; its first ``final`` tokens are."""

    def counted(self, name: str, amount: int = 1) -> None:
        """Something with a counter of that name happened."""


class Observers(SchedulerEvents):
    """Several observers as one, in this order. One that none observes costs a call of nothing."""

    def __init__(self, observers: Sequence[SchedulerEvents]) -> None:
        for event in [name for name in vars(SchedulerEvents) if not name.startswith("_")]:
            ignore = getattr(SchedulerEvents, event)
            heard = [
                getattr(one, event) for one in observers if getattr(type(one), event) is not ignore
            ]
            if heard:
                setattr(self, event, heard[0] if len(heard) == 1 else _each(heard))


def _each(heard: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: Any) -> None:
        for event in heard:
            event(*args)

    return tell


@niceties("the counting for metrics")
class Counters(SchedulerEvents):
    """Counters of the scheduler side since the last report (names as in ``COUNTERS``), the loads
    that ended since then, and of requests that began prompt tokens by source and misses."""

    def __init__(self, facts: EngineFacts, clock: Callable[[], float] = time.monotonic) -> None:
        self._facts = facts
        self._clock = clock
        self._taken_at = clock()
        self.counts: Counts[str] = Counts()
        self.splits: dict[str, dict[str, int]] = {}
        self.misses: dict[str, Miss] = {}
        self.loads: dict[str, list[float]] = {}  # tier -> seconds of each
        self._totals: Counts[str] = Counts()  # of the pool, when they were last watched

    def counted(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def waited(self, state: RequestState, outcome: Handover, tokens: int) -> None:
        self.counts["handovers_late"] += outcome is Handover.LATE

    def declined(self, state: RequestState, hit: Hit, shorter: Hit | None, plan: LoadPlan) -> None:
        self.counts["blocks_declined"] += hit.blocks - (0 if shorter is None else shorter.blocks)

    def load_over(self, state: RequestState, load: PrefixLoad) -> None:
        self.counts["loads_given_up"] += load.given_up

    def load_ordered(self, state: RequestState, copies: Sequence[Copy]) -> None:
        for copy in copies:
            kind = self._facts.groups[copy.group].kind
            self.counts[f"{kind}:loaded_blocks"] += len(copy.block_ids)

    def sources_known(self, state: RequestState) -> None:
        self.splits[state.id] = {**state.sources(), "unit": self._facts.unit}

    def reported(self, report: StepReport) -> None:
        for name in ("loaded_bytes", "load_seconds", "stored_bytes", "store_seconds"):
            self.counts[name] += getattr(report, name)

    def load_done(
        self, state: RequestState | None, load: PrefixLoad, failed: bool, copied_s: float | None
    ) -> None:
        if not failed:
            seconds = round(load.costs.elapsed(load.mark), 6)
            self.loads.setdefault(str(load.lowest_tier), []).append(seconds)

    def finished(self, state: RequestState, final: int) -> None:
        self.counts["requests"] += 1
        for source, tokens in state.sources().items():
            self.counts[f"{source}:prompt_tokens"] += tokens

    def is_due(self, busy: bool) -> bool:
        """Whether a report is to be made after this step: at once if a request began, loaded or
        ended, or the engine is not ``busy``; else now and then: it costs a step."""
        news = self.splits or self.misses or self.loads or self.counts["requests"]
        return bool(news) or not busy or self._clock() - self._taken_at >= _REPORT_EVERY_S

    def watch(self, stats: PoolStats) -> dict[str, float]:
        """Adds the increase of the pool's running totals; returns the present gauges."""
        gauges: dict[str, float] = {name: getattr(stats, name) for name in POOL_GAUGES}
        for name in POOL_COUNTERS:
            total = getattr(stats, name)
            self.counts[name] += total - self._totals[name]
            self._totals[name] = total
        for tier in stats.tiers:
            for name in TIER_COUNTERS:
                label, total = f"{tier.name}:tier_{name}", getattr(tier, name)
                self.counts[label] += total - self._totals[label]
                self._totals[label] = total
            for name in TIER_GAUGES:
                gauges[f"{tier.name}:tier_{name}"] = float(getattr(tier, name))
        return gauges

    def take(self) -> RecallStats:
        """The counts that moved, the splits, misses and loads, without gauges; starts anew."""
        self._taken_at = self._clock()
        moved = {name: amount for name, amount in self.counts.items() if amount}
        stats = RecallStats.of(moved, splits=self.splits, loads=self.loads, misses=self.misses)
        self.counts, self.splits, self.loads, self.misses = Counts(), {}, {}, {}
        return stats


def _empty() -> dict[str, Any]:
    return {name: {} for name in _SECTIONS}


class RecallStats(KVConnectorStats):
    """Payload: ``counts`` (name -> increment), ``gauges`` (name -> value), ``splits`` (request
    -> source -> tokens), ``misses`` (request -> ``Miss``), ``heat`` (layer -> where its blocks lay
    and were chosen) and ``loads`` (tier -> seconds of each)."""

    @classmethod
    def of(
        cls,
        counts: Mapping[str, float],
        heat: Mapping[int, list[list[int]]] | None = None,
        **sections: Mapping[str, Any],
    ) -> RecallStats:
        plain = {str(layer): rows for layer, rows in (heat or {}).items()}
        return cls(data={**_empty(), "counts": dict(counts), "heat": plain, **sections})

    def reset(self) -> None:
        self.data: dict[str, Any] = _empty()

    def is_empty(self) -> bool:
        return not self.data.get("counts") and not self.data.get("gauges")

    @nicety("the sum of statistics", lambda self, _: self)
    def aggregate(self, other: KVConnectorStats) -> RecallStats:
        counts: Counts[str] = Counts()
        heat = HeatTotals()
        loads: dict[str, list[float]] = {}
        merged: dict[str, dict[str, Any]] = {"gauges": {}, "splits": {}, "misses": {}}
        for payload in (self.data, other.data):
            for name, amount in payload.get("counts", {}).items():
                counts[name] += amount
            heat.add(payload.get("heat", {}))
            for tier, seconds in payload.get("loads", {}).items():
                loads.setdefault(tier, []).extend(seconds)
            for section, values in merged.items():
                values.update(payload.get(section, {}))
        return RecallStats.of(counts, heat.take(), loads=loads, **merged)

    @nicety("the log line of statistics", lambda _: {})
    def reduce(self) -> dict[str, int | float]:
        """The values for the log line of the last interval."""
        counts = self.data.get("counts", {})
        line: dict[str, int | float] = {
            f"{source} tokens": int(counts.get(f"{source}:prompt_tokens", 0)) for source in SOURCES
        }
        for way, seconds in (("loaded", "load_seconds"), ("stored", "store_seconds")):
            nbytes = counts.get(f"{way}_bytes", 0)
            line[f"{way} MB"] = round(nbytes / 1e6, 1)
            if counts.get(seconds):
                line[f"{way} GB/s"] = round(nbytes / counts[seconds] / 1e9, 2)
        return line


class RecallPromMetrics(KVConnectorPromMetrics):
    """Registers ``kvrecall_*`` metrics and updates them; labels: the engine's own, and ``tier``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}

        def register(kind: Any, texts: Mapping[str, str], first: str = "", *labels: str) -> None:
            for name, text in texts.items():
                self._metrics[first + name] = metric_types[kind](
                    name=f"kvrecall_{first}{name}",
                    documentation=text,
                    labelnames=[*labelnames, *labels],
                )

        register(Counter, COUNTERS)
        register(Counter, POOL_COUNTERS)
        text = "Prompt tokens by source of their KV."
        register(Counter, {"prompt_tokens": text}, "", "source")
        text = "Prompt tokens computed, by the reason why the first of them was not recalled"
        register(Counter, {"missed_tokens": f"{text} (docs/misses.md)."}, "", "reason")
        text = "Blocks copied to the device, by what their KV group keeps: full, window, state."
        register(Counter, {"loaded_blocks": text}, "", "group")
        register(Counter, TIER_COUNTERS, "tier_", "tier")
        register(Gauge, POOL_GAUGES)
        register(Gauge, TIER_GAUGES, "tier_", "tier")
        self._load_latency = metric_types[Histogram](
            name="kvrecall_load_latency_seconds",
            documentation=LOAD_LATENCY,
            buckets=LOAD_BUCKETS,
            labelnames=[*labelnames, "tier"],
        )

    @nicety("the update of metrics")
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one payload of ``RecallStats``. ``label:metric`` names a labelled metric."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for section, act in (("counts", "inc"), ("gauges", "set")):
            for name, value in transfer_stats_data.get(section, {}).items():
                label, _, metric = name.rpartition(":")
                series = self._metrics[metric].labels(*labels, *([label] if label else []))
                getattr(series, act)(value)
        for tier, loads in transfer_stats_data.get("loads", {}).items():
            for seconds in loads:
                self._load_latency.labels(*labels, tier).observe(seconds)
