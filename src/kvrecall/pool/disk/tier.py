"""The disk tier: blocks in slab files, found by an index, durable across crashes. Its readers are
threads that fetch blocks into slots of the host; reads have priority over writes.
"""

from __future__ import annotations

import dataclasses
import mmap
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName
from kvrecall.config import DEFAULT_POLICY, DiskConfig, PoolTerms
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.base import TierStats
from kvrecall.pool.changes import Cause, Watcher
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk.catalog import DiskEntry
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.disk.engine import DiskEngine
from kvrecall.pool.disk.flusher import Flusher
from kvrecall.pool.disk.folder import LEAST_BYTES, check_room, refusal
from kvrecall.pool.disk.slabs import FileIo, SlabLost, adjacent, slab_of
from kvrecall.pool.eviction import make_policy
from kvrecall.pool.hints import Advice
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Buckets, Done, Get, Outcome, Put, PutVerdict, Tier, ended

_GIB = 1 << 30
_OPENING_S = 1.0  # how long opening waits for the blocks of a folder to be found
_CHECK_PATIENCE_S = 0.05  # how long a check lets one load go first


@dataclass(frozen=True, slots=True)
class _Read:
    """One system call: blocks in adjacent slots."""

    gets: tuple[Get, ...]
    entries: tuple[DiskEntry, ...]
    queued_at: float
    is_check: bool = False


