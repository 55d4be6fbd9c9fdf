"""The last half hour of a server's figures: a bounded ring of samples of its own metrics; and what
was missed in a day."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from prometheus_client import REGISTRY, CollectorRegistry

from kvrecall.nicety import nicety
from kvrecall.server.dashboard.alarms import Alarms
from kvrecall.server.dashboard.sample import Bounds, Sample, sample

EVERY_S = 2.0
KEPT = 900
DAY_S = 24 * 3600.0
_DAY_STEP_S = 600.0


class History:
    """The last ``KEPT`` samples, one every ``EVERY_S`` seconds, and the alarms."""

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._samples: deque[Sample] = deque()
        self._day: deque[tuple[float, Mapping[str, float]]] = deque()
        self._buckets: dict[str, list[int]] = {}  # of the last sample, all of them
        self._task: asyncio.Task[None] | None = None
        self.bounds: Bounds = {}
        self.alarms = Alarms(EVERY_S * KEPT)

    @nicety("the dashboard's sampling")
    def take(self) -> None:
        """Adds a sample."""
        made, self.bounds = sample(self._registry, round(self._clock(), 3))
        everything = made.buckets
        made.buckets = {k: rows for k, rows in everything.items() if self._buckets.get(k) != rows}
        self._buckets = everything
        self._samples.append(made)
        if len(self._samples) > KEPT:
            oldest = self._samples.popleft()
            self._samples[0].buckets = oldest.buckets | self._samples[0].buckets
        self.alarms.see(made)
        if not self._day or made.at >= self._day[-1][0] + _DAY_STEP_S:
            self._day.append((made.at, made.missed))
        while len(self._day) > 1 and self._day[1][0] <= made.at - DAY_S:
            self._day.popleft()

    def day(self) -> tuple[float, Mapping[str, float]]:
        """The tokens missed by reason, as of 24 hours ago (to ten minutes) or of the start, and
        when that was (wall-clock seconds)."""
        return self._day[0] if self._day else (self._clock(), {})

    def since(self, moment: float) -> Sequence[Sample]:
        """Samples after ``moment`` (wall-clock seconds), oldest first."""
        return [each for each in self._samples if each.at > moment]

    def latest(self) -> Sample:
        """A new sample, which is not kept."""
        return sample(self._registry, round(self._clock(), 3))[0]

    def begin(self) -> None:
        """Starts sampling in the running event loop. Idempotent."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.take()
            await asyncio.sleep(EVERY_S)
