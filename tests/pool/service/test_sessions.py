"""What one client may hold, and what all may register, is bounded."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvrecall.block import NAMESPACE_BYTES, SHARED, Namespace
from kvrecall.config import PoolConfig
from kvrecall.pool import Pool
from kvrecall.pool.base import Verdict
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service import sessions
from kvrecall.pool.service.link import Peer
from kvrecall.pool.service.sessions import Registered, Session
from kvrecall.testing import chain, namespace, wait_until
from pool.inside import leaving, retired

SPACE = namespace()
KEYS = chain(SPACE, 4)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.open(PoolConfig(1 << 20)) as pool:
        yield pool


@pytest.fixture
def session(pool: Pool) -> Iterator[Session]:
    peer = Peer(os.getpid(), os.pidfd_open(os.getpid()))
    session = Session(pool, peer, Registered(pool), 1)
    assert registers(session, SPACE)
    yield session
    peer.close()


def registers(session: Session, space: Namespace) -> bool:
    reply = session.answer(p.Register(1, space.digest, space.parts, 4096))
    assert isinstance(reply, p.Acknowledged | p.Trouble)
    return isinstance(reply, p.Acknowledged)


def acquired(session: Session, ticket: int) -> int:
    """Blocks that a client gets."""
    session.answer(p.Acquire(ticket, tuple(KEYS), 1.0, None, SHARED))
    reply = session.answer(p.Poll(1, ticket))
    assert isinstance(reply, p.RecallReply)
    return len(reply.offsets)


def test_tickets_are_bounded(pool: Pool, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {one.verdict for one in pool.reserve(KEYS)} == {Verdict.RESERVED}
    pool.commit(KEYS)
    assert [acquired(session, 1), acquired(session, 1)] == [4, 4]
    assert pool.stats().leases == 4, "a number in use leases nothing more"
    monkeypatch.setattr(sessions, "_MAX_TICKETS", 2)
    assert [acquired(session, ticket) for ticket in (2, 3)] == [4, 0]
    session.answer(p.Release(1))
    assert acquired(session, 3) == 4
    session.end()
    assert pool.stats().leases == 0


def test_namespaces_are_bounded(
    pool: Pool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MAX_NAMESPACES", 2)
    assert registers(session, namespace("second"))
    assert not registers(session, namespace("third"))
    assert registers(session, SPACE), "one that is known takes no room"
    monkeypatch.undo()
    monkeypatch.setattr(sessions, "_MAX_PARTS_BYTES", 100)
    peer = session.peer
    other = Session(pool, peer, Registered(pool), 2)
    assert not registers(other, Namespace.of({"weights": "x" * 100}))
    assert registers(other, Namespace.of({"weights": "x" * 50}))
    assert not registers(other, Namespace.of({"weights": "y" * 50}))


def test_keys_of_no_namespace_are_refused(pool: Pool, session: Session) -> None:
    other = chain(namespace("other"), 2)
    reply = session.answer(p.Reserve(1, tuple(other), None, SHARED))
    assert isinstance(reply, p.ReserveReply)
    assert p.VERDICTS.unpack(reply.verdicts) == (Verdict.REFUSED,) * 2
    session.answer(p.Acquire(1, tuple(other), 1.0, None, SHARED))
    assert session.is_settled


def test_what_another_client_has_is_not_retired(pool: Pool, session: Session) -> None:
    """The last one that has other weights retires it, and whoever has them again undoes that."""
    other = Session(pool, session.peer, session._registered, 2)
    assert registers(other, SPACE)
    session.answer(p.Retire((SPACE.digest,)))
    assert not retired(pool)
    other.answer(p.Retire((SPACE.digest,)))
    assert retired(pool) == {SPACE.digest}
    assert registers(session, SPACE)
    assert not retired(pool)


def test_a_flood_of_retirements_takes_neither_memory_nor_stack(
    pool: Pool, session: Session
) -> None:
    """Each was a search, one inside the other: the loop stood still, and 300,000 such iterators end
    an interpreter."""
    other = Session(pool, session.peer, session._registered, 2)
    for number in range(100_000):
        digests = number.to_bytes(NAMESPACE_BYTES, "big"), SPACE.digest
        assert other.answer(p.Retire(digests)) is None
    assert not retired(pool)
    session.answer(p.Reserve(1, tuple(KEYS), None, SHARED))
    session.answer(p.Commit(tuple(KEYS)))
    for _ in range(3):  # weights that come and go
        session.answer(p.Retire((SPACE.digest,)))
        wait_until(lambda: len(leaving(pool)) == 4)
        assert registers(session, SPACE)
