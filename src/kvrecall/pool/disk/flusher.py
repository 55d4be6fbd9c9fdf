"""The flusher: the thread that writes slabs, with a second one's help, and the index after them."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kvrecall.block import BlockKey, Namespace
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk.codec import Packer
from kvrecall.pool.disk.engine import DiskEngine
from kvrecall.pool.disk.index import MAX_ROWS, IndexRow
from kvrecall.pool.disk.reclaimer import Reclaimer
from kvrecall.pool.disk.slabs import RUN_BYTES, SlabLost, adjacent, slab_of
from kvrecall.pool.tier import Done, Outcome, Put, PutVerdict

_LOG = logging.getLogger(__name__)
_BATCH_BYTES = 128 << 20
_PACKED_BYTES = 32 << 20  # of a batch that is compressed, into as much memory
_PATIENCE_S = 0.05  # how long one write lets reads go first
_TICK_S = 1.0
_SHRINK_S = 0.01  # between two steps towards a lowered limit
_RECENCY_S = 5.0  # how often last uses are noted


T = TypeVar("T")
Placed = list[tuple[int, Put]]  # puts with their slots


@dataclass(frozen=True, slots=True)
class _Queued:
    put: Put
    at: float


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
        self._reclaimer = Reclaimer(engine)
        self._on_done = on_done
        self._wake = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._pending: dict[BlockKey, bool] = {}  # queued or being written -> still wanted
        self._queued_bytes = 0
        self._duties: list[Callable[[], None]] = []  # of the thread, before its next batch
        self._later: list[Callable[[], None]] = []  # those that failed
        self._when_noted: list[threading.Event] = []  # set when the present pins are written down
        self._closing_at: float | None = None
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

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        self._do(partial(self._register, namespace, block_bytes))

    def _do(self, duty: Callable[[], None]) -> None:
        with self._wake:
            self._duties.append(duty)
            self._wake.notify_all()

    def submit(self, puts: Sequence[Put]) -> list[PutVerdict]:
        now = time.monotonic()
        verdicts: list[PutVerdict] = []
        with self._wake:
            for put in puts:
                if put.key in self._catalog or put.key in self._pending:
                    verdicts.append(PutVerdict.PRESENT)
                elif self._broken or self._closing_at is not None or self._is_full(len(put.data)):
                    verdicts.append(PutVerdict.SHED)
                else:
                    self._queue.append(_Queued(put, now))
                    self._pending[put.key] = True
                    self._queued_bytes += len(put.data)
                    verdicts.append(PutVerdict.QUEUED)
            self._wake.notify_all()
        self._counters.add(dropped=verdicts.count(PutVerdict.SHED))
        return verdicts

    def _is_full(self, nbytes: int) -> bool:
        queued = self._queued_bytes
        return queued > 0 and queued + nbytes > self._engine.config.max_queued_bytes

    def cancel(self, keys: Sequence[BlockKey] | None) -> None:
        """Cancels puts in flight of these keys (None: all): they do not become visible."""
        with self._wake:
            for key in list(self._pending) if keys is None else keys:
                if key in self._pending:
                    self._pending[key] = False

    def report_lost(self, slab: int) -> None:
        """Reports that the file of that slab is gone."""
        self._do(partial(self._remove_lost, slab))
        self._catalog.forget_slab(slab, Cause.LOST)

    def hurry(self) -> None:
        """Wakes the thread to do its duties now."""
        self._do(lambda: None)

    def wait_pins_noted(self, timeout_s: float) -> bool:
        """Waits until the present pins are written to the index. False if that fails."""
        noted = threading.Event()
        self._do(lambda: self._when_noted.append(noted))
        return noted.wait(timeout_s)

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
            if not self._queue and self._closing_at is None and not self._duties:
                self._wake.wait(_SHRINK_S if self._engine.surplus_bytes else _TICK_S)
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
        """Small duties: what others asked for, memory for new names, the eviction orders, deleted
        rows, last uses."""
        with self._wake:
            duties, self._duties, self._later = [*self._later, *self._duties], [], []
        for duty in duties:
            duty()
        self._catalog.settle()
        self._reclaimer.reap(self._is_late_or_cleared)
        self._note_pins()
        self._reclaimer.shrink()
        if time.monotonic() - self._recency_at > _RECENCY_S:
            self._recency_at = time.monotonic()
            self._note_uses(limit=2 * MAX_ROWS)

    def _register(self, namespace: Namespace, block_bytes: int) -> None:
        self._catalog.fit(block_bytes)
        if not self._engine.changed_index(self._index.register, namespace, block_bytes):
            self._later.append(partial(self._register, namespace, block_bytes))

    def _remove_lost(self, slab: int) -> None:
        if self._store.slab(slab) is not None:
            self._catalog.forget_slab(slab, Cause.LOST)
            try:
                self._store.remove(slab)
            except OSError as error:
                self._later.append(partial(self._remove_lost, slab))
                self._counters.fault("a slab could not be deleted", error)
                return
            lost = SlabLost(errno.EIO, str(slab))
            self._counters.fault("a slab was deleted or truncated", lost)

    def _note_uses(self, limit: int) -> None:
        """Writes last uses to the index; and the time, of which those since then are counted."""
        while limit > 0 and (uses := self._catalog.take_unnoted_uses(MAX_ROWS)):
            limit -= len(uses)
            changed = self._engine.changed_index
            if not (changed(self._index.update, "used", uses) and changed(self._index.note_time)):
                return

    def _note_pins(self) -> None:
        """Writes pins and unpins to the index."""
        while pins := self._catalog.take_unnoted_pins(MAX_ROWS):
            if not self._engine.changed_index(self._index.update, "pinned", pins):
                self._catalog.return_unnoted_pins(pins)
                break
        else:
            for noted in self._when_noted:
                noted.set()
            self._when_noted.clear()

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
        """Compresses them, half in each thread, whose memory they are in until its next call.
        Without that memory they stay as they are."""
        middle = len(puts) // 2
        halves = puts[:middle], puts[middle:]
        try:
            first, second = self._second.beside(*(partial(packer.pack, half) for half in halves))
        except (OSError, MemoryError) as error:
            self._counters.fault("no memory to compress blocks in", error)
            return puts
        return first + second

    def _place(self, puts: Sequence[Put]) -> Placed:
        """Slots for puts, by ascending address; puts without one are left out."""
        placed: Placed = []
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

    def _write(self, placed: Placed, tags: dict[BlockKey, bytes]) -> Placed:
        """Writes runs of adjacent slots; returns the written ones and adds their ``tags``. With
        several runs two threads do it, so that one encodes while the other waits for the medium.
        Each yields to reads before every few MiB, however small the runs."""
        runs = deque(adjacent(placed, lambda one: (one[0], len(one[1].data))))
        written: Placed = []
        failed: list[tuple[OSError, Placed]] = []

        def write_runs() -> None:
            since = RUN_BYTES
            while True:
                try:
                    run = runs.popleft()
                except IndexError:
                    return
                if since >= RUN_BYTES:
                    self._counters.yield_to_reads(_PATIENCE_S)
                    since = 0
                since += sum(len(put.data) for _, put in run)
                try:
                    buffers = self._codec.encode([put for _, put in run], tags)
                    self._store.write(run[0][0], buffers)
                    written.extend(run)
                except OSError as error:
                    failed.append((error, run))

        if len(runs) > 1:
            self._second.beside(write_runs, write_runs)
        else:
            write_runs()
        for error, run in failed:
            self._medium_failed(error, run)
        return written

    def _sync(self, written: Placed) -> Placed:
        """Makes the bytes durable; returns those that are."""
        durable: Placed = []
        by_slab: dict[int, Placed] = {}
        for address, put in written:
            by_slab.setdefault(slab_of(address), []).append((address, put))
        for some in by_slab.values():
            try:
                self._store.sync(some[0][0])
                durable += some
            except OSError as error:
                self._medium_failed(error, some)
        return durable

    def _commit(self, durable: Placed, tags: dict[BlockKey, bytes]) -> list[Put]:
        """Writes the rows and makes the blocks visible; returns the puts that are stored."""
        now = int(self._catalog.now())
        pinned = self._catalog.pinned_of([put.key for _, put in durable])
        rows = [
            IndexRow(at, p.key, p.parent, p.depth, p.nbytes, tags[p.key], now, p.tenant, is_pinned)
            for (at, p), is_pinned in zip(durable, pinned, strict=True)
        ]
        if not rows:
            return []
        is_in = self._insert(rows) or (not self._engine.is_index_failing and self._insert(rows))
        if is_in and not self._index.is_in_place():
            self._engine.renew_index("it was deleted or replaced")
            is_in = False
        if not is_in:
            self._reclaimer.give_back([row.address for row in rows])
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
        changed = self._engine.changed_index
        return changed(self._engine.limit_index) and changed(self._index.insert, rows)

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

    def _medium_failed(self, error: OSError, placed: Placed) -> None:
        self._counters.fault("write failed, blocks are not stored", error)
        self._reclaimer.give_back([address for address, _ in placed])
        if isinstance(error, SlabLost):
            self.report_lost(slab_of(placed[0][0]))


class SecondThread:
    """A thread that shares the work of its owner: the same one each time, as memory of threads is
    kept (``ScratchBuffers``). It starts with the first work, and is a daemon because its work may
    be stuck in the medium when the process ends."""

    def __init__(self, name: str) -> None:
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def beside(self, own: Callable[[], T], other: Callable[[], T]) -> tuple[T, T]:
        """Calls both, ``other`` in the second thread; returns their results when both are done.
        Raises what either raised. Called by one thread."""
        if self._thread.ident is None:
            self._thread.start()
        ended: Future[T] = Future()
        self._work.put((ended, other))
        try:
            first = own()
        finally:
            wait([ended])
        return first, ended.result()

    def end(self) -> None:
        """Lets the thread end. Only without work under way."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            ended, work = item
            try:
                ended.set_result(work())
            except BaseException as error:  # noqa: BLE001 - ``beside`` raises it
                ended.set_exception(error)
