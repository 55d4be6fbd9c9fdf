"""The disk tier's book-keeping: counters, latencies, and who may use the medium now."""

from __future__ import annotations

import logging
import threading
import time

from kvrecall.pool.histogram import Histogram
from kvrecall.pool.tier import Buckets, Outcome

_LOG = logging.getLogger(__name__)
_SILENCE_S = 10.0  # between two complaints


class Ledger:
    """Counters of one disk tier. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.reading = 0  # gets not done
        self.reads = 0
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.hits = 0
        self.writes = 0
        self.write_bytes = 0
        self.write_seconds = 0.0
        self.shed = 0
        self.errors = 0
        self.corrupt = 0
        self._silent_until = 0.0
        self._read_latency = Histogram()
        self._write_latency = Histogram()

    def reads_began(self, count: int) -> None:
        with self._changed:
            self.reading += count

    def read(self, nbytes: int, seconds: float) -> None:
        """One system call ended."""
        with self._changed:
            self.read_bytes += nbytes
            self.read_seconds += seconds

    def read_done(self, outcome: Outcome, seconds: float) -> None:
        """One get ended, ``seconds`` after it was queued."""
        with self._changed:
            self.reading -= 1
            self.reads += 1
            self.hits += outcome is Outcome.LOADED
            self.corrupt += outcome is Outcome.CORRUPT
            self.errors += outcome is Outcome.ERROR
            self._read_latency.observe(seconds)
            if not self.reading:
                self._changed.notify_all()

    def wrote(self, nbytes: int, seconds: float) -> None:
        """A batch became durable."""
        with self._changed:
            self.write_bytes += nbytes
            self.write_seconds += seconds

    def write_done(self, outcome: Outcome, seconds: float) -> None:
        """One put ended, ``seconds`` after it was queued."""
        with self._changed:
            if outcome is Outcome.STORED:
                self.writes += 1
                self._write_latency.observe(seconds)
            else:
                self.shed += 1

    def shed_some(self, count: int) -> None:
        with self._changed:
            self.shed += count

    def failed(self, what: str, error: Exception) -> None:
        """An operation of the medium failed."""
        with self._changed:
            self.errors += 1
        self.complain(what, error)

    def complain(self, what: str, error: Exception) -> None:
        """Tells the log what went wrong, unless it was told something just now."""
        now = time.monotonic()
        with self._changed:
            if now < self._silent_until:
                return
            self._silent_until = now + _SILENCE_S
        _LOG.warning("disk tier: %s: %s", what, error)

    def yield_to_reads(self, at_most_s: float) -> None:
        """Waits until no read is queued, so that loads go before stores; but not for ever."""
        until = time.monotonic() + at_most_s
        with self._changed:
            while self.reading and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)

    def histograms(self) -> dict[str, Buckets]:
        with self._changed:
            return {
                "disk_read_seconds": self._read_latency.buckets(),
                "disk_write_seconds": self._write_latency.buckets(),
            }
