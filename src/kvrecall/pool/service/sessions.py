"""What connected clients hold of the pool, and what lost ones may still be copying."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace
from kvrecall.errors import ConfigError
from kvrecall.pool.base import Recall, RecallState, Verdict
from kvrecall.pool.hints import Hint
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.peers import Peer, families_of, mappers_of, peer_of

_LOG = logging.getLogger(__name__)
_NOTHING = Recall(RecallState.READY)
_MAX_TICKETS = 50_000
_MAX_NAMESPACES = 10_000
_ATTACH_S = 10.0
"""Longest time from an order to copy until the process that got it has mapped the arena."""
_ORPHANS_S = 0.05  # between checks of whether lost clients are dead
_FAMILIES_S = 30.0  # workers are there before anything is saved, so families hardly change
_LONGEST_PAUSE_S = 2.0  # between looks at who maps the arena


class Session:
    """One client's leases, reservations and tickets. Used by the service's loop only.

    A client can end only what it began itself: keys it did not reserve are ignored.
    """

    def __init__(self, pool: Pool, peer: Peer, known: set[bytes]) -> None:
        """``known``: namespaces registered with the pool by any session, which all share."""
        self._pool = pool
        self._known = known
        self.peer = peer
        self.token = secrets.token_bytes(16)
        self.since = time.monotonic()
        self.namespaces: set[bytes] = set()
        self.requests = 0
        self._tickets: dict[int, int] = {}  # the client's number -> the pool's
        self._filling: dict[BlockKey, int] = {}  # -> number of the request that reserved it

    @property
    def tickets(self) -> int:
        return len(self._tickets)

    @property
    def reserved(self) -> int:
        return len(self._filling)

    @property
    def is_settled(self) -> bool:
        """Whether it holds nothing."""
        return not (self._tickets or self._filling)

    def answer(self, request: p.Request) -> p.Message | None:
        """Asks the pool, which answers at once. None if the request has no reply."""
        pool = self._pool
        match request:
            case p.Find(number, keys):
                found = pool.find(keys)
                return p.FoundReply(number, p.TIERS.pack(found.tiers), found.pending)
            case p.Locate(number, keys):
                located = pool.locate(keys)
                return p.LocatedReply(number, p.PLACES.pack(located.tiers), located.pending)
            case p.Why(number, key):
                return p.WhyReply(number, pool.why(key))
            case p.Acquire(ticket, keys):
                is_new = ticket not in self._tickets and len(self._tickets) < _MAX_TICKETS
                if is_new and self._knows(keys):  # if not, its poll will find nothing
                    self._tickets[ticket] = pool.acquire(
                        keys, request.deadline_s, request.parent, request.tenant, request.parents
                    )
            case p.Poll(number, ticket):
                held = self._tickets.get(ticket)
                recall = _NOTHING if held is None else pool.poll(held)
                is_ready = recall.state is RecallState.READY
                return p.RecallReply(number, is_ready, recall.offsets, p.TIERS.pack(recall.tiers))
            case p.Release(ticket):
                self._release(ticket)
            case p.Touch(keys, hanging, ending, hint, tenant):
                pool.touch(keys, hanging, ending, hint and Hint(*hint), tenant)
            case p.Reserve(number, keys):
                if not self._knows(keys):
                    return p.ReserveReply(
                        number, p.VERDICTS.pack([Verdict.REFUSED] * len(keys)), ()
                    )
                answers = pool.reserve(keys, request.parent, request.tenant, request.parents)
                given = {
                    key: answer.offset
                    for key, answer in zip(keys, answers, strict=True)
                    if answer.verdict is Verdict.RESERVED
                }
                self._filling.update(dict.fromkeys(given, number))
                verdicts = p.VERDICTS.pack([answer.verdict for answer in answers])
                return p.ReserveReply(number, verdicts, tuple(given.values()))
            case p.Commit(keys):
                pool.commit([key for key in keys if self._filling.pop(key, None) is not None])
            case p.Abandon(keys):
                self._abandon(keys)
            case p.Cancel(number):
                self._abandon([key for key, by in self._filling.items() if by == number])
            case p.Stats(number):
                return p.StatsReply(number, pool.stats())
            case p.Register(number, digest, parts, block_bytes):
                if len(self.namespaces) < _MAX_NAMESPACES:
                    try:
                        pool.register(Namespace(digest, parts), block_bytes)
                    except ConfigError as error:
                        return p.Trouble(number, str(error))
                    self._known.add(digest)
                    self.namespaces.add(digest)
                return p.Done(number)
            case p.Bye(number):
                self.end()
                return p.Done(number)
        return None

    def end_leases(self) -> None:
        for ticket in list(self._tickets):
            self._release(ticket)

    def end(self) -> None:
        """Gives everything back."""
        self.end_leases()
        self._abandon(list(self._filling))

    def _release(self, ticket: int) -> None:
        held = self._tickets.pop(ticket, None)
        if held is not None:
            self._pool.release(held)

    def _abandon(self, keys: Iterable[BlockKey]) -> None:
        self._pool.abandon([key for key in keys if self._filling.pop(key, None) is not None])

    def _knows(self, keys: Sequence[BlockKey]) -> bool:
        """Whether all keys are of namespaces that were registered since the service started."""
        return {key[:NAMESPACE_BYTES] for key in keys} <= self._known


@dataclass(slots=True)
class Orphan:
    """A session whose connection was lost while it held something. ``family``: the client and its
    descendants when last seen; None: never seen."""

    session: Session
    lost_at: float
    family: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class _Evidence:
    """``families`` of connected clients by token. ``strangers``: who maps the arena and is neither
    the service nor of the family of a living client. ``running``: the processes of each dead
    client's family that still run; None if that family was never seen."""

    families: dict[bytes, frozenset[int]]
    strangers: Collection[int]
    running: dict[bytes, Collection[int] | None]


