"""What the two ends of the pool service's socket may send each other: anything in right frames."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.hostile import fuzz, hostile, outcome

from kvrecall import __version__
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Verdict
from kvrecall.pool.hints import Hint
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.admin import Resize, ServiceAdmin, Stat, command_of, model_of
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.link import Link, LinkLost
from kvrecall.testing import chain
from kvrecall.testing.tier_contract import NAMESPACE
from pool.service.test_server import fake_service

KEYS = chain(NAMESPACE, 3)
PACK = msgspec.msgpack.encode
REQUESTS = [
    PACK(one)
    for one in (
        p.Register(1, NAMESPACE.digest, NAMESPACE.parts, 5000),
        p.Acquire(2, tuple(KEYS), 1.0, None, p.SHARED, (None, KEYS[0], KEYS[1])),
        p.Reserve(3, tuple(KEYS), KEYS[0], p.SHARED),
        p.Touch(tuple(KEYS), hint=Hint(True, 5.0, None)),
        p.Flush(4, tuple(KEYS), 1.0),
        p.Settle(b"t" * 16),
        p.Administer(5, "Resize", PACK(Resize(1 << 20, None))),
    )
]


@fuzz()
@given(hostile(*REQUESTS, PACK(p.Hello(p.PROTOCOL, __version__))))
def test_a_request_is_read_or_refused(body: bytes) -> None:
    outcome(p.read_hello, body, p.ProtocolError)
    read = outcome(p.read_request, body, p.ProtocolError)
    if isinstance(read, p.Acquire | p.Reserve) and read.parents is not None:
        assert len(read.parents) == len(read.keys)
    if isinstance(read, p.Administer):
        outcome(lambda _: command_of(read), body, p.ProtocolError)


@fuzz()
@given(st.lists(hostile(*map(p.frame_of, [p.Release(7), p.Acknowledged(1)])), max_size=5))
def test_a_stream_is_cut_into_the_frames_it_holds(chunks: list[bytes]) -> None:
    framer, taken = p.Framer(), []

    def read(_: bytes) -> None:
        for chunk in chunks:
            framer.feed(chunk)
            taken.extend(framer.take())

    stream = b"".join(chunks)
    outcome(read, stream, p.ProtocolError)
    assert stream.startswith(b"".join(len(one).to_bytes(4, "little") + one for one in taken))


@fuzz(100)
@given(hostile(b'{"architectures": ["A", "B"], "x": [1]}'), st.text(max_size=30))
def test_a_model_s_name_can_be_printed(config: bytes, text: str) -> None:
    parts = [("architecture", config.decode("latin-1")), ("model", text), ("dtype", text)]
    assert outcome(lambda _: model_of(parts), config).isprintable()


# -- a service that answers anything --------------------------------------------------------

NUMBERS = st.integers(-1, 1 << 20) | st.sampled_from([0, 4096, 8192, 1 << 63, -(1 << 62)])
CODES = st.binary(max_size=4) | st.lists(st.integers(0, 5), max_size=4).map(bytes)
BODIES: dict[type[Any], tuple[Any, ...]] = {
    p.Acknowledged: (),
    p.Trouble: (st.text(max_size=9),),
    p.PlacesReply: (CODES, st.booleans()),
    p.RecallReply: (st.booleans(), st.lists(NUMBERS, max_size=5).map(tuple), CODES),
    p.ReserveReply: (CODES, st.lists(NUMBERS, max_size=4).map(tuple)),
    p.Flushed: (st.booleans(),),
    p.Administered: (hostile(PACK({"host": 1, "disk": None}), PACK(Stat())),),
}
REPLIES = st.one_of(
    *(st.tuples(st.just(kind), st.tuples(*fields)) for kind, fields in BODIES.items()),
    st.tuples(st.none(), hostile(PACK(p.Flushed(1, True)))),
)


SILENT = (4, 6, 8, 9, 10, 11, 15)  # tags of requests without a reply


@pytest.fixture(scope="module")
def lies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Any]]]:
    """The socket of a service whose replies are taken from the list, and that list."""
    path, replies = tmp_path_factory.mktemp("socket") / "pool.sock", []
    path.parent.chmod(0o700)
    arena = Arena.create(1 << 20)
    welcome = p.frame_of(p.Welcome(p.PROTOCOL, __version__, b"t" * 16, arena.handle()))

    def answers(body: bytes) -> Iterator[bytes]:
        request = msgspec.msgpack.decode(body)
        if request[0] == 1:
            yield welcome
        elif request[0] not in SILENT:
            kind, fields = replies.pop(0) if replies and request[0] != 16 else (p.Acknowledged, ())
            made = fields if kind is None else msgspec.msgpack.encode(kind(request[1], *fields))
            yield len(made).to_bytes(4, "little") + made

    with fake_service(path, answers):
        yield path, replies
    del arena


@fuzz(50)
@given(st.lists(REPLIES, min_size=4, max_size=6))
@example([(None, b"\x92\x42\x00")] * 4)
@example([(p.RecallReply, (True, (0, 4096, 8192, 12288), bytes(4)))] * 4)
def test_whatever_a_service_answers_it_is_a_miss_or_fits(
    lies: tuple[Path, list[Any]], given_replies: list[Any]
) -> None:
    path, replies = lies
    replies[:] = given_replies
    client = ServiceClient(path, call_timeout_s=1.0)
    end = client.arena_handle().nbytes
    try:
        client._names[NAMESPACE.digest] = NAMESPACE, 5000
        assert client.find(KEYS).blocks <= len(KEYS)
        assert len(client.locate(KEYS).tiers) == len(KEYS)
        offsets = [one.offset for one in client.reserve(KEYS) if one.verdict is Verdict.RESERVED]
        ticket = client.acquire(KEYS, 1.0)
        recall = client.poll(ticket)
        assert len(recall.offsets) == len(recall.tiers) <= len(KEYS)
        for offset in (*offsets, *recall.offsets):
            assert offset % 4096 == 0
            assert 0 <= offset < end
        client.release(ticket)
        client.abandon(KEYS)
        client.flush(KEYS, 0.1)
        client.stats()
    finally:
        replies.clear()
        client.close()


@fuzz(60)
@given(REPLIES)
@example((p.Acknowledged, ()))
@example((p.Administered, (b"\xa1\xff",)))
@example((p.Administered, (b"\x91" * 5000,)))
def test_what_is_no_result_of_a_command_is_an_error(
    lies: tuple[Path, list[Any]], reply: Any
) -> None:
    path, replies = lies
    replies[:] = [reply]
    with ServiceAdmin(path) as admin:
        for command in (Stat(), Resize(None, None)):
            with contextlib.suppress(TierError, ConfigError):
                admin.do(command)


@pytest.mark.parametrize("reply", [p.Acknowledged(0), p.Trouble(0, "no")])
def test_a_greeting_of_another_kind_is_no_service(tmp_path: Path, reply: p.Reply) -> None:
    path = tmp_path / "pool.sock"
    answers = fake_service(path, lambda _: [p.frame_of(reply)])
    with answers, pytest.raises(LinkLost, match="does not greet"):
        Link.open(path, 1.0)
