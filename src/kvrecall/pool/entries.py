"""The blocks of a tier: one table of entries, by number, under the host and the disk; and the
orders in which they are evicted.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName, is_tail
from kvrecall.config import Amount, PoolTerms, TenantTerms
from kvrecall.pool.accounts import Accounts
from kvrecall.pool.changes import MADE_ROOM, Cause, Watchers
from kvrecall.pool.departures import Departures
from kvrecall.pool.eviction import EvictionPolicy, policy_over
from kvrecall.pool.eviction.base import NumberRefs, RequestUse
from kvrecall.pool.eviction.queues import LruPolicy, QueueLinks
from kvrecall.pool.names import DictNames, Names
from kvrecall.pool.slots import slot_bytes_of

_LOOKED_UP = 512  # blocks of a request under one hold of the lock
_HELD_AT_ONCE = 4096  # about 4 ms
_HELD_FROM = 64  # busy blocks passed in one search: more than one step of an engine commits
# State of an entry, changed under the tier's lock:
HERE = 1  # visible
PINNED = 2
CHANGED = 4  # came, left, was pinned or unpinned, or is idle again, and its orders do not know yet
_TAIL = 8
_HANGS = 16
# and marks of the thread that owns the orders:
RANKED = 1  # in the orders
UNNOTED = 2  # its last use is not written down yet


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block in one tier when it was listed. ``used``: second of its last use."""

    key: BlockKey
    tier: TierName
    tenant: Tenant
    parent: BlockKey | None
    depth: int
    slot_bytes: int
    used: float
    pinned: bool

    @property
    def hangs(self) -> bool:
        """Whether it hangs on a block of another KV group, as windows and states do."""
        return hangs(self.key, self.parent)


def hangs(key: BlockKey, parent: BlockKey | None) -> bool:
    """Whether a block belongs to another KV group than the chain that its parent is in."""
    return parent is not None and not key.startswith(parent[:NAMESPACE_BYTES])


def flags_of(key: BlockKey, parent: BlockKey | None) -> int:
    """The state of an entry that becomes visible."""
    return HERE | _TAIL * is_tail(key) | _HANGS * hangs(key, parent)


@dataclass(slots=True)
class Extent:
    """The blocks in one run of slots of one size, which the tier can only release as a whole: an
    extent of the arena, or a slab of the disk. ``fixed``: those that cannot be evicted now."""

    slot_bytes: int = 0
    blocks: int = 0
    fixed: int = 0
    pinned: int = 0


