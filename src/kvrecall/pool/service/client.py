"""``ServiceClient``: the pool of a node service, as an engine sees it.

It behaves as a ``Pool`` while a service is there, and as an empty pool otherwise. No call waits
longer than its deadline for a service that died, stalls or sends invalid messages.

**Which arena an offset belongs to.** A restarted service has another arena. Offsets
returned by ``poll`` and ``reserve`` belong to the arena of the next ``arena_handle``; the client
switches to another arena only in ``find``, ``locate`` or ``arena_handle``, and only if it returned
no offset since the last ``arena_handle``. An engine that sends the offsets of a step together with
one handle, as the connector does, therefore never mixes arenas.

**What a lost connection held.** The service keeps those slots until this client reports that the
copies have ended: when every ticket was released and every reservation committed or abandoned.
Blocks that were reserved on a lost connection are never committed, and until their copy has ended
they are not reserved again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from kvrecall.block import NAMESPACE_BYTES, SHARED, BlockKey, Namespace, Tenant
from kvrecall.config import RecallSettings
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import open_arena
from kvrecall.pool.base import (
    NO_ARENA,
    Absence,
    ArenaHandle,
    Found,
    Located,
    PoolClient,
    PoolStats,
    Presence,
    Recall,
    RecallState,
    Reservation,
    TierStats,
    Verdict,
    check_parents,
)
from kvrecall.pool.hints import Hint
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.link import Link, LinkLate, LinkLost
from kvrecall.pool.slots import ALIGNMENT

S = TypeVar("S", PoolStats, TierStats)
Ts = TypeVarTuple("Ts")

_LOG = logging.getLogger(__name__)
_PENDING = Recall(RecallState.PENDING)
_NOTHING = Recall(RecallState.READY)
_REFUSED = Reservation(Verdict.REFUSED)
_PRESENT = Reservation(Verdict.PRESENT)
_GREETING_S = 2.0
_CLEAR_S = 10.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 1.0
_WATCH_S = 1.0
_MOST_ASKED = 256  # questions why a block is missing that are under way
_NO_SERVICE = Absence(Presence.AWAY, "service")
_BARRED = Absence(Presence.BARRED)
_POOL_COUNTERS = tuple("lookups hits refused hints hints_believed hints_true hints_false".split())
_TIER_GAUGES = ("name", "capacity_bytes", "used_bytes", "blocks", "pinned_bytes", "full")
_TIER_COUNTERS = tuple(
    field.name for field in dataclasses.fields(TierStats) if field.name not in _TIER_GAUGES
)


class _Totals:
    """Sums of the counters over all runs of a service, as one client saw them. Histograms are those
    of the present run. Not thread-safe."""

    def __init__(self) -> None:
        self._boot = ""
        self._before = PoolStats(())  # the sums when the present life began
        self._tiers_before: dict[str, TierStats] = {}
        self.last = PoolStats(())

    def add(self, boot: str, stats: PoolStats) -> None:
        """Adds ``stats`` of the run ``boot``."""
        if boot != self._boot:
            self._boot = boot
            self._before = self.last
            self._tiers_before |= {tier.name: tier for tier in self.last.tiers}
        tiers = tuple(
            _plus(tier, self._tiers_before.get(tier.name), _TIER_COUNTERS) for tier in stats.tiers
        )
        self.last = dataclasses.replace(_plus(stats, self._before, _POOL_COUNTERS), tiers=tiers)

    def without_service(self) -> PoolStats:
        """The sums so far, with gauges at rest."""
        tiers = tuple(
            dataclasses.replace(t, used_bytes=0, blocks=0, pinned_bytes=0, full=0)
            for t in self.last.tiers
        )
        counts = {name: getattr(self.last, name) for name in _POOL_COUNTERS}
        return PoolStats(tiers, **counts, histograms=self.last.histograms, pool_up=0)


def _plus(now: S, before: S | None, counters: Sequence[str]) -> S:
    """``now`` plus the counts of ``before``."""
    if before is None:
        return now
    sums = {name: getattr(now, name) + getattr(before, name) for name in counters}
    return dataclasses.replace(now, **sums)


class _Life(Link):
    """A connection and its open operations. ``knows``: namespaces that are registered, ``refuses``:
    those of them that the service cannot hold."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self.knows: set[bytes] = set()
        self.refuses: set[bytes] = set()
        self.tickets: set[int] = set()
        self.keys: set[BlockKey] = set()
        self._file = -1  # the arena's, opened when it is first read

    @property
    def handle(self) -> ArenaHandle:
        return self.welcome.arena

    def read(self, offsets: Sequence[int], at: int, nbytes: int) -> list[bytes]:
        """See ``PoolClient``."""
        if self.is_lost:
            return []
        try:
            if self._file < 0:
                self._file = open_arena(self.handle)
            return [os.pread(self._file, nbytes, offset + at) for offset in offsets]
        except (OSError, TierError):
            return []

    def unmap(self) -> None:
        """Closes the arena, whose memory ends with its last holder."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@dataclass(eq=False, slots=True)
class _Ticket:
    life: _Life | None
    blocks: int  # that were asked for
    result: Recall | None = None


class ServiceClient:
    """A ``PoolClient``. Thread-safe. See the module for what it promises."""

    def __init__(self, path: Path, call_timeout_s: float = 0.1, stats_age_s: float = 0.0) -> None:
        """Connects if there is a service; otherwise searches for one in the background.
        ``call_timeout_s``: the longest any call waits for a reply, except ``flush``, ``clear`` and
        ``register``. ``stats_age_s``: maximum age of ``stats``."""
        self._path = path
        self._timeout_s = call_timeout_s
        self._greeting_s = max(_GREETING_S, call_timeout_s)
        self._stats_age_s = stats_age_s
        self._stats_at = float("-inf")
        self._totals = _Totals()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # guards what follows; never held over a request
        self._names: dict[bytes, tuple[Namespace, int]] = {}
        self._tickets: dict[int, _Ticket] = {}
        self._filling: dict[BlockKey, _Life] = {}
        self._unsettled: list[_Life] = []
        self._asked: dict[BlockKey, tuple[_Life, int]] = {}  # why it is missing
        self._life: _Life | None = None
        self._next: _Life | None = None
        self._unsent = False  # offsets were given out since the last ``arena_handle``
        self._said = ""
        self._closed = threading.Event()
        try:
            self._life = self._connect()
        except LinkLost as error:
            self._say(f"{error}. Every block is computed until a service runs")
        self._keeper = threading.Thread(target=self._keep, name="kvrecall-rejoin", daemon=True)
        self._keeper.start()

    @property
    def is_connected(self) -> bool:
        """Whether a service is connected, as far as known."""
        life = self._next or self._life
        return life is not None and not life.is_lost

    def arena_handle(self) -> ArenaHandle:
        """The arena of the offsets returned since the last call. ``NO_ARENA`` before there was a
        service."""
        with self._lock:
            self._adopt()
            self._unsent = False
            return NO_ARENA if self._life is None else self._life.handle

    def read(self, offsets: Sequence[int], at: int, nbytes: int) -> list[bytes]:
        with self._lock:
            life = self._life
            return [] if life is None else life.read(offsets, at, nbytes)

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        if block_bytes <= 0:
            raise ConfigError(f"block_bytes is {block_bytes}; it must be more than 0")
        with self._lock:
            before = self._names.get(namespace.digest)
            self._names[namespace.digest] = namespace, block_bytes
            life = self._current() or self._next
        reply = self._ask(
            life,
            p.Register,
            namespace.digest,
            namespace.parts,
            block_bytes,
            timeout_s=self._greeting_s,
        )
        if isinstance(reply, p.Trouble):
            with self._lock:
                if before is None:
                    del self._names[namespace.digest]
                else:
                    self._names[namespace.digest] = before
            raise ConfigError(reply.text)

    # -- recall ----------------------------------------------------------------------------

    def find(self, keys: Sequence[BlockKey]) -> Found:
        wanted = tuple(keys[: p.MAX_KEYS])
        reply = self._ask(self._adopted(), p.Find, wanted)
        if not isinstance(reply, p.PlacesReply):
            return Found(())
        tiers = tuple(filter(None, p.PLACES.unpack(reply.places)))
        is_whole = len(tiers) == len(reply.places) <= len(wanted)
        return Found(tiers if is_whole else (), reply.pending)

    def locate(self, keys: Sequence[BlockKey]) -> Located:
        wanted = tuple(keys[: p.MAX_KEYS])
        reply = self._ask(self._adopted(), p.Locate, wanted)
        if not isinstance(reply, p.PlacesReply) or len(reply.places) != len(wanted):
            return Located((None,) * len(keys))
        beyond = (None,) * (len(keys) - len(wanted))
        return Located((*p.PLACES.unpack(reply.places), *beyond), reply.pending)

    def why(self, key: BlockKey) -> Absence | None:
        with self._lock:
            life = self._current()
            asked = self._asked.pop(key, None)
        if life is None or (asked is not None and asked[0] is not life):
            return _NO_SERVICE
        if asked is None:
            if key[:NAMESPACE_BYTES] in life.refuses:
                return _BARRED
            try:
                asked = life, life.begin(p.Why, key, timeout_s=self._timeout_s)
            except (LinkLate, LinkLost):
                return _NO_SERVICE
        elif (reply := life.taken(asked[1])) is not None:
            return reply.absence if isinstance(reply, p.WhyReply) else _NO_SERVICE
        with self._lock:
            self._asked[key] = asked
            spare = [*self._asked][:-_MOST_ASKED]  # by requests that have ended since
            for old, forgotten in [self._asked.pop(one) for one in spare]:
                old.forget(forgotten)
        return None

    def acquire(
        self,
        keys: Sequence[BlockKey],
        deadline_s: float,
        parent: BlockKey | None = None,
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> int:
        check_parents(keys, parent, parents)
        number = next(self._numbers)
        with self._lock:
            life = self._current()
            self._tickets[number] = _Ticket(life, len(keys), _NOTHING if life is None else None)
            if life is not None:
                life.tickets.add(number)
        deadline_s = min(max(0.0, float(deadline_s)), p.MAX_SECONDS)
        wanted, above = _portion(keys, parents)
        self._tell(life, p.Acquire(number, wanted, deadline_s, parent, tenant, above))
        return number

    def poll(self, ticket: int) -> Recall:
        with self._lock:
            state = self._tickets[ticket]
            life = state.life
            if life is None or life is not self._current():
                state.result = _NOTHING
            if state.result is not None:
                self._unsent |= bool(state.result.offsets)
                return state.result
        reply = self._ask(life, p.Poll, ticket)
        recall = _NOTHING
        if isinstance(reply, p.RecallReply):
            if not reply.ready:
                return _PENDING
            tiers = tuple(filter(None, p.PLACES.unpack(reply.places)))
            fits = len(tiers) == len(reply.offsets) <= state.blocks
            if fits and self._are_inside(life, reply.offsets):
                recall = Recall(RecallState.READY, reply.offsets, tiers)
        with self._lock:
            if life is not self._life:
                recall = _NOTHING
            state.result = recall
            self._unsent |= bool(recall.offsets)
        return recall

    def release(self, ticket: int) -> None:
        with self._lock:
            state = self._tickets.pop(ticket, None)
            life = None if state is None else state.life
            if life is not None:
                life.tickets.discard(ticket)
        if life is not None:
            self._tell(life, p.Release(ticket))
            self._settle(life)

    def touch(
        self,
        keys: Sequence[BlockKey],
        hanging: Sequence[BlockKey] = (),
        ending: Sequence[BlockKey] = (),
        hint: Hint | None = None,
        tenant: Tenant = SHARED,
    ) -> None:
        room = p.MAX_KEYS // 3 if hanging or ending else p.MAX_KEYS
        used, beside, last = (tuple(each[:room]) for each in (keys, hanging, ending))
        self._tell(self._current(), p.Touch(used, beside, last, hint, tenant))

    def retire(self, digests: Collection[bytes]) -> None:
        self._tell(self._current(), p.Retire(tuple(digests)))

    def describe(self, batch: bytes) -> None:
        """Tells the service the KV events of an engine, which say what its blocks contain."""
        if len(batch) <= p.MAX_BATCH:
            self._tell(self._current(), p.Describe(batch))

    # -- save ------------------------------------------------------------------------------

    def reserve(
        self,
        keys: Sequence[BlockKey],
        parent: BlockKey | None = None,
        tenant: Tenant = SHARED,
        parents: Sequence[BlockKey | None] | None = None,
    ) -> tuple[Reservation, ...]:
        check_parents(keys, parent, parents)
        for digest in {key[:NAMESPACE_BYTES] for key in keys}:
            if digest not in self._names:
                raise KeyError(f"namespace {digest.hex()} was not registered")
        life = self._current()
        wanted, above = _portion(keys, parents)
        numbers: list[int] = []

        def request(number: int) -> p.Message:
            numbers.append(number)
            return p.Reserve(number, wanted, parent, tenant, above)

        reply = self._ask(life, request)
        if life is None or not isinstance(reply, p.ReserveReply):
            if numbers:  # perhaps it was done, and only the reply is late
                self._tell(life, p.Cancel(numbers[0]))
            return (_REFUSED,) * len(keys)
        answers = self._take_in(life, wanted, reply)
        return (*answers, *(_REFUSED,) * (len(keys) - len(answers)))

    def _take_in(
        self, life: _Life, keys: Sequence[BlockKey], reply: p.ReserveReply
    ) -> list[Reservation]:
        """Records reservations. Keys that are still being copied for a lost connection are
        returned: the end of that copy must not commit this one."""
        offsets = iter(reply.offsets)
        answers: list[Reservation] = []
        unwanted: list[BlockKey] = []
        with self._lock:
            usable = life is self._life
            inside = self._are_inside(life, reply.offsets)
            for key, verdict in zip(keys, p.VERDICTS.unpack(reply.verdicts), strict=False):
                if verdict is not Verdict.RESERVED:
                    answers.append(_PRESENT if verdict is Verdict.PRESENT else _REFUSED)
                    continue
                offset = next(offsets, -1)
                if not usable or offset < 0 or key in self._filling or not inside:
                    unwanted.append(key)
                    answers.append(_REFUSED)
                    continue
                self._filling[key] = life
                life.keys.add(key)
                self._unsent = True
                answers.append(Reservation(Verdict.RESERVED, offset))
        if unwanted:
            self._tell(life, p.Abandon(tuple(unwanted)))
        return answers

    def commit(self, keys: Sequence[BlockKey]) -> None:
        self._end_filling(keys, p.Commit)

    def abandon(self, keys: Sequence[BlockKey]) -> None:
        self._end_filling(keys, p.Abandon)

    def _end_filling(
        self, keys: Sequence[BlockKey], message: Callable[[tuple[BlockKey, ...]], p.Message]
    ) -> None:
        by_life: dict[_Life, list[BlockKey]] = {}
        with self._lock:
            for key in keys:
                life = self._filling.pop(key, None)
                if life is not None:
                    life.keys.discard(key)
                    by_life.setdefault(life, []).append(key)
        for life, ended in by_life.items():
            for part in _parts(ended):
                self._tell(life, message(part))
            self._settle(life)

    def flush(self, keys: Sequence[BlockKey], deadline_s: float) -> bool:
        until = time.monotonic() + min(deadline_s, p.MAX_FLUSH_S)
        life = self._current()
        for part in _parts(keys):
            left = max(0.0, until - time.monotonic())
            timeout_s = left + self._timeout_s
            reply = self._ask(life, p.Flush, part, left, timeout_s=timeout_s, slow=True)
            if not (isinstance(reply, p.Flushed) and reply.durable):
                return False
        return True

    def clear(self) -> None:
        """Drops the blocks of the namespaces registered by this client; those of other engines
        on the service stay."""
        self._ask(self._current(), p.Clear, timeout_s=_CLEAR_S, slow=True)

    # -- the rest --------------------------------------------------------------------------

    def stats(self) -> PoolStats:
        """Statistics of the whole service, all its engines together. Counters continue across
        restarts."""
        now = time.monotonic()
        life = self._current()
        if life is None:
            return self._totals.without_service()
        if now - self._stats_at < self._stats_age_s:
            return self._totals.last
        reply = self._ask(life, p.Stats)
        with self._lock:
            if isinstance(reply, p.StatsReply):
                self._stats_at = now
                self._totals.add(life.handle.boot, reply.stats)
            return self._totals.last

    def close(self) -> None:
        """Ends the connection. The caller has ended all its copies, for lost connections too;
        the service continues."""
        if self._closed.is_set():
            return
        with self._lock:
            for ended in (*self._unsettled, *self._lives()):
                ended.tickets, ended.keys = set(), set()
            self._unsent = False
        life = self._adopted()
        self._ask(life, p.Bye)
        self._closed.set()
        for life in self._lives():
            life.fail("closed")
        self._keeper.join()
        for life in self._lives():  # perhaps one that was made meanwhile
            life.close()
            with self._lock:
                life.unmap()

    # -- the connection --------------------------------------------------------------------

    def _lives(self) -> list[_Life]:
        with self._lock:
            return [life for life in (self._life, self._next) if life is not None]

    def _current(self) -> _Life | None:
        life = self._life
        return None if life is None or life.is_lost or self._closed.is_set() else life

    def _adopted(self) -> _Life | None:
        """The present connection, perhaps a new one."""
        with self._lock:
            self._adopt()
            return self._current()

    def _ask(
        self,
        life: _Life | None,
        kind: Callable[[int, *Ts], p.Message],
        *fields: *Ts,
        timeout_s: float | None = None,
        slow: bool = False,
    ) -> p.Reply | None:
        """The reply; None if there is no service, or none that answers in time."""
        if life is None:
            return None
        try:
            reply = life.ask(kind, *fields, timeout_s=timeout_s or self._timeout_s, slow=slow)
        except LinkLate:
            self._say(
                f"the pool service at {self._path} did not answer in time; continuing without it"
            )
            return None
        except LinkLost:
            return None  # the keeper says so
        self._said = ""
        return reply

    def _are_inside(self, life: _Life | None, offsets: Sequence[int]) -> bool:
        """Whether blocks at these offsets can be in the arena; if not, the service is abandoned: a
        worker must not copy what it names."""
        if life is None:
            return False
        end = life.handle.nbytes - ALIGNMENT
        if all(0 <= offset <= end and offset % ALIGNMENT == 0 for offset in offsets):
            return True
        life.fail("the service names bytes outside of its arena")
        return False

    def _tell(self, life: _Life | None, message: p.Message) -> None:
        """Nothing if ``life`` is over."""
        if life is not None and not life.is_lost:
            with contextlib.suppress(LinkLost):
                life.tell(message, self._timeout_s)

    def _adopt(self) -> None:
        """Switches to a new connection if there is one and no caller could mix the arenas."""
        if self._next is not None and not (self._unsent or self._closed.is_set()):
            old, self._life, self._next = self._life, self._next, None
            if old is not None:
                old.close()
                old.unmap()
                self._unsettled.append(old)
            boot = self._life.handle.boot
            self._unsettled = [lost for lost in self._unsettled if lost.handle.boot == boot]
        for lost in list(self._unsettled):
            self._settle(lost)

    def _settle(self, life: _Life) -> None:
        """Tells the service if the copies of a lost connection have ended."""
        with self._lock:
            current = self._current()
            if current is None or life not in self._unsettled or life.tickets or life.keys:
                return
            self._unsettled.remove(life)
        self._tell(current, p.Settle(life.welcome.token))

    def _connect(self) -> _Life:
        """A new connection that knows all namespaces. Raises LinkLost."""
        last = self._next or self._life
        before = NO_ARENA if last is None else last.handle
        life = _Life.open(self._path, self._greeting_s, before)
        try:
            while missing := self._names.keys() - life.knows:
                for digest in missing:
                    namespace, nbytes = self._names[digest]
                    reply = life.ask(
                        p.Register, digest, namespace.parts, nbytes, timeout_s=self._greeting_s
                    )
                    if isinstance(reply, p.Trouble):
                        _LOG.error("kvrecall: the pool service refuses blocks: %s", reply.text)
                        life.refuses.add(digest)
                    life.knows.add(digest)
        except LinkLate as error:
            life.close()
            raise LinkLost(f"the service at {self._path} does not answer") from error
        except LinkLost:
            life.close()
            raise
        return life

    def _keep(self) -> None:
        """Thread: notices the end of a connection, and makes the next one."""
        pause = _FIRST_PAUSE_S
        while not self._closed.is_set():
            life = self._next or self._life
            if life is not None and not life.is_lost:
                if not life.wait_lost(_WATCH_S):
                    continue
                with self._lock:
                    life.unmap()
                if not self._closed.is_set():
                    self._say(
                        f"the pool service at {self._path} is lost ({life.why_lost}); "
                        "every block is computed until it is back"
                    )
                continue
            try:
                fresh = self._connect()
            except LinkLost as error:
                self._say(str(error))
                self._closed.wait(pause)
                pause = min(_LONGEST_PAUSE_S, 2 * pause)
                continue
            pause = _FIRST_PAUSE_S
            with self._lock:
                if self._names.keys() - fresh.knows:  # registered while it connected
                    fresh.close()
                    continue
                stale, self._next = self._next, fresh
            if stale is not None:
                stale.close()
            self._said = ""
            _LOG.warning("kvrecall: joined the pool service at %s", self._path)

    def _say(self, text: str) -> None:
        """Logs a message once, until it changes."""
        if text != self._said:
            self._said = text
            _LOG.warning("kvrecall: %s", text)


def _portion(
    keys: Sequence[BlockKey], parents: Sequence[BlockKey | None] | None
) -> tuple[tuple[BlockKey, ...], tuple[BlockKey | None, ...] | None]:
    """As many keys as fit into a message, with their parents."""
    if parents is None:
        return tuple(keys[: p.MAX_KEYS]), None
    return tuple(keys[: p.MAX_KEYS // 2]), tuple(parents[: p.MAX_KEYS // 2])


def _parts(keys: Sequence[BlockKey]) -> Iterator[tuple[BlockKey, ...]]:
    """Keys in portions of a message, at least one portion."""
    for start in range(0, max(1, len(keys)), p.MAX_KEYS):
        yield tuple(keys[start : start + p.MAX_KEYS])


_STATS_AGE_S = 0.5
"""An engine requests statistics in every step; readers need them less often."""


def open_pool(settings: RecallSettings) -> PoolClient:
    """The engine's own pool (backend ``embedded``), or a client of the node's pool (``service``).
    Raises ConfigError or TierError if the former cannot be opened. The latter behaves as an empty
    pool while there is no service."""
    service = settings.service
    if service is None:
        return Pool.open(settings.pool)
    return ServiceClient(service.socket, service.call_timeout_s, _STATS_AGE_S)
