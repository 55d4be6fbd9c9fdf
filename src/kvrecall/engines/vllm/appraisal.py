"""Load or recompute: what is expected to be faster, from what this machine was seen to do.

A hit that loses to recomputing is worse than a miss. Loading costs time in proportion to bytes, by
tier; computing a token costs more the deeper it lies (attention). Both are measured on the engine's
own work, so neither needs settings: prefill steps as they run, recalls as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrecall.block import TierName

TRIVIAL_S = 0.02
"""Loads expected to take less are made without asking: nothing can be lost by them."""

_MEMORY = 0.9  # weight of the past in running averages
_MIN_STEP_TOKENS = 32  # smaller steps are decoding, and tell nothing of prefill
_PROBE_SHARE = 0.05  # share of the computing time that a probe of a slow tier may cost
_RISK_SHARE = 0.1  # share of the computing time saved that may be waited in vain
_SLACK = 2.0  # a load may take so many times what is expected before the wait ends


@dataclass(frozen=True, slots=True)
class Plan:
    """How many leading blocks to load, and how long to wait for them (seconds)."""

    blocks: int
    deadline_s: float


class Appraiser:
    """Expected costs of one engine. Owned by its scheduler side; not thread-safe."""

    def __init__(self, block_tokens: int, block_bytes: int, deadline_s: float) -> None:
        """``deadline_s``: the longest any load may be waited for."""
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._deadline_s = deadline_s
        self._bandwidth: dict[TierName, float] = {}
        self._prefill = _PrefillModel()

    # ---- what was seen ------------------------------------------------------------------

    def saw_step(self, tokens: int, depth: int, seconds: float) -> None:
        """A step computed ``tokens`` prompt tokens whose mean position was ``depth``."""
        if tokens >= _MIN_STEP_TOKENS and seconds > 0:
            self._prefill.saw(tokens, depth, seconds)

    def saw_load(self, tier: TierName, blocks: int, seconds: float) -> None:
        """``blocks`` blocks came from ``tier`` within ``seconds`` of asking, queues included.

        Blocks that did not come in time count as a bandwidth of what did come.
        """
        rate = max(blocks, 0.01) * self._block_bytes / max(seconds, 1e-6)
        known = self._bandwidth.get(tier)
        self._bandwidth[tier] = rate if known is None else _MEMORY * known + (1 - _MEMORY) * rate
        if known is not None and rate < known / 2:  # a tier that stalls is believed at once
            self._bandwidth[tier] = rate

    # ---- what follows -------------------------------------------------------------------

    def plan(self, tiers: Sequence[TierName], start_block: int) -> Plan:
        """For a found prefix, ``tiers[i]`` holding block ``start_block + i``.

        Chooses the length that minimises loading it plus computing what is left of it. Unknown
        costs are taken as nothing to load and everything to compute, so that they get known.
        """
        if not self._prefill.known:
            return Plan(len(tiers), self._deadline_s)
        loads = [self.load_seconds(tier) for tier in tiers]
        computes = [self.compute_seconds(start_block + i) for i in range(len(tiers))]
        left = sum(computes)
        best, best_cost, spent = 0, left, 0.0
        for index, (load, compute) in enumerate(zip(loads, computes, strict=True)):
            spent += load
            left -= compute
            if spent + left <= best_cost or spent <= TRIVIAL_S:
                best, best_cost = index + 1, spent + left
        if best < len(tiers):
            best = max(best, self._probe(loads, sum(computes)))
        expected = sum(loads[:best])
        if not expected:
            return Plan(best, self._deadline_s)
        worth = _RISK_SHARE * sum(computes[:best])
        return Plan(best, min(self._deadline_s, max(_SLACK * expected, worth, TRIVIAL_S)))

    def load_seconds(self, tier: TierName) -> float:
        """Expected seconds to load one block; 0 if the tier was not seen yet."""
        rate = self._bandwidth.get(tier)
        return self._block_bytes / rate if rate else 0.0

    def compute_seconds(self, block: int) -> float:
        """Expected seconds to compute the ``block``-th block of a sequence."""
        depth = (block + 0.5) * self._block_tokens
        return self._block_tokens * self._prefill.seconds_per_token(depth)

    def _probe(self, loads: Sequence[float], compute: float) -> int:
        """Blocks to load from a slow tier all the same, so that its recovery is noticed."""
        spent, count = 0.0, 0
        for load in loads:
            spent += load
            if spent > _PROBE_SHARE * compute:
                break
            count += 1
        return count


class _PrefillModel:
    """Seconds per prompt token as ``base + slope * depth``, by running least squares."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._weight > 0

    def saw(self, tokens: int, depth: float, seconds: float) -> None:
        cost = seconds / tokens
        sums = (1.0, depth, cost, depth * depth, depth * cost)
        old = (self._weight, self._x, self._y, self._xx, self._xy)
        new = [_MEMORY * a + b for a, b in zip(old, sums, strict=True)]
        self._weight, self._x, self._y, self._xx, self._xy = new

    def seconds_per_token(self, depth: float) -> float:
        """Neither negative nor falling with depth."""
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1.0:
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        return max(mean_y + slope * (depth - mean_x), mean_y * 0.1)
