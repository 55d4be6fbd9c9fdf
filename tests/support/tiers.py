"""Tiers for tests: wrappers that delay, fail and record."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrecall.block import BlockKey, Namespace, TierName
from kvrecall.pool.base import TierStats
from kvrecall.pool.changes import Cause
from kvrecall.pool.hints import Advice
from kvrecall.pool.tier import Buckets, Done, Get, Outcome, Put, PutVerdict, Tier


class WrapperTier(Tier):
    """Passes everything on to ``inner``; the base of wrappers that change one thing."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.name = inner.name

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        self.inner.register(namespace, block_bytes)

    def contains(self, key: BlockKey) -> bool:
        return self.inner.contains(key)

    def tier_of(self, key: BlockKey) -> TierName:
        return self.inner.tier_of(key)

    def ask(self, keys: Sequence[BlockKey], every: bool = False) -> bool:
        return self.inner.ask(keys, every)

    def depth_of(self, key: BlockKey) -> int | None:
        return self.inner.depth_of(key)

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        return self.inner.submit_put(puts)

    def submit_get(self, gets: Sequence[Get]) -> None:
        self.inner.submit_get(gets)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        return self.inner.poll(timeout_s)

    def touch(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        self.inner.touch(chain, hanging, ending, advice)

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        self.inner.drop(keys, cause)

    def clear(self) -> None:
        self.inner.clear()

    def stats(self) -> TierStats:
        return self.inner.stats()

    def histograms(self) -> dict[str, Buckets]:
        return self.inner.histograms()

    def queued(self) -> tuple[int, int]:
        return self.inner.queued()

    def close(self, deadline_s: float = 10.0) -> None:
        self.inner.close(deadline_s)


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


class RecordingTier(WrapperTier):
    """Keeps the names and arguments of the calls that change something."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, tuple[BlockKey, ...]]] = []

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        self.calls.append(("put", tuple(put.key for put in puts)))
        return super().submit_put(puts)

    def submit_get(self, gets: Sequence[Get]) -> None:
        self.calls.append(("get", tuple(get.key for get in gets)))
        super().submit_get(gets)

    def touch(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        self.calls.append(("touch", (*chain, *hanging, *ending)))
        super().touch(chain, hanging, ending, advice)

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        self.calls.append(("drop", tuple(keys)))
        super().drop(keys, cause)
