"""The reclaimer: frees slots in the slabs, but only after the index has deleted their rows."""

from __future__ import annotations

import errno
import mmap
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from kvrecall.block import BlockKey, Tenant
from kvrecall.config import Watermarks
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk.catalog import DiskEntry
from kvrecall.pool.disk.engine import DiskEngine
from kvrecall.pool.disk.index import MAX_ROWS, ROW_BYTES, WAL_BYTES
from kvrecall.pool.disk.slabs import Slab, address_of, slab_of
from kvrecall.pool.entries import Extent
from kvrecall.pool.tier import Put

_EVICTED_BYTES = 1 << 20  # the least, each time no slab can be emptied without a loss
_JUDGED = 1024  # blocks that show which sizes are cold
_MOVED_AT_ONCE = 64  # blocks of a transaction
_RETRY_S = 10.0  # after the medium refused to grow, or to delete a slab
_UNUSED = Extent()


class Reclaimer:
    """Grows slabs, evicts, deletes the rows of dropped blocks and then frees their slots; empties
    slabs when the limit was lowered. Used by the flusher's thread only; waits for the medium.

    A block that is moved to another slab gets its new row only when its copy is durable, and its
    old slot is not reused before that: whenever the process dies, the row leads to the right bytes.
    """

    def __init__(self, engine: DiskEngine) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._store = engine.store
        self._index = engine.index
        self._counters = engine.counters
        self._watermarks = Watermarks(engine.config.high_watermark, engine.config.low_watermark)
        self._emptied: set[int] = set()  # slabs, of which slots may still be read
        self._grow_at = self._remove_at = 0.0

    def make_room(self, slot_bytes: int, count: int) -> None:
        """Grows, then evicts down to the low watermark, so that ``count`` slots are free if
        possible."""
        slots = self._store.slot_class(slot_bytes)
        if slots.slots + self._room_to_grow(slot_bytes) < count:
            self._take_over(slot_bytes, count)
        room = self._room_to_grow(slot_bytes)
        total, spare = slots.slots + room, slots.free + room - count
        if spare < total * (1 - self._watermarks.high):
            target = int(total * (1 - self._watermarks.low)) or 1
            short = target - spare
            if self._cold_elsewhere(slot_bytes, short):
                self._take_over(slot_bytes, short)
            else:
                self._catalog.evict(short * slot_bytes, slot_bytes)
            self.reap()
        while slots.free < count and self._room_to_grow(slot_bytes):
            self._grow(slot_bytes)
        if slots.free < count:
            self._catalog.evict((count - slots.free) * slot_bytes, slot_bytes)
            self.reap()

    def _grow(self, slot_bytes: int) -> None:
        """Adds a slab, with space in the index for all its rows."""
        more = min(self._store.target_slots(slot_bytes), self._store.room_for(slot_bytes))
        rows = self._store.index_bytes - WAL_BYTES + more * ROW_BYTES
        try:
            if not self._index.reserve(rows):
                self._store.cannot_grow(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            elif self._store.grow(slot_bytes):
                return
        except OSError as error:
            self._store.cannot_grow(error)
        self._grow_at = time.monotonic() + _RETRY_S

    def _room_to_grow(self, slot_bytes: int) -> int:
        if self._store.full and time.monotonic() < self._grow_at:
            return 0
        return self._store.room_for(slot_bytes)

    def _cold_elsewhere(self, slot_bytes: int, count: int) -> bool:
        """Whether most of the least valuable blocks are of other sizes."""
        if len(self._store.classes()) < 2:
            return False
        coldest = self._catalog.coldest(min(max(1, count), _JUDGED))
        return sum(entry.slot_bytes != slot_bytes for entry in coldest) * 2 > len(coldest)

    def _take_over(self, slot_bytes: int, count: int) -> None:
        """Releases slabs of other sizes, coldest first, until ``count`` slots could be added."""
        uses = self._catalog.slab_uses()
        cold = Counter(slab_of(entry.address) for entry in self._catalog.coldest(64))
        others = [
            slab
            for slab in self._store.slabs()
            if slab.slot_bytes != slot_bytes
            and slab.number not in self._emptied
            and not uses.get(slab.number, _UNUSED).fixed
        ]
        others.sort(key=lambda s: (-cold[s.number], uses.get(s.number, _UNUSED).blocks))
        for slab in others:
            if self._store.room_for(slot_bytes) >= count:
                return
            self._catalog.forget_slab(slab.number, Cause.CAPACITY)
            self.reap()
            is_empty = slab.base in self._store.slot_class(slab.slot_bytes).empty_extents()
            if is_empty and not self._removed(slab.number):
                return

    def reap(self, is_late: Callable[[], bool] = lambda: False) -> None:
        """Deletes the rows of dropped blocks, then frees their slots. Stops once ``is_late``: what
        is not deleted then is found again by the next process."""
        while not is_late() and (addresses := self._catalog.take_pending_free(MAX_ROWS)):
            if not self._engine.changed_index(self._index.delete, addresses):
                self._catalog.add_pending_free(addresses)
                return
            self.give_back(addresses)

    def reap_all(self) -> None:
        """``reap`` of a tier without a block, in one transaction. Only while none can come, neither
        from the index nor from a put."""
        if self._catalog.pending_free and not self._engine.changed_index(self._index.delete_all):
            return
        while addresses := self._catalog.take_pending_free(MAX_ROWS):
            self.give_back(addresses)

    def give_back(self, addresses: Sequence[int]) -> None:
        for number, some in groupby(sorted(addresses), slab_of):
            slab = self._store.slab(number)
            if slab is not None and slab.number not in self._emptied:
                self._store.slot_class(slab.slot_bytes).give_all(some)

    def admitted(self, slot_bytes: int, puts: list[Put]) -> list[Put]:
        """The puts that the policy admits at the price of others; all while there is space."""
        slots = self._store.slot_class(slot_bytes)
        room = slots.free + self._room_to_grow(slot_bytes) - len(puts)
        if room >= (slots.slots + room) * (1 - self._watermarks.high):
            return puts
        refused: set[BlockKey] = set()
        for put in puts:
            if put.parent in refused or not self._catalog.admits(put.key, put.parent):
                refused.add(put.key)
        return [put for put in puts if put.key not in refused]

    def within_limits(self, puts: list[Put]) -> list[Put]:
        """The puts that their tenants may store: the coldest blocks of a tenant make room for its
        new ones; if that is not enough the new ones are cut, suffixes first."""
        by_tenant: dict[Tenant, list[Put]] = {}
        for put in puts:
            by_tenant.setdefault(put.tenant, []).append(put)
        wanted: list[Put] = []
        for tenant, group in by_tenant.items():
            nbytes = sum(len(put.data) for put in group)
            excess = self._catalog.make_way(tenant, nbytes, group[0].parent)
            count = len(group)
            while excess > 0 and count:
                count -= 1
                excess -= len(group[count].data)
            self._catalog.refuse(tenant, len(group) - count)
            wanted += group[:count]
        return wanted

    # -- towards a lowered limit -----------------------------------------------------------

    def shrink(self) -> None:
        """A step towards a lowered limit: empties a slab whose blocks fit in others; if there is
        none, evicts some of the least valuable blocks. If no more blocks can be evicted, blocks are
        lost with their slab, but not pinned ones: such a slab stays."""
        self._remove_emptied()
        if not self._engine.measure_surplus() or self._emptied:
            return
        costs, surplus = self._costs(), self._engine.surplus_bytes
        free = sum(slots.free * slots.slot_bytes for slots in self._store.classes())
        some = max(_EVICTED_BYTES, surplus - free, surplus // 64)  # before the next search
        if costs and (not costs[0][0] or not self._catalog.evict(some)):
            slab = self._store.slab(costs[0][2])
            assert slab is not None
            try:
                self._empty(slab)
            except OSError as error:
                self._counters.fault("a slab could not be emptied", error)
        self.reap()
        if not self._engine.measure_surplus():
            self._end_shrinking()

    def _costs(self) -> list[tuple[int, int, int]]:
        """For every slab the bytes that emptying it would lose, the bytes it would move, and its
        number; the cheapest first. Omits slabs whose emptying would lose a pinned block."""
        uses = self._catalog.slab_uses()
        costs: list[tuple[int, int, int]] = []
        for slab in self._store.slabs():
            use, size = uses.get(slab.number, _UNUSED), slab.slot_bytes
            slots = self._store.slot_class(size)
            room = slots.free - (slab.slots - slots.used_in(slab.base))
            if use.pinned <= max(0, room):
                lost = max(0, use.blocks - room)
                costs.append((lost * size, use.blocks * size, slab.number))
        return sorted(costs)

    def _empty(self, slab: Slab) -> None:
        """Moves the blocks of a slab, drops those without space elsewhere, and deletes it: now, or
        when its reads have ended. Raises OSError if the medium fails; blocks not moved by then are
        dropped with the slab."""
        self._store.slot_class(slab.slot_bytes).discard_extent(slab.base)
        entries = self._catalog.in_slab(slab.number)
        try:
            for start in range(0, len(entries), _MOVED_AT_ONCE):
                self._move(slab, entries[start : start + _MOVED_AT_ONCE])
        finally:
            self._catalog.forget_slab(slab.number, Cause.CAPACITY)
            self._emptied.add(slab.number)
            self._remove_emptied()

    def _move(self, slab: Slab, entries: Sequence[DiskEntry]) -> None:
        slots = self._store.slot_class(slab.slot_bytes)
        places = slots.take(len(entries))
        moves = list(zip(entries, places, strict=False))
        try:
            with memoryview(mmap.mmap(-1, slab.slot_bytes)) as page:
                for entry, place in moves:
                    self._store.read(entry.address, [page])
                    self._store.write(place, [page])
            for number in {slab_of(place) for place in places}:
                self._store.sync(address_of(number))
            self._index.update("address", [(place, entry.address) for entry, place in moves])
        except BaseException as error:
            slots.give_all(places)
            if isinstance(error, sqlite3.Error):
                raise OSError(str(error)) from error
            raise
        gone = [place for entry, place in moves if not self._catalog.relocate(entry, place)]
        self._catalog.add_pending_free(gone)

    def _remove_emptied(self) -> None:
        """Deletes emptied slabs whose reads have ended, those of dropped blocks too."""
        for number in self._emptied - self._catalog.slabs_read():
            if self._store.slab(number) is not None and not self._removed(number):
                return
            self._emptied.discard(number)

    def _removed(self, number: int) -> bool:
        """Deletes a slab. False, and it is tried again later, if the medium fails."""
        if time.monotonic() < self._remove_at:
            return False
        try:
            self._store.remove(number)
            return True
        except OSError as error:
            self._remove_at = time.monotonic() + _RETRY_S
            self._counters.fault("a slab could not be deleted", error)
            return False

    def _end_shrinking(self) -> None:
        """Evicts to the low watermark if the remaining blocks are above the high one; returns space
        that the index no longer needs."""
        total = sum(slots.slots * slots.slot_bytes for slots in self._store.classes())
        if self._catalog.used_bytes > total * self._watermarks.high:
            self._catalog.evict(self._catalog.used_bytes - int(total * self._watermarks.low))
            self.reap()
        bound = self._store.index_bytes - WAL_BYTES
        self._engine.changed_index(self._index.compact, bound)
