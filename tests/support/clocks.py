"""Time that tests move by hand."""

from __future__ import annotations

from kvrecall.pool.clock import Clock


class ManualClock:
    """A clock that stands still until ``advance`` is called."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class HostClocks:
    """The clocks of a host: ``time`` passes by both, and the wall clock is set to anything."""

    def __init__(self, wall: float = 1.8e9) -> None:
        self.wall = wall
        self.since_boot = 100.0
        self.boots = 0

    def clock(self) -> Clock:
        """Of a process that starts now."""
        return Clock(lambda: self.wall, lambda: self.since_boot, f"boot {self.boots}")

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.since_boot += seconds

    def reboot(self, off_s: float) -> None:
        """The host is off for so long."""
        self.wall += off_s
        self.since_boot = 1.0
        self.boots += 1
