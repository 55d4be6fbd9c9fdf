"""Latency histograms with fixed buckets."""

from __future__ import annotations

from bisect import bisect_left

_BOUNDS = tuple(
    base * 10.0**power for power in range(-4, 2) for base in (1.0, 2.5, 5.0)
)  # 0.1 ms to 50 s


class Histogram:
    """Counts of seconds. One writer at a time; readers may look any time."""

    __slots__ = ("_counts", "count", "total")

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self.count = 0
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self.count += 1
        self.total += seconds

    def buckets(self) -> tuple[tuple[float, int], ...]:
        """``(upper bound in seconds, how many were at most that)``, ascending, up to infinity."""
        rows: list[tuple[float, int]] = []
        below = 0
        for bound, count in zip((*_BOUNDS, float("inf")), self._counts, strict=True):
            below += count
            rows.append((round(bound, 6), below))
        return tuple(rows)