class Reaper:
    """Keeps the slots of orphaned sessions from being used again while a process may copy.

    A connection can be lost while client and workers live on (a protocol error, a stall), and a
    client can die while its workers still execute the step they were given. So what an orphaned
    session holds comes back only when

    - the client says over a new connection that its copies have ended (``settle``), or
    - its process is dead. Leases end then at once: a worker that reads a slot for a dead engine
      harms no other. Reserved slots end when moreover no process is left that could write to
      them: no process maps the arena but the service and the families (process and descendants)
      of living clients, and descendants of the dead client that have not mapped the arena by
      then are gone or had ``_ATTACH_S`` to do so.

    There is no time limit for a process that lives and maps the arena: a slot too few is better
    than a wrong block. Used by the service's loop only.
    """

    def __init__(self, inode: int, own_pid: int, sessions: Callable[[], list[Session]]) -> None:
        """``inode``: of the arena. ``sessions``: those of open connections."""
        self._inode = inode
        self._own_pid = own_pid
        self._sessions = sessions
        self._orphans: dict[bytes, Orphan] = {}
        self._families: dict[bytes, frozenset[int]] = {}
        self._looked_at = 0.0
        self._pause_s = 0.0
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "kvrecall-reaper")

    @property
    def orphans(self) -> list[Orphan]:
        """May be read by any thread."""
        return list(self._orphans.values())

    def reserved(self, session: Session) -> None:
        """``session`` has reserved slots: its family must be known if it dies."""
        if session.token not in self._families:
            self._wake.set()

    def orphan(self, session: Session) -> None:
        """The connection of ``session`` was lost."""
        family = self._families.pop(session.token, None)
        if not session.is_settled:
            self._orphans[session.token] = Orphan(session, time.monotonic(), family)
            self._pause_s = 0.0
            self._end_dead_leases()
            self._wake.set()

    def settle(self, token: bytes) -> None:
        """The copies of the orphaned session ``token`` have ended."""
        orphan = self._orphans.pop(token, None)
        if orphan is not None:
            orphan.session.end()

    async def run(self) -> None:
        """Looks at processes when there is reason to, until it is cancelled."""
        while True:
            tick = _ORPHANS_S if self._orphans else _FAMILIES_S
            # Python 3.11's wait_for swallows a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick):
                    await self._wake.wait()
            self._wake.clear()
            self._end_dead_leases()
            sessions = self._sessions()
            dead = [orphan for orphan in self.orphans if not orphan.session.peer.is_alive]
            unseen = any(s.reserved and s.token not in self._families for s in sessions)
            due = self._looked_at + (self._pause_s if dead else _FAMILIES_S) < time.monotonic()
            if unseen or (due and (dead or sessions)):
                await self._look(sessions, dead)

    def close(self) -> None:
        """Waits for its thread."""
        self._thread.shutdown()

    async def _look(self, sessions: Sequence[Session], dead: Sequence[Orphan]) -> None:
        living = {session.token: session.peer.pid for session in sessions}
        lost = [o.session.peer.pid for o in self.orphans if o not in dead]
        loop = asyncio.get_running_loop()
        try:
            seen = await loop.run_in_executor(self._thread, self._gather, living, lost, dead)
        except OSError as error:  # no files left, say: what is not seen is not dead
            _LOG.warning("pool service: cannot inspect processes: %s", error.strerror)
            await asyncio.sleep(_ORPHANS_S)
            return
        self._looked_at = time.monotonic()
        connected = {session.token for session in self._sessions()}
        self._families = {t: family for t, family in seen.families.items() if t in connected}
        if dead:
            self._sweep(seen)
            self._pause_s = min(_LONGEST_PAUSE_S, _ORPHANS_S + 2 * self._pause_s)

    def _gather(
        self, living: dict[bytes, int], lost: Sequence[int], dead: Sequence[Orphan]
    ) -> _Evidence:
        """Thread; takes milliseconds. ``living``: processes of connected clients. ``lost``: of
        living clients without a connection."""
        families = families_of({*living.values(), *lost})
        known = {self._own_pid}.union(*families.values())
        return _Evidence(
            {token: frozenset(families[pid]) for token, pid in living.items()},
            mappers_of(self._inode, known) if dead else (),
            {
                orphan.session.token: None
                if orphan.family is None
                else [pid for pid in orphan.family if pid not in known and _runs(pid)]
                for orphan in dead
            },
        )

    def _sweep(self, seen: _Evidence) -> None:
        """Gives back the slots to which no process can write any more."""
        if seen.strangers:
            return
        now = time.monotonic()
        for token, running in seen.running.items():
            orphan = self._orphans.get(token)
            if orphan is None or orphan.session.peer.is_alive:
                continue
            if running == [] or now - orphan.lost_at > _ATTACH_S:
                self.settle(token)

    def _end_dead_leases(self) -> None:
        """Ends the leases of dead clients, and those of them that held nothing else. Quick."""
        for orphan in self.orphans:
            if not orphan.session.peer.is_alive:
                orphan.session.end_leases()
                if orphan.session.is_settled:
                    del self._orphans[orphan.session.token]


def _runs(pid: int) -> bool:
    peer = peer_of(pid)
    return peer is not None and peer.is_alive
