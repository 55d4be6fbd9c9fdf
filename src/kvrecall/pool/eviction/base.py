"""The interface between a tier and its eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, NamedTuple, Protocol, TypeVar

from kvrecall.pool.hints import Advice
from kvrecall.pool.names import Column, Kind


class NumberRefs(Protocol):
    """What a policy needs of the names of its tier (see ``Names``): columns over the numbers, and
    references that keep a number from being used for another block."""

    def keep(self, number: int) -> None: ...

    def keep_all(self, numbers: Sequence[int]) -> None: ...

    def drop(self, number: int) -> None: ...

    def drop_all(self, numbers: Sequence[int]) -> None: ...

    def column(self, kind: Kind, width: int = 1) -> Column: ...


B = TypeVar("B")


class RequestUse(NamedTuple, Generic[B]):
    """A request used ``chain`` (prefix first), and ``hanging`` blocks: each has a block of a chain
    as its parent, but is none itself. ``ending``: those that are at the request's own end, or will
    be: where a request that continues it begins. ``advice``: what the client said about the return
    of ``chain``, if it is believed; it may be wrong."""

    chain: Sequence[B]
    now: float
    hanging: Sequence[B] = ()
    ending: Sequence[B] = ()
    advice: Advice | None = None


class EvictionPolicy(ABC):
    """Orders the blocks of one tier for eviction.

    Owned by the one thread that evicts, which needs no lock for it; never blocks; a few
    microseconds per block. The tier reports every event; the policy owns only the order. One
    request makes these calls:

    1. ``access(chain)`` once, on arrival, with all its full blocks whether resident or not
       (blocks that hang on the chain may be reported by a second call);
    2. for each block to be stored, prefix first: if the tier is full, ``admit`` and, if that
       returns True, ``victims``; ``remove`` for each victim taken; then ``insert``.

    A resident block whose parent is not resident cannot be hit, so a policy evicts children
    before their parents wherever it can. Of a model with several KV groups one is the chain; the
    blocks of the others *hang* on it.

    Blocks are numbers, -1 for none. What a policy knows of a block is in columns over the names of
    its tier, so that ten million blocks take no Python objects. It keeps the numbers it knows.
    """

    learns: ClassVar[bool] = False
    """Whether it wants numbers also for keys of a chain, or at a request's end, that have none."""

    @abstractmethod
    def insert(self, number: int, parent: int, now: float, hangs: bool = False) -> None:
        """A block became resident. ``now`` is in seconds and never decreases. Counts as the block's
        first use. ``hangs``: the parent is a block of a chain, and this one is not; it is best
        evicted right before its parent. Already resident: no effect.
        """

    @abstractmethod
    def access(self, use: RequestUse[int]) -> None:
        """Blocks that are not resident are allowed: a policy may learn from them, but does not make
        them resident."""

    @abstractmethod
    def remove(self, number: int) -> None:
        """The block was evicted or dropped. Not resident: no effect."""

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        """Up to ``count`` resident blocks to evict, the best first. Removes none: the caller calls
        ``remove``. Blocks that are not ``evictable`` are skipped and keep their place.
        """

    def hold(self, number: int) -> None:  # noqa: B027
        """The block was skipped and stays (it is leased): ``victims`` need not consider it again
        before ``release`` or its next use. Not resident, or held already: no effect.

        Without this and ``release`` a policy is correct, but considers every leased block that is
        colder than its victim each time.
        """

    def release(self, number: int) -> None:  # noqa: B027
        """The block can be evicted again. It returns to its former place, as far as the policy
        knows it. Not held: no effect."""

    def admit(self, number: int, parent: int, now: float, hangs: bool = False) -> bool:
        """Whether the new block is worth more than the blocks it would displace. Called only when
        the tier is full. False: do not insert it, nor its successors in the chain."""
        return True

    def chance(self, number: int, now: float) -> float | None:
        """The probability that the block, resident or known, is used again within hours. None if
        this policy makes no such estimate, or has not seen enough yet."""
        return None
