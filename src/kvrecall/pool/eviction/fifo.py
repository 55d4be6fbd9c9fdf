"""First in, first out: the plain queue, and S3-FIFO."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.queue import Node, Queue, QueuePolicy


class FifoPolicy(QueuePolicy):
    """First in, first out; blocks stored in one go as a chain leave from the chain's end."""

    name: ClassVar[str] = "fifo"

    def _join(self, node: Node, parent: BlockKey | None) -> None:
        self._queue.append_chained(node, parent)

    def access(self, chain: Sequence[BlockKey], now: float) -> None:
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

    def insert(self, key: BlockKey, parent: BlockKey | None, depth: int, now: float) -> None:
        if key in self._nodes:
            return
        node = self._nodes[key] = Node(key)
        if key in self._ghost:
            del self._ghost[key]
            self._main.append_chained(node, parent)
        else:
            self._small.append_chained(node, parent)

    def access(self, chain: Sequence[BlockKey], now: float) -> None:
        nodes = self._nodes
        for key in chain:
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
        """Oldest first: used ones go round again with a use less, the others are victims."""
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
