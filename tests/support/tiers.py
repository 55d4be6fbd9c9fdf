"""Tiers for tests: wrappers that delay and fail."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrecall.block import BlockKey
from kvrecall.pool.tier import Done, Get, Outcome, Put, PutVerdict, Tier


class WrapperTier:
    """Passes everything on to ``inner``; the base of wrappers that change one thing."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class LatencyTier(WrapperTier):
    """Every operation is heard of ``delay_s`` seconds after the inner tier did it."""

    def __init__(
        self, inner: Tier, delay_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: deque[tuple[float, Done]] = deque()

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        fresh = self.inner.poll(timeout_s)
        now = self._monotonic()
        with self._lock:
            self._held.extend((now + self.delay_s, done) for done in fresh)
            ripe: list[Done] = []
            while self._held and self._held[0][0] <= now:
                ripe.append(self._held.popleft()[1])
        return ripe


@dataclass(slots=True)
class Faults:
    """What goes wrong in a ``FaultyTier``, by key. May be changed at any time."""

    shed: set[BlockKey] = field(default_factory=set)  # puts that fail
    gets: dict[BlockKey, Outcome] = field(default_factory=dict)  # gets that end so
    hung: set[BlockKey] = field(default_factory=set)  # gets whose end is not heard of


class FaultyTier(WrapperTier):
    """A tier some of whose operations fail or hang as ``faults`` says."""

    def __init__(self, inner: Tier, faults: Faults | None = None) -> None:
        super().__init__(inner)
        self.faults = faults or Faults()
        self._lock = threading.Lock()
        self._own: list[Done] = []
        self._hung: list[Done] = []

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        verdicts = []
        for put in puts:
            if put.key in self.faults.shed:
                with self._lock:
                    self._own.append(Done(put.key, Outcome.SHED))
                verdicts.append(PutVerdict.QUEUED)
            else:
                verdicts += self.inner.submit_put([put])
        return verdicts

    def submit_get(self, gets: Sequence[Get]) -> None:
        passed = []
        for get in gets:
            outcome = self.faults.gets.get(get.key)
            if outcome is None:
                passed.append(get)
                continue
            with self._lock:
                self._own.append(Done(get.key, outcome))
            if outcome in (Outcome.CORRUPT, Outcome.ERROR):
                get.into[:] = b"\xff" * len(get.into)
                self.inner.drop([get.key])
        self.inner.submit_get(passed)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        done = self.inner.poll(0.0 if self._own else timeout_s)
        with self._lock:
            done += self._own
            self._own = []
            hung = self.faults.hung
            late = [d for d in done if d.key in hung and d.outcome is not Outcome.STORED]
            done = [d for d in done if d not in late]
            self._hung += late
            done += [d for d in self._hung if d.key not in hung]
            self._hung = [d for d in self._hung if d.key in hung]
        return done
