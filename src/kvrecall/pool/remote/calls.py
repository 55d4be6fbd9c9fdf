"""Calls to a store: in batches from queues, sized for short calls, paused after failures; and what
the store answered, for a short while."""

from __future__ import annotations

import enum
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvrecall.block import BlockKey

T = TypeVar("T")

_FIRST_BYTES = 8 << 20  # of a batch, before the store's speed is known
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 64 << 20
_LATENCIES = 4  # a call shall last so many times what the store takes to answer at all
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0
_FORGET = 1.2  # how fast a latency that was short once is forgotten
_OWN_S = 120.0  # what this host stored itself
_THERE_S = 10.0  # what the store answered it has
_ABSENT_S = 0.25  # what the store answered it has not; promised blocks come a moment later
_DROPPED_S = 60.0  # what was dropped here
_MAX_ENTRIES = 1 << 18


class CircuitBreaker:
    """Pauses calls to a store after a failure: open for ``_FIRST_PAUSE_S`` seconds, then twice as
    long each time, up to ``_LONGEST_PAUSE_S``; the first call after the pause is the trial.
    Thread-safe."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until = float("-inf")

    @property
    def is_open(self) -> bool:
        """Whether the store must not be called now."""
        return self._monotonic() < self._until

    def failed(self) -> bool:
        """Records a failed call. True if that begins an outage."""
        with self._lock:
            begins = self._pause_s == 0.0
            if not self.is_open:  # of several calls that fail together one counts
                self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
                self._until = self._monotonic() + self._pause_s
            return begins

    def worked(self) -> bool:
        """Records a successful call. True if that ends an outage."""
        with self._lock:
            ends = self._pause_s > 0.0
            self._pause_s = 0.0
            self._until = float("-inf")
            return ends


class BatchSize:
    """Bytes of blocks for one call: as much as the store moves in ``turn_s`` seconds.

    Blocks thus arrive one after the other instead of all at the end, and a waiting request sees
    progress. A distant store gets more at once, so that its latency is paid only a few times, and
    none gets more than it moves in ``limit_s``. Owner: one queue; its threads may call it at the
    same time.
    """

    def __init__(self, turn_s: float, limit_s: float) -> None:
        self._turn_s = turn_s
        self._limit_s = limit_s
        self._lock = threading.Lock()  # guards in_flight
        self._latency_s: float | None = None
        self.nbytes = _FIRST_BYTES
        self.in_flight = 0
        """Bytes of the calls that were submitted and have not ended."""

    def answered(self, seconds: float) -> None:
        """Records ``seconds`` of a lookup, which moves no blocks."""
        known = self._latency_s
        self._latency_s = seconds if known is None else min(seconds, _FORGET * known)

    def submitted(self, nbytes: int) -> int:
        """Records a call; returns the bytes of those in flight before it, which a store that makes
        one call at a time moves first."""
        with self._lock:
            ahead = self.in_flight
            self.in_flight += nbytes
            return ahead

    def ended(self, nbytes: int, moved: int, seconds: float, ahead: int = 0) -> None:
        """Records the end of a call of ``nbytes`` that moved ``moved`` of them and took ``seconds``
        since it was submitted. ``ahead``: what ``submitted`` returned."""
        with self._lock:
            self.in_flight -= nbytes
        if moved:
            seconds = max(seconds, 1e-6)
            turn_s = max(self._turn_s, _LATENCIES * (self._latency_s or 0.0))
            fitting = int(min((moved + ahead) * turn_s, moved * self._limit_s) / seconds)
            self.nbytes = max(_LEAST_BYTES, min(_MOST_BYTES, 2 * self.nbytes, fitting))


class CallQueue(Generic[T]):
    """Work for a store: passes added items, in order and several at a time, to ``call`` in its own
    threads. ``call`` may block for any time and must not raise.

    ``call`` may work on its items before and after it asks the store. That is hidden behind the
    store's work on another batch, except before the first batch and after the last one of a run:
    ``first_share`` and ``last_share`` make these smaller.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        call: Callable[[list[T]], None],
        limit: Callable[[], int],
        size_of: Callable[[T], int],
        monotonic: Callable[[], float],
        first_share: float = 1.0,
        last_share: float = 1.0,
    ) -> None:
        """A batch has items of up to ``limit()`` by ``size_of``, at least one. ``first_share``: of
        the limit, while no other batch is in flight; ``last_share``: of the limit, for the batch
        that empties the queue. Half a limit or less is not divided: a call has a cost of its own.
        """
        self._call = call
        self._limit = limit
        self._size_of = size_of
        self._monotonic = monotonic
        self._changed = threading.Condition()
        hides = threads > 1  # one thread's work is never behind another one's call
        self._first_share = first_share if hides else 1.0
        self._last_share = last_share if hides else 1.0
        self._queue: deque[T] = deque()
        self._queued = 0  # by size_of
        self._began: dict[int, float] = {}  # thread -> when its batch began
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvrecall-{name}-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def add(self, items: Sequence[T]) -> None:
        with self._changed:
            self._queue.extend(items)
            self._queued += sum(map(self._size_of, items))
            self._changed.notify_all()

    def clear(self) -> list[T]:
        """Removes items that no thread has started."""
        with self._changed:
            left = list(self._queue)
            self._queue.clear()
            self._queued = 0
            return left

    def is_stuck(self, for_s: float) -> bool:
        """Whether a batch has been in flight for that long."""
        if not self._began:
            return False
        since = self._monotonic() - for_s
        return any(began < since for began in list(self._began.values()))

    def close(self, deadline_s: float) -> bool:
        """Ends the threads when the queue is empty; False if that takes too long."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        until = time.monotonic() + deadline_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        me = threading.get_ident()
        while batch := self._next_batch(me):
            self._call(batch)
            self._began.pop(me, None)

    def _next_batch(self, me: int) -> list[T]:
        """Empty: the queue is closed."""
        batch: list[T] = []
        size = 0
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            limit = self._batch_limit()
            while self._queue:
                item_size = self._size_of(self._queue[0])
                if batch and size + item_size > limit:
                    break
                size += item_size
                batch.append(self._queue.popleft())
            self._queued -= size
            if batch:
                self._began[me] = self._monotonic()
        return batch

    def _batch_limit(self) -> int:
        """The size of the next batch. Under the lock."""
        limit = self._limit()
        if self._queued <= limit // 2:
            return limit
        if not self._began:
            limit = int(self._first_share * limit)
        last = int(self._last_share * min(limit, self._queued))
        if self._last_share < 1.0 and self._queued < limit + last:
            return self._queued - last
        return limit


class Existence(enum.Enum):
    """What the cache knows of a block in a store."""

    UNKNOWN = "unknown"
    THERE = "there"
    ABSENT = "absent"
    DROPPED = "dropped"  # absent, whatever the store says


@dataclass(frozen=True, slots=True)
class _Answer:
    """``depth`` is None where the block was not stored by this host."""

    existence: Existence
    until: float
    nbytes: int = 0
    depth: int | None = None


class ExistenceCache:
    """A bounded cache of answers, each good for some seconds. Not thread-safe."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._entries: OrderedDict[BlockKey, _Answer] = OrderedDict()
        self.blocks = 0  # believed to be there
        self.nbytes = 0

    def of(self, key: BlockKey) -> Existence:
        entry = self._entries.get(key)
        if entry is None or entry.until < self._monotonic():
            return Existence.UNKNOWN
        return entry.existence

    def depth_of(self, key: BlockKey) -> int | None:
        entry = self._entries.get(key)
        return None if entry is None or entry.existence is not Existence.THERE else entry.depth

    def stored(self, key: BlockKey, nbytes: int, depth: int) -> None:
        """Records that this host stored the block."""
        self._note(key, _Answer(Existence.THERE, self._monotonic() + _OWN_S, nbytes, depth))

    def answered(self, key: BlockKey, is_there: bool, nbytes: int) -> None:
        """Records an answer of the store. Blocks dropped here stay dropped."""
        if self.of(key) is Existence.DROPPED:
            return
        if is_there:
            self._note(key, _Answer(Existence.THERE, self._monotonic() + _THERE_S, nbytes))
        else:
            self._note(key, _Answer(Existence.ABSENT, self._monotonic() + _ABSENT_S))

    def dropped(self, key: BlockKey) -> None:
        """Records a dropped block: it is not found any more."""
        self._note(key, _Answer(Existence.DROPPED, self._monotonic() + _DROPPED_S))

    def drop_all(self) -> None:
        """Drops all known blocks: they are not found any more."""
        for key in [k for k, entry in self._entries.items() if entry.existence is Existence.THERE]:
            self.dropped(key)

    def invalidate(self, key: BlockKey) -> None:
        """The store did not answer for the block. What was dropped here stays dropped."""
        entry = self._entries.get(key)
        if entry is not None and entry.existence is not Existence.DROPPED:
            self._count(self._entries.pop(key), -1)

    def invalidate_all(self) -> None:
        """The store may have changed altogether."""
        kept = [(k, e) for k, e in self._entries.items() if e.existence is Existence.DROPPED]
        self._entries = OrderedDict(kept)
        self.blocks = self.nbytes = 0

    def _note(self, key: BlockKey, entry: _Answer) -> None:
        self._count(self._entries.pop(key, None), -1)
        self._entries[key] = entry
        self._count(entry, 1)
        if len(self._entries) > _MAX_ENTRIES:
            self._count(self._entries.popitem(last=False)[1], -1)

    def _count(self, entry: _Answer | None, sign: int) -> None:
        if entry is not None and entry.existence is Existence.THERE:
            self.blocks += sign
            self.nbytes += sign * entry.nbytes
