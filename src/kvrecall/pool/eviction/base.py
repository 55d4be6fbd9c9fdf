"""The interface between a tier and its eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvrecall.block import BlockKey


class EvictionPolicy(ABC):
    """Orders the blocks of one tier for eviction.

    Owner: one tier; not thread-safe; never blocks; a few microseconds per block. The tier tells
    everything that happens, the policy owns nothing but the order. One request makes these calls:

    1. ``access(chain)`` once, on arrival, with all its full blocks whether resident or not;
    2. for each block to be stored, prefix first: if the tier is full, ``admit`` and, if that
       says yes, ``victims``; ``remove`` for each victim taken; then ``insert``.

    A resident block whose parent is not resident cannot be hit, so a policy gives up children
    before their parents wherever it can.
    """

    name: ClassVar[str]

    @abstractmethod
    def insert(self, key: BlockKey, parent: BlockKey | None, depth: int, now: float) -> None:
        """A block became resident. ``depth`` counts from 0 at the root, ``now`` is in seconds and
        never decreases. Counts as the block's first use. Already resident: nothing happens.
        """

    @abstractmethod
    def access(self, chain: Sequence[BlockKey], now: float) -> None:
        """A request used ``chain`` (prefix first). Keys that are not resident are allowed: a
        policy may learn from them, it does not make them resident."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """The block was evicted or dropped. Not resident: nothing happens."""

    @abstractmethod
    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        """Up to ``count`` resident blocks to give up, the best first. Nothing is removed: the
        caller says so with ``remove``. Blocks that are not ``evictable`` are passed over and keep
        their place.
        """

    def hold(self, key: BlockKey) -> None:  # noqa: B027
        """The block was passed over and stays (it is leased): ``victims`` need not look at it
        again before ``release`` or ``access``. Not resident, or held already: nothing happens.

        Without this and ``release`` a policy is right, but looks at every leased block that is
        colder than its victim each time.
        """

    def release(self, key: BlockKey) -> None:  # noqa: B027
        """The block can be evicted again. It takes the place it had, as far as the policy knows
        it. Not held: nothing happens."""

    def admit(self, key: BlockKey, parent: BlockKey | None, depth: int, now: float) -> bool:
        """Whether the new block is worth more than what it would push out. Called only when the
        tier is full. No: do not insert it, nor what comes after it in its chain."""
        return True

    def chance(self, key: BlockKey, now: float) -> float | None:
        """How likely it is that the block, resident or known, is used again within hours. None:
        this policy makes no such estimate, or has not seen enough yet."""
        return None
