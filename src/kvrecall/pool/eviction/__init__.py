"""Eviction policies: they choose the blocks that a full tier evicts."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvrecall.errors import ConfigError
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.hazard import HazardPolicy
from kvrecall.pool.eviction.lfu import LfuPolicy
from kvrecall.pool.eviction.queues import FifoPolicy, LruPolicy, S3FifoPolicy

_MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": lambda capacity: LruPolicy(),
    "fifo": lambda capacity: FifoPolicy(),
    "lfu": lambda capacity: LfuPolicy(),
    "s3fifo": S3FifoPolicy,
    "hazard": HazardPolicy,
}

POLICY_NAMES: tuple[str, ...] = tuple(_MAKERS)


def make_policy(name: str, capacity_blocks: int) -> EvictionPolicy:
    """A new policy for a tier of ``capacity_blocks``. Raises ConfigError for an unknown name or no
    capacity."""
    if name not in _MAKERS:
        close = difflib.get_close_matches(name, POLICY_NAMES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"policy: {name!r} is unknown; known: {', '.join(POLICY_NAMES)}{hint}")
    if capacity_blocks <= 0:
        raise ConfigError(f"capacity: {capacity_blocks} blocks; it must be more than 0")
    return _MAKERS[name](capacity_blocks)


__all__ = ["POLICY_NAMES", "EvictionPolicy", "make_policy"]
