"""Time as eviction policies want it."""

from __future__ import annotations

from collections.abc import Callable


class SteadyClock:
    """The wall clock, except that it stands still while the system's clock is set back."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._latest = float("-inf")

    def __call__(self) -> float:
        self._latest = max(self._latest, self._wall())
        return self._latest
