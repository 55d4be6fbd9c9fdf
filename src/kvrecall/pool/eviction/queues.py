"""Policies that keep blocks in queues: LRU, FIFO and S3-FIFO."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy


class Node:
    """A block's place. ``uses`` is for policies that count; ``queue`` is its queue."""

    __slots__ = ("key", "next", "parent", "prev", "queue", "uses")

    def __init__(self, key: BlockKey, parent: BlockKey | None = None) -> None:
        self.key = key
        self.parent = parent
        self.uses = 0
        self.queue: Queue | None = None
        self.prev = self
        self.next = self


class Queue:
    """Blocks from oldest to youngest, a doubly linked ring."""

    __slots__ = ("_end", "_latest", "size")

    def __init__(self) -> None:
        self._end = Node(BlockKey(b""))  # its ``next`` is the oldest, its ``prev`` the youngest
        self._latest = self._end  # last one put in
        self.size = 0

    def append(self, node: Node) -> None:
        """``node``, in no queue, becomes the youngest."""
        self.put_before(node, self._end)

    def append_chained(self, node: Node, parent: BlockKey | None) -> None:
        """Appends, but right before its parent if that was appended last: blocks stored in one
        go as a chain leave from the chain's end."""
        latest = self._latest
        chained = latest.queue is self and latest.key == parent
        self.put_before(node, latest if chained else self._end)

    def prepend(self, node: Node) -> None:
        """``node``, in no queue, becomes the oldest."""
        self.put_before(node, self._end.next)
        self._latest = self._end

    def put_before(self, node: Node, other: Node) -> None:
        """``node``, in no queue, gets the place right before (older than) ``other``."""
        node.queue = self
        node.prev = other.prev
        node.next = other
        other.prev.next = node
        other.prev = node
        self._latest = node
        self.size += 1

    def take(self, node: Node) -> None:
        """Removes ``node``, which is in this queue."""
        node.prev.next = node.next
        node.next.prev = node.prev
        node.queue = None
        self.size -= 1

    def __iter__(self) -> Iterator[Node]:
        """Oldest first. The yielded node may be removed or moved meanwhile."""
        node = self._end.next
        while node is not self._end:
            following = node.next
            yield node
            node = following


class QueuePolicy(EvictionPolicy):
    """Blocks leave from the front of one queue; the subclass decides where they join it.

    Held blocks are out of the queue; they come back to its front, because all blocks skipped with
    them were older than the rest.
    """

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._queue = Queue()

    @abstractmethod
    def _join(self, node: Node, hangs: bool) -> None:
        """Puts a new block into the queue."""

    def insert(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> None:
        if key not in self._nodes:
            node = self._nodes[key] = Node(key, parent)
            self._join(node, hangs)

    def remove(self, key: BlockKey) -> None:
        node = self._nodes.pop(key, None)
        if node is not None and node.queue is not None:
            self._queue.take(node)

    def hold(self, key: BlockKey) -> None:
        node = self._nodes.get(key)
        if node is not None and node.queue is not None:
            self._queue.take(node)

    def release(self, key: BlockKey) -> None:
        node = self._nodes.get(key)
        if node is not None and node.queue is None:
            self._queue.prepend(node)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        return list(islice(filter(evictable, self.oldest()), count))

    def oldest(self) -> Iterator[BlockKey]:
        """All blocks that are not held, in eviction order. The yielded one may be removed or
        held."""
        return (node.key for node in self._queue)


class LruPolicy(QueuePolicy):
    """Least recently used. Within one request the deepest block counts as the oldest: an access
    refreshes the chain from its end; a new block, and one that hangs on a chain, goes right before
    its parent."""

    name: ClassVar[str] = "lru"

    def _join(self, node: Node, hangs: bool) -> None:
        above = None if node.parent is None else self._nodes.get(node.parent)
        if above is None or above.queue is None:
            self._queue.append(node)
        else:
            self._queue.put_before(node, above)

    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
    ) -> None:
        nodes, queue = self._nodes, self._queue
        for key in reversed(chain):
            node = nodes.get(key)
            if node is not None:
                if node.queue is not None:
                    queue.take(node)
                queue.append(node)
        for key in hanging:
            node = nodes.get(key)
            if node is not None:
                if node.queue is not None:
                    queue.take(node)
                self._join(node, True)


