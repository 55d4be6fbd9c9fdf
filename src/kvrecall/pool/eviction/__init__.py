"""Eviction policies: they choose the blocks that a full tier evicts."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from kvrecall.errors import ConfigError
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.hazard import HazardPolicy
from kvrecall.pool.eviction.lfu import LfuPolicy
from kvrecall.pool.eviction.queues import FifoPolicy, Links, LruPolicy, S3FifoPolicy
from kvrecall.pool.names import Names

_Maker = Callable[[int, Names | None, Links | None], EvictionPolicy]

_MAKERS: dict[str, _Maker] = {
    "lru": lambda capacity, names, links: LruPolicy(names, links),
    "fifo": lambda capacity, names, links: FifoPolicy(names, links),
    "lfu": lambda capacity, names, links: LfuPolicy(names, links),
    "s3fifo": S3FifoPolicy,
    "hazard": lambda capacity, names, links: HazardPolicy(capacity, None, names, links),
}

POLICY_NAMES: tuple[str, ...] = tuple(_MAKERS)


def make_policy(
    name: str, capacity_blocks: int, names: Names | None = None, links: Links | None = None
) -> EvictionPolicy:
    """A new policy for a tier of ``capacity_blocks``, over the tier's names and links. Raises
    ConfigError for an unknown name or no capacity."""
    if name not in _MAKERS:
        close = difflib.get_close_matches(name, POLICY_NAMES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"policy: {name!r} is unknown; known: {', '.join(POLICY_NAMES)}{hint}")
    if capacity_blocks <= 0:
        raise ConfigError(f"capacity: {capacity_blocks} blocks; it must be more than 0")
    return _MAKERS[name](capacity_blocks, names, links)


__all__ = ["POLICY_NAMES", "EvictionPolicy", "make_policy"]
