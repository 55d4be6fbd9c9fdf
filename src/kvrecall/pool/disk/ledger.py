"""The disk tier's book-keeping, and who may use the medium now."""

from __future__ import annotations

import time

from kvrecall.pool.ledger import TierLedger
from kvrecall.pool.tier import Outcome


class Ledger(TierLedger):
    """Counters of one disk tier. Thread-safe."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.reading = 0  # gets not done

    def reads_began(self, count: int) -> None:
        with self._changed:
            self.reading += count

    def read_done(self, outcome: Outcome, seconds: float) -> None:
        super().read_done(outcome, seconds)
        with self._changed:
            self.reading -= 1
            if not self.reading:
                self._changed.notify_all()

    def faulted(self, what: str, error: Exception) -> None:
        """An operation of the medium failed, which the log is told."""
        self.failed()
        self.complain(f"{what}: {error}")

    def yield_to_reads(self, at_most_s: float) -> None:
        """Waits until no read is queued, so that loads go before stores; but not for ever."""
        until = time.monotonic() + at_most_s
        with self._changed:
            while self.reading and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
