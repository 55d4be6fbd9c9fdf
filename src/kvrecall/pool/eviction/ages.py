"""Ages of blocks, and their ranking: blocks of one class that were last used at the same time age
together, and are worth the same.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from kvrecall.pool.eviction.lifetable import Floats, LifeTable

MOST_MEMBERS = 1024  # of a bucket: more would take too long to prune at once
_PRUNED_FROM = 16  # names of a bucket, and twice as many as it has members
_NONE = array("i")  # shared and never appended to


class AgeBucket:
    """The blocks of one class with the same time of last use."""

    __slots__ = (
        "alive", "bin", "born", "ended", "forgotten", "kind", "names", "number", "residents", "run",
    )  # fmt: skip

    def __init__(self, number: int, kind: int, born: float) -> None:
        self.number = number
        self.kind = kind
        self.born = born
        self.bin = 0
        self.alive = 0  # members not used again since, resident or remembered
        self.names = array("i")  # which joined; some may have moved on
        # Those that became resident, in the order in which they go; some may have left since. The
        # oldest run down a chain comes first, each from its end. ``run``: where the latest begins.
        self.residents = _NONE
        self.run = 0
        self.ended = False  # has no members and gets no more
        self.forgotten = False  # names are no longer remembered when they are evicted

    def add_resident(self, number: int, parent: int) -> None:
        """A member became resident."""
        if self.residents is _NONE:
            self.residents = array("i")
        if self.run < len(self.residents) and self.residents[self.run] != parent:
            self.run = len(self.residents)
        self.residents.insert(self.run, number)

    def drop_residents(self, count: int) -> None:
        """Drops the first ones, which have left."""
        del self.residents[:count]
        self.run = max(0, self.run - count)

    @property
    def size(self) -> int:
        return len(self.names) + len(self.residents)

    def prune(self, of: Sequence[int], known: Sequence[int]) -> None:
        """Frees the memory of those that moved on. ``of``: the bucket of each number; ``known``:
        whether it is known."""

        def stay(numbers: Sequence[int]) -> array[int]:
            return array("i", [n for n in numbers if of[n] == self.number and known[n]])

        self.names = stay(self.names)
        before = stay(self.residents[: self.run])
        self.residents = before + stay(self.residents[self.run :]) or _NONE
        self.run = len(before)

    def clear(self) -> None:
        self.names, self.residents, self.run = array("i"), _NONE, 0


class AgeRanking:
    """All buckets, by age; and those with blocks that can be evicted (*ready*) in the order in
    which they should be. Feeds the life table with the blocks that reach each age."""

    def __init__(self, table: LifeTable, classes: int) -> None:
        self.now = 0.0
        self.by_number: list[AgeBucket] = []
        self.memory: OrderedDict[int, None] = OrderedDict()
        """Buckets whose names can be forgotten, the oldest first."""
        self._table = table
        self._classes = classes
        self._bins = table.bins.count
        self._unused: list[int] = []  # numbers of buckets that ended
        self._by_bin: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(self._bins)]
        self._youngest: dict[int, AgeBucket] = {}  # by class
        self._ready: list[dict[int, None]] = [{} for _ in range(classes * self._bins)]  # by cell
        self._filled: list[int] = []  # places whose cell has a ready bucket, ascending
        self._is_by_age = False
        self.rank(np.zeros((classes, self._bins)), False)

    def join(self, kind: int, slack: float = 0.0) -> AgeBucket:
        """The bucket of ``kind`` that starts now, or ``slack`` seconds ago, with one more
        member."""
        bucket = self._youngest.get(kind)
        if (
            bucket is None
            or self.now - bucket.born > slack
            or bucket.forgotten
            or len(bucket.names) >= MOST_MEMBERS
        ):
            number = self._unused.pop() if self._unused else len(self.by_number)
            old, bucket = bucket, AgeBucket(number, kind, self.now)
            self.by_number[number : number + 1] = (bucket,)
            self._youngest[kind] = bucket
            self._by_bin[0][number] = self.memory[number] = None
            if old is not None:
                self.drop_empty(old)
        bucket.alive += 1
        entered = self._table.entered[kind]
        for age in range(bucket.bin + 1):
            entered[age] += 1.0
        return bucket

    def drop_empty(self, bucket: AgeBucket) -> None:
        """Drops a bucket without members, if nothing joins it any more."""
        if bucket.alive == 0 and self._youngest.get(bucket.kind) is not bucket:
            self._drop(bucket)

    def _drop(self, bucket: AgeBucket) -> None:
        if bucket.ended:
            return
        self.make_unready(bucket)
        self._by_bin[bucket.bin].pop(bucket.number, None)
        self.memory.pop(bucket.number, None)
        bucket.forgotten = bucket.ended = True
        bucket.clear()
        self._unused.append(bucket.number)

    def advance(self, now: float, of: Sequence[int], known: Sequence[int]) -> None:
        """Moves buckets on to the bins of their age, and prunes them (see ``AgeBucket.prune``)."""
        self.now = max(now, self.now)
        for queue, end in zip(reversed(self._by_bin), reversed(self._table.bins.ends), strict=True):
            while queue:
                bucket = self.by_number[next(iter(queue))]
                if bucket.alive == 0:
                    self._drop(bucket)
                elif self.now - bucket.born >= end:
                    del queue[bucket.number]
                    self._grow(bucket)
                    # A bucket stays as long as one of its blocks was not used again, and there may
                    # be as many buckets as blocks.
                    if bucket.size > 2 * (bucket.alive + _PRUNED_FROM):
                        bucket.prune(of, known)
                else:
                    break

    def _grow(self, bucket: AgeBucket) -> None:
        """Puts a bucket into the bin of its age; it is in no bin's queue now."""
        was_ready = self.make_unready(bucket)
        entered, ends = self._table.entered[bucket.kind], self._table.bins.ends
        while self.now - bucket.born >= ends[bucket.bin]:
            bucket.bin += 1
            entered[bucket.bin] += bucket.alive
        self._by_bin[bucket.bin][bucket.number] = None
        if was_ready:
            self.make_ready(bucket)

    # -- ranking ---------------------------------------------------------------------------

    def cell(self, bucket: AgeBucket) -> int:
        return bucket.kind * self._bins + bucket.bin

    def worth(self, cell: int) -> float:
        """What a block of that cell is worth, as the blocks were last ranked."""
        return self._worth[cell]

    def rank(self, worth: Floats, by_age: bool, last: int | None = None) -> None:
        """Ranks the cells by ``worth`` (classes, bins), or ``by_age``: the least recently used
        first. Those of the class ``last`` are worth less than all others."""
        self._is_by_age = by_age
        if by_age:
            worth = np.tile(-np.arange(self._bins, dtype=np.float64), (self._classes, 1))
        if last is not None:
            worth[last] = worth.min() - 1.0
        flat = worth.ravel()
        order = len(flat) - 1 - np.argsort(flat[::-1], kind="stable")  # ties: the older first
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        self._worth = memoryview(flat.data)
        self._order = memoryview(order.data)  # cells, least worth first
        self._place = memoryview(place.data)  # inverse of _order
        self._filled = sorted(self._place[cell] for cell, ready in enumerate(self._ready) if ready)

    def make_ready(self, bucket: AgeBucket) -> None:
        cell = self.cell(bucket)
        ready = self._ready[cell]
        if not ready:
            insort(self._filled, self._place[cell])
        ready[bucket.number] = None

    def make_unready(self, bucket: AgeBucket) -> bool:
        """False if it was not ready."""
        cell = self.cell(bucket)
        ready = self._ready[cell]
        if bucket.number not in ready:
            return False
        del ready[bucket.number]
        if not ready:
            del self._filled[bisect_left(self._filled, self._place[cell])]
        return True

    def candidates(self) -> Iterator[AgeBucket]:
        """Ready buckets, the least worth first."""
        buckets, ready, order = self.by_number, self._ready, self._order
        if not self._is_by_age:
            for place in self._filled:
                yield from map(buckets.__getitem__, ready[order[place]])
            return
        for _, places in groupby(self._filled, lambda place: order[place] % self._bins):
            cells = (map(buckets.__getitem__, ready[order[place]]) for place in places)
            yield from heapq.merge(*cells, key=lambda bucket: bucket.born)
