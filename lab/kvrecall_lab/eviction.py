"""Reference eviction policies beside the product's: ``python -m kvrecall_lab.eviction TRACE
CAPACITY...`` prints the hit rate of each."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from kvrecall.pool.eviction import POLICY_NAMES, EvictionPolicy, KeyedPolicy
from kvrecall.pool.eviction.base import NumberRefs, RequestUse
from kvrecall.pool.eviction.queues import Queue, QueueLinks
from kvrecall.simulate.replay import PolicyMaker, TierSpec, clairvoyant_hits, replay
from kvrecall.simulate.trace import Trace, read_trace


class FifoPolicy(EvictionPolicy):
    """First in, first out; blocks stored in one go as a chain leave from the chain's end."""

    def __init__(self, names: NumberRefs) -> None:
        self._names = names
        self._queue = Queue(QueueLinks(names))

    def insert(self, number: int, parent: int, depth: int, now: float, hangs: bool = False) -> None:
        if number in self._queue:
            return
        self._names.keep(number)
        if hangs and parent >= 0 and parent in self._queue:
            self._queue.put_before(number, parent)
        else:
            self._queue.append_chained(number, parent)

    def access(self, use: RequestUse[int]) -> None:
        """Use does not matter to a queue."""

    def remove(self, number: int) -> None:
        if number in self._queue:
            self._queue.take(number)
            self._names.drop(number)

    def victims(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        found: list[int] = []
        for number in self._queue:
            if len(found) == count:
                break
            if evictable(number):
                found.append(number)
        return found


class LfuPolicy(EvictionPolicy):
    """Least frequently used while resident; ties go to the least recently used, then the
    deepest."""

    def __init__(self, names: NumberRefs) -> None:
        self._names = names
        self._ranks: dict[int, tuple[int, int, int]] = {}  # uses, tick of the last, -depth
        self._heap: list[tuple[tuple[int, int, int], int]] = []  # with outdated ranks, too
        self._tick = 0  # accesses, and seconds without one
        self._now = 0.0

    def _rank(self, number: int, uses: int, depth: int) -> None:
        rank = self._ranks[number] = (uses, self._tick, -depth)
        heapq.heappush(self._heap, (rank, number))

    def insert(self, number: int, parent: int, depth: int, now: float, hangs: bool = False) -> None:
        if number not in self._ranks:
            self._names.keep(number)
            self._tick += now - self._now >= 1.0
            self._now = max(now, self._now)
            self._rank(number, 1, depth)

    def access(self, use: RequestUse[int]) -> None:
        self._tick += 1
        self._now = max(use.now, self._now)
        for number in (*use.chain, *use.hanging):
            if number in self._ranks:
                uses, _, depth = self._ranks[number]
                self._rank(number, uses + 1, -depth)

    def remove(self, number: int) -> None:
        if self._ranks.pop(number, None):
            self._names.drop(number)

    def victims(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        found: list[int] = []
        kept: list[tuple[tuple[int, int, int], int]] = []
        while self._heap and len(found) < count:
            item = heapq.heappop(self._heap)
            if self._ranks.get(item[1]) == item[0] and item not in kept[-1:]:
                kept.append(item)
                if evictable(item[1]):
                    found.append(item[1])
        for item in kept:
            heapq.heappush(self._heap, item)
        return found


REFERENCES: Mapping[str, PolicyMaker] = {
    "fifo": lambda capacity: KeyedPolicy(FifoPolicy),
    "lfu": lambda capacity: KeyedPolicy(LfuPolicy),
}


def rates(trace: Trace, capacity: int) -> dict[str, float]:
    """The hit rate of each policy, and of the best possible one."""
    play = partial(replay, trace, [TierSpec("host", capacity)])
    found = {name: play(name).hit_rate for name in POLICY_NAMES}
    found |= {name: play(make).hit_rate for name, make in REFERENCES.items()}
    return found | {"clairvoyant": clairvoyant_hits(trace, capacity) / trace.blocks}


def main(path: str, *capacities: str) -> None:
    trace = read_trace(Path(path))
    for capacity in map(int, capacities):
        found = rates(trace, capacity)
        print(f"{capacity:,} blocks:", *(f"{name} {rate:.4f}" for name, rate in found.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
