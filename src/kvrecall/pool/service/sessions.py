"""What connected clients hold of the pool, and what lost ones may still be copying."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrecall.block import NAMESPACE_BYTES, SHARED, BlockKey, Namespace, Tenant
from kvrecall.pool.base import Found, Recall, RecallState, Reservation, Verdict
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.peers import Peer, families_of, mappers_of, peer_of

_NOTHING = Recall(RecallState.READY)
_MAX_TICKETS = 50_000
_MAX_NAMESPACES = 10_000
_ATTACH_S = 10.0
"""Longest time from an order to copy until the process that got it has mapped the arena."""
_UNKNOWN = frozenset({0})
"""A family nobody has seen: it may well have members."""


class Session:
    """One client's leases, reservations and tickets. Used by the service's loop only.

    A client can end only what it began itself: keys it did not reserve are ignored.
    """

    def __init__(self, pool: Pool, peer: Peer, known: set[bytes]) -> None:
        """``known``: namespaces registered with the pool by anybody; shared by all sessions."""
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

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        """Raises ConfigError."""
        if len(self.namespaces) < _MAX_NAMESPACES:
            self._pool.register(namespace, block_bytes)
            self._known.add(namespace.digest)
            self.namespaces.add(namespace.digest)

    def find(self, keys: Sequence[BlockKey]) -> Found:
        return self._pool.find(keys)

    def acquire(
        self,
        ticket: int,
        keys: Sequence[BlockKey],
        deadline_s: float,
        parent: BlockKey | None,
        tenant: Tenant = SHARED,
    ) -> None:
        if ticket in self._tickets or len(self._tickets) >= _MAX_TICKETS or self._strange(keys):
            return  # its poll will find nothing
        self._tickets[ticket] = self._pool.acquire(keys, deadline_s, parent, tenant)

    def poll(self, ticket: int) -> Recall:
        number = self._tickets.get(ticket)
        return _NOTHING if number is None else self._pool.poll(number)

    def release(self, ticket: int) -> None:
        number = self._tickets.pop(ticket, None)
        if number is not None:
            self._pool.release(number)

    def reserve(
        self,
        number: int,
        keys: Sequence[BlockKey],
        parent: BlockKey | None,
        tenant: Tenant = SHARED,
    ) -> tuple[Reservation, ...]:
        if self._strange(keys):
            return (Reservation(Verdict.REFUSED),) * len(keys)
        answers = self._pool.reserve(keys, parent, tenant)
        for key, answer in zip(keys, answers, strict=True):
            if answer.verdict is Verdict.RESERVED:
                self._filling[key] = number
        return answers

    def commit(self, keys: Iterable[BlockKey]) -> None:
        self._pool.commit([k for k in keys if self._filling.pop(k, None) is not None])

    def abandon(self, keys: Iterable[BlockKey]) -> None:
        self._pool.abandon([k for k in keys if self._filling.pop(k, None) is not None])

    def cancel(self, number: int) -> None:
        self.abandon([key for key, by in self._filling.items() if by == number])

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self._pool.touch(keys)

    def end_leases(self) -> None:
        for ticket in list(self._tickets):
            self.release(ticket)

    def end(self) -> None:
        """Gives everything back."""
        self.end_leases()
        self.abandon(list(self._filling))

    def _strange(self, keys: Sequence[BlockKey]) -> bool:
        """Whether some key is of a namespace nobody registered since the service started."""
        return not {key[:NAMESPACE_BYTES] for key in keys} <= self._known


@dataclass(slots=True)
class Ghost:
    """A session whose connection was lost while it held something."""

    session: Session
    lost_at: float
    family: frozenset[int] | None  # the client and its descendants, when last seen; None: never


@dataclass(frozen=True, slots=True)
class Evidence:
    """Who maps the arena that is neither the service nor of a connected client's family, and who
    of which dead client's family still runs. Gathered outside the loop."""

    strangers: frozenset[int]
    families: dict[bytes, frozenset[int]] = field(default_factory=dict)


class Ghosts:
    """Keeps the slots of lost sessions from being used again while somebody may copy.

    A connection can be lost while client and workers live on (a protocol error, a stall), and a
    client can die while its workers still execute the step they were given. So what a lost
    session held comes back only when

    - the client says over a new connection that its copies have ended (``settle``), or
    - its process is dead. Leases end then at once: a worker that reads a slot for a dead engine
      harms nobody. Reserved slots end when moreover nobody is left who could write to them: no
      process maps the arena but the service and the families (process and descendants) of
      connected clients, and descendants of the dead client that have not mapped the arena by
      then are gone or had ``_ATTACH_S`` to do so.

    There is no time limit for a process that lives and maps the arena: a slot too few is better
    than a wrong block.
    """

    def __init__(self, inode: int, own_pid: int) -> None:
        self._inode = inode
        self._own_pid = own_pid
        self._ghosts: dict[bytes, Ghost] = {}

    def __len__(self) -> int:
        return len(self._ghosts)

    def all(self) -> list[Ghost]:
        return list(self._ghosts.values())

    def add(self, session: Session, family: frozenset[int] | None) -> None:
        """The connection of ``session`` was lost."""
        if session.is_settled:
            return
        self._ghosts[session.token] = Ghost(session, time.monotonic(), family)
        self.end_dead_leases()

    def settle(self, token: bytes) -> None:
        ghost = self._ghosts.pop(token, None)
        if ghost is not None:
            ghost.session.end()

    def end_dead_leases(self) -> None:
        """Ends the leases of dead clients, and those of them that held nothing else. Quick."""
        for ghost in self.all():
            if not ghost.session.peer.is_alive:
                ghost.session.end_leases()
                if ghost.session.is_settled:
                    del self._ghosts[ghost.session.token]

    @property
    def need_evidence(self) -> bool:
        """Whether a dead client's reserved slots wait."""
        return any(not ghost.session.peer.is_alive for ghost in self.all())

    def gather(self, ghosts: Sequence[Ghost], living: Sequence[int]) -> Evidence:
        """Looks around; ``living`` are the processes of connected clients. Blocks for
        milliseconds; may be called from any thread with what the loop handed out."""
        dead = [ghost for ghost in ghosts if not ghost.session.peer.is_alive]
        alive = [ghost.session.peer.pid for ghost in ghosts if ghost not in dead]
        known = {self._own_pid}.union(*families_of([*living, *alive]).values())
        strangers = frozenset(mappers_of(self._inode, known))
        left = {
            ghost.session.token: _UNKNOWN
            if ghost.family is None
            else frozenset(pid for pid in ghost.family if pid not in known and _runs(pid))
            for ghost in dead
        }
        return Evidence(strangers, left)

    def sweep(self, evidence: Evidence) -> None:
        """Gives back the slots that nobody can write to any more."""
        if evidence.strangers:
            return
        now = time.monotonic()
        for token, left in evidence.families.items():
            ghost = self._ghosts.get(token)
            if ghost is None or ghost.session.peer.is_alive:
                continue
            if not left or now - ghost.lost_at > _ATTACH_S:
                ghost.session.end()
                del self._ghosts[token]


def _runs(pid: int) -> bool:
    peer = peer_of(pid)
    return peer is not None and peer.is_alive
