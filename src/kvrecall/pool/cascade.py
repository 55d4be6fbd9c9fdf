"""Combines two tiers below the host into one: a near one on this host, a far one beyond it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvrecall.block import BlockKey, Namespace, TierName
from kvrecall.pool.base import TierStats
from kvrecall.pool.changes import Cause, Watcher
from kvrecall.pool.hints import Advice
from kvrecall.pool.tier import Buckets, Done, Get, Outcome, Put, PutVerdict, Tier

_SLICE_S = 0.01  # how long one of the tiers is waited for while both work


@dataclass(slots=True)
class _Storing:
    """A put that a tier still works on. ``outcome`` is the near tier's."""

    outcome: Outcome
    near: bool
    far: bool


class Cascade(Tier):
    """Stores each block in both tiers (or only in the near one, if its put is not ``shared``), and
    fetches it from the nearest tier that has it.

    The near tier decides: its outcome is the outcome of a put, and ``name`` is its name. The far
    one is best effort: a block that it sheds or loses is still in the near one. A put is done when
    both tiers are done with its memory. ``tier_of`` returns the tier of a block; a block that is
    only in the far tier may be put again.
    """

    def __init__(self, near: Tier, far: Tier) -> None:
        """Takes ownership of both."""
        self.near = near
        self.far = far
        self.name = near.name
        self._lock = threading.Lock()  # over submit and poll: no end before its beginning
        self._storing: dict[BlockKey, _Storing] = {}

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        self.near.register(namespace, block_bytes)
        self.far.register(namespace, block_bytes)

    def contains(self, key: BlockKey) -> bool:
        return self.near.contains(key) or self.far.contains(key)

    def tier_of(self, key: BlockKey) -> TierName:
        tier = self.near if self.near.contains(key) else self.far
        return tier.tier_of(key)

    def tiers_of(self, keys: Sequence[BlockKey]) -> list[TierName | None]:
        tiers = self.near.tiers_of(keys)
        absent = [place for place, tier in enumerate(tiers) if tier is None]
        far = self.far.tiers_of([keys[place] for place in absent])
        for place, tier in zip(absent, far, strict=True):
            tiers[place] = tier
        return tiers

    def ask(self, keys: Sequence[BlockKey], every: bool = False) -> bool:
        return self.far.ask([key for key in keys if not self.near.contains(key)], every)

    def is_silent(self, key: BlockKey) -> bool:
        return self.far.is_silent(key)

    def depth_of(self, key: BlockKey) -> int | None:
        depth = self.near.depth_of(key)
        return self.far.depth_of(key) if depth is None else depth

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        with self._lock:
            new = [put for put in puts if put.key not in self._storing]
            near = self.near.submit_put(new)
            shared = [put for put in new if put.shared]
            far = {p.key: v for p, v in zip(shared, self.far.submit_put(shared), strict=True)}
            verdicts = {
                put.key: self._begin(put.key, verdict, far.get(put.key, PutVerdict.SHED))
                for put, verdict in zip(new, near, strict=True)
            }
            return [verdicts.get(put.key, PutVerdict.PRESENT) for put in puts]

    def _begin(self, key: BlockKey, near: PutVerdict, far: PutVerdict) -> PutVerdict:
        queued = PutVerdict.QUEUED
        if queued not in (near, far):
            return near
        outcome = Outcome.STORED if near is PutVerdict.PRESENT else Outcome.SHED
        self._storing[key] = _Storing(outcome, near is queued, far is queued)
        return queued

    def submit_get(self, gets: Sequence[Get]) -> None:
        here = [get for get in gets if self.near.contains(get.key)]
        near = {get.key for get in here}
        self.near.submit_get(here)
        self.far.submit_get([get for get in gets if get.key not in near])

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        until = time.monotonic() + timeout_s
        wait_s = 0.0
        while True:
            first = self.near if self.far.queued() == (0, 0) else self.far
            done = self._take(first, wait_s)
            done += self._take(self.far if first is self.near else self.near, 0.0)
            left = until - time.monotonic()
            if done or left <= 0:
                return done
            idle = self.queued() == (0, 0)
            wait_s = left if idle else min(left, _SLICE_S)

    def _take(self, tier: Tier, timeout_s: float) -> list[Done]:
        """Processes the completed operations of ``tier``."""
        ended = tier.poll(timeout_s)
        with self._lock:
            return [done for item in ended if (done := self._end(tier, item)) is not None]

    def _end(self, tier: Tier, done: Done) -> Done | None:
        storing = self._storing.get(done.key)
        if storing is None or done.outcome not in (Outcome.STORED, Outcome.SHED):
            return done
        if tier is self.near:
            storing.near, storing.outcome = False, done.outcome
        else:
            storing.far = False
        if storing.near or storing.far:
            return None
        del self._storing[done.key]
        return Done(done.key, storing.outcome)

    def touch(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        self.near.touch(chain, hanging, ending, advice)
        self.far.touch(chain, hanging, ending, advice)

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        self.near.drop(keys, cause)
        self.far.drop(keys, cause)

    def clear(self) -> None:
        self.near.clear()
        self.far.clear()

    def watch(self, watcher: Watcher) -> None:
        self.near.watch(watcher)
        self.far.watch(watcher)

    def sweep(self, watcher: Watcher) -> Iterator[None]:
        yield from self.near.sweep(watcher)
        yield from self.far.sweep(watcher)

    def stats(self) -> TierStats:
        return self.near.stats()

    def stats_of_each(self) -> tuple[TierStats, ...]:
        return (*self.near.stats_of_each(), *self.far.stats_of_each())

    def histograms(self) -> dict[str, Buckets]:
        return {**self.near.histograms(), **self.far.histograms()}

    def queued(self) -> tuple[int, int]:
        return len(self._storing), self.near.queued()[1] + self.far.queued()[1]

    def close(self, deadline_s: float = 10.0) -> None:
        until = time.monotonic() + deadline_s
        self.near.close(deadline_s)
        self.far.close(max(0.0, until - time.monotonic()))
