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
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName
from kvrecall.config import PoolTerms
from kvrecall.pool.accounts import TenantUse
from kvrecall.pool.changes import Cause, Watcher
from kvrecall.pool.departures import BlockDeparture
from kvrecall.pool.disk.index import MAX_ROWS, IndexRow
from kvrecall.pool.disk.slabs import SLAB_BITS, slab_of
from kvrecall.pool.entries import (
    CHANGED,
    HERE,
    PINNED,
    RANKED,
    UNNOTED,
    BlockInfo,
    EntryTable,
    Extent,
    flags_of,
)
from kvrecall.pool.eviction.base import RequestUse
from kvrecall.pool.hints import Advice
from kvrecall.pool.names import CompactNames, MemoryColumn, Names
from kvrecall.pool.slots import ALIGNMENT, slot_bytes_of
from kvrecall.pool.tier import Outcome, TierCounters

_STALE_S = 10.0  # a last use is written to the index again when it is older than this
_RECOVERED = 512  # rows taken over under one hold
_AT_ONCE = 64  # blocks that change under one hold of the lock: half a millisecond, on slow memory
_ADDED = 32  # new blocks, the same
_SCANNED = 1 << 12  # numbers looked through under one hold
_NUMBERS = 1 << 13
_MOST_USES = 256  # requests whose uses wait for the owner; further ones are not recorded
_MOST_USED = 1 << 18  # blocks of these
# Names of a tier, at most: of each block of its capacity, its parent, and what the policy remembers
# beside them; and more of a small tier. This much address space is taken, but no memory.
_NAMES_FOR_ONE = 4
_MORE_NAMES = 1 << 19
T = TypeVar("T")
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """A durable block as it was when it was looked up."""

    number: int
    key: BlockKey
    address: int
    nbytes: int
    tag: bytes

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.nbytes)


