"""Readers: threads that fetch blocks from slabs into slots of the host."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrecall.pool.disk.catalog import Catalog, Entry
from kvrecall.pool.disk.ledger import Ledger
from kvrecall.pool.disk.seal import Seal
from kvrecall.pool.disk.slabs import SlabLost, SlabStore
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Done, Get, Outcome

_MERGE_BYTES = 4 << 20
_MERGE_BLOCKS = 512  # buffers of one system call (IOV_MAX is 1024)


@dataclass(frozen=True, slots=True)
class _Read:
    """One system call: blocks in adjacent slots."""

    gets: tuple[Get, ...]
    entries: tuple[Entry, ...]
    queued_at: float


class Readers:
    """Serves gets. ``on_done`` is called for every get, from a reader or the submitting thread;
    ``on_lost`` with the number of a slab whose file is gone."""

    def __init__(
        self,
        threads: int,
        catalog: Catalog,
        store: SlabStore,
        ledger: Ledger,
        on_done: Callable[[Done], None],
        on_lost: Callable[[int], None],
        seal: Seal,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._ledger = ledger
        self._on_done = on_done
        self._on_lost = on_lost
        self._seal = seal
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
            entry = self._pin(get)
            if entry is None:
                continue
            slot = len(get.into)
            if entries:
                last = entries[-1]
                adjacent = last.address + slot_bytes_of(last.nbytes) == entry.address
                if not adjacent or size + slot > _MERGE_BYTES or len(run) == _MERGE_BLOCKS:
                    self._enqueue(_Read(tuple(run), tuple(entries), now))
                    run, entries, size = [], [], 0
            run.append(get)
            entries.append(entry)
            size += slot
        if run:
            self._enqueue(_Read(tuple(run), tuple(entries), now))

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

    def _pin(self, get: Get) -> Entry | None:
        entry = None if self._closed else self._catalog.pin(get.key)
        if entry is not None and slot_bytes_of(entry.nbytes) != len(get.into):
            self._catalog.unpin(entry)
            self._catalog.forget([get.key])
            entry = None
        if entry is None:
            self._on_done(Done(get.key, Outcome.MISS))
        return entry

    def _enqueue(self, read: _Read) -> None:
        self._ledger.reads_began(len(read.gets))
        self._queue.put(read)

    def _run(self) -> None:
        while (read := self._queue.get()) is not None:
            outcomes = [Outcome.MISS] * len(read.gets) if self._closed else self._serve(read)
            self._finish(read, outcomes)

    def _serve(self, read: _Read) -> list[Outcome]:
        """Reads and checks; blocks that cannot be read together are tried one by one."""
        began = time.monotonic()
        places = self._seal.read([get.into for get in read.gets])
        try:
            got = self._store.read(read.entries[0].address, places)
        except SlabLost as error:
            self._ledger.complain(f"blocks are dropped: {error}")
            self._on_lost(read.entries[0].address >> 40)
            return [Outcome.ERROR] * len(read.gets)
        except OSError as error:
            if len(read.gets) == 1:
                self._ledger.complain(f"read failed, the block is dropped: {error}")
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
            right = whole and self._seal.open(get.key, entry.nbytes, entry.proof, place, get.into)
            outcomes.append(Outcome.LOADED if right else Outcome.CORRUPT)
        self._ledger.read(got, time.monotonic() - began)
        return outcomes

    def _finish(self, read: _Read, outcomes: Sequence[Outcome]) -> None:
        waited = time.monotonic() - read.queued_at
        for get, entry, outcome in zip(read.gets, read.entries, outcomes, strict=True):
            if outcome is Outcome.CORRUPT:
                self._ledger.complain("a block is dropped: its bytes are wrong")
            if outcome in (Outcome.CORRUPT, Outcome.ERROR):
                self._catalog.forget([get.key])
            self._catalog.unpin(entry)
            self._ledger.read_done(outcome, waited)
            self._on_done(Done(get.key, outcome))
