"""The mover: empties slabs without losing what is in them."""

from __future__ import annotations

import mmap
import sqlite3
from collections.abc import Sequence

from kvrecall.pool.disk.catalog import Catalog, Entry
from kvrecall.pool.disk.index import Index
from kvrecall.pool.disk.slabs import Slab, SlabStore

_AT_ONCE = 64  # blocks of a transaction


class Mover:
    """Copies blocks to free slots of other slabs. Used by the flusher's thread only; waits for
    the medium.

    A block's row changes only when its copy is durable, and its old slot is not used again before
    that: whenever the process dies, the row leads to the right bytes.
    """

    def __init__(self, catalog: Catalog, store: SlabStore, index: Index) -> None:
        self._catalog = catalog
        self._store = store
        self._index = index
        self._leaving: dict[int, list[Entry]] = {}  # slabs without blocks, with reads under way

    def empty(self, slab: Slab) -> None:
        """Moves the blocks of a slab, drops those there is no room for, and deletes it: now, or
        in ``tend`` when reads of it have ended. Raises OSError or sqlite3.Error if the medium
        fails; blocks not moved by then are dropped with the slab only if that was the reason."""
        slots = self._store.slot_class(slab.slot_bytes)
        slots.discard_extent(slab.base)
        entries = self._catalog.in_slab(slab.number)
        try:
            for start in range(0, len(entries), _AT_ONCE):
                self._move(slab, entries[start : start + _AT_ONCE])
        finally:
            self._catalog.forget_slab(slab.number)
            self._leaving[slab.number] = entries
            self.tend()

    def tend(self) -> None:
        """Deletes emptied slabs that nobody reads any more."""
        for number, entries in list(self._leaving.items()):
            if not any(entry.pins for entry in entries):
                del self._leaving[number]
                if number in self._store.numbers():
                    self._store.remove(number)

    @property
    def leaving(self) -> frozenset[int]:
        """Slabs that are to be deleted."""
        return frozenset(self._leaving)

    def _move(self, slab: Slab, entries: Sequence[Entry]) -> None:
        slots = self._store.slot_class(slab.slot_bytes)
        places = slots.take(len(entries))
        moves: list[tuple[Entry, int]] = list(zip(entries, places, strict=False))
        done = False
        try:
            with memoryview(mmap.mmap(-1, slab.slot_bytes)) as page:
                for entry, place in moves:
                    self._store.read(entry.address, [page])
                    self._store.write(place, [page])
            for number in {place >> 40 for place in places}:
                self._store.sync(number << 40)
            self._index.move([(place, entry.address) for entry, place in moves])
            done = True
        except sqlite3.Error as error:
            raise OSError(str(error)) from error
        finally:
            if not done:
                for place in places:
                    slots.give(place)
        gone = [place for entry, place in moves if not self._catalog.relocate(entry, place)]
        self._catalog.condemn(gone)
