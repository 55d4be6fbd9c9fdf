"""Readers: threads that fetch blocks from slabs into slots of the host, before all writes."""

from __future__ import annotations

import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvrecall.block import BlockKey
from kvrecall.pool.counters import TierCounters
from kvrecall.pool.disk.catalog import Catalog, Entry
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.disk.slabs import SlabLost, SlabStore, slab_of
from kvrecall.pool.tier import Done, Get, Outcome

_MERGE_BYTES = 4 << 20
_MERGE_BLOCKS = 512  # buffers of one system call (IOV_MAX is 1024)
_CHECK_PATIENCE_S = 0.05  # how long a check lets one load go first


class DiskCounters(TierCounters):
    """Counters of one disk tier, and which reads are under way. Thread-safe."""

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
        """Waits until no read is queued, so that loads go before stores; but not for ever."""
        until = time.monotonic() + at_most_s
        with self._changed:
            while self.reading and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)


@dataclass(frozen=True, slots=True)
class _Read:
    """One system call: blocks in adjacent slots."""

    gets: tuple[Get, ...]
    entries: tuple[Entry, ...]
    queued_at: float
    is_check: bool = False


class Readers:
    """Serves gets. ``on_done`` is called for every get, from a reader or the submitting thread;
    ``on_lost`` with the number of a slab whose file is gone."""

    def __init__(
        self,
        threads: int,
        catalog: Catalog,
        store: SlabStore,
        counters: DiskCounters,
        on_done: Callable[[Done], None],
        on_lost: Callable[[int], None],
        codec: BlockCodec,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._counters = counters
        self._on_done = on_done
        self._on_lost = on_lost
        self._codec = codec
        self._closed = False
        self._queue: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvrecall-read-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, gets: Sequence[Get]) -> None:
        """Queues gets in their order; neighbours on disk are read together."""
        now = time.monotonic()
        run: list[Get] = []
        entries: list[Entry] = []
        size = 0
        for get in gets:
            entry = self._acquire(get)
            if entry is None:
                continue
            slot = len(get.into)
            if entries:
                last = entries[-1]
                adjacent = last.address + last.slot_bytes == entry.address
                if not adjacent or size + slot > _MERGE_BYTES or len(run) == _MERGE_BLOCKS:
                    self._enqueue(_Read(tuple(run), tuple(entries), now))
                    run, entries, size = [], [], 0
            run.append(get)
            entries.append(entry)
            size += slot
        if run:
            self._enqueue(_Read(tuple(run), tuple(entries), now))

    def check(self, keys: Sequence[BlockKey]) -> Iterator[tuple[BlockKey, Outcome]]:
        """Reads blocks in the caller's thread, beside the loads, which go first: LOADED if a block
        is right, MISS if it is gone. Damaged ones are dropped. Blocks."""
        buffers: dict[int, memoryview] = {}
        for key in self._catalog.in_order(keys):
            entry = self._catalog.acquire(key)
            if entry is None:
                yield key, Outcome.MISS
                continue
            if entry.slot_bytes not in buffers:
                buffers[entry.slot_bytes] = memoryview(mmap.mmap(-1, entry.slot_bytes))
            get, began = Get(key, buffers[entry.slot_bytes]), time.monotonic()
            try:
                self._counters.yield_to_reads(_CHECK_PATIENCE_S)
                (outcome,) = self._serve(_Read((get,), (entry,), began, is_check=True))
                if outcome is not Outcome.LOADED:
                    self._catalog.forget([key])
                    self._counters.reads_began(1)
                    self._counters.read_done(outcome, time.monotonic() - began)
            finally:
                self._catalog.release(entry)
            yield key, outcome

    def close(self, deadline_s: float) -> bool:
        """Ends the threads after the reads under way; what is queued becomes a miss. False if a
        thread is stuck in the medium past the deadline."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _acquire(self, get: Get) -> Entry | None:
        entry = None if self._closed else self._catalog.acquire(get.key)
        if entry is not None and entry.slot_bytes != len(get.into):
            self._catalog.release(entry)
            self._catalog.forget([get.key])
            entry = None
        if entry is None:
            self._on_done(Done(get.key, Outcome.MISS))
        return entry

    def _enqueue(self, read: _Read) -> None:
        self._counters.reads_began(len(read.gets))
        self._queue.put(read)

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            outcomes = [Outcome.MISS] * len(read.gets) if self._closed else self._serve(read)
            self._finish(read, outcomes)

    def _serve(self, read: _Read) -> list[Outcome]:
        """Reads and checks; blocks that cannot be read together are tried one by one."""
        began = time.monotonic()
        places = self._codec.buffers([get.into for get in read.gets])
        try:
            got = self._store.read(read.entries[0].address, places)
        except SlabLost as error:
            self._counters.warn(f"blocks are dropped: {error}")
            self._on_lost(slab_of(read.entries[0].address))
            return [Outcome.ERROR] * len(read.gets)
        except OSError as error:
            if len(read.gets) == 1:
                self._counters.warn(f"read failed, the block is dropped: {error}")
                return [Outcome.ERROR]
            outcomes: list[Outcome] = []
            for get, entry in zip(read.gets, read.entries, strict=True):
                outcomes += self._serve(_Read((get,), (entry,), read.queued_at))
            return outcomes
        outcomes = []
        end = 0
        for get, entry, place in zip(read.gets, read.entries, places, strict=True):
            whole = end + entry.nbytes <= got
            end += len(get.into)
            right = whole and self._codec.decode(get.key, entry.nbytes, entry.tag, place, get.into)
            outcomes.append(Outcome.LOADED if right else Outcome.CORRUPT)
        if not read.is_check:
            self._counters.read(got, time.monotonic() - began)
        return outcomes

    def _finish(self, read: _Read, outcomes: Sequence[Outcome]) -> None:
        waited = time.monotonic() - read.queued_at
        for get, entry, outcome in zip(read.gets, read.entries, outcomes, strict=True):
            if outcome is Outcome.CORRUPT:
                self._counters.warn("a block is dropped: its bytes are wrong")
            if outcome in (Outcome.CORRUPT, Outcome.ERROR):
                self._catalog.forget([get.key])
            self._catalog.release(entry)
            self._counters.read_done(outcome, waited)
            self._on_done(Done(get.key, outcome))
