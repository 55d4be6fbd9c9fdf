"""Times the engine's steps and what happens between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes: anything at all, and how many prompt tokens at which mean position."""

    any: bool
    prompt_tokens: int = 0
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, and how many working steps had begun by then."""

    seconds: float
    steps: int


class StepClock:
    """Steps begin and end in order. Not thread-safe; owned by the scheduler side."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._under_way: deque[tuple[float, Work]] = deque()
        self._steps = 0

    def step_begins(self, work: Work) -> None:
        self._under_way.append((self._now(), work))
        self._steps += work.any

    def step_ends(self) -> tuple[Work, float | None]:
        """The oldest step under way and its seconds; None if steps overlapped (asynchronous
        scheduling, pipeline stages), as its time is then not its own."""
        if not self._under_way:
            return Work(False), None
        overlapped = len(self._under_way) > 1
        begin, work = self._under_way.popleft()
        return work, None if overlapped else self._now() - begin

    def mark(self) -> Mark:
        return Mark(self._now(), self._steps)

    def elapsed(self, mark: Mark) -> float:
        """Seconds since ``mark``, whatever the engine did."""
        return self._now() - mark.seconds

    def since(self, mark: Mark) -> float | None:
        """Seconds since ``mark``; None if the engine computed something in between."""
        return self._now() - mark.seconds if mark.steps == self._steps else None
