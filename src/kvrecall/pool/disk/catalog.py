"""The contents of the disk, in memory: the entries of durable blocks, their slots to be freed, and
the tier's counters.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName
from kvrecall.config import PoolTerms
from kvrecall.pool.changes import Cause, Watcher
from kvrecall.pool.counters import TierCounters
from kvrecall.pool.departures import Departure
from kvrecall.pool.disk.index import MAX_ROWS, Row, Rows
from kvrecall.pool.disk.slabs import SLAB_BITS, slab_of
from kvrecall.pool.eviction import EvictionPolicy
from kvrecall.pool.hints import Advice
from kvrecall.pool.holds import in_holds
from kvrecall.pool.names import CompactNames, Names
from kvrecall.pool.residents import (
    HELD_AT_ONCE,
    HELD_FROM,
    BlockInfo,
    EvictionOrders,
    TenantUse,
)
from kvrecall.pool.slots import ALIGNMENT, slot_bytes_of
from kvrecall.pool.tier import Outcome

_STALE_S = 10.0  # a last use is written to the index again when it is older than this
_RECOVERED = 512  # rows taken over under one hold
_PREPARED = 8 * _RECOVERED  # names for which there is memory before the lock is taken
_AT_ONCE = 64  # blocks that change under one hold of the lock: a millisecond, on slow memory
_PART = 16  # blocks between two looks at how long the lock has been held
_SCANNED = 1 << 12  # numbers looked through under one hold
_NUMBERS = 1 << 13
# Names of a tier, at most: of each block of its capacity, its parent, and what the policy remembers
# beside them; and more of a small tier. This much address space is taken, but no memory.
_NAMES_FOR_ONE = 4
_MORE_NAMES = 1 << 19
T = TypeVar("T")
Bools = npt.NDArray[np.bool_]
# State of a number:
_HERE = 1
_PINNED = 2
_RANKED = 4  # in the eviction orders, or pinned
_USED = 8  # its last use is not in the index yet


@dataclass(frozen=True, slots=True)
class Entry:
    """A durable block as it was when it was looked up."""

    number: int
    key: BlockKey
    address: int
    nbytes: int
    tag: bytes

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.nbytes)


@dataclass(slots=True)
class SlabUse:
    """The number of blocks in a slab, of those that cannot be moved or dropped now, and of pinned
    ones."""

    blocks: int = 0
    fixed: int = 0
    pinned: int = 0


class Catalog(EvictionOrders):
    """The entries of one disk tier. Its public methods are thread-safe; they never wait for I/O,
    and never hold the lock for longer than a few hundred blocks take.

    An entry is a cell in each of some columns, over the names that the eviction orders use too:
    about 130 bytes a block, of which the garbage collector sees nothing. A block is *idle* if no
    read of its slot is in flight and it is not pinned; only idle blocks are evicted.

    A forgotten entry is not found from that moment on. Its slot is passed to the flusher
    (``take_pending_free``), which deletes the row before the slot is reused.

    After a restart the blocks of the earlier process come in parts (``recover``), are found from
    then on, and can be evicted after ``rank_rest``.
    """

    def __init__(
        self,
        policy: str,
        capacity_blocks: int,
        capacity_bytes: Callable[[], int],
        clock: Callable[[], float],
        terms: PoolTerms,
        tag_bytes: int = 16,
        expected: int = 0,
    ) -> None:
        """``expected``: blocks that will be recovered."""
        self._tag_bytes = tag_bytes
        self._expected = expected
        self._blocks = 0
        super().__init__(TierName.DISK, policy, capacity_blocks, capacity_bytes, clock, terms)
        self._lock = threading.Lock()
        self._reading: dict[int, int] = {}  # reads in flight, by address
        self._doomed: set[int] = set()  # addresses of forgotten blocks that are still read
        self._slabs: dict[int, SlabUse] = {}
        self._held: set[int] = set()  # numbers that the orders hold
        self._tenant_numbers: dict[Tenant, int] = {}
        self._tenant_list: list[Tenant] = []
        self._tenants_gone: list[int] = []  # their numbers, to be used again
        self._late: _Late | None = None  # while blocks are still being recovered
        self._pending_free = _Numbers()
        self._unnoted_uses = _Numbers()  # of blocks that were used, or gone since
        self._unnoted_pins: dict[int, int] = {}  # 1 or 0 by address, not in the index yet
        self.used_bytes = 0

    def _new_names(self) -> Names:
        most = _NAMES_FOR_ONE * self._capacity_blocks + _MORE_NAMES
        self._table = names = CompactNames(max(self._expected, 1), most)
        self._state = names.column("B")
        self._address = names.column("q")
        self._nbytes = names.column("I")
        self._depth = names.column("i")
        self._parent = names.column("i")  # plus one; 0: none
        self._used = names.column("d")
        self._tenant = names.column("I")
        self._tag = names.column("B", self._tag_bytes)
        return names

    # -- looking up ------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._blocks and self._late is None

    def __len__(self) -> int:
        return self._blocks

    def __contains__(self, key: BlockKey) -> bool:
        with self._lock:
            return self._find(key) >= 0

    def present(self, keys: Sequence[BlockKey]) -> Bools:
        """Whether each of ``keys`` is here [keys], by its hash of 64 bits: ``acquire`` looks at all
        of it."""
        with self._lock:
            numbers = self._table.numbers_of(keys, exact=False)
            here: Bools = self._state.array().take(numbers) > 0
        here &= numbers >= 0
        return here

    def _find(self, key: BlockKey) -> int:
        """The number of a block that is here, -1 if it is not."""
        number = self._table.number(key)
        return number if number >= 0 and self._state.cells[number] else -1

    def depth_of(self, key: BlockKey) -> int | None:
        with self._lock:
            number = self._find(key)
            return None if number < 0 else int(self._depth.cells[number])

    def known_of(self, key: BlockKey) -> tuple[bool, Departure | None]:
        """Whether a block is here; and why and when it left, as far as that is remembered."""
        with self._lock:
            number = self._table.number(key)
            if number < 0:
                return False, None
            return bool(self._state.cells[number]), self.departures.of_n(number)

    def _entry(self, number: int) -> Entry:
        begin = number * self._tag_bytes
        return Entry(
            number,
            self._table.key(number),
            self._address.cells[number],
            self._nbytes.cells[number],
            bytes(self._tag.cells[begin : begin + self._tag_bytes]),
        )

    def _slot_bytes(self, number: int) -> int:
        return slot_bytes_of(self._nbytes.cells[number])

    def _parent_of(self, number: int) -> BlockKey | None:
        above = self._parent.cells[number]
        return self._table.key(above - 1) if above else None

    def _tenant_of(self, number: int) -> Tenant:
        tenant: int = self._tenant.cells[number]
        return self._tenant_list[tenant]

    def infos(self, unused_since: float | None = None) -> Iterator[BlockInfo]:
        """Every block, or those unused since that second; as they are when their turn
        comes."""
        before = float("inf") if unused_since is None else unused_since
        for parts in in_holds(self._lock, self._infos(before)):
            yield from itertools.chain.from_iterable(parts)

    def _infos(self, before: float) -> Iterator[list[BlockInfo]]:
        for part in self._all_numbers():
            state, used = self._state.cells, self._used.cells
            yield [self._info(n) for n in part if state[n] and used[n] < before]

    def _all_numbers(self) -> Iterator[range]:
        """All numbers, also those that come meanwhile, in parts."""
        start = 0
        while start < self._table.size:
            end = min(self._table.size, start + _PART)
            yield range(start, end)
            start = end

    def rows(self) -> Iterator[Sequence[Row]]:
        """Every block, as it is in the index, in parts of at most ``MAX_ROWS``."""
        for parts in in_holds(self._lock, self._rows()):
            yield from _parts(itertools.chain.from_iterable(parts), MAX_ROWS)

    def _rows(self) -> Iterator[list[Row]]:
        for part in self._all_numbers():
            state = self._state.cells
            yield [self._row(n) for n in part if state[n]]

    def _row(self, number: int) -> Row:
        entry = self._entry(number)
        return Row(
            entry.address,
            entry.key,
            self._parent_of(number),
            self._depth.cells[number],
            entry.nbytes,
            entry.tag,
            int(self._used.cells[number]),
            self._tenant_of(number),
            bool(self._state.cells[number] & _PINNED),
        )

    def watch(self, watcher: Watcher) -> None:
        """From now on ``watcher`` is told what comes and goes."""
        with self._lock:
            self.watchers = (*self.watchers, watcher)

    def sweep(self, watcher: Watcher) -> Iterator[None]:
        """Reports every block as stored, some with each step."""
        for _ in in_holds(self._lock, self._sweep(watcher)):
            yield

    def _sweep(self, watcher: Watcher) -> Iterator[None]:
        for part in self._all_numbers():
            state = self._state.cells
            for number in part:
                if state[number]:
                    key, parent = self._table.key(number), self._parent_of(number)
                    watcher.stored(TierName.DISK, key, parent)
            yield

    def _info(self, number: int) -> BlockInfo:
        return BlockInfo(
            self._table.key(number),
            TierName.DISK,
            self._tenant_of(number),
            self._parent_of(number),
            self._depth.cells[number],
            self._slot_bytes(number),
            self._used.cells[number],
            bool(self._state.cells[number] & _PINNED),
        )

    def resize_policy(self, capacity_blocks: int) -> None:
        with self._lock:
            super().resize_policy(capacity_blocks)

    # -- coming ----------------------------------------------------------------------------

    def begin_recovery(self) -> None:
        """Blocks of an earlier process will follow."""
        self._late = _Late()

    def recover(self, rows: Rows) -> list[int]:
        """Takes over blocks of an earlier process, not yet ranked. Returns the places of those that
        it does not: dropped since the recovery began, or here already."""
        refused: list[int] = []
        for start in range(0, len(rows.keys), _RECOVERED):
            self.prepare()
            places = range(start, min(start + _RECOVERED, len(rows.keys)))
            if not self._take_many(rows, places):
                refused += self._take_each(rows, places)
            time.sleep(0)  # whoever waits for the interpreter goes first
        return refused

    def _take_each(self, rows: Rows, places: Sequence[int]) -> list[int]:
        """``recover`` of the rows at these places, one by one."""
        refused: list[int] = []
        for part in _parts(places):
            with self._lock:
                now = self.now()
                for place in part:
                    row = rows.row(place)
                    if self._is_outdated(row) or self._find(row.key) >= 0:
                        refused.append(place)
                        continue
                    if row.pinned and row.key not in self._late_unpinned:
                        self.pins.add(row.key)
                    number = self._take_in(row, min(float(row.used), now))
                    pinned = row.key in self.pins and (row.pinned or self._may_pin(number))
                    if pinned:
                        self._set_pinned(number, True)
                    if pinned != row.pinned:
                        self._unnoted_pins[row.address] = int(pinned)
        return refused

    def _take_many(self, rows: Rows, places: range) -> bool:
        """``_take_in`` of the rows at these places. False, and takes none, unless their blocks are
        not pinned, each another, and none is here or was named since the recovery began."""
        part = slice(places.start, places.stop)
        keys, parents = rows.keys[part], rows.parents[part]
        if any(rows.pinned[part]) or len(set(keys)) < len(keys):
            return False
        # All that needs no lock, before it is taken.
        below = [place for place, parent in enumerate(parents) if parent is not None]
        over = [key for key in parents if key is not None]
        addresses = np.asarray(rows.addresses[part], np.int64)
        nbytes = np.asarray(rows.nbytes[part], np.int64)
        depths = np.asarray(rows.depths[part], np.int32)
        used = np.asarray(rows.used[part], np.float64)
        tags = np.frombuffer(b"".join(rows.tags[part]), np.uint8).reshape(-1, self._tag_bytes)
        slot_bytes = (-(-nbytes // ALIGNMENT) * ALIGNMENT).tolist()
        charged: dict[Tenant, int] = {}
        for tenant, size in zip(rows.tenants[part], slot_bytes, strict=True):
            charged[tenant] = charged.get(tenant, 0) + size
        owners = {tenant: place for place, tenant in enumerate(charged)}
        owned = [owners[tenant] for tenant in rows.tenants[part]]
        slabs, counts = np.unique(addresses >> SLAB_BITS, return_counts=True)

        with self._lock:
            if self._late is None or self._late.has_any:
                return False
            names = self._table
            numbers = names.meet_many(keys)
            names.keep_many(numbers)
        time.sleep(0)
        with self._lock:
            above = names.meet_many(over)
            names.keep_many(above)
            late = self._late  # what was said, and came, meanwhile
            if late is None or late.has_any or self._state.array()[numbers].any():
                names.drop_all([*numbers.tolist(), *above.tolist()])
                return False
            self._parent.array()[numbers] = 0
            self._parent.array()[numbers[below]] = above + 1
            self._address.array()[numbers] = addresses
            self._nbytes.array()[numbers] = nbytes
            self._depth.array()[numbers] = depths
            self._used.array()[numbers] = np.minimum(used, self.now())
            self._tag.array()[numbers] = tags
            self._state.array()[numbers] = _HERE
            for watcher in self.watchers:
                for key, parent in zip(keys, parents, strict=True):
                    watcher.stored(TierName.DISK, key, parent)
            self._blocks += len(numbers)
            self.used_bytes += sum(charged.values())
            for tenant, size in charged.items():
                self.accounts.charge(tenant, size)
            tenants = np.array([self._tenant_number(tenant) for tenant in charged], np.uint32)
            self._tenant.array()[numbers] = tenants[owned]
            for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
                self._slabs.setdefault(slab, SlabUse()).blocks += count
        return True

    @property
    def _late_unpinned(self) -> set[BlockKey]:
        return set() if self._late is None else self._late.unpinned

    def _is_outdated(self, row: Row) -> bool:
        late = self._late
        if late is None:
            return False
        size = late.sizes.get(row.key[:NAMESPACE_BYTES], row.nbytes)
        return late.cleared or row.key in late.dropped or size != row.nbytes

    def rank_rest(self, is_closing: Callable[[], bool]) -> bool:
        """All were recovered: puts them into the eviction orders, the least recently used first,
        and of those used in the same second the deepest. False if the tier is closing."""
        with self._lock:
            self._late = None  # what comes from now on is ranked as it comes
        parts = list(self._unranked())
        numbers, used, depth = map(np.concatenate, zip(*parts, strict=True))
        del parts
        order = numbers[np.lexsort((-depth, used))]
        del numbers, used, depth
        holds = in_holds(self._lock, self._rank_each(order))
        return not any(is_closing() for _ in holds)

    def _rank_each(self, order: npt.NDArray[np.int32]) -> Iterator[None]:
        for start in range(0, len(order), _PART):
            state = self._state.cells
            for number in order[start : start + _PART].tolist():
                if state[number] & (_HERE | _RANKED) == _HERE:
                    self._rank_in(number, self._used.cells[number])
            yield

    def _unranked(self) -> Iterator[tuple[npt.NDArray[Any], ...]]:
        """Number, last use and depth of each block that is in no order yet, in parts."""
        start = 0
        while True:
            with self._lock:
                part = slice(start, min(self._table.size, start + _SCANNED))
                here = self._state.array()[part] & (_HERE | _RANKED) == _HERE
                numbers = np.flatnonzero(here).astype(np.int32) + start
                used, depth = self._used.array()[part][here], self._depth.array()[part][here]
            yield numbers, used, depth
            if part.stop < start + _SCANNED:
                return
            start = part.stop

    def prepare(self) -> None:
        """Has memory for the next new names, so that it need not be taken from the system under the
        lock. For the flusher's thread."""
        self._table.prepare(_PREPARED)

    def publish(self, rows: Sequence[Row]) -> None:
        """Makes durable blocks visible."""
        deque(in_holds(self._lock, self._publish(rows)), maxlen=0)

    def _publish(self, rows: Sequence[Row]) -> Iterator[None]:
        for part in _parts(rows, _PART):
            now = self.now()
            for row in part:
                number = self._take_in(row, now)
                pinned = row.key in self.pins and self._may_pin(number)
                if pinned:
                    self._set_pinned(number, True)
                else:
                    self._rank_in(number, now)
                if pinned != row.pinned:
                    self._unnoted_pins[row.address] = int(pinned)
            yield

    def _take_in(self, row: Row, used: float) -> int:
        names, address = self._table, row.address
        number = names.meet(row.key)
        names.keep(number)
        above = 0
        if row.parent is not None:
            above = names.meet(row.parent) + 1
            names.keep(above - 1)
        self._parent.cells[number] = above
        self._address.cells[number] = address
        self._nbytes.cells[number] = row.nbytes
        self._depth.cells[number] = row.depth
        self._used.cells[number] = used
        begin = number * self._tag_bytes
        self._tag.cells[begin : begin + self._tag_bytes] = row.tag
        self._state.cells[number] = _HERE
        for watcher in self.watchers:
            watcher.stored(TierName.DISK, row.key, row.parent)
        self._blocks += 1
        slot_bytes = slot_bytes_of(row.nbytes)
        self.used_bytes += slot_bytes
        self.accounts.charge(row.tenant, slot_bytes)
        self._tenant.cells[number] = self._tenant_number(row.tenant)
        slab = self._slabs.get(slab_of(address))
        if slab is None:
            slab = self._slabs[slab_of(address)] = SlabUse()
        slab.blocks += 1
        return number

    def _tenant_number(self, tenant: Tenant) -> int:
        number = self._tenant_numbers.get(tenant)
        if number is None:
            if self._tenants_gone:
                number = self._tenants_gone.pop()
                self._tenant_list[number] = tenant
            else:
                number = len(self._tenant_list)
                self._tenant_list.append(tenant)
            self._tenant_numbers[tenant] = number
        return number

    def _orders(self, number: int) -> tuple[EvictionPolicy, ...]:
        """The orders that contain a block."""
        tail = self._table.is_tail(number)
        order: EvictionPolicy = self._tails if tail else self._policy
        if not self.accounts.is_bounded:
            return (order,)
        return (order, self.accounts.orders(self._tenant_of(number))[0 if tail else 1])

    def _rank_in(self, number: int, used: float) -> None:
        """A block can be evicted from now on."""
        above = self._parent.cells[number] - 1
        hanging = above >= 0 and not self._table.is_same_space(number, above)
        for order in self._orders(number):
            order.insert_n(number, above, self._depth.cells[number], used, hanging)
        self._state.cells[number] |= _RANKED

    def _rank_out(self, number: int) -> None:
        if self._state.cells[number] & _RANKED:
            for order in self._orders(number):
                order.remove_n(number)
            self._state.cells[number] ^= _RANKED
            self._held.discard(number)

    # -- in use ----------------------------------------------------------------------------

    def acquire(self, key: BlockKey) -> Entry | None:
        """Protects the block's slot for a read, until ``release``. None if the block is not
        here."""
        with self._lock:
            number = self._find(key)
            if number < 0:
                return None
            entry = self._entry(number)
            reads = self._reading.get(entry.address, 0)
            self._reading[entry.address] = reads + 1
            if not (reads or self._state.cells[number] & _PINNED):
                self._slabs[slab_of(entry.address)].fixed += 1
            return entry

    def release(self, entry: Entry) -> None:
        with self._lock:
            address, number = entry.address, entry.number
            left = self._reading[address] - 1
            if left:
                self._reading[address] = left
                return
            del self._reading[address]
            if address in self._doomed:  # forgotten meanwhile
                self._doomed.discard(address)
                self._pending_free.append(address)
            elif self._state.cells[number] and self._address.cells[number] == address:
                if not self._state.cells[number] & _PINNED:
                    self._slabs[slab_of(address)].fixed -= 1
                if number in self._held:
                    self._held.discard(number)
                    for order in self._orders(number):
                        order.release_n(number)

    def is_read(self, address: int) -> bool:
        """Whether reads of the slot are in flight."""
        return address in self._reading

    def touch(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        """A request used ``chain`` (prefix first) and ``hanging`` blocks beside it, and leaves
        ``ending`` ones at its end."""
        self.use(self._lock, chain, hanging, ending, advice)

    def _note_uses(
        self, keys: Sequence[BlockKey], numbers: Sequence[int], now: float
    ) -> Tenant | None:
        """They are to be written to the index if the last use on record is old."""
        state, used, stale = self._state.cells, self._used.cells, now - _STALE_S
        owner = -1
        for number in numbers:
            if number >= 0 and state[number]:
                owner = number
                if used[number] <= stale:
                    used[number] = now
                    if not state[number] & _USED:
                        state[number] |= _USED
                        self._unnoted_uses.append(number)
        return None if owner < 0 else self._tenant_of(owner)

    def take_unnoted_uses(self, limit: int) -> list[tuple[int, int]]:
        """``(second, address)`` of up to ``limit`` last uses not yet written to the index."""
        noted: list[tuple[int, int]] = []
        with self._lock:
            state = self._state.cells
            for number in self._unnoted_uses.take(limit):
                if state[number] & _USED:
                    state[number] ^= _USED
                    noted.append((int(self._used.cells[number]), self._address.cells[number]))
        return noted

    # -- pinned by an operator -------------------------------------------------------------

    def pin(self, keys: Collection[BlockKey]) -> None:
        """Pins blocks of these keys, present or future, as far as ``pin_limit`` allows."""
        deque(in_holds(self._lock, self._pin(keys)), maxlen=0)

    def _pin(self, keys: Collection[BlockKey]) -> Iterator[None]:
        for part in _parts(keys, _PART):
            self.pins.update(part)
            if self._late is not None:
                self._late.pinned = True
                self._late.unpinned.difference_update(part)
            for key in part:
                number = self._find(key)
                if number < 0 or self._state.cells[number] & _PINNED:
                    continue
                if self._may_pin(number):
                    self._rank_out(number)
                    self._set_pinned(number, True)
                    self._unnoted_pins[self._address.cells[number]] = 1
            yield

    def unpin(self, keys: Collection[BlockKey]) -> None:
        """Undoes ``pin``."""
        deque(in_holds(self._lock, self._unpin(keys)), maxlen=0)

    def _unpin(self, keys: Collection[BlockKey]) -> Iterator[None]:
        for part in _parts(keys, _PART):
            self.pins.difference_update(part)
            if self._late is not None:
                self._late.unpinned.update(part)
            for key in part:
                number = self._find(key)
                if number >= 0 and self._state.cells[number] & _PINNED:
                    self._set_pinned(number, False)
                    self._rank_in(number, self.now())
                    self._unnoted_pins[self._address.cells[number]] = 0
            yield

    def _may_pin(self, number: int) -> bool:
        return self.pinned_bytes + self._slot_bytes(number) <= self.pin_limit

    def _set_pinned(self, number: int, pinned: bool) -> None:
        change = 1 if pinned else -1
        address = self._address.cells[number]
        slab = self._slabs[slab_of(address)]
        slab.pinned += change
        if address not in self._reading:
            slab.fixed += change
        self.pinned_bytes += change * self._slot_bytes(number)
        state = self._state.cells
        if pinned:
            state[number] |= _PINNED | _RANKED
        else:
            state[number] &= ~(_PINNED | _RANKED)

    def expect_pins(self, keys: Iterable[BlockKey]) -> None:
        """Pins of blocks that will be recovered."""
        with self._lock:
            self.pins.update(keys)

    def pinned_keys(self) -> frozenset[BlockKey]:
        """All pinned keys, of blocks here or not."""
        with self._lock:
            return frozenset(self.pins)

    def take_unnoted_pins(self, limit: int) -> list[tuple[int, int]]:
        """``(1 or 0, address)`` of blocks pinned or unpinned, not yet written to the index."""
        with self._lock:
            pins = self._unnoted_pins
            taken = [pins.popitem() for _ in range(min(limit, len(pins)))]
            return [(pinned, address) for address, pinned in taken]

    def return_unnoted_pins(self, pins: Iterable[tuple[int, int]]) -> None:
        """Returns entries that could not be written; newer ones override them."""
        with self._lock:
            for pinned, address in pins:
                self._unnoted_pins.setdefault(address, pinned)

    # -- going -----------------------------------------------------------------------------

    def forget(self, keys: Sequence[BlockKey], cause: Cause) -> int:
        """Drops blocks; returns how many were here."""
        return sum(map(sum, in_holds(self._lock, self._forget_keys(keys, cause))))

    def _forget_keys(self, keys: Sequence[BlockKey], cause: Cause) -> Iterator[int]:
        for part in _parts(keys, _PART):
            count = 0
            if self._late is not None:
                self._late.dropped.update(part)
            for key in part:
                number = self._find(key)
                if number >= 0:
                    self._forget(number, cause)
                    count += 1
            yield count

    def forget_slab(self, number: int, cause: Cause) -> int:
        """Drops all blocks of a slab."""
        return self._forget_where(
            lambda part: self._address.array()[part] >> SLAB_BITS == number,
            lambda n: slab_of(self._address.cells[n]) == number,
            cause,
        )

    def forget_namespace(self, digest: bytes, but_of: int) -> int:
        """Drops the blocks of a namespace whose size is not ``but_of`` bytes."""
        with self._lock:
            if self._late is not None:
                self._late.sizes[digest] = but_of
        return self._forget_where(
            lambda part: self._nbytes.array()[part] != but_of,
            lambda n: (
                self._nbytes.cells[n] != but_of and self._table.key(n)[:NAMESPACE_BYTES] == digest
            ),
            Cause.RESIZED,
        )

    def forget_all(self) -> None:
        with self._lock:
            self.pins.clear()
            if self._late is not None:
                self._late.cleared = True
        here = self._state
        self._forget_where(lambda part: here.array()[part] > 0, lambda n: True, Cause.CLEARED)

    def _forget_where(
        self, select: Callable[[slice], Bools], check: Callable[[int], bool], cause: Cause
    ) -> int:
        """Drops the blocks for which both are true: the first of a part of all numbers, the second
        of a number, asked again when its turn comes."""
        start = count = 0
        while True:
            with self._lock:
                part = slice(start, min(self._table.size, start + _SCANNED))
                if start >= part.stop:
                    return count
                found = select(part) & (self._state.array()[part] > 0)
                numbers = (start + np.flatnonzero(found)).tolist()
            going = self._forget_numbers(numbers, check, cause)
            count += sum(map(sum, in_holds(self._lock, going)))
            start = part.stop

    def _forget_numbers(
        self, numbers: Sequence[int], check: Callable[[int], bool], cause: Cause
    ) -> Iterator[int]:
        for part in _parts(numbers, _PART):
            count = 0
            for number in part:
                if self._state.cells[number] and check(number):
                    self._forget(number, cause)
                    count += 1
            yield count

    def evict(self, count: int, slot_bytes: int) -> int:
        """Drops up to ``count`` blocks of that slot size, the least valuable ones."""
        evicted = 0
        while evicted < count:
            with self._lock:
                going = self._victims(min(count - evicted, _AT_ONCE), slot_bytes)
                self._evict(going)
            if not going:
                break
            evicted += len(going)
            time.sleep(0)
        return evicted

    def evict_bytes(self, nbytes: int) -> int:
        """Drops the least valuable blocks of any size until that many bytes are freed, or none can
        be. Returns the number of bytes."""
        given = 0
        while given < nbytes:
            going: list[int] = []
            with self._lock:
                for number in self._victims(_AT_ONCE):
                    if given >= nbytes:
                        break
                    given += self._slot_bytes(number)
                    going.append(number)
                self._evict(going)
            if not going:
                break
            time.sleep(0)
        return given

    def make_way(self, tenant: Tenant, nbytes: int, parent: BlockKey | None) -> int:
        """Evicts the tenant's own coldest blocks so that it may store ``nbytes`` more below
        ``parent``, whose ancestors stay; evicts none if the parent is not here, because the new
        blocks would then be useless. Returns by how much the limit would still be exceeded."""
        with self._lock:
            excess = self.accounts.excess(tenant, nbytes)
            above = -1 if parent is None else self._find(parent)
            if not excess or (parent is not None and above < 0):
                return excess
            spared: set[int] = set()
            while above >= 0 and above not in spared:
                spared.add(above)
                above = self._parent.cells[above] - 1
        while excess > 0:
            with self._lock:
                going = self._victims_of(tenant, excess, spared)
                self.accounts.evict(tenant, len(going))
                excess -= sum(map(self._slot_bytes, going))
                self._evict(going, Cause.QUOTA)
            if not going:
                break
            time.sleep(0)
        return max(0, excess)

    def _victims(self, count: int, slot_bytes: int | None = None) -> list[int]:
        """Up to ``count`` idle blocks (of a slot size), the least valuable first."""
        busy: list[int] = []
        address, reading = self._address.cells, self._reading

        def evictable(number: int) -> bool:
            if reading and address[number] in reading:
                busy.append(number)
                return False
            return slot_bytes is None or self._slot_bytes(number) == slot_bytes

        now = self.now()
        found = self._tails.victims_n(count, evictable, now)
        if len(found) < count:
            found += self._policy.victims_n(count - len(found), evictable, now)
        self._hold(busy)
        return found

    def _victims_of(self, tenant: Tenant, nbytes: int, spared: set[int]) -> list[int]:
        """Some of a limited tenant's idle blocks, coldest first, up to ``nbytes`` bytes."""
        found: list[int] = []
        busy: list[int] = []
        orders = self.accounts.orders(tenant)
        for number in itertools.chain.from_iterable(order.oldest_n() for order in orders):
            if nbytes <= 0 or len(found) == _AT_ONCE:
                break
            if self._address.cells[number] in self._reading:
                busy.append(number)
            elif number not in spared:
                found.append(number)
                nbytes -= self._slot_bytes(number)
        self._hold(busy)
        return found

    def _hold(self, busy: Sequence[int]) -> None:
        """The orders skip these blocks until they are idle."""
        if len(busy) < HELD_FROM:
            return
        for number in busy[:HELD_AT_ONCE]:
            self._held.add(number)
            for order in self._orders(number):
                order.hold_n(number)

    def _evict(self, numbers: Sequence[int], cause: Cause = Cause.CAPACITY) -> None:
        for number in numbers:
            self._forget(number, cause)
        self.evictions += len(numbers)

    def _forget(self, number: int, cause: Cause) -> None:
        for watcher in self.watchers:
            watcher.removed(TierName.DISK, self._table.key(number), cause)
        self.departures.note_n(number, cause)
        address, state = self._address.cells[number], self._state.cells
        slot_bytes = self._slot_bytes(number)
        if state[number] & _PINNED:
            self._set_pinned(number, False)
        else:
            self._rank_out(number)
        state[number] = 0
        self._blocks -= 1
        self._leave_slab(address)
        tenant = self._tenant_of(number)
        if not self.accounts.refund(tenant, slot_bytes):
            self._tenants_gone.append(self._tenant_numbers.pop(tenant))
        self._unnoted_pins.pop(address, None)
        self.used_bytes -= slot_bytes
        if address in self._reading:
            self._doomed.add(address)
        else:
            self._pending_free.append(address)
        above = self._parent.cells[number]
        self._table.drop(number)
        if above:
            self._table.drop(above - 1)

    def _leave_slab(self, address: int) -> None:
        slab = self._slabs[slab_of(address)]
        slab.blocks -= 1
        slab.fixed -= address in self._reading
        if not slab.blocks:
            del self._slabs[slab_of(address)]

    @property
    def pending_free(self) -> int:
        """Slots whose rows are to be deleted."""
        return len(self._pending_free)

    def take_pending_free(self, limit: int) -> list[int]:
        """Slots whose rows are to be deleted; the caller owns them now."""
        with self._lock:
            return self._pending_free.take(limit)

    def add_pending_free(self, addresses: Iterable[int]) -> None:
        """Adds (or returns) slots to the list of those whose rows are to be deleted."""
        with self._lock:
            for address in addresses:
                self._pending_free.append(address)

    # -- limits, and what the reclaimer goes by --------------------------------------------

    def refuse(self, tenant: Tenant, blocks: int) -> None:
        """Counts blocks not stored because of a tenant's limit."""
        with self._lock:
            self.accounts.refuse(tenant, blocks)

    def tenants(self) -> list[TenantUse]:
        """Tenants that hold blocks."""
        with self._lock:
            return self.accounts.uses()

    def admits(self, key: BlockKey, parent: BlockKey | None, depth: int) -> bool:
        with self._lock:
            return super().admits(key, parent, depth)

    def coldest(self, count: int) -> list[Entry]:
        """The ``count`` least valuable blocks of any size."""
        with self._lock:
            return [self._entry(number) for number in self._victims(count)]

    def slab_uses(self) -> dict[int, SlabUse]:
        """The use of each slab that holds a block, by its number."""
        with self._lock:
            return {number: copy.copy(slab) for number, slab in self._slabs.items()}

    def in_order(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The blocks that are here, in the order of their addresses on the medium."""
        placed: list[tuple[int, BlockKey]] = []
        for part in _parts(keys):
            with self._lock:
                numbers = map(self._find, part)
                cells = self._address.cells
                placed += [(cells[n], k) for n, k in zip(numbers, part, strict=True) if n >= 0]
        return [key for _, key in sorted(placed)]

    def in_slab(self, number: int) -> list[Entry]:
        """The blocks of a slab: the pinned first, then the latest used."""
        found: list[tuple[bool, float, Entry]] = []
        start = 0
        while True:
            with self._lock:
                part = slice(start, min(self._table.size, start + _SCANNED))
                if start >= part.stop:
                    break
                here = self._state.array()[part] > 0
                here &= self._address.array()[part] >> SLAB_BITS == number
                numbers = (start + np.flatnonzero(here)).tolist()
            for some in _parts(numbers):
                with self._lock:
                    state, address, used = self._state.cells, self._address.cells, self._used.cells
                    for n in some:
                        if state[n] and slab_of(address[n]) == number:
                            pinned = bool(state[n] & _PINNED)
                            found.append((not pinned, -used[n], self._entry(n)))
            start = part.stop
        return [entry for *_, entry in sorted(found, key=lambda item: item[:2])]

    def relocate(self, old: Entry, address: int) -> bool:
        """Records that the block of ``old`` was copied to ``address`` and its row updated. False if
        it is gone meanwhile: the caller then owns the new slot. Reads of the old slot may still be
        in flight."""
        with self._lock:
            number = self._find(old.key)
            if number < 0 or self._address.cells[number] != old.address:
                return False
            pinned = self._state.cells[number] & _PINNED
            if pinned:
                self._set_pinned(number, False)
            elif number in self._held:
                self._held.discard(number)
                for order in self._orders(number):
                    order.release_n(number)
            self._leave_slab(old.address)
            self._address.cells[number] = address
            self._slabs.setdefault(slab_of(address), SlabUse()).blocks += 1
            if pinned:
                self._set_pinned(number, True)
            if old.address in self._unnoted_pins:
                self._unnoted_pins[address] = self._unnoted_pins.pop(old.address)
            return True


@dataclass(slots=True)
class _Late:
    """What happened to blocks that may not be recovered yet: keys dropped, pinned or unpinned, all
    dropped, and the only valid size of a namespace's blocks."""

    dropped: set[BlockKey] = field(default_factory=set)
    unpinned: set[BlockKey] = field(default_factory=set)
    sizes: dict[bytes, int] = field(default_factory=dict)
    cleared: bool = False
    pinned: bool = False  # some were

    @property
    def has_any(self) -> bool:
        return bool(self.dropped or self.unpinned or self.sizes or self.cleared or self.pinned)


class _Numbers:
    """Up to as many integers as a tier has blocks, in arrays of some thousands: no list that would
    have to be copied as it grows, and in which the garbage collector would look at each."""

    def __init__(self) -> None:
        self._full: list[array[int]] = []
        self._last = array("q")

    def __len__(self) -> int:
        return _NUMBERS * len(self._full) + len(self._last)

    def append(self, number: int) -> None:
        if len(self._last) == _NUMBERS:
            self._full.append(self._last)
            self._last = array("q")
        self._last.append(number)

    def take(self, limit: int) -> list[int]:
        """Removes up to ``limit`` of them, the latest; none only if there are none."""
        if not self._last and self._full:
            self._last = self._full.pop()
        taken = self._last[-limit:].tolist()
        del self._last[-limit:]
        return taken


def _parts(items: Iterable[T], size: int = _AT_ONCE) -> Iterator[Sequence[T]]:
    rest = iter(items)
    while part := list(itertools.islice(rest, size)):
        yield part


class DiskCounters(TierCounters):
    """Counters of one disk tier, and its reads in flight. Thread-safe."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.reading = 0  # gets not done

    def reads_began(self, count: int) -> None:
        with self._changed:
            self.reading += count

    def read_done(self, outcome: Outcome, seconds: float) -> None:
        super().read_done(outcome, seconds)
        with self._changed:
            self.reading -= 1
            if not self.reading:
                self._changed.notify_all()

    def fault(self, what: str, error: Exception) -> None:
        """An operation of the medium failed: counts and logs it."""
        self.failed()
        self.warn(f"{what}: {error}")

    def yield_to_reads(self, at_most_s: float) -> None:
        """Waits until no read is queued, so that loads have priority over stores; but not
        forever."""
        until = time.monotonic() + at_most_s
        with self._changed:
            while self.reading and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
