"""The remote tier's book-keeping."""

from __future__ import annotations

from kvrecall.pool.histogram import Histogram
from kvrecall.pool.ledger import TierLedger
from kvrecall.pool.tier import Buckets


class Ledger(TierLedger):
    """Counters of one remote tier. Thread-safe."""

    def __init__(self) -> None:
        super().__init__("remote")
        self._lookup_latency = Histogram()

    def looked_up(self, seconds: float) -> None:
        """One batch of existence checks was answered."""
        with self._changed:
            self._lookup_latency.observe(seconds)

    def histograms(self) -> dict[str, Buckets]:
        with self._changed:
            latency = {"remote_lookup_seconds": self._lookup_latency.buckets()}
        return super().histograms() | latency
