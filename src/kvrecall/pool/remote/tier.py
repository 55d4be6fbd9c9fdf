"""The remote tier: turns any ``Store`` into a well-behaved ``Tier``."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import queue
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from types import MappingProxyType
from typing import TypeVar

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName
from kvrecall.config import RemoteConfig
from kvrecall.errors import hidden
from kvrecall.pool.base import TierStats
from kvrecall.pool.changes import Cause, Watcher, Watchers
from kvrecall.pool.remote.calls import (
    BatchSize,
    CallQueue,
    CircuitBreaker,
    Existence,
    ExistenceCache,
)
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Object, Store
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import (
    Buckets,
    Done,
    Get,
    Histogram,
    Outcome,
    Put,
    PutVerdict,
    Tier,
    TierCounters,
    checksum_of,
    ended,
)

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_TURN_S = 0.03  # how long one call of the store shall take
_EDGE_SHARE = 0.25  # of a batch: the first of puts and the last of gets
_CALL_SHARE = 0.1  # of the deadline of a call that one may take, however distant the store
_NAMES_AT_ONCE = 8192
_ASKS_WAITING = 64  # lookups; beyond it blocks count as absent
_STORE_CLOSE_S = 5.0
_HOPELESS_S = 60.0
_MAX_UNREADABLE = 1024
_MAX_UNANSWERED = 8192
_MOST_REPORTED = 1 << 20  # blocks of which watchers know: some hundred MB
_SWEPT = 1024

HEADER_BYTES = 64
_VERSION, _MAGIC = 1, b"kvrc"
_HEADER = struct.Struct("<4sIQ16s16s16x")  # magic, version, nbytes, digest of the key, checksum
assert _HEADER.size == HEADER_BYTES


@dataclass(eq=False, slots=True)
class _Storing:
    """A put in flight. ``ended``: its ``Done`` was returned."""

    put: Put
    at: float
    wanted: bool = True
    ended: bool = False


@dataclass(eq=False, slots=True)
class _Fetching:
    """A get in flight."""

    get: Get
    nbytes: int
    at: float
    ended: bool = False


class RemoteTier(Tier):
    """Blocks in a store beyond this host. See ``Tier`` for the contract.

    Only this tier's threads use the store. While a call to it is overdue, and for a pause after a
    failed one, the tier is empty and accepts nothing; then it tries again. Queued operations end at
    once; memory that an overdue call may still touch stays owed until the call returns.

    The store is shared: ``clear`` forgets what this tier knows of its content, ``drop`` removes
    blocks for all hosts, and ``stats`` counts only known blocks.
    """

    name = TierName.REMOTE

    def __init__(
        self, store: Store, config: RemoteConfig, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes ownership of ``store``, to which the memory was attached."""
        self._store = store
        self._config = config
        self._ledger = TierCounters("remote")
        self._lookups = Histogram()
        self._monotonic = monotonic
        self._breaker = CircuitBreaker(monotonic)
        self._done: queue.Queue[Done | None] = queue.Queue()
        self._opening = threading.Lock()  # held while a put is prepared for an idle store
        self._lock = threading.Lock()  # guards everything below
        self._existence = ExistenceCache(monotonic)
        self._sizes: dict[bytes, int] = {}
        self._storing: dict[BlockKey, _Storing] = {}
        self._fetching: set[_Fetching] = set()
        self._asking: set[BlockKey] = set()
        self._asks = 0
        self._unreadable: dict[BlockKey, float] = {}  # there, but not got, since then
        self._unanswered: dict[BlockKey, None] = {}  # their last lookup failed, the oldest first
        self._queued_bytes = 0
        self._closed = False
        self._watchers: Watchers = ()
        self._reported: OrderedDict[BlockKey, BlockKey | None] = OrderedDict()  # and their parents
        longest_s = _CALL_SHARE * config.call_deadline_s
        self._get_size, self._put_size = (BatchSize(_TURN_S, longest_s) for _ in range(2))
        threads = max(1, config.threads)
        self._puts: CallQueue[_Storing] = CallQueue(
            "remote-put",
            threads,
            self._call_puts,
            lambda: self._put_size.nbytes,
            lambda item: item.put.nbytes,
            monotonic,
            first_share=_EDGE_SHARE,  # no byte moves while its checksums are computed
        )
        self._gets: CallQueue[_Fetching] = CallQueue(
            "remote-get",
            threads,
            self._call_gets,
            lambda: self._get_size.nbytes,
            lambda item: item.nbytes,
            monotonic,
            last_share=_EDGE_SHARE,  # nor while these are verified
        )
        self._looks: CallQueue[tuple[BlockKey, ...]] = CallQueue(
            "remote-look", 1, self._call_looks, lambda: _NAMES_AT_ONCE, len, monotonic
        )
        self._drops: CallQueue[BlockKey] = CallQueue(
            "remote-drop", 1, self._call_drops, lambda: _NAMES_AT_ONCE, lambda _: 1, monotonic
        )

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        with self._lock:
            self._sizes[namespace.digest] = block_bytes

    # -- questions -------------------------------------------------------------------------

    def contains(self, key: BlockKey) -> bool:
        return self._existence.of(key) is Existence.THERE and self._is_up()

    def is_silent(self, key: BlockKey) -> bool:
        is_open = self._existence.of(key) in (Existence.UNKNOWN, Existence.THERE)
        return is_open and (key in self._unanswered or not self._is_up())

    def depth_of(self, key: BlockKey) -> int | None:
        return self._existence.depth_of(key)

    def ask(self, keys: Sequence[BlockKey], every: bool = False) -> bool:
        with self._lock:
            if self._closed or not keys or not self._is_up():
                return True
            of, asking = self._existence.of, self._asking
            if not every and of(keys[0]) is not Existence.UNKNOWN:
                return True
            if not every and keys[0] in asking:
                return False
            unknown = [k for k in keys if of(k) is Existence.UNKNOWN]
            if every and asking.issuperset(unknown):
                return not unknown
            if self._asks >= _ASKS_WAITING:
                return True
            unknown = [k for k in unknown if k not in asking]
            asking.update(unknown)
            starts = range(0, len(unknown), _NAMES_AT_ONCE)
            parts = [tuple(unknown[at : at + _NAMES_AT_ONCE]) for at in starts]
            self._asks += len(parts)
        self._looks.add(parts)
        return False

    def _is_up(self) -> bool:
        """Whether the store may be called now."""
        limit = self._config.call_deadline_s
        stuck = self._gets.is_stuck(limit) or self._looks.is_stuck(limit)
        return not (stuck or self._breaker.is_open or self._puts.is_stuck(2 * limit))

    # -- orders ----------------------------------------------------------------------------

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        verdicts: list[PutVerdict] = []
        queued: list[_Storing] = []
        now = time.monotonic()
        takes = self._is_up() and self._config.writes
        with self._lock:
            takes = takes and not self._closed
            for put in puts:
                queued_bytes, limit = self._queued_bytes, self._config.max_queued_bytes
                is_full = queued_bytes > 0 and queued_bytes + put.nbytes > limit
                if put.key in self._storing or self._existence.of(put.key) is Existence.THERE:
                    verdicts.append(PutVerdict.PRESENT)
                elif not takes or is_full:
                    verdicts.append(PutVerdict.SHED)
                else:
                    item = self._storing[put.key] = _Storing(put, now)
                    self._queued_bytes += put.nbytes
                    queued.append(item)
                    verdicts.append(PutVerdict.QUEUED)
        self._puts.add(queued)
        if self._config.writes:
            self._ledger.add(dropped=verdicts.count(PutVerdict.SHED))
        return verdicts

    def submit_get(self, gets: Sequence[Get]) -> None:
        now = time.monotonic()
        queued: list[_Fetching] = []
        is_up = self._is_up()
        with self._lock:
            for get in gets:
                nbytes = self._sizes.get(get.key[:NAMESPACE_BYTES], 0)
                fits = nbytes > 0 and slot_bytes_of(nbytes) == len(get.into)
                dropped = self._existence.of(get.key) is Existence.DROPPED
                if self._closed or not is_up or dropped or not fits:
                    self._done.put(Done(get.key, Outcome.MISS))
                else:
                    queued.append(_Fetching(get, nbytes, now))
            self._fetching.update(queued)
        self._gets.add(queued)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        if not self._is_up():
            self._end_puts(self._puts.clear())
            self._end_gets(self._gets.clear())
        return ended(self._done, timeout_s)

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        """As in ``Tier``, but only what an operator drops, or what is corrupt, is removed from the
        store: other hosts use it, whatever expires on this one."""
        if cause not in (Cause.DROPPED, Cause.CORRUPT):
            return
        with self._lock:
            for key in keys:
                if key in self._storing:
                    self._storing[key].wanted = False
                self._existence.dropped(key)
            self._withdraw(keys, cause)
        self._drops.add(list(keys))

    def clear(self) -> None:
        with self._lock:
            for item in self._storing.values():
                item.wanted = False
                self._existence.dropped(item.put.key)
            self._existence.drop_all()
            self._withdraw(list(self._reported), Cause.CLEARED)

    # -- changes ---------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        """``watcher`` learns what this tier stores from now on, and which of it is dropped here,
        or found missing: what other hosts store and the store itself evicts is not known here."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)

    def sweep(self, watcher: Watcher) -> Iterator[None]:
        with self._lock:
            keys = list(self._reported)
        for start in range(0, len(keys), _SWEPT):
            with self._lock:
                for key in keys[start : start + _SWEPT]:
                    if key in self._reported:
                        watcher.stored(self.name, key, self._reported[key])
            yield

    def _report(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A block was stored. Under the lock."""
        if not self._watchers:
            return
        self._reported[key] = parent
        self._reported.move_to_end(key)
        for watcher in self._watchers:
            watcher.stored(self.name, key, parent)
        if len(self._reported) > _MOST_REPORTED:
            self._withdraw([next(iter(self._reported))], Cause.LOST)

    def _withdraw(self, keys: Iterable[BlockKey], cause: Cause) -> None:
        """Blocks are not there any more, or that is no longer sure. Under the lock."""
        for key in keys:
            if key in self._reported:
                del self._reported[key]
                for watcher in self._watchers:
                    watcher.removed(self.name, key, cause)

    # -- the rest --------------------------------------------------------------------------

    def stats(self) -> TierStats:
        with self._lock:
            blocks, nbytes = self._existence.blocks, self._existence.nbytes
        stats = self._ledger.stats(0, nbytes, blocks)
        if isinstance(self._store, StagedStore):
            given, stored = self._store.sizes
            stats = dataclasses.replace(stats, given_bytes=given, compressed_bytes=stored)
        return stats

    def histograms(self) -> dict[str, Buckets]:
        return self._ledger.histograms() | {"remote_lookup_seconds": self._lookups.buckets()}

    def queued(self) -> tuple[int, int]:
        with self._lock:
            return len(self._storing), len(self._fetching)

    def close(self, deadline_s: float = 10.0) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        until = time.monotonic() + deadline_s
        self._looks.clear()
        self._end_gets(self._gets.clear())
        if not self._puts.close(deadline_s):
            self._end_puts(self._puts.clear())
        closer = threading.Thread(target=self._close_store, name="kvrecall-remote-end", daemon=True)
        closer.start()  # a call that hangs may end by it
        for work in (self._gets, self._looks, self._drops):
            work.close(max(0.1, until - time.monotonic()))
        closer.join(_STORE_CLOSE_S)
        if closer.is_alive():
            _LOG.error("remote tier: the store does not close; its threads are abandoned")
        with self._lock:
            puts, gets = list(self._storing.values()), list(self._fetching)
        self._end_puts(puts)
        self._end_gets(gets)

    def _close_store(self) -> None:
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 - a store may raise anything
            self._ledger.warn(f"closing the store failed: {_text(error)}")

    # -- the threads -----------------------------------------------------------------------

    def _call_puts(self, batch: list[_Storing]) -> None:
        live = [item for item in batch if item.wanted and not item.ended]
        stored: set[BlockKey] = set()
        if live and not self._breaker.is_open:
            size = sum(item.put.nbytes for item in live)
            objects, ahead = self._prepared(live, size)
            began = time.monotonic()
            answers = self._ask_store("put", self._store.put, objects)
            puts = [item.put for item in compress(live, answers)]
            stored.update(put.key for put in puts)
            nbytes, seconds = sum(put.nbytes for put in puts), time.monotonic() - began
            self._ledger.add(write_bytes=nbytes, write_seconds=seconds)
            self._put_size.ended(size, nbytes, seconds, ahead)
        self._end_puts(batch, stored)

    def _prepared(self, items: Sequence[_Storing], nbytes: int) -> tuple[list[Object], int]:
        """Objects with checksums for a call of ``nbytes``, and the bytes of the calls ahead of it.
        For an idle store one thread at a time prepares them: several share the memory's bandwidth,
        so that the first call would begin later."""
        with self._opening:
            if not self._put_size.in_flight:
                return _objects_of(items), self._put_size.submitted(nbytes)
        return _objects_of(items), self._put_size.submitted(nbytes)

    def _end_puts(self, items: Iterable[_Storing], stored: Collection[BlockKey] = ()) -> None:
        """Ends each put that has not ended yet."""
        unwanted: list[BlockKey] = []
        now = time.monotonic()
        with self._lock:
            for item in items:
                if item.ended:
                    continue
                item.ended = True
                put = item.put
                del self._storing[put.key]
                self._queued_bytes -= put.nbytes
                is_stored = put.key in stored
                if is_stored and item.wanted:
                    self._existence.stored(put.key, put.nbytes, put.depth)
                    self._report(put.key, put.parent)
                elif is_stored:
                    unwanted.append(put.key)
                outcome = Outcome.STORED if is_stored and item.wanted else Outcome.SHED
                self._ledger.write_done(outcome, now - item.at)
                self._done.put(Done(put.key, outcome))
        self._drops.add(unwanted)

    def _call_gets(self, batch: list[_Fetching]) -> None:
        ended: dict[BlockKey, Done] = {}
        live = [item for item in batch if not item.ended]
        if live and not self._closed and not self._breaker.is_open:
            headers = [bytearray(HEADER_BYTES) for _ in live]
            objects = [
                Object(name_of(i.get.key), (memoryview(header), i.get.into[: i.nbytes]))
                for i, header in zip(live, headers, strict=True)
            ]
            size = sum(item.nbytes for item in live)
            ahead = self._get_size.submitted(size)
            began = time.monotonic()
            answers = self._ask_store("get", self._store.get, objects)
            nbytes = 0
            for item, header, is_there in zip(live, headers, answers, strict=False):
                key, data = item.get.key, item.get.into[: item.nbytes]
                if not is_there:
                    ended[key] = Done(key, Outcome.MISS)
                elif (checksum := verified(key, header, data)) is not None:
                    ended[key] = Done(key, Outcome.LOADED, checksum)
                    nbytes += item.nbytes
                else:
                    ended[key] = Done(key, Outcome.CORRUPT)
            seconds = time.monotonic() - began
            self._ledger.add(read_bytes=nbytes, read_seconds=seconds)
            self._get_size.ended(size, nbytes, seconds, ahead)
            self._remove_bad(ended)
        self._end_gets(batch, ended)

    def _remove_bad(self, ended: dict[BlockKey, Done]) -> None:
        """Records values of a wrong size, which a store reports as absent, and removes all corrupt
        ones, so that they can be stored again."""
        missed = [key for key, done in ended.items() if done.outcome is Outcome.MISS]
        believed = [key for key in missed if self._existence.of(key) is Existence.THERE]
        if believed:
            names = [name_of(key) for key in believed]
            there = self._ask_store("lookup", self._store.exists, names)
            for key in filter(self._is_hopeless, compress(believed, there)):
                ended[key] = Done(key, Outcome.CORRUPT)
        corrupt = [key for key, done in ended.items() if done.outcome is Outcome.CORRUPT]
        if corrupt:
            self._ledger.warn(f"{len(corrupt)} corrupt blocks are dropped")
            self.drop(corrupt, Cause.CORRUPT)

    def _is_hopeless(self, key: BlockKey) -> bool:
        """Whether a present block could not be fetched for a long time: its size is wrong. For a
        shorter time the host that holds it may only be unreachable."""
        now = self._monotonic()
        with self._lock:
            since = self._unreadable.setdefault(key, now)
            if len(self._unreadable) > _MAX_UNREADABLE:
                del self._unreadable[next(iter(self._unreadable))]
            if now - since < _HOPELESS_S:
                return False
            self._unreadable.pop(key, None)
            return True

    def _end_gets(
        self, items: Iterable[_Fetching], ended: Mapping[BlockKey, Done] = MappingProxyType({})
    ) -> None:
        """Ends each get that has not ended yet. One that is not among ``ended`` is a miss: the
        store failed, and is asked again what it has."""
        now = time.monotonic()
        with self._lock:
            for item in items:
                if item.ended:
                    continue
                item.ended = True
                self._fetching.discard(item)
                key = item.get.key
                done = ended.get(key) or Done(key, Outcome.MISS)
                if done.outcome is Outcome.CORRUPT:
                    self._existence.dropped(key)
                    self._withdraw((key,), Cause.CORRUPT)
                elif key not in ended:
                    self._existence.invalidate(key)
                elif done.outcome is Outcome.MISS:
                    self._existence.answered(key, False, 0)
                    self._withdraw((key,), Cause.LOST)
                self._ledger.read_done(done.outcome, now - item.at)
                self._done.put(done)

    def _call_looks(self, batch: list[tuple[BlockKey, ...]]) -> None:
        keys = list(chain.from_iterable(batch))
        answers: list[bool] = []
        if not self._closed and not self._breaker.is_open:
            names = [name_of(key) for key in keys]
            began = time.monotonic()
            answers = self._ask_store("lookup", self._store.exists, names)
            seconds = time.monotonic() - began
            self._lookups.observe(seconds)
            if answers:
                self._get_size.answered(seconds)
                self._put_size.answered(seconds)
        with self._lock:
            self._note_answered(keys, bool(answers))
            for key, is_there in zip(keys, answers, strict=False):
                nbytes = self._sizes.get(key[:NAMESPACE_BYTES], 0)
                self._existence.answered(key, is_there and nbytes > 0, nbytes)
                if not is_there:
                    self._withdraw((key,), Cause.LOST)
            self._asking.difference_update(keys)
            self._asks -= len(batch)

    def _note_answered(self, keys: Iterable[BlockKey], answered: bool) -> None:
        """Remembers which blocks the store did not tell about, also after its pause. Under the
        lock."""
        for key in keys:
            self._unanswered.pop(key, None)
            if not answered:
                self._unanswered[key] = None
        while len(self._unanswered) > _MAX_UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]

    def _call_drops(self, batch: list[BlockKey]) -> None:
        with self._lock:  # some may have been stored anew meanwhile
            gone = [key for key in batch if self._existence.of(key) is Existence.DROPPED]
            names = [name_of(key) for key in gone if key not in self._storing]
        if names and not self._closed and not self._breaker.is_open:
            self._ask_store("remove", self._store.remove, names)

    def _ask_store(
        self, what: str, call: Callable[[Sequence[T]], list[bool] | None], about: Sequence[T]
    ) -> list[bool]:
        """The store's answers; none if it failed."""
        try:
            answers = call(about)
            if answers is not None and len(answers) != len(about):
                raise ValueError(f"{len(answers)} answers to {len(about)} requests")
        except Exception as error:  # noqa: BLE001 - a store may raise anything
            self._ledger.add(errors=1)
            if self._breaker.failed():
                self._ledger.warn(
                    f"{what} failed, calls to the store pause and blocks are recomputed: "
                    f"{_text(error)}"
                )
            return []
        if self._breaker.worked():
            with self._lock:
                self._existence.invalidate_all()
                self._withdraw(list(self._reported), Cause.LOST)
            _LOG.warning("remote tier: the store answers again")
        return answers or []


def _text(error: Exception) -> str:
    return hidden(f"{type(error).__name__}: {error}")


def name_of(key: BlockKey) -> str:
    """``v1.<namespace>.<block hash>``, both in hex; the same on every host."""
    return f"v{_VERSION}.{key[:NAMESPACE_BYTES].hex()}.{key[NAMESPACE_BYTES:].hex()}"


def _objects_of(items: Iterable[_Storing]) -> list[Object]:
    objects = []
    for put in (item.put for item in items):
        header = memoryview(header_of(put.key, put.nbytes, put.compute_checksum()))
        objects.append(Object(name_of(put.key), (header, put.data[: put.nbytes])))
    return objects


def header_of(key: BlockKey, nbytes: int, checksum: bytes) -> bytearray:
    """The header of a block: key, length and checksum of the bytes that follow. Whatever a store
    returns, old, short, torn or another block's, is therefore either the requested block or a
    miss."""
    digest = hashlib.blake2b(key, digest_size=16).digest()
    return bytearray(_HEADER.pack(_MAGIC, _VERSION, nbytes, digest, checksum))


def verified(key: BlockKey, header: bytearray, data: memoryview) -> bytes | None:
    """The checksum of ``data`` if that and ``header`` are the block ``key``, whole and unchanged;
    None if not."""
    checksum = checksum_of(key, data)
    return checksum if header == header_of(key, data.nbytes, checksum) else None
