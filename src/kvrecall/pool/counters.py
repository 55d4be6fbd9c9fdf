"""Counters of the tiers below the host: operations, bytes, latencies, failures."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from itertools import accumulate
from typing import Any

from kvrecall.pool.base import TierStats
from kvrecall.pool.tier import Buckets, Outcome

_LOG = logging.getLogger(__name__)
_SILENCE_S = 10.0  # between two warnings
_BOUNDS = tuple(
    base * 10.0**power for power in range(-4, 2) for base in (1.0, 2.5, 5.0)
)  # 0.1 ms to 50 s


class Histogram:
    """Counts of seconds in fixed buckets. One writer at a time; readers may read at any time."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_BOUNDS, seconds)] += 1

    def buckets(self) -> Buckets:
        """``(upper bound in seconds, number of samples up to that)``, ascending, up to infinity."""
        bounds = (*_BOUNDS, float("inf"))
        counts = accumulate(self._counts)
        return tuple((round(at, 6), count) for at, count in zip(bounds, counts, strict=True))


class TierCounters:
    """Counters of the tier called ``name``. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # its lock guards everything below
        self._counts: defaultdict[str, Any] = defaultdict(int)  # fields of ``TierStats``
        self._silent_until = 0.0
        self._read_latency = Histogram()
        self._write_latency = Histogram()

    def add(self, **more: float) -> None:
        """Adds to these fields of ``TierStats``."""
        with self._changed:
            for name, value in more.items():
                self._counts[name] += value

    def read_done(self, outcome: Outcome, seconds: float) -> None:
        """One get ended, ``seconds`` after it was queued."""
        with self._changed:
            self._counts["reads"] += 1
            self._counts["hits"] += outcome is Outcome.LOADED
            self._counts["corrupt"] += outcome is Outcome.CORRUPT
            self._counts["errors"] += outcome is Outcome.ERROR
            self._read_latency.observe(seconds)

    def write_done(self, outcome: Outcome, seconds: float) -> None:
        """One put ended, ``seconds`` after it was queued."""
        with self._changed:
            if outcome is Outcome.STORED:
                self._counts["writes"] += 1
                self._write_latency.observe(seconds)
            else:
                self._counts["dropped"] += 1

    def warn(self, what: str) -> None:
        """Logs a failure, unless another was logged just before."""
        now = time.monotonic()
        with self._changed:
            if now < self._silent_until:
                return
            self._silent_until = now + _SILENCE_S
        _LOG.warning("%s tier: %s", self._name, what)

    def histograms(self) -> dict[str, Buckets]:
        with self._changed:
            return {
                f"{self._name}_read_seconds": self._read_latency.buckets(),
                f"{self._name}_write_seconds": self._write_latency.buckets(),
            }

    def stats(self, capacity_bytes: int, used_bytes: int, blocks: int) -> TierStats:
        with self._changed:
            return TierStats(self._name, capacity_bytes, used_bytes, blocks, **self._counts)
