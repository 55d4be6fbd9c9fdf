"""Queues of blocks that give up any member in O(1): the spine of the queue-like policies."""

from __future__ import annotations

from collections.abc import Iterator

from kvrecall.block import BlockKey


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
        self._latest = self._end  # last one appended
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
