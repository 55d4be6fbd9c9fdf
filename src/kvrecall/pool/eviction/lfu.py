"""Least frequently used, for reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain as joined
from itertools import islice
from typing import ClassVar

from kvrecall.pool.eviction.base import PART, EvictionPolicy
from kvrecall.pool.eviction.queues import Links, Queue
from kvrecall.pool.hints import Advice
from kvrecall.pool.names import Names


class LfuPolicy(EvictionPolicy):
    """Least frequently used while resident; ties go to the least recently used, then deepest.

    A queue for each number of uses, oldest first: an access appends to them, and so does a new
    block, at its depth among those that came at the same time. Held blocks come back as the oldest
    of their queue.
    """

    name: ClassVar[str] = "lfu"

    def __init__(self, names: Names | None = None, links: Links | None = None) -> None:
        super().__init__(names)
        self._links = links or Links(self.names)
        self._uses = self.names.column("i")
        self._depth = self.names.column("i")
        self._tick = self.names.column("I")  # of the last use
        self._queues: dict[int, Queue] = {}  # by uses
        self._held: set[int] = set()
        self._tick_now = 0  # accesses, and seconds without one
        self._now = 0.0
        self._latest = -1  # last one inserted

    def insert_n(
        self, number: int, parent: int, depth: int, now: float, hangs: bool = False
    ) -> None:
        if self._uses.cells[number]:
            return
        tick = self._advance(now, False)
        self.names.keep(number)
        self._uses.cells[number], self._depth.cells[number] = 1, depth
        self._tick.cells[number] = tick
        queue = self._queue_of(1)
        place = self._place(queue, depth, tick)
        if place < 0:
            queue.append(number)
        else:
            queue.put_before(number, place)
        self._latest = number

    def _place(self, queue: Queue, depth: int, tick: int) -> int:
        """The block before which a new one of that depth goes; -1: none. Starts at the last one
        inserted, next to which the next of a chain belongs."""
        ticks, depths, links = self._tick.cells, self._depth.cells, self._links
        at = self._latest
        if at < 0 or at not in queue or ticks[at] != tick:
            at = queue.last
        if at < 0 or ticks[at] != tick:
            return -1
        while depths[at] <= depth:
            before: int = links.older.cells[at] - 1
            if before < 0 or ticks[before] != tick or depths[before] > depth:
                return at
            at = before
        while at >= 0 and depths[at] > depth:
            at = links.younger.cells[at] - 1
        return at

    def access_in_parts(
        self,
        chain: Sequence[int],
        now: float,
        hanging: Sequence[int] = (),
        ending: Sequence[int] = (),
        advice: Advice | None = None,
    ) -> Iterator[None]:
        """The deepest first, which is the oldest of those used as often."""
        tick = self._advance(now, True)
        uses, depths = self._uses.cells, self._depth.cells
        known = [n for n in (*chain, *hanging) if n >= 0 and uses[n]]
        known.sort(key=lambda n: -depths[n])
        for start in range(0, len(known), PART):
            uses, ticks = self._uses.cells, self._tick.cells
            for number in known[start : start + PART]:
                if not uses[number]:  # removed meanwhile
                    continue
                if number not in self._held:
                    self._leave(number)
                uses[number] += 1
                ticks[number] = tick
                if number not in self._held:
                    self._queue_of(uses[number]).append(number)
            yield

    def remove_n(self, number: int) -> None:
        if not self._uses.cells[number]:
            return
        if number in self._held:
            self._held.discard(number)
        else:
            self._leave(number)
        self._uses.cells[number] = 0
        self.names.drop(number)

    def hold_n(self, number: int) -> None:
        if self._uses.cells[number] and number not in self._held:
            self._held.add(number)
            self._leave(number)

    def release_n(self, number: int) -> None:
        if number in self._held:
            self._held.discard(number)
            self._queue_of(self._uses.cells[number]).prepend(number)

    def victims_n(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        queues = (self._queues[uses] for uses in sorted(self._queues))
        return list(islice(filter(evictable, joined.from_iterable(queues)), count))

    def _advance(self, now: float, is_access: bool) -> int:
        """The present tick. What comes a second later than the last block has one of its own, as
        after a restart."""
        if is_access or now - self._now >= 1.0:
            self._tick_now = (self._tick_now + 1) & 0xFFFFFFFF
        self._now = max(now, self._now)
        return self._tick_now

    def _queue_of(self, uses: int) -> Queue:
        if uses not in self._queues:
            self._queues[uses] = Queue(self._links)
        return self._queues[uses]

    def _leave(self, number: int) -> None:
        uses = self._uses.cells[number]
        queue = self._queues[uses]
        queue.take(number)
        if not queue.size:
            del self._queues[uses]
