"""Least recently used, suffixes before prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.queue import Node, QueuePolicy


class LruPolicy(QueuePolicy):
    """Least recently used. Within one request the deepest block counts as the oldest: an access
    refreshes the chain from its end, a new block goes right before its parent."""

    name: ClassVar[str] = "lru"

    def _join(self, node: Node, parent: BlockKey | None) -> None:
        above = None if parent is None else self._nodes.get(parent)
        if above is None or above.queue is None:
            self._queue.append(node)
        else:
            self._queue.put_before(node, above)

    def access(self, chain: Sequence[BlockKey], now: float) -> None:
        nodes, queue = self._nodes, self._queue
        for key in reversed(chain):
            node = nodes.get(key)
            if node is not None:
                if node.queue is not None:
                    queue.take(node)
                queue.append(node)
