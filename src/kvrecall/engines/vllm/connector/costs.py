"""Load or recompute: what is expected to be faster, from what this machine was seen to do.

A hit that loses to recomputing is worse than a miss. Loading costs time in proportion to bytes, by
tier; computing a token costs more the deeper it lies (attention). Both are measured on the engine's
own work, so neither needs settings: prefill steps as they run, recalls as they arrive. Before the
first prefill step, the rate of matrix products on this device stands in for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvrecall.block import TierName

TRIVIAL_S = 0.02
"""Loads expected to take less are made without asking: nothing can be lost by them."""

_LEAST_PATIENCE_S = 0.05
"""Waits may always be as long: a disk that is merely busy for a moment shall not cut hits short."""

_MEMORY = 0.9  # weight of the past in running averages
_MIN_STEP_TOKENS = 32  # smaller steps are decoding, and tell nothing of prefill
_PROBE_SHARE = 0.05  # share of the computing time that a probe of a slow tier may cost
_PROBE_EVERY = 4  # a tier that is passed over is tried again so often
_PROBE_AFTER_S = 5.0  # and when nothing was loaded from it for so long
_RISK_SHARE = 0.08  # share of the computing time at stake that may be waited in vain


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: anything at all, and how many prompt tokens at which mean position."""

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
    """How many leading blocks to load, and for how many seconds to wait for them *beyond* what
    those that came have saved (``gained_seconds``).

    So a load from a medium that is as fast as expected is waited for to its end, however long it
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
        """``deadline_s``: the longest any load may be waited for. ``least_token_seconds``: what a
        prompt token is taken to cost until one was computed; 0: unknown."""
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
        """Learns from the oldest step under way. Not if steps overlapped (asynchronous scheduling,
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
        """``blocks`` blocks came from ``tier`` within ``seconds`` of asking, queues included.

        Blocks that did not come in time count as a bandwidth of what did come.
        """
        self._seen_at[tier] = self._clock()
        rate = max(blocks, 0.1) * self._block_bytes / max(seconds, 1e-6)
        known = self._bandwidth.get(tier)
        if known is None or not known / 2 <= rate <= 2 * known:
            self._bandwidth[tier] = rate  # a tier that stalls, or has recovered: believed at once
        else:
            self._bandwidth[tier] = _MEMORY * known + (1 - _MEMORY) * rate

    # ---- what follows -------------------------------------------------------------------

    def plan(self, tiers: Sequence[TierName], start_block: int) -> LoadPlan:
        """For a found prefix, ``tiers[i]`` holding block ``start_block + i``.

        Chooses the length that minimises loading it plus computing what is left of it. Unknown
        costs are taken as nothing to load and everything to compute, so that they get known.
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
        """Whether to load from a slow tier all the same, so that its recovery is noticed."""
        self._passed_over += 1
        unheard_s = self._clock() - self._seen_at.get(tier, 0.0)
        return self._passed_over % _PROBE_EVERY == 0 or unheard_s >= _PROBE_AFTER_S

    def gained_seconds(self, tiers: Sequence[TierName], start_block: int) -> float:
        """Computing that is saved by what came from below the host; ``tiers`` as in ``plan``."""
        return sum(
            self.compute_seconds(start_block + place)
            for place, tier in enumerate(tiers)
            if tier is not TierName.HOST and self._prefill.known
        )

    def load_seconds(self, tier: TierName) -> float:
        """Expected seconds to load one block; 0 if the tier was not seen yet."""
        rate = self._bandwidth.get(tier)
        return self._block_bytes / rate if rate else 0.0

    def compute_seconds(self, block: int) -> float:
        """Expected seconds to compute the ``block``-th block of a sequence."""
        depth = (block + 0.5) * self._block_tokens
        return self._block_tokens * self._prefill.seconds_per_token(depth)


class _PrefillModel:
    """Seconds per prompt token as ``base + slope * depth``, by running least squares; ``least``
    until one was seen (0: unknown)."""

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


_ROWS = 512  # tokens, as in a prefill step
_COLUMNS = 2048
_TIMES = 4


def least_token_seconds(flops: float, hidden: int, dtype: torch.dtype, device: str) -> float:
    """What computing a prompt token costs at the least, in seconds: its ``flops`` operations in
    products of width ``hidden`` at the rate this device reaches now. 0 if either is 0.

    The first request after a start may find its prefix on a slow disk, and must know how long it
    may wait. Takes some milliseconds: the best of a few tries, as the first ones pay for other
    things.
    """
    if not (flops and hidden):
        return 0.0
    a = torch.ones((_ROWS, hidden), dtype=dtype, device=device)
    b = torch.ones((hidden, _COLUMNS), dtype=dtype, device=device)
    best = float("inf")
    for _ in range(_TIMES):
        began = time.perf_counter()
        torch.mm(a, b)
        if a.device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return flops * best / (2.0 * _ROWS * hidden * _COLUMNS)
