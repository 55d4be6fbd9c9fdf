"""The time by which blocks age."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

_MOST_S = 366 * 86400.0


class Clock:
    """Seconds that only pass: they begin as the wall clock's, and then go on by the time since the
    host's boot, whatever the wall clock is set to.

    A time that must outlive the process is kept beside ``note()``; ``since`` of that note says how
    long ago it was. Under one boot that is exact. Over a boot there is only the wall clock, which
    may have been wrong then or be wrong now: a difference below 0 or above a year is not believed,
    and counts as no time at all. So blocks neither expire all at once nor are kept for ever: they
    age on from where they were.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        since_boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        boot: str = "",
    ) -> None:
        """``boot``: an identity of the boot; the kernel's if empty."""
        self._wall = wall
        self._since_boot = since_boot
        self._boot = boot or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._ahead = wall() - since_boot()

    def __call__(self) -> float:
        return self._since_boot() + self._ahead

    def note(self) -> str:
        """The present moment, for a later process."""
        return json.dumps([self._boot, self._since_boot(), self._wall()])

    def since(self, note: str) -> float:
        """Seconds since a note was made. Raises ValueError if it is none."""
        try:
            boot, *seconds = json.loads(note)
            since_boot, wall = map(float, seconds)
        except (TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"{note[:80]!r} is no note of a time") from error
        if boot == self._boot:
            return max(0.0, self._since_boot() - since_boot)
        passed = self._wall() - wall
        return passed if 0.0 <= passed <= _MOST_S else 0.0
