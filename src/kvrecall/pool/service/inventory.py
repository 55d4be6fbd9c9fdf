"""What lies in a pool or in a disk folder: listed, checked and dropped by namespace or age.

This module knows the insides of ``Pool`` and ``DiskTier`` (their dictionaries and locks), because
administration looks at everything while neither needs such methods for its own work.
"""

from __future__ import annotations

import mmap
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.catalog import Catalog, Entry
from kvrecall.pool.disk.reader import checksum_of
from kvrecall.pool.disk.slabs import SlabLost
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.views import Listing, NamespaceView
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Outcome

_PATIENCE_S = 0.05
_PROGRESS_S = 0.1
_DROPPED_AT_ONCE = 1000

OnProgress = Callable[[int, int, int], None]
"""Called with blocks checked, blocks in all, blocks found damaged."""


class Inventory:
    """Over a pool, or over the disk tier of a folder that no pool uses. Its methods block, the
    longest (``verify``) for as long as the disk takes; call them outside of any loop."""

    def __init__(self, pool: Pool | None, disk: DiskTier | None = None) -> None:
        below = pool._below if pool is not None else disk
        self._pool = pool
        self._disk = below if isinstance(below, DiskTier) else None
        self._names: dict[bytes, tuple[Namespace, int]] = {}
        if self._disk is not None:
            for namespace, nbytes in self._disk.namespaces():
                self._names[namespace.digest] = namespace, nbytes

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        """A client told what a namespace is."""
        self._names[namespace.digest] = namespace, block_bytes

    def listing(self) -> Listing:
        host = Counter(key[:NAMESPACE_BYTES] for key in self._host_keys())
        disk: Counter[bytes] = Counter()
        uses: dict[bytes, tuple[float, float]] = {}
        for entry in self._entries():
            digest = entry.key[:NAMESPACE_BYTES]
            disk[digest] += 1
            last, first = uses.get(digest, (0.0, float("inf")))
            uses[digest] = max(last, entry.used), min(first, entry.used)
        now = time.time()
        rows = []
        for digest in sorted({*host, *disk, *self._names}):
            namespace, nbytes = self._names.get(digest, (Namespace(digest, ()), 0))
            last, first = uses.get(digest, (now + 1.0, now + 1.0))
            rows.append(
                NamespaceView(
                    digest.hex(),
                    dict(namespace.parts),
                    nbytes,
                    host[digest],
                    disk[digest],
                    now - last,
                    now - first,
                )
            )
        return Listing(tuple(rows))

    def drop(self, digests: Collection[bytes] | None, older_than_s: float | None = None) -> int:
        """Drops the blocks of these namespaces (None: of all), with ``older_than_s`` only those
        on disk, with their copies in the host, that were not used for so long. Leased blocks stay
        in the host. Returns how many blocks were dropped."""
        before = None if older_than_s is None else time.time() - older_than_s
        keys = {
            entry.key
            for entry in self._entries()
            if _chosen(entry.key, digests) and (before is None or entry.used < before)
        }
        if before is None:
            keys.update(key for key in self._host_keys() if _chosen(key, digests))
        owner = self._pool or self._disk
        rest = list(keys)
        while rest and owner is not None:
            owner.drop(rest[-_DROPPED_AT_ONCE:])  # engines are answered in between
            del rest[-_DROPPED_AT_ONCE:]
        return len(keys)

    def verify(
        self, digests: Collection[bytes] | None, progress: OnProgress = lambda *_: None
    ) -> tuple[int, int]:
        """Reads every block of these namespaces (None: of all) on disk and checks its bytes; the
        damaged are dropped. Returns how many were checked, and how many damaged."""
        if self._disk is None:
            return 0, 0
        entries = [e for e in self._entries() if _chosen(e.key, digests)]
        entries.sort(key=lambda entry: entry.address)
        checker = _Checker(self._disk)
        checked = damaged = 0
        told = 0.0
        for entry in entries:
            outcome = checker.check(entry.key)
            checked += outcome is not Outcome.MISS
            if outcome in (Outcome.CORRUPT, Outcome.ERROR):
                damaged += 1
                self._no_longer_stored(entry.key)
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                progress(checked, len(entries), damaged)
        progress(checked, len(entries), damaged)
        return checked, damaged

    # -- inside ----------------------------------------------------------------------------

    def _entries(self) -> list[Entry]:
        if self._disk is None:
            return []
        catalog: Catalog = self._disk._catalog
        with catalog._lock:
            return list(catalog._entries.values())

    def _host_keys(self) -> list[BlockKey]:
        if self._pool is None:
            return []
        with self._pool._changed:
            return list(self._pool._host.blocks)

    def _no_longer_stored(self, key: BlockKey) -> None:
        with self._pool._changed if self._pool is not None else nullcontext():
            block = None if self._pool is None else self._pool._host.blocks.get(key)
            if block is not None:
                block.stored = False  # it is written again when it is used next


class _Checker:
    """Reads blocks beside the pool's own loads, which go first."""

    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk
        self._buffers: dict[int, memoryview] = {}

    def check(self, key: BlockKey) -> Outcome:
        """LOADED if the block is right; MISS if it is gone meanwhile. Damaged ones are dropped."""
        disk = self._disk
        entry = disk._catalog.pin(key)
        if entry is None:
            return Outcome.MISS
        began = time.monotonic()
        try:
            disk._ledger.yield_to_reads(_PATIENCE_S)
            outcome = self._read(entry)
            if outcome is not Outcome.LOADED:
                disk._catalog.forget([key])
                disk._ledger.reads_began(1)
                disk._ledger.read_done(outcome, time.monotonic() - began)
            return outcome
        finally:
            disk._catalog.unpin(entry)

    def _read(self, entry: Entry) -> Outcome:
        slot = slot_bytes_of(entry.nbytes)
        if slot not in self._buffers:
            self._buffers[slot] = memoryview(mmap.mmap(-1, slot))
        into = self._buffers[slot]
        try:
            got = self._disk._store.read(entry.address, [into])
        except SlabLost:
            self._disk._flusher.report_lost(entry.address >> 40)
            return Outcome.ERROR
        except OSError:
            return Outcome.ERROR
        data = into[: entry.nbytes]
        whole = got >= entry.nbytes
        right = whole and checksum_of(entry.key, data) == entry.checksum
        return Outcome.LOADED if right else Outcome.CORRUPT


def _chosen(key: BlockKey, digests: Collection[bytes] | None) -> bool:
    return digests is None or key[:NAMESPACE_BYTES] in digests