class FifoPolicy(QueuePolicy):
    """First in, first out; blocks stored in one go as a chain leave from the chain's end."""

    name: ClassVar[str] = "fifo"

    def _join(self, node: Node, hangs: bool) -> None:
        above = self._nodes.get(node.parent) if hangs and node.parent is not None else None
        if above is None or above.queue is None:
            self._queue.append_chained(node, node.parent)
        else:
            self._queue.put_before(node, above)

    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
    ) -> None:
        """Use does not matter to a queue."""


class S3FifoPolicy(EvictionPolicy):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for probation, a main queue with second
    chances, a ghost queue of names that were evicted from probation.

    As in the paper: small is a tenth of the tier, the ghost remembers as many names as main holds
    blocks, uses are counted up to 3, more than one use in small promotes. Chains stored in one go
    leave from their end.
    """

    name: ClassVar[str] = "s3fifo"

    def __init__(self, capacity_blocks: int) -> None:
        self._small_room = max(1, capacity_blocks // 10)
        self._ghost_room = max(1, capacity_blocks - self._small_room)
        self._nodes: dict[BlockKey, Node] = {}
        self._small = Queue()
        self._main = Queue()
        self._ghost: OrderedDict[BlockKey, None] = OrderedDict()
        self._held: dict[BlockKey, Queue] = {}  # and the queues they go back to

    def insert(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> None:
        if key in self._nodes:
            return
        node = Node(key)
        above = self._nodes.get(parent) if hangs and parent is not None else None
        self._nodes[key] = node
        if above is not None and above.queue is not None:
            self._ghost.pop(key, None)
            above.queue.put_before(node, above)
        elif key in self._ghost:
            del self._ghost[key]
            self._main.append_chained(node, parent)
        else:
            self._small.append_chained(node, parent)

    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
    ) -> None:
        nodes = self._nodes
        for key in (*chain, *hanging):
            node = nodes.get(key)
            if node is not None and node.uses < 3:
                node.uses += 1

    def remove(self, key: BlockKey) -> None:
        node = self._nodes.pop(key, None)
        if node is None:
            return
        queue = node.queue or self._held.pop(key)
        if queue is self._small:
            self._ghost[key] = None
            if len(self._ghost) > self._ghost_room:
                self._ghost.popitem(last=False)
        if node.queue is not None:
            queue.take(node)

    def hold(self, key: BlockKey) -> None:
        node = self._nodes.get(key)
        if node is not None and node.queue is not None:
            self._held[key] = node.queue
            node.queue.take(node)

    def release(self, key: BlockKey) -> None:
        queue = self._held.pop(key, None)
        if queue is not None:
            queue.prepend(self._nodes[key])

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        found: list[BlockKey] = []
        if self._small.size > self._small_room:
            self._sweep_small(count, evictable, found)
        if len(found) < count:
            self._sweep_main(count, evictable, found)
        if len(found) < count:  # nothing else left to give up
            taken = frozenset(found)
            rest = (n.key for n in self._small if n.key not in taken and evictable(n.key))
            found.extend(islice(rest, count - len(found)))
        return found

    def _sweep_small(
        self, count: int, evictable: Callable[[BlockKey], bool], found: list[BlockKey]
    ) -> None:
        """Oldest first: used ones move to main, the others are victims."""
        for node in self._small:
            if len(found) >= count or self._small.size - len(found) <= self._small_room:
                return
            if node.uses > 1:
                node.uses = 0
                self._small.take(node)
                self._main.append(node)
            elif evictable(node.key):
                found.append(node.key)

    def _sweep_main(
        self, count: int, evictable: Callable[[BlockKey], bool], found: list[BlockKey]
    ) -> None:
        """Oldest first: used ones go round again with one use less, the others are victims."""
        taken = frozenset(found)
        for _ in range(4):  # a use is counted up to 3: the fourth round finds every block
            for node in islice(self._main, self._main.size):
                if len(found) >= count:
                    return
                if node.uses > 0:
                    node.uses -= 1
                    self._main.take(node)
                    self._main.append(node)
                elif node.key not in taken and evictable(node.key):
                    found.append(node.key)
                    taken |= {node.key}
