"""The engine of a disk tier: owns an open folder from its opening to its closing."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from array import array
from collections.abc import Callable
from itertools import compress, groupby

from kvrecall.config import DiskConfig, PoolTerms
from kvrecall.errors import TierError
from kvrecall.pool.clock import Clock
from kvrecall.pool.compression import check_compression
from kvrecall.pool.disk.catalog import Catalog, DiskCounters
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.disk.folder import FolderLock, check_room, refusal
from kvrecall.pool.disk.index import AGAIN_S, MAX_ROWS, WAL_BYTES, Index, aside_bytes, is_damage
from kvrecall.pool.disk.slabs import INDEX_BASE_BYTES, SLAB_BITS, FileIo, SlabStore, slab_of
from kvrecall.pool.lockfile import leads_to

_LOG = logging.getLogger(__name__)
_MIB = 1 << 20
_SILENCE_S = 3.0


class DiskEngine:
    """One folder of blocks: its lock, its index, its slabs, and what is known of them in memory.

    It is opened by the constructor. Until ``recover`` has ended, blocks whose row was read are
    served and none is stored or evicted. Only the flusher's thread calls that, as it alone uses the
    index and the slot maps from then on.
    """

    def __init__(
        self,
        config: DiskConfig,
        policy: str,
        io: FileIo,
        clock: Clock,
        codec: BlockCodec,
        terms: PoolTerms,
    ) -> None:
        """Opens or creates the folder. Raises TierError if it cannot be used, and then changes
        nothing; MediumFails if that may be different at the next start."""
        self.recovered = threading.Event()
        """Whether the recovery has ended, well or not."""
        self.config = config
        self.capacity_bytes = config.capacity_bytes
        self.codec = codec
        self.counters = DiskCounters()
        self.surplus_bytes = 0
        """Bytes on the medium above the limit, since that was lowered."""
        self.is_index_failing = False
        """Whether the index could not be written when last tried."""
        try:
            doubt = check_room(config.path, config.capacity_bytes)
        except OSError as error:
            raise refusal(config.path, error) from error
        if doubt:
            _LOG.warning("disk tier: %s; the tier grows as far as there is room", doubt)
        with contextlib.ExitStack() as undo:
            self._lock = FolderLock(config.path)
            undo.callback(self._lock.release)
            try:
                try:
                    self._open(policy, io, clock, terms)
                except sqlite3.DatabaseError as error:
                    if not is_damage(error):
                        raise
                    # Though it was closed well, or its pages are right and what they hold is not.
                    self._open(policy, io, clock, terms, f"it is damaged ({error})")
            except (OSError, sqlite3.Error) as error:
                raise refusal(config.path, error) from error
            undo.pop_all()

    def _open(
        self, policy: str, io: FileIo, clock: Clock, terms: PoolTerms, damage: str = ""
    ) -> None:
        """``damage``: of the index, if it is known."""
        self.index = Index.open(self.config.path, clock, damage)
        try:
            self._open_blocks(policy, io, clock, terms)
        except BaseException:
            self.index.close(False)
            raise

    def _open_blocks(self, policy: str, io: FileIo, clock: Clock, terms: PoolTerms) -> None:
        path, capacity = self.config.path, self.config.capacity_bytes
        self._admit_content()
        limit = capacity - aside_bytes(path)
        if not leads_to(path, self._lock.fd):
            raise TierError(f"disk_path: {path} was replaced by another folder just now; try again")
        self.store = SlabStore(
            path, limit, self.index.pool_id, io, self.config.direct_io, self._lock.fd
        )
        self.namespaces = self.index.namespaces()
        used = self.index.count_in_slabs(SLAB_BITS)
        missing = self.store.recover(used)
        if missing:
            _LOG.warning("disk tier: %d slabs are missing or damaged", len(missing))
        for slab in sorted(self.store.slabs(), key=lambda slab: used[slab.number]):
            if not self.measure_surplus():  # of a limit that was lowered meanwhile
                break
            self.store.remove(slab.number)
        slabs = self.store.slabs()
        self.catalog = Catalog(
            policy,
            (capacity - INDEX_BASE_BYTES) // (slabs[-1].slot_bytes if slabs else _MIB),
            lambda: self.capacity_bytes,
            clock,
            terms,
            self.codec.tag_bytes,
            sum(used.values()),
        )
        self.catalog.begin_recovery(self.index.pinned_keys())
        self.index.reserve(self.store.index_bytes - WAL_BYTES)

    def _admit_content(self) -> None:
        """Ensures that the content of the folder fits the codec. Raises TierError if a key is
        missing, ConfigError if the library for compressed blocks is; if there is a key now, plain
        blocks are deleted before any block is stored."""
        path, index = self.config.path, self.index
        if index.has("sealed") and not self.codec.encrypts:
            raise TierError(
                f"disk_path: {path} holds blocks encrypted with a key; set "
                "encryption_key_file, or delete the folder to continue without encryption"
            )
        if self.codec.encrypts and not index.has("sealed"):
            index.delete_all()
            for slab in path.glob("slab-*.kv"):
                _LOG.warning("disk tier: %s was written without encryption; deleted", slab)
                slab.unlink()
            index.note("sealed")
        if self.codec.packer is not None and not index.has("compressed"):
            index.note("compressed")
        if index.has("compressed"):
            check_compression("of this folder")

    def measure_surplus(self) -> int:
        """Sets ``surplus_bytes``."""
        store = self.store
        self.surplus_bytes = max(0, store.file_bytes + store.index_bytes - store.limit_bytes)
        return self.surplus_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Sets the limit."""
        self.capacity_bytes = capacity_bytes
        self.store.limit_bytes = capacity_bytes - aside_bytes(self.config.path)

    def close(self, flushed: bool, read: bool) -> None:
        """Closes what no thread uses any more. ``flushed``: the flusher's has ended; ``read``: the
        readers' have."""
        if flushed:
            self.index.close(not self.is_index_failing)
        if flushed and read:
            self.store.close()
            self._lock.release()
        else:
            _LOG.error("disk tier: the medium does not answer; %s stays open", self.config.path)

    # -- recovery --------------------------------------------------------------------------

    def recover(self, is_closing: Callable[[], bool]) -> bool:
        """Reads the index, once, before anything is stored: only then it is known which slots are
        free. A block is served from the moment its row was read; when all were, they are ranked for
        eviction. False if the tier is closing."""
        taken = {slab.number: array("q") for slab in self.store.slabs()}
        try:
            try:
                if not self._read_rows(taken, is_closing):
                    return False
            except sqlite3.Error as error:
                self.counters.fault("the index cannot be read", error)
                while not self.renew_index(str(error)):  # with what was found
                    if is_closing():
                        return False
                    time.sleep(AGAIN_S)
            for number, addresses in taken.items():
                self.store.place(number, addresses)
            return self.catalog.rank_rest(is_closing)
        finally:
            self.recovered.set()

    def _read_rows(self, taken: dict[int, array[int]], is_closing: Callable[[], bool]) -> bool:
        """Adds the addresses of the blocks of each slab to ``taken``. False if the tier is
        closing."""
        path, began = self.config.path, time.monotonic()
        told = began
        bad: list[int] = []
        seen = locked = 0
        damaged = self.index.damaged
        for rows, broken in self.index.rows():
            if is_closing():
                return False
            known = [self.codec.knows(row.tag) for row in rows]
            locked += known.count(False)
            slots = self.store.are_slots(
                [row.address for row in rows], [row.nbytes for row in rows]
            )
            right = list(compress(rows, slots & known)) if rows else []
            refused = set(self.catalog.recover(right))
            good = [row.address for row in right if row.address not in refused]
            bad += broken
            bad += {row.address for row in rows}.difference(good)
            for number, its in groupby(good, slab_of):
                taken[number].extend(its)
            seen += len(rows) + len(broken)
            damaged += len(broken)
            if time.monotonic() - told > _SILENCE_S:
                told = time.monotonic()
                _LOG.info("disk tier: %d blocks read from the index of %s so far", seen, path)
        if locked:
            _LOG.warning(
                "disk tier: %d of %d blocks in %s are encrypted with a key that "
                "encryption_key_file does not contain; they are dropped",
                locked,
                seen,
                path,
            )
        if damaged:
            self.counters.add(corrupt=damaged)
            _LOG.warning(
                "disk tier: %d rows in the index of %s are damaged; their blocks are dropped",
                damaged,
                path,
            )
        for start in range(0, len(bad), MAX_ROWS):
            self.index.delete(bad[start : start + MAX_ROWS])
        _LOG.info(
            "disk tier: %d blocks in %s found in %.2f s (%d lost)",
            seen - len(bad),
            path,
            time.monotonic() - began,
            len(bad),
        )
        return True

    # -- the index, for the flusher's thread -----------------------------------------------

    def limit_index(self) -> None:
        """Lets the index use the room that the slabs leave."""
        self.index.limit(self.store.limit_bytes - self.store.file_bytes - WAL_BYTES)

    def index_works(self) -> bool:
        """Whether rows can be written; checked before blocks are evicted for new ones."""
        try:
            if self.is_index_failing:
                self.index.note_time()
                self.is_index_failing = False
        except sqlite3.Error as error:
            if is_damage(error):
                self.renew_index(str(error))
        return not self.is_index_failing

    def changed_index(self, change: Callable[..., object], *args: object) -> bool:
        """Makes a change of the index. False if that failed: it is undone, and a damaged index
        replaced."""
        try:
            change(*args)
            return True
        except (sqlite3.Error, OSError) as error:
            self.is_index_failing = True
            self.counters.fault("index failed, blocks are not stored", error)
            if is_damage(error):
                self.renew_index(str(error))
            return False

    def renew_index(self, why: str) -> bool:
        """Goes on with a new index of the same blocks. False if the medium does not allow one."""
        self.is_index_failing = True
        try:
            self._begin_anew(why)
        except (sqlite3.Error, OSError) as error:
            self.counters.fault("a new index cannot be started", error)
            return False
        self.is_index_failing = False
        return True

    def _begin_anew(self, why: str) -> None:
        """Sets a damaged index aside and writes a new one, of the blocks that are known by now.
        Raises sqlite3.Error or OSError if the medium does not allow it."""
        self.store.limit_bytes -= self.index.begin_anew(why)
        self.limit_index()
        for rows in self.catalog.rows():
            self.index.insert(rows)
