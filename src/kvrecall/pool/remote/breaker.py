"""The breaker: leaves a store alone for a while after it failed."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Breaker:
    """Open after a failure for ``first_s`` seconds, then twice as long each time, up to
    ``longest_s``; the first call after the pause is the trial. Thread-safe."""

    def __init__(
        self, monotonic: Callable[[], float], first_s: float = 0.5, longest_s: float = 15.0
    ) -> None:
        self._monotonic = monotonic
        self._first_s = first_s
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether nothing shall be asked of the store now."""
        return self._monotonic() < self._until

    def failed(self) -> bool:
        """A call failed. True if that begins an outage."""
        with self._lock:
            begins = self._pause_s == 0.0
            if not self.is_open:  # of several calls that fail together one counts
                self._pause_s = min(self._longest_s, max(self._first_s, 2 * self._pause_s))
                self._until = self._monotonic() + self._pause_s
            return begins

    def worked(self) -> bool:
        """A call succeeded. True if that ends an outage."""
        with self._lock:
            ends = self._pause_s > 0.0
            self._pause_s = 0.0
            self._until = float("-inf")
            return ends
