"""A request on the scheduler side: its blocks, and the load of the prefix found in the pool.

A request *matches* (which leading blocks does the pool have?), *waits* (for blocks that a prefill
instance promised, for a store's answer, for blocks on their way into the arena), *loads* (the
workers copy, leases hold the blocks) and is then an ordinary request of the engine.
``RecallScheduler`` moves it from one state to the next.

A hit that is slower than recomputing is worse than a miss, so ``LoadCostModel`` decides how much
of a match to load and how long to wait for it. The cost of loading is proportional to bytes, per
tier; computing a token costs more the deeper it is (attention). Both are measured on the engine's
own work, so neither needs settings: prefill steps as they run, recalls as they arrive. Before the
first prefill step, the rate of matrix products on this device is used instead.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName
from kvrecall.engines.base import HANDOVER
from kvrecall.pool.base import PoolClient, Recall, RecallState

_PORTIONS = 16
_LOOK_EVERY_S = 0.002

TRIVIAL_S = 0.02
"""Loads expected to take less are always made: they cannot lose anything."""

_LEAST_PATIENCE_S = 0.05
"""Minimum patience of a wait: a disk that is busy for a moment must not shorten hits."""

_MEMORY = 0.9  # weight of the past in running averages
_MIN_STEP_TOKENS = 32  # smaller steps are decoding, and tell nothing of prefill
_PROBE_SHARE = 0.05  # share of the computing time that a probe of a slow tier may cost
_PROBE_EVERY = 4  # a tier that is passed over is tried again so often
_PROBE_AFTER_S = 5.0  # and when nothing was loaded from it for so long
_RISK_SHARE = 0.08  # share of the computing time at stake that may be waited in vain


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step: whether it computes, and how many prompt tokens at which mean
    position."""

    any: bool
    prompt_tokens: int = 0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and how many working steps had begun by then."""

    seconds: float
    steps: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How many leading blocks to load, and how many seconds to wait for them *beyond* the time that
    the arrived ones have saved (``gained_seconds``).

    A load from a medium that is as fast as expected is thus awaited to its end, however long it
    takes; one that stalls, at whatever point, costs at most ``patience_s`` more than computing.
    """

    blocks: int
    patience_s: float


