"""Eviction policies: they choose the blocks that a full tier evicts."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from kvrecall.block import BlockKey
from kvrecall.errors import ConfigError
from kvrecall.pool.eviction.base import EvictionPolicy, RequestUse
from kvrecall.pool.eviction.queues import LruPolicy, QueueLinks, S3FifoPolicy
from kvrecall.pool.eviction.warmup import WarmUp
from kvrecall.pool.hints import Advice
from kvrecall.pool.names import DictNames

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


class KeyedPolicy:
    """An ``EvictionPolicy`` over names of its own, for replays; each method takes keys in place of
    numbers."""

    def __init__(self, make: Callable[[DictNames], EvictionPolicy]) -> None:
        self.names = DictNames()
        self.policy = make(self.names)

    def insert(
        self, key: BlockKey, parent: BlockKey | None, now: float, hangs: bool = False
    ) -> None:
        number, above = self.names.meet(key), -1 if parent is None else self.names.meet(parent)
        met = (number,) if above < 0 else (number, above)
        self.names.keep_all(met)
        self.policy.insert(number, above, now, hangs)
        self.names.drop_all(met)

    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        names, learns = self.names, self.policy.learns
        look_up = names.meet_all if learns else names.numbers
        used, last = look_up(chain), look_up(ending)
        if learns:
            names.keep_all((*used, *last))
        self.policy.access(RequestUse(used, now, names.numbers(hanging), last, advice))
        if learns:
            names.drop_all((*used, *last))

    def remove(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.policy.remove(number)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        key = self.names.key
        return [key(n) for n in self.policy.victims(count, lambda n: evictable(key(n)), now)]

    def hold(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.policy.hold(number)

    def release(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.policy.release(number)

    def admit(
        self, key: BlockKey, parent: BlockKey | None, now: float, hangs: bool = False
    ) -> bool:
        above = -1 if parent is None else self.names.number(parent)
        return self.policy.admit(self.names.number(key), above, now, hangs)

    def chance(self, key: BlockKey, now: float) -> float | None:
        return self.policy.chance(self.names.number(key), now)


def make_policy(name: str, capacity_blocks: int) -> KeyedPolicy:
    """``policy_over`` names of its own, by the keys of blocks."""
    return KeyedPolicy(lambda names: policy_over(QueueLinks(names), name, capacity_blocks))


__all__ = ["POLICY_NAMES", "EvictionPolicy", "KeyedPolicy", "make_policy", "policy_over"]
