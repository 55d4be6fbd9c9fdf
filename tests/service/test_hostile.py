"""Nonsense on the socket costs its own connection; strangers are refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall import __version__
from kvrecall.config import PoolConfig
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.base import Verdict
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.link import Link, LinkLost
from kvrecall.pool.service.server import Patience, Terms
from kvrecall.pool.service.serving import ServiceThread, SocketLock
from kvrecall.testing.blocks import chain, namespace

NAMESPACE = namespace("hostile")
MIB = 1 << 20
HELLO = p.frame_of(p.Hello(p.PROTOCOL, __version__))
KEYS = tuple(chain(NAMESPACE, 3))
"""What hostile clients know of; what they reserve stays theirs while this process lives."""
OWN = tuple(chain(NAMESPACE, 3, "own"))


@pytest.fixture(scope="module")
def path() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvrecall-test-"))
    path = folder / "pool.sock"
    service = ServiceThread(PoolConfig(16 * MIB), path, Terms(Patience(0.4, 0.4)))
    yield path
    service.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def healthy(path: Path) -> Iterator[ServiceClient]:
    client = ServiceClient(path, call_timeout_s=5.0)
    client.register(NAMESPACE, 5000)
    yield client
    assert client._life is not None
    assert not client._life.is_over, "the healthy client lost its connection"
    client.close()


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(str(path))
    return sock


def is_ended(sock: socket.socket) -> bool:
    """Whether the service ends the connection."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def still_serves(client: ServiceClient) -> bool:
    answers = client.reserve(OWN)
    client.abandon(OWN)
    return {answer.verdict for answer in answers} == {Verdict.RESERVED}


NUMBERS = st.integers(-(2**63), 2**64 - 1)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | NUMBERS
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=80),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)
TAGS = st.sampled_from([*range(1, 17), *range(32, 36), *range(64, 70)])
KEY_LISTS = st.lists(st.sampled_from(KEYS) | st.binary(max_size=100), max_size=6)
BODIES = st.one_of(
    st.binary(min_size=1, max_size=300),
    VALUES.map(msgspec.msgpack.encode),
    st.tuples(TAGS, st.lists(VALUES | KEY_LISTS, max_size=5)).map(
        lambda made: msgspec.msgpack.encode([made[0], *made[1]])
    ),
    st.tuples(TAGS, st.integers(0, 9), KEY_LISTS, st.floats(0, 1) | st.none()).map(
        lambda made: msgspec.msgpack.encode(list(made))
    ),
)
STREAMS = st.lists(
    st.one_of(
        BODIES.map(lambda body: struct.pack("<I", len(body)) + body),
        st.binary(max_size=200),
        st.integers(0, 2**32 - 1).map(lambda length: struct.pack("<I", length)),
    ),
    max_size=6,
).map(b"".join)


@settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)
@given(stream=STREAMS, greets=st.booleans())
def test_nonsense_costs_its_own_connection_only(
    path: Path, healthy: ServiceClient, stream: bytes, greets: bool
) -> None:
    with connect(path) as sock:
        try:
            sock.sendall((HELLO if greets else b"") + stream)
            sock.shutdown(socket.SHUT_WR)
            assert is_ended(sock)
        except ConnectionError:
            pass  # it was faster
    assert still_serves(healthy)


