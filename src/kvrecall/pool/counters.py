"""Counters of the tiers below the host: operations, bytes, latencies, failures."""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from itertools import accumulate

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
        self._reads = 0
        self._read_bytes = 0
        self._read_seconds = 0.0
        self._hits = 0
        self._writes = 0
        self._write_bytes = 0
        self._write_seconds = 0.0
        self._given_bytes = 0
        self._compressed_bytes = 0
        self._shed = 0
        self._errors = 0
        self._corrupt = 0
        self._silent_until = 0.0
        self._read_latency = Histogram()
        self._write_latency = Histogram()

    def read(self, nbytes: int, seconds: float) -> None:
        """One call of the medium for blocks ended."""
        with self._changed:
            self._read_bytes += nbytes
            self._read_seconds += seconds

    def read_done(self, outcome: Outcome, seconds: float) -> None:
        """One get ended, ``seconds`` after it was queued."""
        with self._changed:
            self._reads += 1
            self._hits += outcome is Outcome.LOADED
            self._corrupt += outcome is Outcome.CORRUPT
            self._errors += outcome is Outcome.ERROR
            self._read_latency.observe(seconds)

    def wrote(self, nbytes: int, seconds: float) -> None:
        """A batch was stored."""
        with self._changed:
            self._write_bytes += nbytes
            self._write_seconds += seconds

    def compressed(self, given: int, stored: int) -> None:
        """Blocks of ``given`` bytes were stored in ``stored``."""
        with self._changed:
            self._given_bytes += given
            self._compressed_bytes += stored

    def write_done(self, outcome: Outcome, seconds: float) -> None:
        """One put ended, ``seconds`` after it was queued."""
        with self._changed:
            if outcome is Outcome.STORED:
                self._writes += 1
                self._write_latency.observe(seconds)
            else:
                self._shed += 1

    def shed_some(self, count: int) -> None:
        with self._changed:
            self._shed += count

    def found_corrupt(self, blocks: int) -> None:
        """Blocks were found damaged beside gets."""
        with self._changed:
            self._corrupt += blocks

    def failed(self) -> None:
        """An operation of the medium failed."""
        with self._changed:
            self._errors += 1

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
        """The counters, together with the tier's gauges."""
        with self._changed:
            return TierStats(
                name=self._name,
                capacity_bytes=capacity_bytes,
                used_bytes=used_bytes,
                blocks=blocks,
                hits=self._hits,
                reads=self._reads,
                read_bytes=self._read_bytes,
                read_seconds=self._read_seconds,
                writes=self._writes,
                write_bytes=self._write_bytes,
                write_seconds=self._write_seconds,
                dropped=self._shed,
                errors=self._errors,
                corrupt=self._corrupt,
                given_bytes=self._given_bytes,
                compressed_bytes=self._compressed_bytes,
            )
