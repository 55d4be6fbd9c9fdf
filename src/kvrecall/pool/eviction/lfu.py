"""Least frequently used, for reference."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy

_Rank = tuple[int, int, int]  # uses, tick of the last use, -depth


class LfuPolicy(EvictionPolicy):
    """Least frequently used while resident; ties go to the least recently used, then deepest."""

    name: ClassVar[str] = "lfu"

    def __init__(self) -> None:
        self._ranks: dict[BlockKey, _Rank] = {}
        self._heap: list[tuple[_Rank, BlockKey]] = []  # lazy: an entry counts if its rank holds
        self._held: set[BlockKey] = set()  # without an entry in the heap that counts
        self._tick = 0

    def insert(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> None:
        if key not in self._ranks:
            self._rank(key, (1, self._tick, -depth))

    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
    ) -> None:
        self._tick += 1
        for key in (*chain, *hanging):
            rank = self._ranks.get(key)
            if rank is not None:
                self._rank(key, (rank[0] + 1, self._tick, rank[2]))

    def remove(self, key: BlockKey) -> None:
        self._ranks.pop(key, None)
        self._held.discard(key)

    def hold(self, key: BlockKey) -> None:
        if key in self._ranks:
            self._held.add(key)

    def release(self, key: BlockKey) -> None:
        if key in self._held:
            self._held.discard(key)
            self._push(key, self._ranks[key])

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        found: list[BlockKey] = []
        kept: list[tuple[_Rank, BlockKey]] = []
        seen: set[BlockKey] = set()
        while self._heap and len(found) < count:
            entry = heapq.heappop(self._heap)
            rank, key = entry
            if self._ranks.get(key) != rank or key in seen or key in self._held:
                continue
            seen.add(key)
            kept.append(entry)
            if evictable(key):
                found.append(key)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found

    def _rank(self, key: BlockKey, rank: _Rank) -> None:
        self._ranks[key] = rank
        if key not in self._held:
            self._push(key, rank)

    def _push(self, key: BlockKey, rank: _Rank) -> None:
        heapq.heappush(self._heap, (rank, key))
        if len(self._heap) > 64 + 4 * len(self._ranks):
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)
