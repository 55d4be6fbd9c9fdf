"""Time that tests move by hand."""

from __future__ import annotations


class ManualClock:
    """A clock that stands still until ``advance`` is called."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
