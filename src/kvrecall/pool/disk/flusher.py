"""The flusher: the thread that writes slabs, with a second one's help, and the index after them."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrecall.block import BlockKey, Namespace
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk.beside import SecondThread
from kvrecall.pool.disk.codec import Packer
from kvrecall.pool.disk.engine import DiskEngine
from kvrecall.pool.disk.index import MAX_ROWS, IndexRow
from kvrecall.pool.disk.reclaimer import Reclaimer
from kvrecall.pool.disk.slabs import SlabLost, slab_of
from kvrecall.pool.tier import Done, Outcome, Put, PutVerdict

_LOG = logging.getLogger(__name__)
_BATCH_BYTES = 128 << 20
_PACKED_BYTES = 32 << 20  # of a batch that is compressed, into as much memory
_WRITE_BYTES = 4 << 20  # one system call
_WRITE_BLOCKS = 512
_PATIENCE_S = 0.05  # how long one write lets reads go first
_TICK_S = 1.0
_SHRINK_S = 0.01  # between two steps towards a lowered limit
_RECENCY_S = 5.0  # how often last uses are noted


@dataclass(frozen=True, slots=True)
class _Queued:
    put: Put
    at: float


_Run = list[tuple[int, Put]]  # puts with adjacent slots


@dataclass(slots=True)
class _Writes:
    """What one thread wrote."""

    written: _Run = field(default_factory=list)
    tags: dict[BlockKey, bytes] = field(default_factory=dict)
    failed: list[tuple[_Run, OSError]] = field(default_factory=list)


class Flusher:
    """Makes puts durable: slots, bytes, fdatasync, rows, then visible.

    Group commit: all waiting puts go into one batch with one sync and one transaction. ``submit``,
    ``cancel`` and ``clear`` may be called from any thread and do not wait; everything else runs in
    the flusher's thread, which alone uses the index and the slot maps.
    """

    def __init__(self, engine: DiskEngine, on_done: Callable[[Done], None]) -> None:
        self._engine = engine
        self._catalog = engine.catalog
        self._store = engine.store
        self._index = engine.index
        self._counters = engine.counters
        self._codec = engine.codec
        self._max_queued_bytes = engine.config.max_queued_bytes
        self._reclaimer = Reclaimer(engine)
        self._on_done = on_done
        self._wake = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._pending: dict[BlockKey, bool] = {}  # queued or being written -> still wanted
        self._queued_bytes = 0
        self._namespaces: list[tuple[Namespace, int]] = []
        self._lost: set[int] = set()
        self._closing_at: float | None = None
        self._hurried = False
        self._tended = 0  # how often pins were written down
        self._broken = False
        self._recency_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="kvrecall-flush", daemon=True)
        self._second = SecondThread("kvrecall-flush-2")

    def start(self) -> None:
        self._thread.start()

    # -- any thread ------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def surplus_bytes(self) -> int:
        """Bytes on the medium above the limit, since that was lowered."""
        return self._reclaimer.surplus_bytes

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        with self._wake:
            self._namespaces.append((namespace, block_bytes))
            self._wake.notify_all()

    def submit(self, puts: Sequence[Put]) -> list[PutVerdict]:
        now = time.monotonic()
        verdicts: list[PutVerdict] = []
        with self._wake:
            for put in puts:
                if put.key in self._catalog or put.key in self._pending:
                    verdicts.append(PutVerdict.PRESENT)
                elif (
                    self._broken
                    or self._closing_at is not None
                    or (
                        self._queued_bytes
                        and self._queued_bytes + len(put.data) > self._max_queued_bytes
                    )
                ):
                    verdicts.append(PutVerdict.SHED)
                else:
                    self._queue.append(_Queued(put, now))
                    self._pending[put.key] = True
                    self._queued_bytes += len(put.data)
                    verdicts.append(PutVerdict.QUEUED)
            self._wake.notify_all()
        self._counters.add(dropped=verdicts.count(PutVerdict.SHED))
        return verdicts

    def cancel(self, keys: Sequence[BlockKey] | None) -> None:
        """Cancels puts in flight of these keys (None: all): they do not become visible."""
        with self._wake:
            for key in list(self._pending) if keys is None else keys:
                if key in self._pending:
                    self._pending[key] = False

    def report_lost(self, slab: int) -> None:
        """Reports that the file of that slab is gone."""
        with self._wake:
            self._lost.add(slab)
            self._wake.notify_all()
        self._catalog.forget_slab(slab, Cause.LOST)

    def hurry(self) -> None:
        """Wakes the thread to do its duties now."""
        with self._wake:
            self._hurried = True
            self._wake.notify_all()

    def wait_pins_noted(self, timeout_s: float) -> bool:
        """Waits until the present pins are written to the index. False if that fails."""
        with self._wake:
            goal = self._tended + 2  # the round under way may have begun before
            until = time.monotonic() + timeout_s
            while self._tended < goal and (left := until - time.monotonic()) > 0:
                self._hurried = True
                self._wake.notify_all()
                self._wake.wait(min(left, _TICK_S))
            return self._tended >= goal

    def close(self, deadline_s: float) -> bool:
        """Stores queued puts as far as ``deadline_s`` allows, then ends. False if the thread is
        stuck in the medium."""
        with self._wake:
            self._closing_at = time.monotonic() + deadline_s
            self._wake.notify_all()
        self._thread.join(deadline_s + 2.0)
        return not self._thread.is_alive()

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        batch: list[_Queued] = []
        try:
            if not self._engine.recover(lambda: self._closing_at is not None):
                return
            while True:
                batch = self._next_batch()
                self._tend()
                if batch:
                    self._store_batch(batch)
                elif self._closing_at is not None and not self._queue:
                    break
            if self._catalog.is_empty:  # no block is being stored now, and all rows were read
                self._reclaimer.reap_all()
            self._note_uses(limit=8 * MAX_ROWS)
            if left := self._catalog.pending_free:
                _LOG.warning(
                    "disk tier: closed before the rows of %d dropped blocks were deleted; they "
                    "will be found again when the folder is opened",
                    left,
                )
        finally:
            self._second.end()
            self._fail_rest(batch)

    def _fail_rest(self, batch: list[_Queued]) -> None:
        """Ends puts that are still queued; there are none unless the thread ended by a bug."""
        with self._wake:
            self._broken = True
            rest = [item for item in batch if item.put.key in self._pending]
            rest += self._queue
            self._queue.clear()
        self._finish(rest, set())

    def _next_batch(self) -> list[_Queued]:
        """The next puts; waits for one for at most a tick."""
        with self._wake:
            idle = not self._queue and self._closing_at is None and not self._lost
            if idle and not self._hurried:
                self._wake.wait(_SHRINK_S if self._reclaimer.surplus_bytes else _TICK_S)
            self._hurried = False
            batch: list[_Queued] = []
            size = 0
            most = _BATCH_BYTES if self._codec.packer is None else _PACKED_BYTES
            while self._queue and len(batch) < MAX_ROWS and size < most:
                batch.append(self._queue.popleft())
                size += len(batch[-1].put.data)
        if self._is_late():
            self._finish(batch, set())
            return []
        return batch

    def _is_late(self) -> bool:
        """Whether it should have ended already."""
        return self._closing_at is not None and time.monotonic() > self._closing_at

    def _is_late_or_cleared(self) -> bool:
        """Whether rows should not be deleted one by one: there is no time left, or at the end all
        can be deleted at once."""
        return self._is_late() or (self._closing_at is not None and self._catalog.is_empty)

    def _tend(self) -> None:
        """Small duties: namespaces, lost slabs, memory for new names, the eviction orders, deleted
        rows, last uses."""
        with self._wake:
            namespaces, self._namespaces = self._namespaces, []
            lost, self._lost = self._lost, set()
        for namespace, block_bytes in namespaces:
            self._catalog.fit(block_bytes)
            try:
                self._index.register(namespace, block_bytes)
            except sqlite3.Error as error:
                self._engine.index_failed(error)
                with self._wake:
                    self._namespaces.append((namespace, block_bytes))
        for number in lost:
            self._catalog.forget_slab(number, Cause.LOST)
            if self._store.slab(number) is not None:
                self._store.remove(number)
                self._counters.fault(
                    "a slab was deleted or truncated", SlabLost(errno.EIO, str(number))
                )
        self._catalog.settle()
        self._reclaimer.reap(self._is_late_or_cleared)
        self._note_pins()
        self._reclaimer.shrink()
        if time.monotonic() - self._recency_at > _RECENCY_S:
            self._recency_at = time.monotonic()
            self._note_uses(limit=2 * MAX_ROWS)

    def _note_uses(self, limit: int) -> None:
        """Writes last uses to the index; and the time, of which those since then are counted."""
        while limit > 0 and (uses := self._catalog.take_unnoted_uses(MAX_ROWS)):
            limit -= len(uses)
            try:
                self._index.mark_used(uses)
                self._index.note_time()
            except sqlite3.Error as error:
                self._engine.index_failed(error)
                return

    def _note_pins(self) -> None:
        """Writes pins and unpins to the index."""
        while pins := self._catalog.take_unnoted_pins(MAX_ROWS):
            try:
                self._index.mark_pinned(pins)
            except sqlite3.Error as error:
                self._catalog.return_unnoted_pins(pins)
                self._engine.index_failed(error)
                break
        if not pins:
            with self._wake:
                self._tended += 1
                self._wake.notify_all()

    # -- storing ---------------------------------------------------------------------------

    def _store_batch(self, batch: list[_Queued]) -> None:
        began = time.monotonic()
        knows = self._index.knows  # a namespace whose row could not be written waits for it
        wanted = [i.put for i in batch if self._pending[i.put.key] and knows(i.put.key)]
        here = {put.key for put in wanted if put.key in self._catalog}  # recovered meanwhile
        wanted = [put for put in wanted if put.key not in here]
        given = {put.key: put.nbytes for put in wanted}
        packer = self._codec.packer
        placed = self._place(wanted if packer is None else self._pack(packer, wanted))
        tags: dict[BlockKey, bytes] = {}
        written = self._sync(self._write(placed, tags))
        stored = self._commit(written, tags)
        nbytes, seconds = sum(len(put.data) for put in stored), time.monotonic() - began
        self._counters.add(write_bytes=nbytes, write_seconds=seconds)
        if packer is not None:
            packer.moved(nbytes, seconds, got=False)
            self._counters.add(
                given_bytes=sum(given[put.key] for put in stored),
                compressed_bytes=sum(put.nbytes for put in stored),
            )
        self._finish(batch, here.union(put.key for put in stored))

    def _pack(self, packer: Packer, puts: list[Put]) -> list[Put]:
        """Compresses them, half in each thread: each calls ``pack`` once, whose memory is the
        thread's until its next call."""
        middle = len(puts) // 2
        halves = deque([(0, puts[:middle]), (1, puts[middle:])])

        def pack_one() -> tuple[int, list[Put]]:
            place, half = halves.popleft()
            return place, packer.pack(half)

        packed = dict(self._second.both(pack_one))
        return packed[0] + packed[1]

    def _place(self, puts: Sequence[Put]) -> list[tuple[int, Put]]:
        """Slots for puts, by ascending address; puts without one are left out."""
        placed: list[tuple[int, Put]] = []
        if not self._engine.index_works():
            return placed
        by_size: dict[int, list[Put]] = {}
        for put in puts:
            by_size.setdefault(len(put.data), []).append(put)
        for slot_bytes, group in by_size.items():
            admitted = self._reclaimer.within_limits(group)
            self._reclaimer.reap()
            admitted = self._reclaimer.admitted(slot_bytes, admitted)
            self._reclaimer.make_room(slot_bytes, len(admitted))
            addresses = self._store.slot_class(slot_bytes).take(len(admitted))
            placed += zip(addresses, admitted, strict=False)
        return placed

    def _write(
        self, placed: list[tuple[int, Put]], tags: dict[BlockKey, bytes]
    ) -> list[tuple[int, Put]]:
        """Writes runs of adjacent slots; returns the written ones and adds their ``tags``. With
        several runs two threads do it, so that one encodes while the other waits for the medium."""
        runs = deque(_adjacent(placed))
        work = partial(self._write_runs, runs)
        done = (work(),) if len(runs) == 1 else self._second.both(work)
        written: list[tuple[int, Put]] = []
        for writes in done:
            written += writes.written
            tags.update(writes.tags)
            for run, error in writes.failed:
                self._medium_failed(error, run)
        return written

    def _write_runs(self, runs: deque[_Run]) -> _Writes:
        """Writes runs as long as there are any: both threads. Yields to reads before every few MiB,
        however small the runs."""
        done = _Writes()
        since = _WRITE_BYTES
        while runs:
            try:
                run = runs.popleft()
            except IndexError:  # the other thread has the last one
                break
            if since >= _WRITE_BYTES:
                self._counters.yield_to_reads(_PATIENCE_S)
                since = 0
            since += sum(len(put.data) for _, put in run)
            try:
                buffers = self._codec.encode([put for _, put in run], done.tags)
                self._store.write(run[0][0], buffers)
                done.written += run
            except OSError as error:
                done.failed.append((run, error))
        return done

    def _sync(self, written: list[tuple[int, Put]]) -> list[tuple[int, Put]]:
        """Makes the bytes durable; returns those that are."""
        durable: list[tuple[int, Put]] = []
        by_slab: dict[int, list[tuple[int, Put]]] = {}
        for address, put in written:
            by_slab.setdefault(slab_of(address), []).append((address, put))
        for run in by_slab.values():
            try:
                self._store.sync(run[0][0])
                durable += run
            except OSError as error:
                self._medium_failed(error, run)
        return durable

    def _commit(self, durable: list[tuple[int, Put]], tags: dict[BlockKey, bytes]) -> list[Put]:
        """Writes the rows and makes the blocks visible; returns the puts that are stored."""
        now = int(self._catalog.now())
        pinned = self._catalog.pinned_of([put.key for _, put in durable])
        rows = [
            IndexRow(
                address,
                put.key,
                put.parent,
                put.depth,
                put.nbytes,
                tags[put.key],
                now,
                put.tenant,
                is_pinned,
            )
            for (address, put), is_pinned in zip(durable, pinned, strict=True)
        ]
        if not rows:
            return []
        if not self._insert(rows) and (self._engine.is_index_failing or not self._insert(rows)):
            self._reclaimer.give_back([row.address for row in rows])
            return []
        if not self._index.is_in_place():
            self._reclaimer.give_back([row.address for row in rows])
            self._engine.renew_index("it was deleted or replaced")
            return []
        self._catalog.settle()  # here, and not while ``submit`` waits
        with self._wake:
            wanted = [row for row in rows if self._pending[row.key]]
            self._catalog.publish(wanted)
        self._catalog.settle()
        kept = {row.key for row in wanted}
        self._catalog.add_pending_free(row.address for row in rows if row.key not in kept)
        return [put for _, put in durable if put.key in kept]

    def _insert(self, rows: Sequence[IndexRow]) -> bool:
        """Writes rows. False if that failed; the index may have been renewed since."""
        try:
            self._engine.limit_index()
            self._index.insert(rows)
        except sqlite3.Error as error:
            self._engine.index_failed(error)
            return False
        return True

    def _finish(self, batch: Sequence[_Queued], stored: set[BlockKey]) -> None:
        now = time.monotonic()
        with self._wake:
            for item in batch:
                del self._pending[item.put.key]
                self._queued_bytes -= len(item.put.data)
        for item in batch:
            outcome = Outcome.STORED if item.put.key in stored else Outcome.SHED
            self._counters.write_done(outcome, now - item.at)
            self._on_done(Done(item.put.key, outcome))

    def _medium_failed(self, error: OSError, run: Sequence[tuple[int, Put]]) -> None:
        self._counters.fault("write failed, blocks are not stored", error)
        self._reclaimer.give_back([address for address, _ in run])
        if isinstance(error, SlabLost):
            self.report_lost(slab_of(run[0][0]))


def _adjacent(placed: Sequence[tuple[int, Put]]) -> Iterator[list[tuple[int, Put]]]:
    """Splits puts, by ascending address, into runs that one system call can write."""
    run: list[tuple[int, Put]] = []
    end = size = 0
    for address, put in placed:
        nbytes = len(put.data)
        full = len(run) == _WRITE_BLOCKS or size + nbytes > _WRITE_BYTES
        if run and (address != end or full):
            yield run
            run, size = [], 0
        run.append((address, put))
        size += nbytes
        end = address + nbytes
    if run:
        yield run