class LoadCostModel:
    """Expected costs of one engine. Owned by its scheduler side; not thread-safe."""

    def __init__(
        self,
        block_tokens: int,
        block_bytes: int,
        deadline_s: float,
        least_token_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deadline_s``: the longest wait for any load. ``least_token_seconds``: the assumed cost
        of a prompt token until one was computed; 0: unknown."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._under_way: deque[tuple[float, Work]] = deque()
        self._steps = 0
        self._bandwidth: dict[TierName, float] = {}
        self._seen_at: dict[TierName, float] = {}
        self._prefill = _PrefillModel(least_token_seconds)
        self._passed_over = 0

    # ---- time ---------------------------------------------------------------------------

    def step_begins(self, work: Work) -> None:
        """Steps begin and end in order."""
        self._under_way.append((self._clock(), work))
        self._steps += work.any

    def step_ends(self) -> None:
        """Learns from the oldest running step, unless steps overlapped (asynchronous scheduling,
        pipeline stages): its time is then not its own."""
        if self._under_way:
            overlapped = len(self._under_way) > 1
            began, work = self._under_way.popleft()
            if work.prompt_tokens and not overlapped:
                self.saw_step(work.prompt_tokens, work.depth, self._clock() - began)

    def mark(self) -> Mark:
        return Mark(self._clock(), self._steps)

    def elapsed(self, mark: Mark) -> float:
        """Seconds since ``mark``, whatever the engine did."""
        return self._clock() - mark.seconds

    def idle_since(self, mark: Mark) -> bool:
        """Whether the engine has computed nothing since ``mark``."""
        return mark.steps == self._steps

    # ---- what was seen ------------------------------------------------------------------

    def saw_step(self, tokens: int, depth: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens whose mean position was ``depth``."""
        if tokens >= _MIN_STEP_TOKENS and seconds > 0:
            self._prefill.saw(tokens, depth, seconds)

    def saw_load(self, tier: TierName, blocks: int, seconds: float) -> None:
        """``blocks`` blocks arrived from ``tier`` within ``seconds`` of the request, queues
        included. Blocks that did not arrive in time lower the bandwidth."""
        self._seen_at[tier] = self._clock()
        rate = max(blocks, 0.1) * self._block_bytes / max(seconds, 1e-6)
        known = self._bandwidth.get(tier)
        if known is None or not known / 2 <= rate <= 2 * known:
            self._bandwidth[tier] = rate  # a tier that stalls, or has recovered: believed at once
        else:
            self._bandwidth[tier] = _MEMORY * known + (1 - _MEMORY) * rate

    # ---- what follows -------------------------------------------------------------------

    def plan(self, tiers: Sequence[TierName], start_block: int) -> LoadPlan:
        """The plan for a found prefix, ``tiers[i]`` holding block ``start_block + i``.

        Chooses the length that minimises loading it plus computing the rest. Unknown costs count as
        zero to load and infinite to compute, so that they become known.
        """
        if not self._prefill.known:
            return LoadPlan(len(tiers), self._deadline_s)
        loads = [self.load_seconds(tier) for tier in tiers]
        computes = [self.compute_seconds(start_block + i) for i in range(len(tiers))]
        left = sum(computes)
        best, best_cost, spent = 0, left, 0.0
        for index, (load, compute) in enumerate(zip(loads, computes, strict=True)):
            spent += load
            left -= compute
            if spent + left <= best_cost or spent <= TRIVIAL_S:
                best, best_cost = index + 1, spent + left
        if best < len(tiers) and self._is_time_to_probe(tiers[best]):
            return LoadPlan(best + 1, max(_LEAST_PATIENCE_S, _PROBE_SHARE * sum(computes)))
        worth = sum(c for c, tier in zip(computes, tiers, strict=True) if tier is not TierName.HOST)
        return LoadPlan(best, min(self._deadline_s, max(_RISK_SHARE * worth, _LEAST_PATIENCE_S)))

    def _is_time_to_probe(self, tier: TierName) -> bool:
        """Whether to load from a slow tier nevertheless, to notice its recovery."""
        self._passed_over += 1
        unheard_s = self._clock() - self._seen_at.get(tier, 0.0)
        return self._passed_over % _PROBE_EVERY == 0 or unheard_s >= _PROBE_AFTER_S

    def gained_seconds(self, tiers: Sequence[TierName], start_block: int) -> float:
        """Computing time saved by blocks from below the host; ``tiers`` as in ``plan``."""
        return sum(
            self.compute_seconds(start_block + place)
            for place, tier in enumerate(tiers)
            if tier is not TierName.HOST and self._prefill.known
        )

    def load_seconds(self, tier: TierName) -> float:
        """Expected seconds to load one block; 0 for a tier without measurements."""
        rate = self._bandwidth.get(tier)
        return self._block_bytes / rate if rate else 0.0

    def compute_seconds(self, block: int) -> float:
        """Expected seconds to compute the ``block``-th block of a sequence."""
        depth = (block + 0.5) * self._block_tokens
        return self._block_tokens * self._prefill.seconds_per_token(depth)


class _PrefillModel:
    """Seconds per prompt token as ``base + slope * depth``, by running least squares; ``least``
    until the first measurement (0: unknown)."""

    def __init__(self, least: float) -> None:
        self._least = least
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0 or self._least > 0

    def saw(self, tokens: int, depth: float, seconds: float) -> None:
        cost = seconds / tokens
        sums = (1.0, depth, cost, depth * depth, depth * cost)
        old = (self._weight, self._x, self._y, self._xx, self._xy)
        new = [_MEMORY * a + b for a, b in zip(old, sums, strict=True)]
        self._weight, self._x, self._y, self._xx, self._xy = new

    def seconds_per_token(self, depth: float) -> float:
        """Neither negative nor falling with depth."""
        if not self._weight:
            return self._least
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1.0:
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(mean_y + slope * (depth - mean_x), mean_y * 0.1)


@dataclass(slots=True)
class PrefixLoad:
    """Leading blocks of a request, acquired in the pool until the workers have copied them.

    They are acquired in portions, which the pool serves in order, so that the scheduler side sees
    the progress and can stop waiting where that does not pay. ``start``: index of the first block
    within the request's chain. ``tiers``: where the blocks were found. ``mark``: when.
    ``patience_s``: how long to wait beyond the time that the arrived blocks have saved.
    ``pending_s``: when it was last seen unfinished, seconds since ``mark``.
    """

    pool: PoolClient
    costs: LoadCostModel
    start: int
    tiers: tuple[TierName, ...]
    mark: Mark
    patience_s: float
    tickets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    whole: list[Recall] = field(default_factory=list)  # of the leading tickets that are READY
    pending_s: float = 0.0
    given_up: bool = False
    recall: Recall | None = None  # once nothing more is waited for

    def acquire(
        self,
        keys: Sequence[BlockKey],
        deadline_s: float,
        parent: BlockKey | None,
        tenant: Tenant = SHARED,
    ) -> None:
        """Acquires ``keys``; in one portion if all of them are in the host."""
        size = -(-len(keys) // _PORTIONS)
        if all(tier is TierName.HOST for tier in self.tiers):
            size = len(keys)
        for first in range(0, len(keys), size):
            part = keys[first : first + size]
            before = keys[first - 1] if first else parent
            self.tickets.append(self.pool.acquire(part, deadline_s, before, tenant))
            self.sizes.append(len(part))

    def poll(self) -> Recall:
        """The blocks that have arrived, over all portions; PENDING while more may arrive and
        waiting for them pays. READY without blocks if the arrived ones are lost."""
        if self.recall is not None:
            return self.recall if self._holds() else Recall(RecallState.READY)
        if self._is_pending():
            self.pending_s = self.costs.elapsed(self.mark)
            gained = self.costs.gained_seconds(self._arrived, self.start)
            self.given_up = self.pending_s > gained + self.patience_s
            if not self.given_up:
                return Recall(RecallState.PENDING)
        for ticket in self.tickets[len(self.whole) :]:
            self.pool.release(ticket)
        del self.tickets[len(self.whole) :]
        offsets = tuple(offset for recall in self.whole for offset in recall.offsets)
        self.recall = Recall(RecallState.READY, offsets, self._arrived)
        self._tell_speeds(self.recall)
        return self.recall

    def _is_pending(self) -> bool:
        """Records the portions that are READY. False after the last of them, and after an
        incomplete one."""
        while (place := len(self.whole)) < len(self.tickets):
            recall = self.pool.poll(self.tickets[place])
            if recall.state is RecallState.PENDING:
                return True
            self.whole.append(recall)
            if len(recall.offsets) < self.sizes[place]:
                return False
        return False

    def _tell_speeds(self, recall: Recall) -> None:
        """Reports the tiers' speeds to the cost model. Blocks that did not arrive although they
        were awaited were lost (a damaged file, a dead service), which says nothing about speed."""
        # After a step of other work it is only known that the blocks took longer than until they
        # were last seen pending.
        elapsed = self.costs.elapsed(self.mark) if self.costs.idle_since(self.mark) else 0.0
        seconds = elapsed or self.pending_s
        for tier in set(self.tiers) - {TierName.HOST}:
            came = recall.tiers.count(tier)
            if seconds > 0 and (came or self.given_up):
                self.costs.saw_load(tier, came, seconds)

    @property
    def _arrived(self) -> tuple[TierName, ...]:
        """The original tiers of the blocks that are in the host now."""
        return tuple(tier for recall in self.whole for tier in recall.tiers)

    def cut(self, blocks: int) -> Recall:
        """Limits the load to that many leading blocks. The leases of the others stay."""
        assert self.recall is not None
        offsets, tiers = self.recall.offsets[:blocks], self.recall.tiers[:blocks]
        self.recall = Recall(RecallState.READY, offsets, tiers)
        return self.recall

    @property
    def lowest_tier(self) -> TierName:
        """The tier farthest from the device that a block came from."""
        assert self.recall is not None
        return max(self.recall.tiers, key=list(TierName).index)

    def _holds(self) -> bool:
        """Whether the arrived blocks are still valid: a pool service may have died since, and its
        replacement have other blocks in their place. Keeps them valid until the next
        ``arena_handle``."""
        came = zip(self.tickets, self.whole, strict=True)
        return all(self.pool.poll(ticket).offsets == recall.offsets for ticket, recall in came)

    def release(self) -> None:
        for ticket in self.tickets:
            self.pool.release(ticket)


class Handover(enum.Enum):
    """The state of a promise."""

    WAIT = "wait"
    KEPT = "kept"
    LATE = "late"


def receipt(namespace: Namespace | None, tokens: int) -> dict[str, Any]:
    """What a prefill instance passes to a decode instance through the router: how many tokens of
    the prompt are in the pool or on their way. Empty if there are none."""
    if namespace is None or tokens <= 0:
        return {}
    return {HANDOVER: {"tokens": tokens, "namespace": namespace.digest.hex()}}


@dataclass(slots=True)
class Promise:
    """Leading blocks of a prompt that a prefill instance's receipt says are in the pool, or on
    their way. The decode instance waits for them ``patience_s`` seconds from the first ``look`` on,
    and never within a step; only blocks that it finds itself count, whatever pool is between the
    two."""

    blocks: int
    namespace: str
    patience_s: float
    clock: Callable[[], float]
    is_over: bool = False
    _until: float | None = None
    _next: float = 0.0

    @classmethod
    def of(
        cls, params: object, block_size: int, patience_s: float, clock: Callable[[], float]
    ) -> Promise | None:
        """The promise in a request's ``kv_transfer_params``; None without a receipt, or with an
        invalid one (they come from outside)."""
        given = params.get(HANDOVER) if isinstance(params, Mapping) else None
        if not isinstance(given, Mapping):
            return None
        tokens, namespace = given.get("tokens"), given.get("namespace")
        if type(tokens) is not int or tokens < block_size or not isinstance(namespace, str):
            return None
        return cls(tokens // block_size, namespace, patience_s, clock)

    def look(self, wanted: int, found: Callable[[], int]) -> Handover:
        """Whether ``wanted`` blocks are there; ``found`` queries the pool, but not at every
        call."""
        now = self.clock()
        if self._until is None:
            self._until = now + self.patience_s
        if now < self._next and now < self._until:
            return Handover.WAIT
        self._next = now + _LOOK_EVERY_S
        if found() >= wanted:
            self.is_over = True
            return Handover.KEPT
        if now < self._until:
            return Handover.WAIT
        self.is_over = True
        return Handover.LATE


@dataclass(slots=True)
class RequestState:
    """The scheduler side's state of a request. Owned by ``RecallScheduler``.

    ``namespace`` is None if the request is not pooled, or not yet ``settled``: its namespace is
    being determined. ``promise``: a prefill instance's, for its blocks. ``first_lookup_at``: when
    they were first looked up in a tier beyond this host (seconds of the scheduler side's clock).
    ``load``: from a match until the engine has given it device blocks. ``computes``: it loads no
    block, because a load failed or is audited. ``saved``: leading blocks of the chain that are in
    the pool or on their way; ``closed``: no more of it can be saved; ``passes``: steps until it
    tries to reserve again, and ``passes_next`` after the last refusal. ``touched``: the pool knows
    that its chain is in use. ``reported``: the API process knows the sources of its prompt.
    """

    request: Any
    hashes_per_block: int
    tenant: Tenant = SHARED
    namespace: Namespace | None = None
    settled: bool = False
    promise: Promise | None = None
    first_lookup_at: float | None = None
    load: PrefixLoad | None = None
    computes: bool = False
    saved: int = 0
    closed: bool = False
    passes: int = 0
    passes_next: int = 0
    open_stores: set[int] = field(default_factory=set)
    touched: bool = False
    reported: bool = False
    device_tokens: int = 0
    recalled: Counter[TierName] = field(default_factory=Counter)
    _keys: list[BlockKey] = field(default_factory=list)

    @property
    def has_media(self) -> bool:
        """Whether its prompt contains images, sound or other media."""
        return bool(getattr(self.request, "mm_features", None))

    def keys(self, count: int) -> list[BlockKey]:
        """Keys of the first ``count`` blocks, or of as many as are hashed by now."""
        if self.namespace is None:
            return []
        step = self.hashes_per_block
        hashes = self.request.block_hashes
        for index in range(len(self._keys), min(count, len(hashes) // step)):
            self._keys.append(self.namespace.key(hashes[(index + 1) * step - 1]))
        return self._keys[:count]

    def sources(self) -> dict[str, int]:
        """Prompt tokens by source of their KV."""
        counts = {str(tier): self.recalled[tier] for tier in TierName}
        counts[str(TierName.DEVICE)] = self.device_tokens
        counts["computed"] = max(0, self.request.num_prompt_tokens - sum(counts.values()))
        return counts
