"""Policies that keep blocks in queues: LRU and S3-FIFO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from kvrecall.pool.eviction.base import EvictionPolicy, NumberRefs, RequestUse

_SWEPT = 4096  # blocks that one search sends round again, at most


class QueueLinks:
    """Columns for queues that share them: a block is in one of them at most."""

    def __init__(self, names: NumberRefs) -> None:
        self.names = names
        # All rare: once ``hazard`` is taught, it has no queue for the blocks that come then.
        self.older = names.column("i")  # its neighbours, plus one; 0: none
        self.younger = names.column("i")
        self.queue = names.column("i")  # the number of its queue; 0: none
        self.parent = names.column("i")  # plus one, for what hangs, if known
        self.queues = 0  # so far


class Queue:
    """Blocks from oldest to youngest, by number, doubly linked. ``first``: the oldest, plus one.
    ``held`` ones are out of the queue; they come back as the oldest, because all blocks skipped
    with them were older than the rest."""

    __slots__ = ("_last", "_latest", "_links", "first", "held", "mark", "size")

    def __init__(self, links: QueueLinks) -> None:
        links.queues += 1
        self.mark = links.queues
        """What ``QueueLinks.queue`` says of its blocks."""
        self._links = links
        self.first = self._last = 0  # oldest and youngest, plus one; 0: none
        self._latest = -1  # last one put in
        self.size = 0
        self.held: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return bool(self._links.queue.cells[number] == self.mark)

    def append(self, number: int) -> None:
        links, name = self._links, number + 1
        links.queue.cells[number] = self.mark
        last = links.older.cells[number] = self._last
        links.younger.cells[number] = 0
        if last:
            links.younger.cells[last - 1] = name
        else:
            self.first = name
        self._last = name
        self._latest = number
        self.size += 1

    def append_chained(self, number: int, parent: int) -> None:
        """Appends, but right before its parent if that was appended last: blocks stored in one
        go as a chain leave from the chain's end."""
        if parent >= 0 and self._latest == parent and parent in self:
            self.put_before(number, parent)
        else:
            self.append(number)

    def prepend(self, number: int) -> None:
        if self.first:
            self.put_before(number, self.first - 1)
        else:
            self.append(number)
        self._latest = -1

    def put_before(self, number: int, other: int) -> None:
        """A block that is in no queue gets the place right before (older than) ``other``."""
        links, name = self._links, number + 1
        before = links.older.cells[other]
        links.queue.cells[number] = self.mark
        links.older.cells[number] = before
        links.younger.cells[number] = other + 1
        links.older.cells[other] = name
        if before:
            links.younger.cells[before - 1] = name
        else:
            self.first = name
        self._latest = number
        self.size += 1

    def take(self, number: int) -> None:
        """Removes a block, which is in this queue."""
        links = self._links
        older, younger = links.older.cells, links.younger.cells
        before, after = older[number], younger[number]
        if before:
            younger[before - 1] = after
        else:
            self.first = after
        if after:
            older[after - 1] = before
        else:
            self._last = before
        links.queue.cells[number] = 0
        self.size -= 1

    def knows(self, number: int) -> bool:
        """Whether the block is in it, or held."""
        return number in self or number in self.held

    def discard(self, number: int) -> bool:
        """Removes a block, held or not. False if it is not known."""
        if number in self:
            self.take(number)
        elif number in self.held:
            self.held.discard(number)
        else:
            return False
        return True

    def hold(self, number: int) -> None:
        if number in self:
            self.take(number)
            self.held.add(number)

    def release(self, number: int) -> None:
        if number in self.held:
            self.held.discard(number)
            self.prepend(number)

    def __iter__(self) -> Iterator[int]:
        """Oldest first. The yielded block may be removed or moved meanwhile."""
        younger = self._links.younger
        following = self.first
        while following:
            number = following - 1
            following = younger.cells[number]
            yield number


