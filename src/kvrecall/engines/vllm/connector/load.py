"""The load of a hit: its blocks, acquired in the pool until the workers have copied them; and what
loading costs, and computing: how much of a hit to load, and how long to wait.

A hit that is slower than recomputing is worse than a miss. The cost of loading is proportional to
bytes, per tier; computing a token costs more the deeper it is (attention). Both are measured on the
engine's own work, so neither needs settings: prefill steps and copies by the device's own time,
whatever overlaps them, and loads from lower tiers as they arrive. Before the first prefill step,
the rate of matrix products on this device is used instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrecall.block import BlockKey, TierName
from kvrecall.engines.vllm.connector.hit import Hit
from kvrecall.engines.vllm.connector.request import RequestState
from kvrecall.nicety import nicety
from kvrecall.pool.base import PoolClient, Recall, RecallState

_PORTIONS = 16

TRIVIAL_S = 0.02
"""Loads expected to take less are always made: they cannot lose anything."""

_LEAST_PATIENCE_S = 0.05
"""Minimum patience of a wait: a disk that is busy for a moment must not shorten hits."""

_MEMORY = 0.9  # weight of the past in running averages
_MIN_STEP_TOKENS = 32  # smaller steps are decoding, and tell nothing of prefill
_MOST_TIMED = 64  # steps whose time is still to be reported
_PROBE_SHARE = 0.05  # share of the computing time that a probe of a slow tier may cost
_PROBE_EVERY, _PROBE_AFTER_S = 4, 5.0  # tried again: a tier passed over so often, or so long
_FEW = 8  # blocks: fewer tell no bandwidth
RISK_SHARE = 0.08  # share of the computing time at stake that may be waited in vain
_FIRST_SHARE = 0.3  # for a tier's first load: nor is it known yet what deep tokens cost


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
    load_s: float = 0.0
    compute_s: float = 0.0


class LoadCostModel:
    """Expected costs of one engine. Owned by its scheduler side; not thread-safe."""

    def __init__(
        self,
        block_tokens: int,
        block_bytes: float,
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
        self._timed: dict[int, tuple[int, int]] = {}
        self._steps = 0
        self._bandwidth: dict[TierName, float] = {}
        self._seen_at: dict[TierName, float] = {}
        self._prefill = _PrefillModel(least_token_seconds)
        self._passed_over = 0

    # ---- time ---------------------------------------------------------------------------

    @nicety("the estimate of costs")
    def step_begins(self, works: bool, prompt_tokens: int = 0, depth: int = 0) -> int | None:
        """A step, of so many prompt tokens at which mean position. A number if workers time it."""
        self._steps += works
        if prompt_tokens < _MIN_STEP_TOKENS:
            return None
        self._timed[self._steps] = prompt_tokens, depth
        if len(self._timed) > _MOST_TIMED:  # their reports were lost
            del self._timed[next(iter(self._timed))]
        return self._steps

    @nicety("the estimate of costs")
    def step_took(self, number: int, seconds: float) -> None:
        """``seconds``: of the device. What a further rank reports of the same step is ignored."""
        work = self._timed.pop(number, None)
        if work is not None:
            self.saw_step(*work, seconds)

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

    @nicety("the estimate of costs")
    def saw_load(self, tier: TierName, blocks: float, seconds: float, asked: int = _FEW) -> None:
        """At most ``blocks`` of ``asked`` blocks arrived from ``tier`` within ``seconds`` of the
        request, queues included. A few do not lower the bandwidth: a moment is late for them."""
        self._seen_at[tier] = self._clock()
        rate = max(blocks, 0.1) * self._block_bytes / max(seconds, 1e-6)
        known = self._bandwidth.get(tier)
        if asked < _FEW and rate < (known or float("inf")):
            return
        if known is None or not known / 2 <= rate <= 2 * known:
            known = rate  # a tier that stalls, or has recovered: believed at once
        self._bandwidth[tier] = _MEMORY * known + (1 - _MEMORY) * rate

    @nicety(
        "the estimate of costs",
        lambda self, tiers, *_, **__: LoadPlan(len(tiers), self._deadline_s),
    )
    def plan(
        self, tiers: Sequence[TierName], start_block: int, weight: float = 1.0, last: float = 1.0
    ) -> LoadPlan:
        """The plan for a found prefix, ``tiers[i]`` holding block ``start_block + i``. ``weight``:
        bytes to load for a block, as a share of its bytes. ``last``: the share of the last block's
        tokens that the prefix has.

        Chooses the length that minimises loading it plus computing the rest. Unknown costs count as
        zero to load and infinite to compute, so that they become known.
        """
        if not self._prefill.known:
            return LoadPlan(len(tiers), self._deadline_s)
        loads = [weight * self.load_seconds(tier) for tier in tiers]
        computes = [self.compute_seconds(start_block + i) for i in range(len(tiers))]
        computes[-1:] = [last * seconds for seconds in computes[-1:]]
        left = sum(computes)
        best, best_cost, spent = 0, left, 0.0
        for index, (load, compute) in enumerate(zip(loads, computes, strict=True)):
            spent += load
            left -= compute
            if spent + left <= best_cost or spent <= TRIVIAL_S:
                best, best_cost = index + 1, spent + left
        if best < len(tiers):  # now and then loads from a slow tier, to notice its recovery
            self._passed_over += 1
            unheard_s = self._clock() - self._seen_at.get(tiers[best], 0.0)
            if self._passed_over % _PROBE_EVERY == 0 or unheard_s >= _PROBE_AFTER_S:
                patience_s = max(_LEAST_PATIENCE_S, _PROBE_SHARE * sum(computes))
                best += 1
                return LoadPlan(best, patience_s, sum(loads[best:]), sum(computes[best:]))
        worth = sum(c for c, tier in zip(computes, tiers, strict=True) if tier is not TierName.HOST)
        share = RISK_SHARE if tiers[-1] in self._bandwidth else _FIRST_SHARE
        patience_s = min(self._deadline_s, max(share * worth, _LEAST_PATIENCE_S))
        return LoadPlan(best, patience_s, sum(loads[best:]), sum(computes[best:]))

    @nicety("the estimate of costs", 0.0)
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
    """Seconds per prompt token: ``base + slope * depth``, by least squares; ``least`` at first."""

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
    """The blocks of a hit on their way into the arena.

    They are acquired in portions, which the pool serves in order, so that the scheduler side sees
    the progress and can stop waiting where that does not pay. ``mark``: when they were found.
    ``patience_s``: how long to wait beyond the time that the arrived blocks have saved.
    ``deadline_s``: of the pool. ``given_up``: computing was faster than waiting longer.
    ``was_late``: that, or the deadline passed. ``offsets``: of the blocks to copy, by run of the
    hit; None while more may arrive. ``acquired_s``: when the pool had been asked, ``pending_s``:
    when it was last seen unfinished, and ``came``: when each of ``whole`` was seen; seconds since
    ``mark``.
    """

    pool: PoolClient
    costs: LoadCostModel
    hit: Hit
    mark: Mark
    patience_s: float
    deadline_s: float
    tickets: list[int] = field(default_factory=list)
    portions: list[tuple[int, int]] = field(default_factory=list)  # run and blocks of each ticket
    whole: list[Recall] = field(default_factory=list)  # of the leading tickets that are READY
    came: list[float] = field(default_factory=list)
    was_late: bool = False
    acquired_s: float = 0.0
    pending_s: float = 0.0
    given_up: bool = False
    offsets: list[tuple[int, ...]] | None = None

    def acquire(self, state: RequestState) -> None:
        """Acquires the blocks of the hit; each run in one portion if all of it is in the host."""
        for number, run in enumerate(self.hit.runs):
            count = len(run.keys)
            is_in_host = all(tier is TierName.HOST for tier in run.tiers)
            size = count if is_in_host else -(-count // _PORTIONS)
            for first in range(0, count, size):
                part = run.part(first, first + size)
                self.tickets.append(part.acquire(self.pool, self.deadline_s, state))
                self.portions.append((number, len(part.keys)))
        self.acquired_s = self.costs.elapsed(self.mark)

    def poll(self) -> bool:
        """Whether nothing more is waited for; ``tokens`` is settled then."""
        if self.offsets is not None:
            held = zip(self.tickets, self.whole, strict=True)
            # A pool service may have died since, and its replacement have other blocks there. This
            # keeps them valid until the next ``arena_handle``.
            if not all(self.pool.poll(ticket).offsets == one.offsets for ticket, one in held):
                self.offsets = [()] * len(self.hit.runs)
            return True
        if self._is_pending():
            self.pending_s = self.costs.elapsed(self.mark)
            gained = self.costs.gained_seconds(self._arrived(), self.hit.chain.first)
            self.given_up = self.pending_s > gained + self.patience_s
            if not self.given_up:
                return False
        while len(self.tickets) > len(self.whole):
            self.pool.release(self.tickets.pop())
        self.offsets = [()] * len(self.hit.runs)
        for (number, _), recall in zip(self.portions, self.whole, strict=False):
            self.offsets[number] += recall.offsets
        self.was_late = self.given_up or self.costs.elapsed(self.mark) >= self.deadline_s
        # After other work it is only known that the blocks took longer than until they were last
        # seen pending. Lost ones (a damaged file, a dead service) say nothing about speed.
        elapsed = self.costs.elapsed(self.mark) if self.costs.idle_since(self.mark) else 0.0
        seconds = elapsed or self.pending_s
        late = self.portions[len(self.whole)][1] if self.given_up else 0  # may come at once
        for tier in {tier for run in self.hit.runs for tier in run.tiers} - {TierName.HOST}:
            most = late + sum(
                recall.tiers.count(tier) * self.hit.runs[number].weight
                for (number, _), recall in zip(self.portions, self.whole, strict=False)
            )
            if seconds > 0 and most:
                asked = sum(run.tiers.count(tier) for run in self.hit.runs)
                self.costs.saw_load(tier, most, seconds, asked)
        return True

    @property
    def tokens(self) -> int:
        """Tokens behind the start that arrived blocks give; of several KV groups all or none."""
        assert self.offsets is not None
        came = [len(offsets) for offsets in self.offsets]
        whole = [len(run.keys) for run in self.hit.runs]
        if self.hit.is_chain:
            return self.hit.tokens(came[0])
        return self.hit.end - self.hit.start if came == whole else 0

    @property
    def missing(self) -> tuple[BlockKey, TierName] | None:
        """The first block of the hit that did not arrive, and its tier."""
        assert self.offsets is not None
        for run, offsets in zip(self.hit.runs, self.offsets, strict=True):
            if len(offsets) < len(run.keys):
                return run.keys[len(offsets)], run.tiers[len(offsets)]
        return None

    def cut(self, tokens: int) -> None:
        """Limits the load to that many tokens. The leases of the others stay."""
        assert self.offsets is not None
        if tokens < self.tokens:
            count = -(-tokens // self.hit.block_size) if self.hit.is_chain else 0
            self.offsets = [offsets[:count] for offsets in self.offsets]

    def tokens_by_tier(self, tokens: int) -> Counter[TierName]:
        """The first ``tokens`` loaded tokens by the tier that their block of the chain came from;
        by the lowest tier of all, if the hit has no blocks of a chain for them."""
        hit, count = self.hit, -(-tokens // self.hit.block_size)
        tiers = self._arrived()[:count]
        if hit.chain.first * hit.block_size != hit.start or len(tiers) != count:
            return Counter({self.lowest_tier: tokens})
        counts: Counter[TierName] = Counter()
        for place, tier in enumerate(tiers):
            counts[tier] += min(hit.tokens(place + 1), tokens) - hit.tokens(place)
        return counts

    @property
    def lowest_tier(self) -> TierName:
        """The tier farthest from the device that a block came from."""
        tiers = (tier for recall in self.whole for tier in recall.tiers)
        return max(tiers, key=list(TierName).index)

    def release(self) -> None:
        for ticket in self.tickets:
            self.pool.release(ticket)

    # ---- within --------------------------------------------------------------------------

    def _is_pending(self) -> bool:
        """Records the portions that are READY. False after the last, or an incomplete one."""
        while (place := len(self.whole)) < len(self.tickets):
            recall = self.pool.poll(self.tickets[place])
            if recall.state is RecallState.PENDING:
                return True
            self.whole.append(recall)
            self.came.append(self.costs.elapsed(self.mark))
            if len(recall.offsets) < self.portions[place][1]:
                return False
        return False

    def _arrived(self) -> tuple[TierName, ...]:
        """The original tiers of the chain's blocks that are in the host now."""
        chain = len(self.hit.runs) - 1
        came = zip(self.portions, self.whole, strict=False)
        return tuple(tier for (of, _), recall in came if of == chain for tier in recall.tiers)