class EntryTable(ABC):
    """The visible blocks of one tier, each with a number, and what is known of it in columns.

    A block is *idle* if it is not pinned and its slot is neither leased nor read or written now;
    only idle blocks are evicted. The subclass knows the slots.

    The *orders* are the policy's, that of tails, and if tenants are limited to shares of the tier,
    one for each tenant (least recently used, suffixes before prefixes), so that a tenant at its
    limit evicts its own coldest block without a search among those of all others. They contain the
    blocks that are not pinned. Tails of blocks are not the policy's: they go before all others, the
    least recently used first, and are accepted only while there is room.

    The orders, the numbering of new keys, and all columns but the state belong to one thread, the
    *owner*, which evicts; it uses the orders without a lock. Other threads change the state of
    entries under the lock and report that by ``_changed``; the owner's ``_settle`` then tells the
    orders. A number is another block's only after that. Methods are for the owner unless they say
    something else. None waits for I/O.
    """

    def __init__(
        self,
        tier: TierName,
        policy: str,
        capacity_blocks: int,
        capacity_bytes: Callable[[], int],
        clock: Callable[[], float],
        terms: PoolTerms,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Shares of tenants and of pinned blocks are fractions of ``capacity_bytes()``; ``clock``
        never goes back. ``lock``: None if the caller of every method has one."""
        self.pins: set[BlockKey] = set()  # keys an operator pinned, of blocks here or not
        self.pinned_bytes = 0
        self.evictions = 0
        self.watchers: Watchers = ()
        self.retired: Set[bytes] = frozenset()  # namespaces whose blocks go first
        self.leaving: OrderedDict[BlockKey, None] = OrderedDict()  # those, the last one goes first
        self._tier = tier
        self._policy_name = policy
        self._capacity_bytes = capacity_bytes
        self.now = clock
        """Seconds that only pass."""
        self._terms = terms
        self._lock = lock or contextlib.nullcontext()
        self._blocks = 0
        amounts = [self._amount(rules) for rules in terms.tenants.all]
        self.accounts = Accounts(any(amount is not None for amount in amounts), self.limit_of)
        self._begin(max(1, capacity_blocks))

    def _begin(self, capacity_blocks: int) -> None:
        """Begins without a block."""
        self._capacity_blocks = capacity_blocks
        self._names = names = self._new_names()
        self._state = names.column("B")
        self._marks = names.column("B")
        self._nbytes = names.column("I")
        self._depth = names.column("i")
        self._parent = names.column("i")  # plus one; 0: none
        self._used = names.column("d")
        self._tenant = names.column("I")
        self._extents: dict[int, Extent] = {}
        self._held: set[int] = set()  # blocks that the orders hold
        self.departures = Departures(names, self.now)
        # A lock that is none would cost the policies time.
        is_locked = not isinstance(self._lock, contextlib.nullcontext)
        self._refs: NumberRefs = _LockedRefs(names, self._lock) if is_locked else names
        links = QueueLinks(self._refs)
        self._policy: EvictionPolicy = policy_over(links, self._policy_name, capacity_blocks)
        self._tails = LruPolicy(links)
        self.accounts.begin(self._refs)

    def _new_names(self) -> Names:
        return DictNames()

    @property
    def is_empty(self) -> bool:
        return not self._blocks

    @property
    def _is_settled(self) -> bool:
        return True

    def fit(self, block_bytes: int) -> None:
        """Sizes the policy for blocks of that size, if the tier is empty."""
        capacity = max(1, self._capacity_bytes() // slot_bytes_of(block_bytes))
        with self._lock:
            if self.is_empty and self._is_settled and capacity != self._capacity_blocks:
                self._begin(capacity)

    def limit_of(self, tenant: Tenant) -> int | None:
        """Bytes the tenant may hold; None without a limit."""
        amount = self._amount(self._terms.tenants.of(tenant))
        return None if amount is None else amount.of(self._capacity_bytes())

    def _amount(self, terms: TenantTerms) -> Amount | None:
        return terms.host if self._tier is TierName.HOST else terms.disk

    # -- the slots -------------------------------------------------------------------------

    @abstractmethod
    def _is_busy(self, number: int) -> bool:
        """Whether the slot of a visible block is leased, read or written now. From any thread."""

    @abstractmethod
    def _place_of(self, number: int) -> int:
        """Where the extent of a block's slot begins: its key in ``_extents``."""

    def _place(self, number: int) -> Extent:
        """Counts a block in its extent. Its slot is new, so nothing uses it yet."""
        at = self._place_of(number)
        extent = self._extents.get(at)
        if extent is None:
            extent = self._extents[at] = Extent(self._slot_bytes(number))
        extent.blocks += 1
        if self._state.cells[number] & PINNED:
            extent.fixed += 1
            extent.pinned += 1
        return extent

    def _displace(self, number: int) -> None:
        """Undoes ``_place``, before the block's slot changes."""
        at = self._place_of(number)
        extent, is_pinned = self._extents[at], bool(self._state.cells[number] & PINNED)
        extent.blocks -= 1
        extent.fixed -= is_pinned or self._is_busy(number)
        extent.pinned -= is_pinned
        if not extent.blocks:
            del self._extents[at]

    # -- entries, under the lock -----------------------------------------------------------

    def _find(self, key: BlockKey) -> int:
        """The number of a visible block, -1 if there is none. From any thread."""
        number = self._names.number(key)
        return number if number >= 0 and self._state.cells[number] & HERE else -1

    def _slot_bytes(self, number: int) -> int:
        return slot_bytes_of(self._nbytes.cells[number])

    def _parent_of(self, number: int) -> BlockKey | None:
        above = self._parent.cells[number]
        return self._names.key(above - 1) if above else None

    def _tenant_of(self, number: int) -> Tenant:
        return self.accounts.by_number[int(self._tenant.cells[number])].tenant

    def _info(self, number: int) -> BlockInfo:
        return BlockInfo(
            self._names.key(number),
            self._tier,
            self._tenant_of(number),
            self._parent_of(number),
            self._depth.cells[number],
            self._slot_bytes(number),
            self._used.cells[number],
            bool(self._state.cells[number] & PINNED),
        )

    def _enter(
        self,
        key: BlockKey,
        parent: BlockKey | None,
        depth: int,
        nbytes: int,
        tenant: Tenant,
        used: float,
    ) -> int:
        """Makes a block visible, which is not here; returns its number. It is not in the orders
        before ``_settle``, nor counted in an extent. ``used``: at most ``now()``."""
        names = self._names
        number = names.meet(key)
        names.keep(number)
        above = -1 if parent is None else names.meet(parent)
        if above >= 0:
            names.keep(above)
        self._parent.cells[number] = above + 1
        self._depth.cells[number] = depth
        self._nbytes.cells[number] = nbytes
        self._used.cells[number] = used
        self._tenant.cells[number] = self.accounts.enter(tenant)
        self._state.cells[number] = flags_of(key, parent)
        self._blocks += 1
        for watcher in self.watchers:
            watcher.stored(self._tier, key, parent)
        return number

    def _leave(self, number: int, cause: Cause) -> None:
        """Makes a block invisible; the caller reports that by ``_changed``. From any thread; what
        is known of it stays until ``_settle``."""
        for watcher in self.watchers:
            watcher.removed(self._tier, self._names.key(number), cause)
        self.departures.note_n(number, cause)
        self.evictions += cause in MADE_ROOM
        self._displace(number)
        state = self._state.cells
        if state[number] & PINNED:
            self.pinned_bytes -= self._slot_bytes(number)
        state[number] &= ~(HERE | PINNED)
        self._blocks -= 1

    # -- the orders ------------------------------------------------------------------------

    def _changed(self, number: int) -> None:
        """The block came, left, was pinned or unpinned, or is idle again."""
        self._settle((number,))

    def _settle(self, numbers: Iterable[int]) -> None:
        """Tells the orders of blocks that changed, and forgets those that left."""
        state, marks = self._state.cells, self._marks.cells
        gone: list[int] = []
        for number in numbers:
            known = state[number]
            is_due, orders = known & (HERE | PINNED) == HERE, self._orders(number)
            if marks[number] & RANKED:
                if number in self._held:
                    self._release(number)
                    if is_due:
                        continue
                for order in orders:
                    order.remove(number)
                marks[number] ^= RANKED
            if is_due:
                above = self._parent.cells[number] - 1
                used, hanging = self._used.cells[number], bool(known & _HANGS)
                for order in orders:
                    order.insert(number, above, used, hanging)
                marks[number] |= RANKED
            elif not known & HERE:
                gone.append(number)
        if gone:
            with self._lock:
                for number in gone:
                    if state[number] & CHANGED:  # it left just now, and is in the next changes
                        continue
                    state[number] = marks[number] = 0
                    self.accounts.leave(self._tenant.cells[number])
                    above = self._parent.cells[number]
                    self._names.drop(number)
                    if above:
                        self._names.drop(above - 1)

    def _orders(self, number: int) -> tuple[EvictionPolicy, ...]:
        is_tail = self._state.cells[number] & _TAIL
        order: EvictionPolicy = self._tails if is_tail else self._policy
        if not self.accounts.is_bounded:
            return (order,)
        tails, others = self.accounts.by_number[self._tenant.cells[number]].orders
        return (order, tails if is_tail else others)

    def _apply(self, use: RequestUse[BlockKey]) -> None:
        """Records a use: in the policy, of the blocks themselves, and in the orders of their
        tenant."""
        learns = self._policy.learns
        chain, ending = self._numbers(use.chain, learns), self._numbers(use.ending, learns)
        hanging = self._numbers(use.hanging, False)
        by_number = RequestUse(chain, use.now, hanging, ending, use.advice)
        self._policy.access(by_number)
        self._tails.access(RequestUse((), use.now, hanging))
        last = self._note_uses(itertools.chain(chain, hanging), use.now)
        if last >= 0 and self.accounts.is_bounded:
            for order in self.accounts.by_number[self._tenant.cells[last]].orders:
                order.access(by_number)
        if learns:
            self._refs.drop_all([*chain, *ending])

    def _numbers(self, keys: Sequence[BlockKey], makes: bool) -> list[int]:
        """The numbers of keys, -1 for none; or ``makes`` new ones, and keeps all."""
        numbers: list[int] = []
        for start in range(0, len(keys), _LOOKED_UP):
            asked = keys[start : start + _LOOKED_UP]
            with self._lock:
                some = self._names.meet_all(asked) if makes else self._names.numbers(asked)
                if makes:
                    self._names.keep_all(some)
            numbers += some
        return numbers

    def _note_uses(self, numbers: Iterable[int], now: float) -> int:
        """Records the last use of those that are here. Returns the last of them, -1 if none is."""
        state, used, last = self._state.cells, self._used.cells, -1
        for number in numbers:
            if number >= 0 and state[number] & HERE:
                last = number
                used[number] = now
        return last

    def admits(self, key: BlockKey, parent: BlockKey | None) -> bool:
        """Whether the policy admits the block at the price of another, which it does not know for a
        tail. Called when full."""
        if is_tail(key):
            return False
        if next(iter(self._tails), None) is not None:
            return True
        with self._lock:
            number = self._names.number(key)
            above = -1 if parent is None else self._names.number(parent)
        return self._policy.admit(number, above, self.now(), hangs(key, parent))

    def chance(self, key: BlockKey) -> float | None:
        """The policy's probability that the block is used again; None: no estimate."""
        return self._policy.chance(self._names.number(key), self.now())

    # -- which go --------------------------------------------------------------------------

    def _search(
        self,
        count: int,
        slot_bytes: int | None = None,
        wanted: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """Up to ``count`` idle blocks (of a slot size, that are ``wanted``), the least valuable
        first. Removes none; some may have left or be busy by now."""
        state = self._state.cells
        busy: list[int] = []

        def evictable(number: int) -> bool:
            if self._is_busy(number):
                busy.append(number)
                return False
            return (
                state[number] & (HERE | PINNED) == HERE
                and (slot_bytes is None or self._slot_bytes(number) == slot_bytes)
                and (wanted is None or wanted(number))
            )

        now = self.now()
        first: dict[int, None] = {}
        for _ in range(min(len(self.leaving), count + _HELD_FROM)):
            key, _ = self.leaving.popitem()
            with self._lock:
                number = self._find(key) if key[:NAMESPACE_BYTES] in self.retired else -1
            if number >= 0 and len(first) < count and evictable(number):
                first[number] = None
            elif number >= 0:  # it is busy, or of another size
                self.leaving[key] = None
                self.leaving.move_to_end(key, last=False)
        found = [*first]
        for order in (self._tails, self._policy):
            if len(found) < count:
                wanted_too = evictable if not first else lambda n: n not in first and evictable(n)
                found += order.victims(count - len(found), wanted_too, now)
        self._hold(busy)
        return found

    def _search_of(
        self,
        tenant: Tenant,
        nbytes: int,
        wanted: Callable[[int], bool] | None = None,
        most: int = 1 << 32,
    ) -> list[int]:
        """A limited tenant's idle blocks, coldest first, up to ``nbytes`` bytes and ``most``."""
        state = self._state.cells
        found: list[int] = []
        busy: list[int] = []
        for number in itertools.chain.from_iterable(self.accounts.orders(tenant)):
            if nbytes <= 0 or len(found) == most:
                break
            if self._is_busy(number):
                busy.append(number)
            elif state[number] & (HERE | PINNED) == HERE and (wanted is None or wanted(number)):
                found.append(number)
                nbytes -= self._slot_bytes(number)
        self._hold(busy)
        return found

    def _hold(self, busy: Sequence[int]) -> None:
        """The orders skip these blocks until they are idle: only the first of them, so that no
        search takes much longer than without. A held block comes back as the oldest, so a few
        blocks in use, which may be the youngest, keep their places."""
        if len(busy) < _HELD_FROM:
            return
        for number in busy[:_HELD_AT_ONCE]:
            self._held.add(number)
            for order in self._orders(number):
                order.hold(number)
        for number in busy[:_HELD_AT_ONCE]:  # those that became idle just now were not reported
            if not self._is_busy(number):
                self._release(number)

    def _release(self, number: int) -> None:
        if number in self._held:
            self._held.discard(number)
            for order in self._orders(number):
                order.release(number)

    # -- pinned by an operator; from any thread, under the lock ----------------------------

    @property
    def pin_limit(self) -> int:
        return int(self._terms.pin_limit * self._capacity_bytes())

    def _may_pin(self, number: int) -> bool:
        """Whether pinning the block stays within ``pin_limit``."""
        return self.pinned_bytes + self._slot_bytes(number) <= self.pin_limit

    def pin(self, keys: Collection[BlockKey]) -> None:
        """Pins blocks of these keys, present or future, as far as ``pin_limit`` allows."""
        self._set_pins(keys, True)

    def unpin(self, keys: Collection[BlockKey]) -> None:
        self._set_pins(keys, False)

    def _set_pins(self, keys: Collection[BlockKey], pinned: bool) -> list[int]:
        """Pins or unpins; returns the visible blocks that this changed."""
        changed: list[int] = []
        for key in keys:
            (self.pins.add if pinned else self.pins.discard)(key)
            number = self._find(key)
            if number < 0 or bool(self._state.cells[number] & PINNED) is pinned:
                continue
            if not pinned or self._may_pin(number):
                self._set_pinned(number, pinned)
                self._changed(number)
                changed.append(number)
        return changed

    def _set_pinned(self, number: int, pinned: bool) -> None:
        extent, change = self._extents[self._place_of(number)], 1 if pinned else -1
        extent.pinned += change
        if not self._is_busy(number):
            extent.fixed += change
        self.pinned_bytes += change * self._slot_bytes(number)
        self._state.cells[number] ^= PINNED


class _LockedRefs:
    """The names of a table for its policies, which have no lock."""

    def __init__(self, names: Names, lock: AbstractContextManager[Any]) -> None:
        self._names = names
        self._lock = lock
        self.column = names.column

    def keep(self, number: int) -> None:
        with self._lock:
            self._names.keep(number)

    def keep_all(self, numbers: Sequence[int]) -> None:
        self._in_parts(self._names.keep_all, numbers)

    def drop(self, number: int) -> None:
        with self._lock:
            self._names.drop(number)

    def drop_all(self, numbers: Sequence[int]) -> None:
        self._in_parts(self._names.drop_all, numbers)

    def _in_parts(self, do: Callable[[Sequence[int]], None], numbers: Sequence[int]) -> None:
        for start in range(0, len(numbers), _LOOKED_UP):
            with self._lock:
                do(numbers[start : start + _LOOKED_UP])