class LruPolicy(EvictionPolicy):
    """Least recently used. Within one request the deepest block counts as the oldest: an access
    refreshes the chain from its end; a new block, and one that hangs on a chain, goes right before
    its parent.
    """

    def __init__(self, links: QueueLinks, keeps: bool = True) -> None:
        """``links``: shared with policies that know none of its blocks. Not ``keeps``: the names of
        its blocks, and of what these hang on, are kept by others."""
        self._names, self._links, self._keeps = links.names, links, keeps
        self._queue = Queue(links)

    def insert(self, number: int, parent: int, now: float, hangs: bool = False) -> None:
        if self._queue.knows(number):
            return
        if self._keeps:
            self._names.keep(number)
        if hangs and parent >= 0:
            if self._keeps:
                self._names.keep(parent)
            self._links.parent.cells[number] = parent + 1
        if parent >= 0 and parent in self._queue:
            self._queue.put_before(number, parent)
        else:
            self._queue.append(number)

    def access(self, use: RequestUse[int]) -> None:
        queue, held = self._queue, self._queue.held
        marks, mark = self._links.queue.cells, queue.mark
        for number in reversed(use.chain):
            if number < 0:
                continue
            if marks[number] == mark:
                queue.take(number)
            elif number in held:
                held.discard(number)
            else:
                continue
            queue.append(number)
        for number in use.hanging:
            if number < 0 or not queue.discard(number):
                continue
            parent = self._links.parent.cells[number] - 1
            if parent >= 0 and parent in queue:
                queue.put_before(number, parent)
            else:
                queue.append(number)

    def remove(self, number: int) -> None:
        if not self._queue.discard(number):
            return
        parent = self._links.parent.cells[number]
        self._links.parent.cells[number] = 0
        if self._keeps:
            self._names.drop_all((parent - 1, number) if parent else (number,))

    def hold(self, number: int) -> None:
        self._queue.hold(number)

    def release(self, number: int) -> None:
        self._queue.release(number)

    def victims(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        return list(islice(filter(evictable, self._queue), count))

    def __iter__(self) -> Iterator[int]:
        """All blocks that are not held, in eviction order. The yielded one may be removed or
        held."""
        return iter(self._queue)


class S3FifoPolicy(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for probation, a main queue with second
    chances, a ghost queue of names that were evicted from probation.

    As in the paper: small is a tenth of the tier, the ghost remembers as many names as main holds
    blocks, uses are counted up to 3, more than one use in small promotes. Chains stored in one go
    leave from their end. One search sends a few thousand blocks round again at most, so that it
    never takes long; what then comes next goes.
    """

    def __init__(self, capacity_blocks: int, links: QueueLinks) -> None:
        self._names = links.names
        self._marks = links.queue
        self._small_room = max(1, capacity_blocks // 10)
        self._ghost_room = max(1, capacity_blocks - self._small_room)
        self._uses = self._names.column("B")
        self._small, self._main, self._ghost = Queue(links), Queue(links), Queue(links)
        self._resident = (self._small, self._main)

    def insert(self, number: int, parent: int, now: float, hangs: bool = False) -> None:
        if any(queue.knows(number) for queue in self._resident):
            return
        above = [queue for queue in self._resident if hangs and parent >= 0 and parent in queue]
        is_ghost = number in self._ghost
        if is_ghost:
            self._ghost.take(number)
        else:
            self._names.keep(number)
        self._uses.cells[number] = 0
        if above:
            above[0].put_before(number, parent)
        else:
            (self._main if is_ghost else self._small).append_chained(number, parent)

    def access(self, use: RequestUse[int]) -> None:
        uses, marks = self._uses.cells, self._marks.cells
        here, held = (self._small.mark, self._main.mark), (self._small.held, self._main.held)
        for number in (*use.chain, *use.hanging):
            if number >= 0 and (marks[number] in here or number in held[0] or number in held[1]):
                uses[number] = min(3, uses[number] + 1)

    def remove(self, number: int) -> None:
        if self._main.discard(number):
            self._names.drop(number)
        elif self._small.discard(number):
            self._ghost.append(number)
            if self._ghost.size > self._ghost_room:
                oldest = self._ghost.first - 1
                self._ghost.take(oldest)
                self._names.drop(oldest)

    def hold(self, number: int) -> None:
        for queue in self._resident:
            queue.hold(number)

    def release(self, number: int) -> None:
        for queue in self._resident:
            queue.release(number)

    def victims(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        found: list[int] = []
        if self._small.size > self._small_room:
            self._sweep_small(count, evictable, found)
        if len(found) < count:
            self._sweep_main(count, evictable, found)
        if len(found) < count:  # nothing else left to give up
            taken = frozenset(found)
            rest = (n for n in self._small if n not in taken and evictable(n))
            found.extend(islice(rest, count - len(found)))
        return found

    def _sweep_small(self, count: int, evictable: Callable[[int], bool], found: list[int]) -> None:
        """Oldest first: used ones move to main, the others are victims."""
        uses, moved = self._uses.cells, 0
        for number in self._small:
            if len(found) >= count or self._small.size - len(found) <= self._small_room:
                return
            if uses[number] > 1 and moved < _SWEPT:
                moved += 1
                uses[number] = 0
                self._small.take(number)
                self._main.append(number)
            elif evictable(number):
                found.append(number)

    def _sweep_main(self, count: int, evictable: Callable[[int], bool], found: list[int]) -> None:
        """Oldest first: used ones go round again with one use less, the others are victims."""
        uses, moved = self._uses.cells, 0
        taken = set(found)
        for _ in range(4):  # a use is counted up to 3: the fourth round finds every block
            for number in islice(self._main, self._main.size):
                if len(found) >= count:
                    return
                if uses[number] > 0 and moved < _SWEPT:
                    moved += 1
                    uses[number] -= 1
                    self._main.take(number)
                    self._main.append(number)
                elif number not in taken and evictable(number):
                    found.append(number)
                    taken.add(number)
