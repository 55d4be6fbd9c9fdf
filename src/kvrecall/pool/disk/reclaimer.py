"""The reclaimer: makes room in the slabs, and never before the index has let go of it."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Sequence

from kvrecall.block import BlockKey, Tenant
from kvrecall.config import Watermarks
from kvrecall.pool.disk.catalog import Catalog
from kvrecall.pool.disk.index import MAX_ROWS, ROW_BYTES, WAL_BYTES, Index
from kvrecall.pool.disk.ledger import Ledger
from kvrecall.pool.disk.mover import Mover
from kvrecall.pool.disk.slabs import SlabStore
from kvrecall.pool.tier import Put

_SHED_BYTES = 1 << 20  # the least, each time no slab can be emptied without a loss
_GROW_RETRY_S = 10.0  # after the medium refused to grow


class Reclaimer:
    """Grows slabs, evicts, deletes the rows of dropped blocks and then frees their slots.

    Used by the flusher's thread only; waits for the medium.
    """

    def __init__(
        self,
        catalog: Catalog,
        store: SlabStore,
        index: Index,
        ledger: Ledger,
        watermarks: Watermarks,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._index = index
        self._ledger = ledger
        self._watermarks = watermarks
        self._mover = Mover(catalog, store, index)
        self.surplus_bytes = 0  # that the tier is above its limit, since that was lowered
        self._failing = False  # the index could not be written when last tried
        self._grow_at = 0.0

    def make_room(self, slot_bytes: int, count: int) -> None:
        """Grows, then evicts down to the low watermark, so that ``count`` slots are free if that
        can be had."""
        slots = self._store.slot_class(slot_bytes)
        room = self._room_to_grow(slot_bytes)
        total = slots.slots + room
        if total < count:
            self._take_over(slot_bytes, count)
            room = self._room_to_grow(slot_bytes)
            total = slots.slots + room
        spare = slots.free + room - count
        if spare < total * (1 - self._watermarks.high):
            target = int(total * (1 - self._watermarks.low)) or 1
            short = target - spare
            if self._cold_elsewhere(slot_bytes, short):
                self._take_over(slot_bytes, short)
            else:
                self._catalog.evict(short, slot_bytes)
            self.reap()
        while slots.free < count and self._room_to_grow(slot_bytes):
            self._grow(slot_bytes)
        if slots.free < count and self._catalog.evict(count - slots.free, slot_bytes):
            self.reap()

    def _grow(self, slot_bytes: int) -> None:
        """Adds a slab, with room in the index for all its rows."""
        more = min(self._store.target_slots(slot_bytes), self._store.room_for(slot_bytes))
        rows = self._store.index_bytes - WAL_BYTES + more * ROW_BYTES
        if not (self._index.reserve(rows) and self._store.grow(slot_bytes)):
            self._store.full = True
            self._grow_at = time.monotonic() + _GROW_RETRY_S

    def index_works(self) -> bool:
        """Whether rows can be written; asked before blocks are given up for new ones."""
        if self._failing:
            try:
                self._index.probe()
            except sqlite3.Error:
                return False
            self._failing = False
        return True

    def _room_to_grow(self, slot_bytes: int) -> int:
        if self._store.full and time.monotonic() < self._grow_at:
            return 0
        return self._store.room_for(slot_bytes)

    def _cold_elsewhere(self, slot_bytes: int, count: int) -> bool:
        """Whether most of the least valuable blocks are of other sizes."""
        coldest = self._catalog.coldest(max(1, count))
        return sum(size != slot_bytes for _, size in coldest) * 2 > len(coldest)

    def _take_over(self, slot_bytes: int, count: int) -> None:
        """Gives up slabs of other sizes, coldest first, until ``count`` slots could be added."""
        blocks, _ = self._catalog.blocks_by_slab()
        cold = Counter(address >> 40 for address, _ in self._catalog.coldest(64))
        busy = self._catalog.busy_slabs() | self._mover.leaving
        others = [
            slab
            for slab in map(self._store.slab, (n << 40 for n in self._store.numbers()))
            if slab is not None and slab.slot_bytes != slot_bytes and slab.number not in busy
        ]
        others.sort(key=lambda slab: (-cold[slab.number], blocks[slab.number]))
        for slab in others:
            if self._store.room_for(slot_bytes) >= count:
                return
            self._catalog.forget_slab(slab.number)
            self.reap()
            if slab.base in self._store.slot_class(slab.slot_bytes).empty_extents():
                self._store.remove(slab.number)

    def reap(self) -> None:
        """Deletes the rows of dropped blocks, then frees their slots."""
        while condemned := self._catalog.take_condemned(MAX_ROWS):
            try:
                self._index.delete(condemned)
            except sqlite3.Error as error:
                self.index_failed(error)
                self._catalog.condemn(condemned)
                return
            self.give_back(condemned)

    def give_back(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            slab = self._store.slab(address)
            if slab is not None and slab.number not in self._mover.leaving:
                self._store.slot_class(slab.slot_bytes).give(address)

    def admitted(self, slot_bytes: int, puts: list[Put]) -> list[Put]:
        """Those that the policy wants at the price of others; all while there is room."""
        slots = self._store.slot_class(slot_bytes)
        room = slots.free + self._room_to_grow(slot_bytes) - len(puts)
        if room >= (slots.slots + room) * (1 - self._watermarks.high):
            return puts
        refused: set[BlockKey] = set()
        for put in puts:
            if put.parent in refused or not self._catalog.admits(put.key, put.parent, put.depth):
                refused.add(put.key)
        return [put for put in puts if put.key not in refused]

    def within_limits(self, puts: list[Put]) -> list[Put]:
        """Those that their tenants may store: the coldest blocks of a tenant make room for its
        new ones; where that is not enough the new ones are cut, suffixes first."""
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

    def shrink(self) -> None:
        """A step towards the limit, if that was lowered: empties a slab whose blocks find room in
        others; if there is none, evicts some of what is worth least. Where nothing more can be
        evicted blocks are lost with their slab, but no pinned ones: such a slab stays."""
        self._mover.tend()
        self.surplus_bytes = self._surplus()
        if not self.surplus_bytes or self._mover.leaving:
            return
        costs = self._costs()
        if costs and (not costs[0][0] or not self._catalog.shed(self._to_shed())):
            slab = self._store.slab(costs[0][2] << 40)
            assert slab is not None
            try:
                self._mover.empty(slab)
            except OSError as error:
                self._ledger.faulted("a slab could not be emptied", error)
        self.reap()
        self.surplus_bytes = self._surplus()
        if not self.surplus_bytes:
            self._end_shrinking()

    def _surplus(self) -> int:
        over = self._store.file_bytes + self._store.index_bytes - self._store.limit_bytes
        return max(0, over)

    def _to_shed(self) -> int:
        """Bytes to evict before it is looked again for a slab that can be emptied."""
        free = sum(slots.free * slots.slot_bytes for slots in self._store.classes())
        return max(_SHED_BYTES, self.surplus_bytes - free, self.surplus_bytes // 64)

    def _costs(self) -> list[tuple[int, int, int]]:
        """Of every slab the bytes that would be lost, and those that would be moved, if it were
        emptied, and its number; the cheapest first. Without those that would lose a pinned
        block."""
        blocks, pinned = self._catalog.blocks_by_slab()
        costs: list[tuple[int, int, int]] = []
        for number in self._store.numbers():
            slab = self._store.slab(number << 40)
            assert slab is not None
            slots, size = self._store.slot_class(slab.slot_bytes), slab.slot_bytes
            room = slots.free - (slab.slots - slots.used_by_extent().get(slab.base, 0))
            if pinned[number] <= max(0, room):
                lost = max(0, blocks[number] - room)
                costs.append((lost * size, blocks[number] * size, number))
        return sorted(costs)

    def _end_shrinking(self) -> None:
        """Evicts to the low watermark if what is left is above the high one; takes back what the
        index needs no more."""
        total = sum(slots.slots * slots.slot_bytes for slots in self._store.classes())
        if self._catalog.used_bytes > total * self._watermarks.high:
            self._catalog.shed(self._catalog.used_bytes - int(total * self._watermarks.low))
            self.reap()
        self._compact()

    def _compact(self) -> None:
        """Takes back what the index needs no more."""
        bound = self._store.index_bytes - WAL_BYTES
        try:
            if self._index.file_bytes() > bound:
                self._index.compact()
        except sqlite3.Error as error:
            self.index_failed(error)

    def index_failed(self, error: sqlite3.Error) -> None:
        """The index could not be written; what was to be changed in it is not changed."""
        self._failing = True
        self._ledger.faulted("index failed, stores are shed", error)