class DiskTier(Tier):
    """One folder of blocks, used by one process at a time. See ``Tier`` for the contract. All its
    files, the index included, stay within ``config.capacity_bytes``."""

    name = TierName.DISK

    def __init__(
        self,
        config: DiskConfig,
        policy: str = DEFAULT_POLICY,
        io: FileIo | None = None,
        clock: Clock | None = None,
        codec: BlockCodec | None = None,
        terms: PoolTerms | None = None,
    ) -> None:
        """Opens or creates the folder. Raises TierError if it cannot be used, and then changes
        nothing; MediumFails if that may be different at the next start.

        The blocks of a large folder are found in the background: those that are not found
        yet are misses, and new ones wait to be stored. ``codec`` (default: a checksum)."""
        make_policy(policy, 1)  # before anything is touched
        self._terms = terms or PoolTerms()
        self._engine = engine = DiskEngine(
            config, policy, io or FileIo(), clock or Clock(), codec or BlockCodec(), self._terms
        )
        self._config = config
        self.catalog = engine.catalog
        """Its entries: to list and to pin them."""
        self._store = engine.store
        self._codec = engine.codec
        self._counters = engine.counters
        self._is_compressed = engine.index.has("compressed")
        self._done: queue.Queue[Done | None] = queue.Queue()
        self._closed = False
        self._sizes = {space.digest: nbytes for space, nbytes in engine.namespaces}
        self._flusher = Flusher(engine, self._done.put)
        self._reads: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._reads_end = False  # what is queued becomes a miss
        self._readers = [
            threading.Thread(target=self._run_reader, name=f"kvrecall-read-{n}", daemon=True)
            for n in range(config.readers)
        ]
        self._flusher.start()
        for reader in self._readers:
            reader.start()
        engine.recovered.wait(_OPENING_S)

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        known = self._sizes.get(namespace.digest)
        if known == block_bytes:
            return
        self._sizes[namespace.digest] = block_bytes
        if known is not None:
            kept = 0 if self._is_compressed else block_bytes
            self.catalog.forget_namespace(namespace.digest, but_of=kept)
        self._flusher.register(namespace, block_bytes)

    def contains(self, key: BlockKey) -> bool:
        return key in self.catalog

    def tiers_of(self, keys: Sequence[BlockKey]) -> list[TierName | None]:
        here = self.catalog.present(keys)
        if here.all():
            return [self.name] * len(keys)
        return [self.name if one else None for one in here.tolist()]

    def depth_of(self, key: BlockKey) -> int | None:
        return self.catalog.depth_of(key)

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        return self._flusher.submit(puts)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        return ended(self._done, timeout_s)

    def touch(
        self,
        chain: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        advice: Advice | None = None,
    ) -> None:
        if not self.catalog.touch(chain, hanging, ending, advice):
            self._flusher.hurry()

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        self._flusher.cancel(keys)
        self.catalog.forget(keys, cause)

    def clear(self) -> None:
        self._flusher.cancel(None)
        self.catalog.forget_all()

    def watch(self, watcher: Watcher) -> None:
        self.catalog.watch(watcher)

    def sweep(self, watcher: Watcher) -> Iterator[None]:
        return self.catalog.sweep(watcher)

    def stats(self) -> TierStats:
        accounts = self.catalog.accounts
        return dataclasses.replace(
            self._counters.stats(
                self._engine.capacity_bytes, self.catalog.used_bytes, len(self.catalog)
            ),
            evictions=self.catalog.evictions,
            pinned_bytes=self.catalog.pinned_bytes,
            over_quota=accounts.refused,
            quota_evictions=accounts.evicted,
            full=int(self._store.full),
        )

    def histograms(self) -> dict[str, Buckets]:
        return self._counters.histograms()

    def queued(self) -> tuple[int, int]:
        return (self._flusher.pending, self._counters.reading)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._store.is_direct

    def namespaces(self) -> list[tuple[Namespace, int]]:
        """Namespaces known when the tier was opened, with the bytes of their blocks."""
        return self._engine.namespaces

    def close(self, deadline_s: float = 10.0) -> None:
        if self._closed:
            return
        self._closed = True
        flushed = self._flusher.close(deadline_s)
        self._done.put(None)
        self._reads_end = True
        for _ in self._readers:
            self._reads.put(None)
        until = time.monotonic() + deadline_s
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        read = not any(reader.is_alive() for reader in self._readers)
        self._engine.close(flushed, read)

    # -- reading ---------------------------------------------------------------------------

    def submit_get(self, gets: Sequence[Get]) -> None:
        """See ``Tier``. Neighbours on disk are read together."""
        now = time.monotonic()
        for run in adjacent(self._found(gets), lambda one: (one[1].address, one[1].slot_bytes)):
            self._counters.reads_began(len(run))
            wanted, entries = zip(*run, strict=True)
            self._reads.put(_Read(wanted, entries, now))

    def _found(self, gets: Sequence[Get]) -> Iterator[tuple[Get, DiskEntry]]:
        """The gets of blocks that are here; ends the others."""
        for get in gets:
            entry = None if self._reads_end else self.catalog.acquire(get.key)
            if entry is not None and not self._fits(get, entry):
                self.catalog.release(entry)
                self.catalog.forget([get.key], Cause.RESIZED)
                entry = None
            if entry is None:
                self._done.put(Done(get.key, Outcome.MISS))
            else:
                yield get, entry

    def _fits(self, get: Get, entry: DiskEntry) -> bool:
        """Whether the block may be one of its namespace's size, whole or compressed."""
        if entry.slot_bytes == len(get.into):
            return True
        block_bytes = self._sizes.get(get.key[:NAMESPACE_BYTES], 0)
        is_size = slot_bytes_of(block_bytes) == len(get.into)
        return self._is_compressed and is_size and entry.nbytes < block_bytes

    def _run_reader(self) -> None:
        while (read := self._reads.get()) is not None:
            try:
                ended = _all(read, Outcome.MISS) if self._reads_end else self._read(read)
            except (OSError, MemoryError) as error:  # for blocks in another form
                self._counters.fault("no memory to read into", error)
                ended = _all(read, Outcome.MISS)
            waited = time.monotonic() - read.queued_at
            for entry, done in zip(read.entries, ended, strict=True):
                if done.outcome is Outcome.CORRUPT:
                    self._counters.warn("a corrupt block is dropped")
                if done.outcome in (Outcome.CORRUPT, Outcome.ERROR):
                    self.catalog.forget([done.key], Cause.CORRUPT)
                self.catalog.release(entry)
                self._counters.read_done(done.outcome, waited)
                self._done.put(done)

    def _read(self, read: _Read) -> list[Done]:
        """Reads and checks; blocks that cannot be read together are tried one by one. Raises
        OSError or MemoryError without the memory for that."""
        began = time.monotonic()
        sizes = [entry.slot_bytes for entry in read.entries]
        places = self._codec.buffers([get.into for get in read.gets], sizes)
        try:
            got = self._store.read(read.entries[0].address, places)
            read_s = time.monotonic() - began
        except SlabLost as error:
            self._counters.warn(f"blocks are dropped: {error}")
            self._flusher.report_lost(slab_of(read.entries[0].address))
            return _all(read, Outcome.ERROR)
        except OSError as error:
            if len(read.gets) == 1:
                self._counters.warn(f"read failed, the block is dropped: {error}")
                return _all(read, Outcome.ERROR)
            each = zip(read.gets, read.entries, strict=True)
            return [d for g, e in each for d in self._read(_Read((g,), (e,), read.queued_at))]
        ended = []
        end = 0
        for get, entry, place in zip(read.gets, read.entries, places, strict=True):
            whole = end + entry.nbytes <= got
            end += entry.slot_bytes
            plain = entry.nbytes
            if self._is_compressed:
                plain = self._sizes.get(get.key[:NAMESPACE_BYTES], 0)
            args = get.key, entry.nbytes, entry.tag, place, get.into, plain
            if whole and self._codec.decode(*args):
                checksum = self._codec.checksum_in(entry.tag, entry.nbytes, plain)
                ended.append(Done(get.key, Outcome.LOADED, checksum))
            else:
                ended.append(Done(get.key, Outcome.CORRUPT))
        if not read.is_check:
            self._counters.add(read_bytes=got, read_seconds=time.monotonic() - began)
            if self._codec.packer is not None:
                self._codec.packer.moved(got, read_s, got=True)
        return ended

    def check(
        self, keys: Sequence[BlockKey], keep: bool = False
    ) -> Iterator[tuple[BlockKey, Outcome]]:
        """Reads blocks in the caller's thread, beside the loads, which have priority: LOADED if a
        block is right, MISS if it is gone. Drops damaged blocks unless ``keep``. Blocks; one pass
        over a medium in use. Raises OSError or
        MemoryError without the memory for a block."""
        buffers: dict[int, memoryview] = {}
        for key in self.catalog.in_order(keys):
            entry = self.catalog.acquire(key)
            if entry is None:
                yield key, Outcome.MISS
                continue
            try:
                plain = slot_bytes_of(self._sizes.get(key[:NAMESPACE_BYTES], 0))
                slot_bytes = max(plain, entry.slot_bytes)
                if slot_bytes not in buffers:
                    buffers[slot_bytes] = memoryview(mmap.mmap(-1, slot_bytes))
                into = buffers[slot_bytes]
                if not self._is_compressed:
                    into = into[: entry.slot_bytes]
                get, began = Get(key, into), time.monotonic()
                self._counters.yield_to_reads(_CHECK_PATIENCE_S)
                (done,) = self._read(_Read((get,), (entry,), began, is_check=True))
                outcome = done.outcome
                if outcome is not Outcome.LOADED:
                    if not keep:
                        self.catalog.forget([key], Cause.CORRUPT)
                    self._counters.reads_began(1)
                    self._counters.read_done(outcome, time.monotonic() - began)
            finally:
                self.catalog.release(entry)
            yield key, outcome

    # -- administration --------------------------------------------------------------------

    def wait_pins_durable(self, timeout_s: float) -> bool:
        """Waits until the present pins would survive a restart. False if that fails."""
        return self._flusher.wait_pins_noted(timeout_s)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._config.path

    def resize(self, capacity_bytes: int) -> None:
        """Sets the limit. Shrinking continues in the background, see ``surplus_bytes``. Raises
        ConfigError if the medium does not have that much, or too much is pinned."""
        if capacity_bytes < LEAST_BYTES:
            raise ConfigError(f"disk: {capacity_bytes} bytes is too small; the minimum is 8MiB")
        if capacity_bytes > self._engine.capacity_bytes:
            try:
                doubt = check_room(self._config.path, capacity_bytes)
            except TierError as error:
                raise ConfigError(str(error)) from error
            except OSError as error:
                raise ConfigError(str(refusal(self._config.path, error))) from error
            if doubt:
                raise ConfigError(f"{doubt}; free some room, or resize to less")
        pinned, share = self.catalog.pinned_bytes, self._terms.pin_limit
        if pinned > share * capacity_bytes:
            raise ConfigError(
                f"disk: {pinned / _GIB:.2f} GiB are pinned, more than pin_limit ({share:g}) "
                f"allows of {capacity_bytes / _GIB:.2f} GiB; unpin some blocks"
            )
        self._engine.resize(capacity_bytes)
        self._flusher.hurry()

    @property
    def surplus_bytes(self) -> int:
        """Bytes on the medium above the limit, since that was lowered."""
        return self._engine.surplus_bytes


def _all(read: _Read, outcome: Outcome) -> list[Done]:
    return [Done(get.key, outcome) for get in read.gets]
