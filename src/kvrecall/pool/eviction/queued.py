"""What the policies that keep all blocks in one queue share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.ring import Node, Queue


class QueuePolicy(EvictionPolicy):
    """Blocks leave from the front of one queue; where they join it is the subclass's choice."""

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
        if node is not None:
            self._queue.take(node)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        return list(islice(filter(evictable, self.oldest()), count))

    def oldest(self) -> Iterator[BlockKey]:
        """All blocks in the order in which they leave. The one handed out may be removed."""
        return (node.key for node in self._queue)