@pytest.mark.parametrize("length", [0, p.MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_lengths_that_are_not_allowed(path: Path, healthy: ServiceClient, length: int) -> None:
    with connect(path) as sock:
        sock.sendall(HELLO + struct.pack("<I", length))
        assert is_ended(sock)
    assert still_serves(healthy)


@pytest.mark.parametrize("head", [b"", HELLO[:3], HELLO + b"\x10\x00\x00\x00half"])
def test_half_messages_and_silence_are_given_up(
    path: Path, healthy: ServiceClient, head: bytes
) -> None:
    with connect(path) as sock:
        began = time.monotonic()
        sock.sendall(head)
        assert is_ended(sock)
        assert time.monotonic() - began < 5.0
    assert still_serves(healthy)


def test_slow_loris_does_not_keep_a_message_open(path: Path, healthy: ServiceClient) -> None:
    with connect(path) as sock:
        sock.sendall(HELLO + struct.pack("<I", 1000))
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 10.0:
                sock.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 5.0
    assert still_serves(healthy)


def test_a_client_that_does_not_read_is_given_up(path: Path, healthy: ServiceClient) -> None:
    ask = p.frame_of(p.Stats(1)) * 500
    with connect(path) as sock:
        sock.sendall(HELLO)
        sock.settimeout(2.0)
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(2000):
                sock.sendall(ask)
            pytest.fail("the service took it all")
        assert still_serves(healthy)
    assert still_serves(healthy)


def test_a_client_cannot_end_what_another_began(path: Path, healthy: ServiceClient) -> None:
    other = ServiceClient(path, call_timeout_s=5.0)
    other.register(NAMESPACE, 5000)
    before = healthy.stats().reserved
    assert {answer.verdict for answer in healthy.reserve(OWN)} == {Verdict.RESERVED}
    link = other._life.link if other._life else None
    assert link is not None
    link.tell(p.Commit(OWN), 1.0)
    link.tell(p.Abandon(OWN), 1.0)
    link.tell(p.Settle(b"0" * 16), 1.0)
    assert other.find(OWN).blocks == 0
    assert other.stats().reserved == before + 3
    healthy.abandon(OWN)
    assert healthy.stats().reserved == before
    other.close()


def test_pickles_are_only_bytes(path: Path, healthy: ServiceClient) -> None:
    bomb = (
        b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
    )
    with connect(path) as sock:
        sock.sendall(HELLO + struct.pack("<I", len(bomb)) + bomb)
        assert is_ended(sock)
    assert still_serves(healthy)


def test_another_version_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    with connect(path) as sock:
        sock.sendall(p.frame_of(p.Hello(999, "9.9")))
        framer = p.Framer()
        framer.feed(sock.recv(1 << 16))
        (body,) = framer.take()
        refusal = p.read_reply(body)
    assert isinstance(refusal, p.Refusal)
    assert "kvrecall 9.9" in refusal.reason
    assert "run the same version" in refusal.reason


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_other_users_are_refused(path: Path, healthy: ServiceClient) -> None:
    code = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "try: s.connect(sys.argv[1])\n"
        "except PermissionError: sys.exit(7)\n"
        "sys.stdout.buffer.write(s.recv(4096))"
    )

    def try_it() -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True)

    assert oct(path.stat().st_mode & 0o777) == "0o600"
    assert oct(path.parent.stat().st_mode & 0o777) == "0o700"
    assert try_it().returncode == 7
    path.parent.chmod(0o755)  # a careless administrator
    path.chmod(0o666)
    answer = try_it()
    path.chmod(0o600)
    path.parent.chmod(0o700)
    assert b"user 65534 may not use the pool" in answer.stdout
    assert still_serves(healthy)


@pytest.mark.parametrize("reply", [b"\xff" * 100, struct.pack("<I", 5) + b"hello", b""])
def test_a_service_that_talks_nonsense_is_no_service(tmp_path: Path, reply: bytes) -> None:
    path = tmp_path / "pool.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(reply)

    threading.Thread(target=serve, daemon=True).start()
    with pytest.raises(LinkLost):
        Link.open(path, 1.0)
    client = ServiceClient(path)
    client.register(NAMESPACE, 5000)
    assert client.find(KEYS).blocks == 0
    assert {answer.verdict for answer in client.reserve(KEYS)} == {Verdict.REFUSED}
    client.close()
    stop.set()
    listener.close()


def test_where_a_socket_cannot_be(tmp_path: Path, path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="nobody else can enter"):
        SocketLock(tmp_path / "pool.sock")
    with pytest.raises(ConfigError, match="relative"):
        SocketLock(Path("pool.sock"))
    with pytest.raises(ConfigError, match="longer than"):
        SocketLock(Path("/tmp") / ("x" * 200))
    with pytest.raises(TierError, match="is served by process"):
        SocketLock(path)
