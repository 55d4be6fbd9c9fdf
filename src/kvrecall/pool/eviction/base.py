"""The interface between a tier and its eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from kvrecall.block import BlockKey


class EvictionPolicy(ABC):
    """Orders the blocks of one tier for eviction.

    Owner: one tier; not thread-safe; never blocks; a few microseconds per block. The tier reports
    every event; the policy owns only the order. One request makes these calls:

    1. ``access(chain)`` once, on arrival, with all its full blocks whether resident or not
       (blocks that hang on the chain may be reported by a second call);
    2. for each block to be stored, prefix first: if the tier is full, ``admit`` and, if that
       returns True, ``victims``; ``remove`` for each victim taken; then ``insert``.

    A resident block whose parent is not resident cannot be hit, so a policy evicts children
    before their parents wherever it can. Of a model with several KV groups one is the chain; the
    blocks of the others *hang* on it.
    """

    name: ClassVar[str]

    @abstractmethod
    def insert(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> None:
        """A block became resident. ``depth`` counts from 0 at the root, ``now`` is in seconds and
        never decreases. Counts as the block's first use. ``hangs``: the parent is a block of a
        chain, and this one is not; it is best evicted right before its parent. Already resident:
        no effect.
        """

    @abstractmethod
    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
    ) -> None:
        """A request used ``chain`` (prefix first), and ``hanging`` blocks: each has a block of a
        chain as its parent, but is none itself. ``ending``: those that are at the request's own
        end, or will be: where a request that continues it begins. Keys that are not resident are
        allowed: a policy may learn from them, but does not make them resident."""

    @abstractmethod
    def remove(self, key: BlockKey) -> None:
        """The block was evicted or dropped. Not resident: no effect."""

    @abstractmethod
    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        """Up to ``count`` resident blocks to evict, the best first. Removes none: the caller calls
        ``remove``. Blocks that are not ``evictable`` are skipped and keep their place.
        """

    def hold(self, key: BlockKey) -> None:  # noqa: B027
        """The block was skipped and stays (it is leased): ``victims`` need not consider it
        again before ``release`` or ``access``. Not resident, or held already: no effect.

        Without this and ``release`` a policy is correct, but considers every leased block that is
        colder than its victim each time.
        """

    def release(self, key: BlockKey) -> None:  # noqa: B027
        """The block can be evicted again. It returns to its former place, as far as the policy
        knows it. Not held: no effect."""

    def admit(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> bool:
        """Whether the new block is worth more than the blocks it would displace. Called only when
        the tier is full. False: do not insert it, nor its successors in the chain."""
        return True

    def chance(self, key: BlockKey, now: float) -> float | None:
        """The probability that the block, resident or known, is used again within hours. None if
        this policy makes no such estimate, or has not seen enough yet."""
        return None
