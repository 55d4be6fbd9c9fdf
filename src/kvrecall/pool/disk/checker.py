"""The checker: reads blocks to see whether they are right."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

from kvrecall.block import BlockKey
from kvrecall.pool.disk.catalog import Catalog, Entry
from kvrecall.pool.disk.ledger import Ledger
from kvrecall.pool.disk.seal import Seal
from kvrecall.pool.disk.slabs import SlabLost, SlabStore
from kvrecall.pool.tier import Outcome

_PATIENCE_S = 0.05


class Checker:
    """Reads blocks beside the tier's own loads, which go first. Blocks; for one thread."""

    def __init__(
        self,
        catalog: Catalog,
        store: SlabStore,
        ledger: Ledger,
        seal: Seal,
        on_lost: Callable[[int], None],
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._ledger = ledger
        self._seal = seal
        self._on_lost = on_lost
        self._buffers: dict[int, memoryview] = {}

    def check(self, key: BlockKey) -> Outcome:
        """LOADED if the block is right; MISS if it is gone meanwhile. Damaged ones are dropped."""
        entry = self._catalog.pin(key)
        if entry is None:
            return Outcome.MISS
        began = time.monotonic()
        try:
            self._ledger.yield_to_reads(_PATIENCE_S)
            outcome = self._read(entry)
            if outcome is not Outcome.LOADED:
                self._catalog.forget([key])
                self._ledger.reads_began(1)
                self._ledger.read_done(outcome, time.monotonic() - began)
            return outcome
        finally:
            self._catalog.unpin(entry)

    def _read(self, entry: Entry) -> Outcome:
        slot = entry.slot_bytes
        if slot not in self._buffers:
            self._buffers[slot] = memoryview(mmap.mmap(-1, slot))
        into = self._buffers[slot]
        try:
            (place,) = self._seal.read([into])
            got = self._store.read(entry.address, [place])
        except SlabLost:
            self._on_lost(entry.address >> 40)
            return Outcome.ERROR
        except OSError:
            return Outcome.ERROR
        whole = got >= entry.nbytes
        right = whole and self._seal.open(entry.key, entry.nbytes, entry.proof, place, into)
        return Outcome.LOADED if right else Outcome.CORRUPT
