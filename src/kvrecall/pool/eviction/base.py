"""The interface between a tier and its eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from kvrecall.block import BlockKey
from kvrecall.pool.hints import Advice
from kvrecall.pool.names import DictNames, Names

PART = 128
"""Blocks of a request whose use is recorded at once: half a millisecond, on slow memory."""


class EvictionPolicy(ABC):
    """Orders the blocks of one tier for eviction.

    Owner: one tier; not thread-safe; never blocks; a few microseconds per block. The tier reports
    every event; the policy owns only the order. One request makes these calls:

    1. ``access(chain)`` once, on arrival, with all its full blocks whether resident or not
       (blocks that hang on the chain may be reported by a second call); that is the steps of
       ``access_in_parts`` between two times ``tend``, and the tier may let go of its lock between
       any two of them;
    2. for each block to be stored, prefix first: if the tier is full, ``admit`` and, if that
       returns True, ``victims``; ``remove`` for each victim taken; then ``insert``.

    A resident block whose parent is not resident cannot be hit, so a policy evicts children
    before their parents wherever it can. Of a model with several KV groups one is the chain; the
    blocks of the others *hang* on it.

    A policy keeps what it knows of a block in columns over the ``names`` of its tier, so that ten
    million blocks take no Python objects. Each method has a form by key and one (``.._n``) by
    number, -1 for none; a policy implements the latter. It keeps the numbers it knows.
    """

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    """Whether it wants numbers also for keys of a chain, or at a request's end, that have none."""

    def __init__(self, names: Names | None = None) -> None:
        self.names = DictNames() if names is None else names

    # -- by number -------------------------------------------------------------------------

    @abstractmethod
    def insert_n(
        self, number: int, parent: int, depth: int, now: float, hangs: bool = False
    ) -> None:
        """A block became resident. ``depth`` counts from 0 at the root, ``now`` is in seconds and
        never decreases. Counts as the block's first use. ``hangs``: the parent is a block of a
        chain, and this one is not; it is best evicted right before its parent. Already resident:
        no effect.
        """

    @abstractmethod
    def access_in_parts(
        self,
        chain: Sequence[int],
        now: float,
        hanging: Sequence[int] = (),
        ending: Sequence[int] = (),
        advice: Advice | None = None,
    ) -> Iterator[None]:
        """A request used ``chain`` (prefix first), and ``hanging`` blocks: each has a block of a
        chain as its parent, but is none itself. ``ending``: those that are at the request's own
        end, or will be: where a request that continues it begins. Blocks that are not resident are
        allowed: a policy may learn from them, but does not make them resident. ``advice``: what
        the client said about the return of ``chain``, if it is believed; it may be wrong.

        Does nothing before the first ``next``, which does a part of it, as does each further one:
        a few hundred blocks at most. Any other call may come
        between two, another request's use included; what one of them removes is from then on a
        block that is not resident. The caller keeps the numbers until the end."""

    def tend(self, now: float) -> bool:
        """Does a part of what the time that has passed and past uses have made due, such as
        learning from what was seen: a few milliseconds at most, whatever the size of the tier. True
        if it should be called again; other calls may come between two. Before an access and after
        it."""
        return False

    @abstractmethod
    def remove_n(self, number: int) -> None:
        """The block was evicted or dropped. Not resident: no effect."""

    @abstractmethod
    def victims_n(self, count: int, evictable: Callable[[int], bool], now: float) -> list[int]:
        """Up to ``count`` resident blocks to evict, the best first. Removes none: the caller calls
        ``remove_n``. Blocks that are not ``evictable`` are skipped and keep their place.
        """

    def hold_n(self, number: int) -> None:  # noqa: B027
        """The block was skipped and stays (it is leased): ``victims_n`` need not consider it
        again before ``release_n`` or its next use. Not resident, or held already: no effect.

        Without this and ``release_n`` a policy is correct, but considers every leased block that is
        colder than its victim each time.
        """

    def release_n(self, number: int) -> None:  # noqa: B027
        """The block can be evicted again. It returns to its former place, as far as the policy
        knows it. Not held: no effect."""

    def admit_n(
        self, number: int, parent: int, depth: int, now: float, hangs: bool = False
    ) -> bool:
        """Whether the new block is worth more than the blocks it would displace. Called only when
        the tier is full. False: do not insert it, nor its successors in the chain."""
        return True

    def chance_n(self, number: int, now: float) -> float | None:
        """The probability that the block, resident or known, is used again within hours. None if
        this policy makes no such estimate, or has not seen enough yet."""
        return None

    # -- by key ----------------------------------------------------------------------------

    def insert(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> None:
        number, above = self.names.meet(key), -1 if parent is None else self.names.meet(parent)
        self.insert_n(number, above, depth, now, hangs)
        self.names.sweep((number,) if above < 0 else (number, above))

    def access(
        self,
        chain: Sequence[BlockKey],
        now: float,
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        """``access_in_parts``, whole, and ``tend``."""
        while self.tend(now):
            pass
        names = self.names
        look = names.meet_all if self.learns else names.numbers
        used, last = look(chain), look(ending)
        deque(self.access_in_parts(used, now, names.numbers(hanging), last, advice), maxlen=0)
        if self.learns:
            names.sweep((*used, *last))
        while self.tend(now):
            pass

    def remove(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.remove_n(number)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now: float
    ) -> list[BlockKey]:
        key = self.names.key
        return [key(n) for n in self.victims_n(count, lambda n: evictable(key(n)), now)]

    def hold(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.hold_n(number)

    def release(self, key: BlockKey) -> None:
        number = self.names.number(key)
        if number >= 0:
            self.release_n(number)

    def admit(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        now: float,
        hangs: bool = False,
    ) -> bool:
        above = -1 if parent is None else self.names.number(parent)
        return self.admit_n(self.names.number(key), above, depth, now, hangs)

    def chance(self, key: BlockKey, now: float) -> float | None:
        return self.chance_n(self.names.number(key), now)
