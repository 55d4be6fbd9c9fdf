"""Queues that give up any member in O(1), and the policies' base that keeps all blocks in one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy


class Node:
    """A block's place. ``uses`` is for policies that count; ``queue`` is where it stands."""

    __slots__ = ("key", "next", "prev", "queue", "uses")

    def __init__(self, key: BlockKey) -> None:
        self.key = key
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
        """Takes ``node``, which is in this queue, out of it."""
        node.prev.next = node.next
        node.next.prev = node.prev
        node.queue = None
        self.size -= 1

    def __iter__(self) -> Iterator[Node]:
        """Oldest first. The node handed out may be taken out or moved meanwhile."""
        node = self._end.next
        while node is not self._end:
            following = node.next
            yield node
            node = following


class QueuePolicy(EvictionPolicy):
    """Blocks leave from the front of one queue; where they join it is the subclass's choice. Held
    blocks are out of the queue; they come back to its front, as all that were passed over with
    them were older than the rest."""

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._queue = Queue()

    @abstractmethod
    def _join(self, node: Node, parent: BlockKey | None) -> None:
        """Puts a new block into the queue."""

    def insert(self, key: BlockKey, parent: BlockKey | None, depth: int, now: float) -> None:
        if key not in self._nodes:
            node = self._nodes[key] = Node(key)
            self._join(node, parent)

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
        """All blocks that are not held, in the order in which they leave. The one handed out may
        be removed or held."""
        return (node.key for node in self._queue)
