"""A policy by the keys of blocks, for replays and small orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvrecall.block import BlockKey
from kvrecall.pool.eviction.base import EvictionPolicy
from kvrecall.pool.eviction.queues import LruPolicy
from kvrecall.pool.hints import Advice
from kvrecall.pool.names import DictNames

MakePolicy = Callable[[DictNames], EvictionPolicy]


class KeyedPolicy:
    """An ``EvictionPolicy`` over names of its own; each method takes keys in place of numbers."""

    def __init__(self, make: MakePolicy) -> None:
        self.names = DictNames()
        self.policy = make(self.names)
        self.name = self.policy.name

    def insert(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> None:
        number, above = self.names.meet(key), -1 if parent is None else self.names.meet(parent)
        self.policy.insert(number, above, depth, now, hangs)
        self.names.sweep((number,) if above < 0 else (number, above))

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
        self.policy.access(used, now, names.numbers(hanging), last, advice)
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

    def __iter__(self) -> Iterator[BlockKey]:
        """All blocks of an LRU, in eviction order. The yielded one may be removed."""
        assert isinstance(self.policy, LruPolicy)
        return map(self.names.key, self.policy)

    def hold(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.policy.hold(number)

    def release(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.policy.release(number)

    def admit(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> bool:
        above = -1 if parent is None else self.names.number(parent)
        return self.policy.admit(self.names.number(key), above, depth, now, hangs)

    def chance(self, key: BlockKey, now: float) -> float | None:
        return self.policy.chance(self.names.number(key), now)
