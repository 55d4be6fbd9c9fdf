"""Least recently used, suffixes before prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.ring import Node, Queue


class LruPolicy(EvictionPolicy):
    """Least recently used. Within one request the deepest block counts as the oldest: an access
    refreshes the chain from its end, a new block goes right before its parent."""

    name: ClassVar[str] = "lru"

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, Node] = {}
        self._queue = Queue()

    def insert(self, key: BlockKey, parent: BlockKey | None, depth: int, now: float) -> None:
        nodes = self._nodes
        if key in nodes:
            return
        node = nodes[key] = Node(key)
        if parent is not None and parent in nodes:
            self._queue.put_before(node, nodes[parent])
        else:
            self._queue.append(node)

    def access(self, chain: Sequence[BlockKey], now: float) -> None:
        nodes, queue = self._nodes, self._queue
        for key in reversed(chain):
            node = nodes.get(key)
            if node is not None:
                queue.take(node)
                queue.append(node)

    def remove(self, key: BlockKey) -> None:
        node = self._nodes.pop(key, None)
        if node is not None:
            self._queue.take(node)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        oldest = (node.key for node in self._queue if evictable(node.key))
        return list(islice(oldest, count))
