"""Eviction policies: they choose the blocks that a full tier evicts."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvrecall.errors import ConfigError
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.keyed import KeyedPolicy
from kvrecall.pool.eviction.queues import LruPolicy, QueueLinks, S3FifoPolicy
from kvrecall.pool.eviction.warmup import WarmUp

_MAKERS: dict[str, Callable[[int, QueueLinks], EvictionPolicy]] = {
    "lru": lambda capacity, links: LruPolicy(links),
    "s3fifo": S3FifoPolicy,
    "hazard": WarmUp,
}

POLICY_NAMES: tuple[str, ...] = tuple(_MAKERS)


def policy_over(links: QueueLinks, name: str, capacity_blocks: int) -> EvictionPolicy:
    """A new policy for a tier of ``capacity_blocks``, over the tier's names and links. Raises
    ConfigError for an unknown name or no capacity."""
    if name not in _MAKERS:
        close = difflib.get_close_matches(name, POLICY_NAMES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"policy: {name!r} is unknown; known: {', '.join(POLICY_NAMES)}{hint}")
    if capacity_blocks <= 0:
        raise ConfigError(f"capacity: {capacity_blocks} blocks; it must be more than 0")
    return _MAKERS[name](capacity_blocks, links)


def make_policy(name: str, capacity_blocks: int) -> KeyedPolicy:
    """``policy_over`` names of its own, by the keys of blocks."""
    return KeyedPolicy(lambda names: policy_over(QueueLinks(names), name, capacity_blocks))


__all__ = ["POLICY_NAMES", "EvictionPolicy", "KeyedPolicy", "make_policy", "policy_over"]
