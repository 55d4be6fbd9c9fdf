"""What connected clients hold of the pool, and what lost ones may still be copying."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace
from kvrecall.errors import ConfigError
from kvrecall.pool.base import Recall, RecallState, Verdict
from kvrecall.pool.hints import Hint
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.link import Peer

_NOTHING = Recall(RecallState.READY)
_MAX_TICKETS = 50_000
_MAX_NAMESPACES = 10_000  # of a service, of all clients
_MAX_PARTS_BYTES = 256 << 20  # of their descriptions
_ORPHANS_S = 0.05  # between checks of whether lost clients are dead


@dataclass(frozen=True, slots=True)
class ClientView:
    """A connected process, or one whose connection was lost and whose slots are kept."""

    pid: int
    seconds: float  # since it connected, or since it was lost
    namespaces: int
    tickets: int
    reserved: int
    requests: int
    lost: bool


class Registered:
    """The namespaces that any session has registered with a pool since the service started."""

    def __init__(self, pool: Pool) -> None:
        self.digests: set[bytes] = set()
        self.sessions: WeakSet[Session] = WeakSet()
        self._pool = pool
        self._room = _MAX_PARTS_BYTES

    def add(self, namespace: Namespace, block_bytes: int) -> None:
        """Raises ConfigError if the pool cannot have it."""
        size = sum(len(name) + len(value) for name, value in namespace.parts)
        is_new = namespace.digest not in self.digests
        if is_new and (len(self.digests) >= _MAX_NAMESPACES or size > self._room):
            raise ConfigError(
                f"the pool service knows {len(self.digests)} namespaces, which is its limit; "
                "restart it"
            )
        self._pool.register(namespace, block_bytes)
        if is_new:
            self.digests.add(namespace.digest)
            self._room -= size


class Session:
    """One client's leases, reservations and tickets. Used by the service's loop only.

    A client can end only what it began itself: keys it did not reserve are ignored.
    """

    def __init__(self, pool: Pool, peer: Peer, registered: Registered, seat: int) -> None:
        """``seat``: of the processes that map the arena for this client."""
        self._pool = pool
        self._registered = registered
        registered.sessions.add(self)
        self.peer = peer
        self.seat = seat
        self.token = secrets.token_bytes(16)
        self.since = time.monotonic()
        self.namespaces: set[bytes] = set()
        self.requests = 0
        self._tickets: dict[int, int] = {}  # the client's number -> the pool's
        self._filling: dict[BlockKey, int] = {}  # -> number of the request that reserved it

    def view(self, seconds: float, lost: bool = False) -> ClientView:
        """``seconds``: since it connected, or was ``lost``."""
        counts = (len(self.namespaces), len(self._tickets), len(self._filling), self.requests)
        return ClientView(self.peer.pid, seconds, *counts, lost)

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
                return p.PlacesReply(number, p.PLACES.pack(found.tiers), found.pending)
            case p.Locate(number, keys):
                located = pool.locate(keys)
                return p.PlacesReply(number, p.PLACES.pack(located.tiers), located.pending)
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
                return p.RecallReply(number, is_ready, recall.offsets, p.PLACES.pack(recall.tiers))
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
            case p.Retire(digests):
                own = self.namespaces & {*digests}
                self.namespaces -= own
                used = set[bytes]().union(*(one.namespaces for one in self._registered.sessions))
                pool.retire(own - used)
            case p.Describe(batch):
                pool.describe(batch)
            case p.Stats(number):
                return p.StatsReply(number, pool.stats())
            case p.Register(number, digest, parts, block_bytes):
                try:
                    self._registered.add(Namespace(digest, parts), block_bytes)
                except ConfigError as error:
                    return p.Trouble(number, str(error))
                self.namespaces.add(digest)
                return p.Acknowledged(number)
            case p.Bye(number):
                self.end()
                return p.Acknowledged(number)
        return None

    def end_leases(self) -> None:
        for ticket in list(self._tickets):
            self._release(ticket)

    def end(self) -> None:
        """Gives everything back."""
        self.end_leases()
        self._abandon(list(self._filling))

    def _release(self, ticket: int) -> None:
        if (held := self._tickets.pop(ticket, None)) is not None:
            self._pool.release(held)

    def _abandon(self, keys: Iterable[BlockKey]) -> None:
        self._pool.abandon([key for key in keys if self._filling.pop(key, None) is not None])

    def _knows(self, keys: Sequence[BlockKey]) -> bool:
        """Whether all keys are of namespaces that were registered since the service started."""
        return {key[:NAMESPACE_BYTES] for key in keys} <= self._registered.digests


@dataclass(frozen=True, slots=True)
class Orphan:
    """A session whose connection was lost while it held something."""

    session: Session
    lost_at: float


class Reaper:
    """Keeps the slots of orphaned sessions from being used again while a process may copy.

    A connection can be lost while client and workers live on (a protocol error, a stall), and a
    client can die while its workers still execute the step they were given. So what an orphaned
    session holds comes back only when

    - the client says over a new connection that its copies have ended (``settle``), or
    - its process is dead. Leases end then at once: a worker that reads a slot for a dead engine
      harms no other. Reserved slots end once the client's seat could be closed: then no process
      maps the arena for it, and none can begin to.

    There is no time limit for a process that maps the arena: a slot too few is better than a wrong
    block. Owns the peers of orphaned sessions. Used by the service's loop only.
    """

    def __init__(self, close_seat: Callable[[int], bool]) -> None:
        """``close_seat``: closes a seat for good; False if a process still maps the arena in it."""
        self._close_seat = close_seat
        self._orphans: dict[bytes, Orphan] = {}
        self._wake = asyncio.Event()

    @property
    def orphans(self) -> list[Orphan]:
        """May be read by any thread."""
        return list(self._orphans.values())

    def orphan(self, session: Session) -> None:
        """The connection of ``session`` was lost."""
        if session.is_settled:
            session.peer.close()
        else:
            self._orphans[session.token] = Orphan(session, time.monotonic())
            self._wake.set()

    def settle(self, token: bytes) -> None:
        """The copies of the orphaned session ``token`` have ended."""
        orphan = self._orphans.pop(token, None)
        if orphan is not None:
            orphan.session.end()
            orphan.session.peer.close()

    def close(self) -> None:
        """After the loop has ended."""
        while self._orphans:
            self._orphans.popitem()[1].session.peer.close()

    async def run(self) -> None:
        """Ends what dead clients held, until it is cancelled."""
        while True:
            await self._wake.wait()
            for orphan in self.orphans:
                session = orphan.session
                if session.peer.is_alive:
                    continue
                session.end_leases()
                if session.is_settled or self._close_seat(session.seat):
                    self.settle(session.token)
            if not self._orphans:
                self._wake.clear()
            await asyncio.sleep(_ORPHANS_S)
