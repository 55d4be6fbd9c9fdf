"""What enters and leaves each tier, for those who watch a pool; and a bounded log of it."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, Protocol

from kvrecall.block import NAMESPACE_BYTES, BlockKey, TierName

MOST_CHANGES = 65_536
"""Changes that a log keeps until they are taken, by default: about 10 MB."""


class Cause(enum.StrEnum):
    """Why a block left a tier."""

    CAPACITY = "capacity"  # evicted by the policy, to make room
    QUOTA = "quota"  # evicted, because its tenant reached its limit
    EXPIRED = "expired"  # unused for longer than its tenant's TTL
    DROPPED = "dropped"  # an operator or a program dropped it
    CLEARED = "cleared"  # the pool was cleared
    CORRUPT = "corrupt"  # damaged, or the medium could not read it
    LOST = "lost"  # its part of the medium is gone
    RESIZED = "resized"  # blocks of its namespace have another size now


MADE_ROOM = (Cause.CAPACITY, Cause.QUOTA)
"""Causes that count as evictions, and leave what lower tiers have."""


class Watcher(Protocol):
    """Is told of every block that enters a tier or leaves it. In a remote tier, which other hosts
    change too: of those that this pool stores there, and then finds missing.

    Called under the tier's lock, in the order of the changes: must return at once and must not call
    the pool. Changes of different tiers may come from different threads.
    """

    def stored(self, tier: TierName, key: BlockKey, parent: BlockKey | None) -> None: ...

    def removed(self, tier: TierName, key: BlockKey, cause: Cause) -> None: ...


Watchers = tuple[Watcher, ...]
"""Those who watch a tier; empty costs one test of an attribute per change."""


class Stored(NamedTuple):
    """A block is in a tier. Said again of blocks that are there already after a ``Restart``."""

    tier: TierName
    key: BlockKey
    parent: BlockKey | None


class Removed(NamedTuple):
    tier: TierName
    key: BlockKey
    cause: Cause


class Restart(enum.Enum):
    """Changes were lost: a reader forgets all that it knows. What is held follows."""

    RESTART = "restart"


Change = Stored | Removed | Restart


class ChangeLog:
    """A ``Watcher`` that keeps changes, up to a number, until one reader takes them. Thread-safe.

    A reader that applies all changes that it takes, in order, knows what the tiers hold: the
    log begins with all that is there, and after an overflow it begins again, behind a ``Restart``.
    """

    def __init__(
        self, sweep: Callable[[Watcher], Iterator[None]], most: int = MOST_CHANGES
    ) -> None:
        """``sweep``: reports all blocks held, some with each step, as ``Pool.sweep`` does; what one
        step reports may exceed ``most``."""
        self._sweep_of = sweep
        self._most = most
        self._lock = threading.Lock()
        self._changes: list[Change] = []
        self._overflowed = False
        self._sweep: Iterator[None] | None = None
        self._swept: frozenset[bytes] | None = None  # by the sweep under way; None: all
        self._has_begun = False  # the sweep under way
        self._next: frozenset[bytes] = frozenset()  # namespaces to sweep after it
        self._told: set[tuple[TierName, BlockKey]] = set()  # as stored, since it began
        self._begin_sweep(None)
        self.restarts = 0

    def _begin_sweep(self, namespaces: frozenset[bytes] | None) -> None:
        self._sweep = self._sweep_of(_Held(self._hold, namespaces))
        self._swept, self._has_begun, self._next = namespaces, False, frozenset()
        self._told = {(one.tier, one.key) for one in self._changes if isinstance(one, Stored)}

    def stored(self, tier: TierName, key: BlockKey, parent: BlockKey | None) -> None:
        self._add(Stored(tier, key, parent))

    def removed(self, tier: TierName, key: BlockKey, cause: Cause) -> None:
        self._add(Removed(tier, key, cause))

    def _add(self, change: Change) -> None:
        with self._lock:
            if len(self._changes) >= self._most:
                self._changes = []
                self._overflowed = True
            if not self._overflowed:
                self._changes.append(change)
                if self._sweep is not None and isinstance(change, Stored):
                    self._told.add((change.tier, change.key))

    def _hold(self, change: Stored) -> None:
        """Unless the log has told it itself, because some readers count how often."""
        with self._lock:
            if not self._overflowed and (change.tier, change.key) not in self._told:
                self._changes.append(change)

    def repeat(self, namespaces: Collection[bytes] | None = None) -> None:
        """All blocks held are reported once more, without a ``Restart``; those of these namespaces
        alone, by their digests, if they are given. Called by the thread that calls ``take``."""
        if namespaces is None:
            self._begin_sweep(None)
        elif self._sweep is None:
            self._begin_sweep(frozenset(namespaces))
        elif self._has_begun:
            self._next |= frozenset(namespaces)
        elif self._swept is not None:
            self._begin_sweep(self._swept | frozenset(namespaces))

    def take(self) -> list[Change]:
        """The changes since the last call. Called by one thread, and without a lock of the pool."""
        with self._lock:
            if self._overflowed:
                self._overflowed = False
                self.restarts += 1
                self._changes = [Restart.RESTART]
                self._begin_sweep(None)
        if self._sweep is not None and len(self._changes) <= self._most // 2:
            self._has_begun = True
            try:
                next(self._sweep)
            except StopIteration:
                self._sweep = None
                if self._next:
                    self._begin_sweep(self._next)
        with self._lock:
            taken, self._changes = self._changes, []
        return taken

    @property
    def is_sweeping(self) -> bool:
        """Whether some of what was held at the beginning has yet to be taken."""
        return self._sweep is not None

    @property
    def is_complete(self) -> bool:
        """Whether all that was held at the beginning has been taken."""
        with self._lock:
            return self._sweep is None and not (self._overflowed or self._changes)


class _Held:
    """Adds what a sweep reports to a log: all of it, or what is of some namespaces."""

    def __init__(self, add: Callable[[Stored], None], namespaces: frozenset[bytes] | None) -> None:
        self._add = add
        self._namespaces = namespaces

    def stored(self, tier: TierName, key: BlockKey, parent: BlockKey | None) -> None:
        if self._namespaces is None or key[:NAMESPACE_BYTES] in self._namespaces:
            self._add(Stored(tier, key, parent))

    def removed(self, tier: TierName, key: BlockKey, cause: Cause) -> None:
        """A sweep reports none."""
