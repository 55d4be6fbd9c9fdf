"""The disk tier: blocks in slab files, found by an index, durable across crashes."""

from __future__ import annotations

import contextlib
import logging
import queue
import sqlite3
import time
from collections.abc import Callable, Sequence

from kvrecall.block import BlockKey, Namespace, TierName
from kvrecall.config import DiskConfig
from kvrecall.errors import TierError
from kvrecall.pool.base import TierStats
from kvrecall.pool.disk.catalog import Catalog
from kvrecall.pool.disk.flusher import Flusher
from kvrecall.pool.disk.folder import FolderLock, check_room
from kvrecall.pool.disk.index import MAX_ROWS, WAL_BYTES, Index, Row, aside_bytes
from kvrecall.pool.disk.io import FileIo
from kvrecall.pool.disk.ledger import Ledger
from kvrecall.pool.disk.reader import Readers
from kvrecall.pool.disk.reclaimer import Reclaimer, Watermarks
from kvrecall.pool.disk.slabs import INDEX_BASE_BYTES, SlabStore
from kvrecall.pool.eviction import make_policy
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Buckets, Done, Get, Put, PutVerdict, Tier

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
_LEAST_BYTES = 8 * _MIB
_TYPICAL_BLOCK = _MIB


class DiskTier(Tier):
    """One folder of blocks, used by one process at a time. See ``Tier`` for the contract.

    All it writes, the index included, stays within ``config.capacity_bytes``.
    """

    name = TierName.DISK

    def __init__(
        self,
        config: DiskConfig,
        policy: str = "lru",
        io: FileIo | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens or makes the folder. TierError if it cannot be used; nothing is changed then."""
        if config.capacity_bytes < _LEAST_BYTES:
            raise TierError(
                f"disk_size: {config.capacity_bytes} bytes is too small; the least is 8MiB"
            )
        make_policy(policy, 1)  # before anything is touched
        check_room(config.path, config.capacity_bytes)
        self._config = config
        with contextlib.ExitStack() as undo:
            self._lock = FolderLock(config.path)
            undo.callback(self._lock.release)
            try:
                self._open(io or FileIo(), policy, clock, undo)
            except (OSError, sqlite3.Error) as error:
                raise TierError(f"disk_path: {config.path}: {error}") from error
            undo.pop_all()
        self._ledger = Ledger()
        self._done: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._closed = False
        self._sizes = {ns.digest: nbytes for ns, nbytes in self._index.namespaces()}
        self._flusher = Flusher(
            self._catalog,
            self._store,
            self._index,
            self._ledger,
            Reclaimer(
                self._catalog,
                self._store,
                self._index,
                self._ledger,
                Watermarks(config.high_watermark, config.low_watermark),
            ),
            config.max_queued_bytes,
            self._done.put,
        )
        self._readers = Readers(
            config.readers,
            self._catalog,
            self._store,
            self._ledger,
            self._done.put,
            self._flusher.report_lost,
        )
        self._flusher.start()

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        known = self._sizes.get(namespace.digest)
        if known == block_bytes:
            return
        self._sizes[namespace.digest] = block_bytes
        if known is None:
            self._catalog.resize(self._config.capacity_bytes // slot_bytes_of(block_bytes))
        else:
            self._catalog.forget_namespace(namespace.digest, but_of=block_bytes)
        self._flusher.register(namespace, block_bytes)

    def contains(self, key: BlockKey) -> bool:
        return key in self._catalog

    def depth_of(self, key: BlockKey) -> int | None:
        return self._catalog.depth_of(key)

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        return self._flusher.submit(puts)

    def submit_get(self, gets: Sequence[Get]) -> None:
        self._readers.submit(gets)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        done: list[Done] = []
        try:
            if timeout_s > 0:
                done.append(self._done.get(timeout=timeout_s))
            while True:
                done.append(self._done.get_nowait())
        except queue.Empty:
            return done

    def touch(self, chain: Sequence[BlockKey]) -> None:
        self._catalog.touch(chain)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        self._flusher.cancel(keys)
        self._catalog.forget(keys)

    def clear(self) -> None:
        self._flusher.cancel(None)
        self._catalog.forget_all()

    def stats(self) -> TierStats:
        ledger = self._ledger
        return TierStats(
            name=str(self.name),
            capacity_bytes=self._config.capacity_bytes,
            used_bytes=self._catalog.used_bytes,
            blocks=len(self._catalog),
            hits=ledger.hits,
            reads=ledger.reads,
            read_bytes=ledger.read_bytes,
            read_seconds=ledger.read_seconds,
            writes=ledger.writes,
            write_bytes=ledger.write_bytes,
            write_seconds=ledger.write_seconds,
            evictions=self._catalog.evictions,
            dropped=ledger.shed,
            errors=ledger.errors,
            corrupt=ledger.corrupt,
        )

    def histograms(self) -> dict[str, Buckets]:
        return self._ledger.histograms()

    def queued(self) -> tuple[int, int]:
        return (self._flusher.pending, self._ledger.reading)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._store.is_direct

    def namespaces(self) -> list[tuple[Namespace, int]]:
        """Namespaces known when the tier was opened, with the bytes of their blocks."""
        return self._known

    def close(self, deadline_s: float = 10.0) -> None:
        if self._closed:
            return
        self._closed = True
        flushed = self._flusher.close(deadline_s)
        read = self._readers.close(deadline_s)
        if flushed:
            self._index.close()
        if flushed and read:
            self._store.close()
            self._lock.release()
        else:
            _LOG.error("disk tier: the medium does not answer; %s stays open", self._config.path)

    # -- opening ---------------------------------------------------------------------------

    def _open(
        self,
        io: FileIo,
        policy: str,
        clock: Callable[[], float],
        undo: contextlib.ExitStack,
    ) -> None:
        """Opens index and slabs and finds what is in them; ``undo`` learns how to close them."""
        path, capacity = self._config.path, self._config.capacity_bytes
        self._index = Index.open(path)
        undo.callback(self._index.close)
        limit = capacity - aside_bytes(path)
        self._store = SlabStore(path, limit, self._index.pool_id, io, self._config.direct_io)
        undo.callback(self._store.close)
        rows = list(self._index.rows())
        self._catalog = Catalog(policy, self._capacity(rows), clock)
        self._recover(rows)
        self._index.reserve(self._store.index_bytes - WAL_BYTES)

    def _capacity(self, rows: Sequence[Row]) -> int:
        """About how many blocks the tier can hold."""
        typical = rows[-1].nbytes if rows else _TYPICAL_BLOCK
        return (self._config.capacity_bytes - INDEX_BASE_BYTES) // slot_bytes_of(typical)

    def _recover(self, rows: Sequence[Row]) -> None:
        """Finds the blocks that rows speak of; rows without a block are deleted."""
        began = time.monotonic()
        self._known = self._index.namespaces()
        used: dict[int, list[int]] = {}
        for row in rows:
            used.setdefault(row.address >> 40, []).append(row.address)
        missing = self._store.recover(used)
        if missing:
            _LOG.warning("disk tier: %d slabs are missing or damaged", len(missing))
        missing += self._shrink(used)
        good: dict[BlockKey, Row] = {}
        bad: list[int] = []
        for row in rows:
            if row.key in good or not self._store.is_slot(row.address, row.nbytes):
                bad.append(row.address)
            else:
                good[row.key] = row
        places: dict[int, list[int]] = {number: [] for number in self._store.numbers()}
        for row in good.values():
            places[row.address >> 40].append(row.address)
        for start in range(0, len(bad), MAX_ROWS):
            self._index.delete(bad[start : start + MAX_ROWS])
        for number, addresses in places.items():
            self._store.place(number, addresses)
        self._catalog.recover(good.values())
        _LOG.info(
            "disk tier: %d blocks in %s found in %.2f s (%d lost)",
            len(good),
            self._config.path,
            time.monotonic() - began,
            len(bad),
        )

    def _shrink(self, used: dict[int, list[int]]) -> list[int]:
        """Gives up the emptiest slabs while the tier is above its (lowered) limit."""
        given_up: list[int] = []
        for number in sorted(self._store.numbers(), key=lambda n: len(used[n])):
            if self._store.file_bytes + self._store.index_bytes <= self._store.limit_bytes:
                break
            self._store.remove(number)
            given_up.append(number)
        return given_up