class Catalog(EntryTable):
    """The entries of one disk tier: about 130 bytes a block, of which the garbage collector sees
    nothing. Thread-safe; never waits for I/O, and never holds the lock for longer than a few
    hundred blocks take.

    The flusher's thread owns the orders (see ``EntryTable``), and alone calls what says so. Other
    threads append what changes, and the uses of requests, to two buffers that the owner empties
    with ``settle``, at the latest before it evicts. The one has each changed block once, and loses
    none; the other is bounded, and what exceeds it is not recorded.

    A forgotten entry is not found from that moment on. Its slot is passed to the flusher
    (``take_pending_free``), which deletes the row before the slot is reused.

    After a restart the blocks of the earlier process come in parts (``recover``), are found from
    then on, and can be evicted after ``rank_rest``.
    """

    _state: MemoryColumn
    _marks: MemoryColumn
    _nbytes: MemoryColumn
    _depth: MemoryColumn
    _parent: MemoryColumn
    _used: MemoryColumn
    _tenant: MemoryColumn

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
        super().__init__(
            TierName.DISK, policy, capacity_blocks, capacity_bytes, clock, terms, threading.Lock()
        )
        self._reading: dict[int, int] = {}  # reads in flight, by address
        self._doomed: set[int] = set()  # addresses of forgotten blocks that are still read
        self._recovers = False  # whether blocks are still being recovered
        self._late = _Late()
        self._changes = _Numbers()  # of blocks that the orders should know of
        self._uses: deque[RequestUse[BlockKey]] = deque()
        self._used_blocks = 0  # in these
        self._pending_free = _Numbers()
        self._unnoted_uses = _Numbers()  # of blocks that were used, or gone since
        self._unnoted_pins: dict[int, int] = {}  # 1 or 0 by address, not in the index yet
        self.used_bytes = 0

    def _new_names(self) -> Names:
        most = _NAMES_FOR_ONE * self._capacity_blocks + _MORE_NAMES
        self._table = names = CompactNames(max(self._expected, 1), most)
        self._address = names.column("q")
        self._tag = names.column("B", self._tag_bytes)
        return names

    def _is_busy(self, number: int) -> bool:
        return self._address.cells[number] in self._reading

    def _place_of(self, number: int) -> int:
        return slab_of(self._address.cells[number])

    # -- looking up, from any thread -------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self._blocks and not self._recovers

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
            here: Bools = self._state.array().take(numbers) & HERE > 0
        here &= numbers >= 0
        return here

    def depth_of(self, key: BlockKey) -> int | None:
        with self._lock:
            number = self._find(key)
            return None if number < 0 else int(self._depth.cells[number])

    def known_of(self, key: BlockKey) -> tuple[bool, BlockDeparture | None]:
        """Whether a block is here; and why and when it left, as far as that is remembered."""
        with self._lock:
            number = self._table.number(key)
            if number < 0:
                return False, None
            return bool(self._state.cells[number] & HERE), self.departures.of_n(number)

    def _entry(self, number: int) -> DiskEntry:
        begin = number * self._tag_bytes
        return DiskEntry(
            number,
            self._table.key(number),
            self._address.cells[number],
            self._nbytes.cells[number],
            bytes(self._tag.cells[begin : begin + self._tag_bytes]),
        )

    def _each(self, read: Callable[[int], T], select: _Select | None = None) -> Iterator[list[T]]:
        """What ``read`` returns of every block, or those that ``select`` finds, in parts; of blocks
        that come meanwhile, too. Under the lock."""
        start = 0
        while True:
            with self._lock:
                part = slice(start, min(self._table.size, start + _SCANNED))
                if start >= part.stop:
                    return
                here = self._state.array()[part] & HERE > 0
                if select is not None:
                    here &= select(part)
                numbers = (start + np.flatnonzero(here)).tolist()
            for some in _turns(numbers):
                with self._lock:
                    state = self._state.cells
                    found = [read(number) for number in some if state[number] & HERE]
                yield found
            start = part.stop

    def infos(self, unused_since: float | None = None) -> Iterator[BlockInfo]:
        """Every block, or those unused since that second, also by what the owner does not know
        yet; as they are when their turn comes."""
        if unused_since is None:
            yield from itertools.chain.from_iterable(self._each(self._info))
            return
        with self._lock:
            uses = list(self._uses)
        used = {key for use in uses for key in (*use.chain, *use.hanging)}
        for infos in self._each(self._info, lambda part: self._used.array()[part] < unused_since):
            for info in infos:
                if info.used < unused_since and info.key not in used:
                    yield info

    def rows(self) -> Iterator[Sequence[IndexRow]]:
        """Every block, as it is in the index, in parts of at most ``MAX_ROWS``."""
        return _parts(itertools.chain.from_iterable(self._each(self._row)), MAX_ROWS)

    def _row(self, number: int) -> IndexRow:
        entry = self._entry(number)
        return IndexRow(
            entry.address,
            entry.key,
            self._parent_of(number),
            self._depth.cells[number],
            entry.nbytes,
            entry.tag,
            int(self._used.cells[number]),
            self._tenant_of(number),
            bool(self._state.cells[number] & PINNED),
        )

    def watch(self, watcher: Watcher) -> None:
        """From now on ``watcher`` is told what comes and goes."""
        with self._lock:
            self.watchers = (*self.watchers, watcher)

    def sweep(self, watcher: Watcher) -> Iterator[None]:
        """Reports every block as stored, some with each step."""

        def report(number: int) -> None:
            watcher.stored(TierName.DISK, self._table.key(number), self._parent_of(number))

        for _ in self._each(report):
            yield

    # -- what happened, for the owner ------------------------------------------------------

    def _changed(self, number: int) -> None:
        if not self._state.cells[number] & CHANGED:
            self._state.cells[number] |= CHANGED
            self._changes.append(number)

    def touch(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> bool:
        """A request used these blocks, see ``RequestUse``. From any thread. False if the owner
        should ``settle`` soon, before uses are lost."""
        with self._lock:
            if len(self._uses) >= _MOST_USES or self._used_blocks >= _MOST_USED:
                return False
            # Copies: the caller's may grow before they are looked at.
            use = RequestUse(tuple(chain), self.now(), tuple(hanging), tuple(ending), advice)
            self._uses.append(use)
            self._used_blocks += len(chain) + len(hanging)
            return 2 * max(len(self._uses) * (_MOST_USED // _MOST_USES), self._used_blocks) < (
                _MOST_USED
            )

    @property
    def _is_settled(self) -> bool:
        return not len(self._changes)

    def fit(self, block_bytes: int) -> None:
        self._settle_changes()  # uses are for the policy that is made now
        super().fit(block_bytes)

    def _settle_changes(self) -> None:
        changed: Sequence[int] = (-1,)
        while changed:
            with self._lock:
                changed = self._changes.take(_AT_ONCE)
                for number in changed:
                    self._state.cells[number] &= ~CHANGED
            self._settle(changed)

    def settle(self) -> None:
        """Tells the orders what happened since. For the owner."""
        self._settle_changes()
        while self._uses:
            with self._lock:
                use = self._uses.popleft()
                self._used_blocks -= len(use.chain) + len(use.hanging)
            self._apply(use)

    def _note_uses(self, numbers: Iterable[int], now: float) -> int:
        """They are to be written to the index if the last use on record is old."""
        state, used, marks, last = self._state.cells, self._used.cells, self._marks.cells, -1
        for number in numbers:
            if number >= 0 and state[number] & HERE:
                last = number
                if used[number] <= now - _STALE_S:
                    used[number] = now
                    if not marks[number] & UNNOTED:
                        marks[number] |= UNNOTED
                        self._unnoted_uses.append(number)
        return last

    def take_unnoted_uses(self, limit: int) -> list[tuple[int, int]]:
        """``(second, address)`` of up to ``limit`` last uses not yet written to the index. For the
        owner."""
        noted: list[tuple[int, int]] = []
        state, marks = self._state.cells, self._marks.cells
        for number in self._unnoted_uses.take(limit):
            if marks[number] & UNNOTED:
                marks[number] ^= UNNOTED
                if state[number] & HERE:
                    noted.append((int(self._used.cells[number]), self._address.cells[number]))
        return noted

    # -- coming, for the owner -------------------------------------------------------------

    def begin_recovery(self, pinned: Iterable[BlockKey]) -> None:
        """Blocks of an earlier process will follow, and these are pinned. Before the tier is
        used."""
        self._recovers = True
        self.pins.update(pinned)

    def recover(self, rows: Sequence[IndexRow]) -> list[int]:
        """Takes over blocks of an earlier process, not yet ranked. Returns the addresses of those
        that it does not: dropped since the recovery began, or here already."""
        refused: list[int] = []
        for part in _turns(rows, _RECOVERED):
            self.settle()
            if not self._take_many(part):
                refused += self._take_each(part)
        return refused

    def _take_each(self, rows: Sequence[IndexRow]) -> list[int]:
        """``recover``, one by one."""
        refused: list[int] = []
        for part in _parts(rows, _AT_ONCE):
            with self._lock:
                now, late = self.now(), self._late
                for row in part:
                    if late.outdates(row) or self._find(row.key) >= 0:
                        refused.append(row.address)
                        continue
                    if row.pinned and row.key not in late.unpinned:
                        self.pins.add(row.key)
                    self._take_in(row, min(float(row.used), now))
        return refused

    def _take_many(self, rows: Sequence[IndexRow]) -> bool:
        """``_take_in`` of these rows. False, and takes none, unless their blocks are not pinned,
        each another, and none is here or was named since the recovery began."""
        addresses, keys, parents, depths, nbytes, tags, used, tenants, pinned = zip(
            *rows, strict=True
        )
        if any(pinned) or len(set(keys)) < len(keys):
            return False
        # All that needs no lock, before it is taken.
        below = [place for place, parent in enumerate(parents) if parent is not None]
        slot_bytes = -(-np.array(nbytes, np.int64) // ALIGNMENT) * ALIGNMENT
        of_tenant: dict[Tenant, list[int]] = {}
        for place, tenant in enumerate(tenants):
            of_tenant.setdefault(tenant, []).append(place)
        slabs, first, counts = np.unique(
            np.array(addresses, np.int64) >> SLAB_BITS, return_index=True, return_counts=True
        )
        columns = (
            (self._address, np.array(addresses, np.int64)),
            (self._nbytes, np.array(nbytes, np.int64)),
            (self._depth, np.array(depths, np.int32)),
            (self._used, np.minimum(np.array(used, np.float64), self.now())),
            (self._tag, np.frombuffer(b"".join(tags), np.uint8).reshape(-1, self._tag_bytes)),
            (self._state, np.fromiter(map(flags_of, keys, parents), np.uint8, len(keys))),
        )
        with self._lock:
            if self._late != _Late():
                return False
            names = self._table
            numbers = names.meet_many(keys)
            names.keep_all(numbers)
            if self._state.array()[numbers].any():
                names.drop_all(numbers)
                return False
            above = names.meet_many([parents[place] for place in below])
            names.keep_all(above)
            self._parent.array()[numbers] = 0
            self._parent.array()[numbers[below]] = above + 1
            for column, values in columns:
                column.array()[numbers] = values
            for watcher in self.watchers:
                for key, parent in zip(keys, parents, strict=True):
                    watcher.stored(TierName.DISK, key, parent)
            self._blocks += len(numbers)
            self.used_bytes += int(slot_bytes.sum())
            for tenant, its in of_tenant.items():
                self.accounts.charge(tenant, int(slot_bytes[its].sum()))
                self._tenant.array()[numbers[its]] = self.accounts.enter(tenant, len(its))
            sizes = slot_bytes[first].tolist()
            for slab, size, count in zip(slabs.tolist(), sizes, counts.tolist(), strict=True):
                self._extents.setdefault(slab, Extent(size)).blocks += count
        return True

    def rank_rest(self, is_closing: Callable[[], bool]) -> bool:
        """All were recovered: puts them into the eviction orders, the least recently used first,
        and of those used in the same second the deepest. False if the tier is closing."""
        with self._lock:
            self._recovers = False
            self._late = _Late()
        self.settle()
        known = slice(self._table.size)
        is_here = self._state.array()[known] & HERE > 0
        is_due = is_here & (self._marks.array()[known] & RANKED == 0)
        numbers = np.flatnonzero(is_due).astype(np.int32)
        used, depth = self._used.array()[numbers], self._depth.array()[numbers]
        order = numbers[np.lexsort((-depth, used))]
        del is_here, is_due, numbers, used, depth
        for start in range(0, len(order), _RECOVERED):
            if is_closing():
                return False
            self._settle(order[start : start + _RECOVERED].tolist())
        return True

    def publish(self, rows: Sequence[IndexRow]) -> None:
        """Makes durable blocks visible. The orders know them after ``settle``."""
        self.settle()
        for part in _turns(rows, _ADDED):
            with self._lock:
                now = self.now()
                for row in part:
                    self._changed(self._take_in(row, now))

    def _take_in(self, row: IndexRow, used: float) -> int:
        number = self._enter(row.key, row.parent, row.depth, row.nbytes, row.tenant, used)
        self._address.cells[number] = row.address
        begin = number * self._tag_bytes
        self._tag.cells[begin : begin + self._tag_bytes] = row.tag
        slot_bytes = slot_bytes_of(row.nbytes)
        self.used_bytes += slot_bytes
        self.accounts.charge(row.tenant, slot_bytes)
        self._place(number)
        pinned = row.key in self.pins and (row.pinned or self._may_pin(number))
        if pinned:
            self._set_pinned(number, True)
        if pinned != row.pinned:
            self._unnoted_pins[row.address] = int(pinned)
        return number

    # -- in use, from any thread -----------------------------------------------------------

    def acquire(self, key: BlockKey) -> DiskEntry | None:
        """Protects the block's slot for a read, until ``release``. None if the block is not
        here."""
        with self._lock:
            number = self._find(key)
            if number < 0:
                return None
            entry = self._entry(number)
            reads = self._reading.get(entry.address, 0)
            self._reading[entry.address] = reads + 1
            if not (reads or self._state.cells[number] & PINNED):
                self._extents[slab_of(entry.address)].fixed += 1
            return entry

    def release(self, entry: DiskEntry) -> None:
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
            elif self._state.cells[number] & HERE and self._address.cells[number] == address:
                if not self._state.cells[number] & PINNED:
                    self._extents[slab_of(address)].fixed -= 1
                if number in self._held:
                    self._changed(number)

    def slabs_read(self) -> set[int]:
        """Slabs of which reads are in flight, also of blocks that are forgotten by now."""
        with self._lock:
            return set(map(slab_of, self._reading))

    # -- pinned by an operator, from any thread --------------------------------------------

    def _set_pins(self, keys: Collection[BlockKey], pinned: bool) -> list[int]:
        changed: list[int] = []
        for part in _turns(keys):
            with self._lock:
                if self._recovers:
                    self._late.pin(part, pinned)
                some = super()._set_pins(part, pinned)
                for number in some:
                    self._unnoted_pins[self._address.cells[number]] = int(pinned)
            changed += some
        return changed

    def pinned_keys(self) -> frozenset[BlockKey]:
        """All pinned keys, of blocks here or not."""
        with self._lock:
            return frozenset(self.pins)

    def pinned_of(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Whether each of these keys is pinned."""
        with self._lock:
            return [key in self.pins for key in keys]

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
        """Drops blocks; returns how many were here. From any thread, as the next three."""
        count = 0
        for part in _turns(keys):
            with self._lock:
                if self._recovers:
                    self._late.dropped.update(part)
                for number in map(self._find, part):
                    if number >= 0:
                        self._forget(number, cause)
                        count += 1
        return count

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
            if self._recovers:
                self._late.sizes[digest] = but_of
        return self._forget_where(
            lambda part: self._nbytes.array()[part] != but_of,
            lambda n: self._table.key(n).startswith(digest),
            Cause.RESIZED,
        )

    def forget_all(self) -> None:
        with self._lock:
            self.pins.clear()
            self._late.cleared = self._recovers
        self._forget_where(None, lambda number: True, Cause.CLEARED)

    def _forget_where(
        self, select: _Select | None, check: Callable[[int], bool], cause: Cause
    ) -> int:
        """Drops the blocks for which both are true: the first of a part of all numbers, the second
        of a number, asked when its turn comes."""

        def forget(number: int) -> bool:
            is_due = check(number)
            if is_due:
                self._forget(number, cause)
            return is_due

        return sum(map(sum, self._each(forget, select)))

    def _forget(self, number: int, cause: Cause) -> None:
        address, slot_bytes = self._address.cells[number], self._slot_bytes(number)
        self._leave(number, cause)
        self._changed(number)
        self.accounts.refund(self._tenant_of(number), slot_bytes)
        self._unnoted_pins.pop(address, None)
        self.used_bytes -= slot_bytes
        if address in self._reading:
            self._doomed.add(address)
        else:
            self._pending_free.append(address)

    # -- evicting, for the owner -----------------------------------------------------------

    def evict(self, nbytes: int, slot_bytes: int | None = None) -> int:
        """Drops the least valuable blocks (of that slot size) until that many bytes are freed, or
        none can be. Returns the number of bytes."""
        self.settle()
        left = nbytes
        while left > 0:
            count = _AT_ONCE if slot_bytes is None else min(_AT_ONCE, -(-left // slot_bytes))
            found = self._search(count, slot_bytes)
            sizes = itertools.accumulate(map(self._slot_bytes, found), initial=0)
            needed = [number for number, size in zip(found, sizes, strict=False) if size < left]
            if not needed:
                break
            left -= sum(map(self._slot_bytes, self._evict(needed)))
        return nbytes - left

    def make_way(self, tenant: Tenant, nbytes: int, parent: BlockKey | None) -> int:
        """Evicts the tenant's own coldest blocks so that it may store ``nbytes`` more below
        ``parent``, whose ancestors stay; evicts none if the parent is not here, because the new
        blocks would then be useless. Returns by how much the limit would still be exceeded."""
        self.settle()
        with self._lock:
            excess = self.accounts.excess(tenant, nbytes)
            above = -1 if parent is None else self._find(parent)
        if not excess or (parent is not None and above < 0):
            return excess
        spared: set[int] = set()
        while above >= 0 and above not in spared:
            spared.add(above)
            above = self._parent.cells[above] - 1
        wanted = lambda number: number not in spared  # noqa: E731
        while excess > 0 and (found := self._search_of(tenant, excess, wanted, _AT_ONCE)):
            excess -= sum(map(self._slot_bytes, self._evict(found, Cause.QUOTA)))
        return max(0, excess)

    def _evict(self, numbers: Sequence[int], cause: Cause = Cause.CAPACITY) -> list[int]:
        """Drops those of these blocks that can still be evicted, and returns them."""
        with self._lock:
            state = self._state.cells
            going = [
                number
                for number in numbers
                if state[number] & (HERE | PINNED) == HERE and not self._is_busy(number)
            ]
            if going and cause is Cause.QUOTA:
                self.accounts.limited(self._tenant_of(going[0]), evicted=len(going))
            for number in going:
                self._forget(number, cause)
        _give_turn()
        self.settle()
        return going

    # -- limits, and what the reclaimer goes by --------------------------------------------

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

    def refuse(self, tenant: Tenant, blocks: int) -> None:
        """Counts blocks not stored because of a tenant's limit."""
        with self._lock:
            self.accounts.limited(tenant, refused=blocks)

    def tenants(self) -> list[TenantUse]:
        """Tenants that hold blocks."""
        with self._lock:
            return self.accounts.uses()

    def coldest(self, count: int) -> list[DiskEntry]:
        """The ``count`` least valuable blocks of any size. For the owner."""
        self.settle()
        return list(map(self._entry, self._search(count)))

    def slab_uses(self) -> dict[int, Extent]:
        """The use of each slab that holds a block, by its number."""
        with self._lock:
            return {number: copy.copy(slab) for number, slab in self._extents.items()}

    def in_order(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """The blocks that are here, in the order of their addresses on the medium."""
        placed: list[tuple[int, BlockKey]] = []
        for part in _turns(keys):
            with self._lock:
                numbers = map(self._find, part)
                cells = self._address.cells
                placed += [(cells[n], k) for n, k in zip(numbers, part, strict=True) if n >= 0]
        return [key for _, key in sorted(placed)]

    def in_slab(self, number: int) -> list[DiskEntry]:
        """The blocks of a slab: the pinned first, then the latest used. For the owner."""

        def read(n: int) -> tuple[bool, float, DiskEntry]:
            return not self._state.cells[n] & PINNED, -self._used.cells[n], self._entry(n)

        select = lambda part: self._address.array()[part] >> SLAB_BITS == number  # noqa: E731
        found = itertools.chain.from_iterable(self._each(read, select))
        return [entry for *_, entry in sorted(found, key=lambda item: item[:2])]

    def relocate(self, old: DiskEntry, address: int) -> bool:
        """Records that the block of ``old`` was copied to ``address`` and its row updated. False if
        it is gone meanwhile: the caller then owns the new slot. Reads of the old slot may still be
        in flight. For the owner."""
        with self._lock:
            number = self._find(old.key)
            if number < 0 or self._address.cells[number] != old.address:
                return False
            self._displace(number)
            self._address.cells[number] = address
            self._place(number)
            if old.address in self._unnoted_pins:
                self._unnoted_pins[address] = self._unnoted_pins.pop(old.address)
        self._release(number)
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

    def pin(self, keys: Collection[BlockKey], pinned: bool) -> None:
        self.pinned |= pinned
        (self.unpinned.difference_update if pinned else self.unpinned.update)(keys)

    def outdates(self, row: IndexRow) -> bool:
        size = self.sizes.get(row.key[:NAMESPACE_BYTES], row.nbytes)
        return self.cleared or row.key in self.dropped or size != row.nbytes


class _Numbers:
    """Up to as many integers as a tier has blocks, first in, first out, in arrays of some
    thousands: no list that would have to be copied as it grows, and in which the garbage collector
    would look at each."""

    def __init__(self) -> None:
        self._parts = deque([array("q")])

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def append(self, number: int) -> None:
        if len(self._parts[-1]) == _NUMBERS:
            self._parts.append(array("q"))
        self._parts[-1].append(number)

    def take(self, limit: int) -> list[int]:
        """Removes up to ``limit`` of them; none only if there are none."""
        first = self._parts[0]
        taken = first[:limit].tolist()
        del first[:limit]
        if not first and len(self._parts) > 1:
            self._parts.popleft()
        return taken


def _parts(items: Iterable[T], size: int) -> Iterator[Sequence[T]]:
    rest = iter(items)
    while part := list(itertools.islice(rest, size)):
        yield part


def _turns(items: Iterable[T], size: int = _AT_ONCE) -> Iterator[Sequence[T]]:
    """Parts, each for one hold of the lock, with a turn for others after each."""
    for part in _parts(items, size):
        yield part
        _give_turn()


def _give_turn() -> None:
    """Lets go of the interpreter. A thread that waits for a lock that was just released could
    otherwise take it up to five milliseconds later, if it is free then."""
    time.sleep(0)


_Select = Callable[[slice], Bools]


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
        self.add(errors=1)
        self.warn(f"{what}: {error}")

    def yield_to_reads(self, at_most_s: float) -> None:
        """Waits until no read is queued, so that loads have priority over stores; but not
        forever."""
        with self._changed:
            self._changed.wait_for(lambda: not self.reading, at_most_s)
