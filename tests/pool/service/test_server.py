"""Invalid messages on the socket end only their own connection; other users are refused."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrecall import __version__
from kvrecall.block import SHARED, BlockKey, TierName
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle, Verdict
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.service import endpoint, server
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.admin import Drop, Query
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread, SocketLock, wait_for_memory
from kvrecall.pool.service.link import Link, LinkLost
from kvrecall.pool.service.server import Patience
from kvrecall.testing import chain, namespace, wait_until
from pool.service.service import Service

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
    service = ServiceThread(PoolConfig(16 * MIB), path, Patience(1.0, 1.0))
    yield path
    service.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def healthy(path: Path) -> Iterator[ServiceClient]:
    client = ServiceClient(path, call_timeout_s=60.0)
    client.register(NAMESPACE, 5000)
    yield client
    assert client._life is not None
    assert not client._life.is_lost, "the healthy client lost its connection"
    client.close()


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(30)
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


STOPPED = """
import sys, time
from pathlib import Path
from kvrecall.config import PoolConfig
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.pool.service.server import Patience
service = ServiceThread(PoolConfig(1 << 24), Path(sys.argv[1]), Patience(0.5, 0.5))
print("serves", flush=True)
time.sleep(60)
"""


def test_what_came_while_the_service_was_stopped_is_read(tmp_path: Path) -> None:
    """Stopped where it waits for events, a loop runs the timers that are due first."""
    path = tmp_path / "pool.sock"
    command = [sys.executable, "-c", STOPPED, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"serves\n"
            sock = connect(path)
            sock.sendall(HELLO[:3])
            time.sleep(0.1)
            process.send_signal(signal.SIGSTOP)
            sock.sendall(HELLO[3:])
            time.sleep(1)
            process.send_signal(signal.SIGCONT)
            sock.settimeout(2)
            assert not is_ended(sock)
        finally:
            process.kill()


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
TAGS = st.sampled_from([*range(1, 18), *range(32, 36), *range(64, 74)])
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


BOMB = b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."
REFUSED = {
    **{f"length {n}": HELLO + struct.pack("<I", n) for n in (0, p.MAX_FRAME + 1, 2**31, 2**32 - 1)},
    "silence": b"",
    "half a greeting": HELLO[:3],
    "half a message": HELLO + b"\x10\x00\x00\x00half",
    "a pickle": HELLO + struct.pack("<I", len(BOMB)) + BOMB,
    "greeting twice": HELLO + HELLO,
    "too few parents": HELLO + p.frame_of(p.Reserve(1, KEYS, None, SHARED, KEYS[:2])),
    "a hint without a number": HELLO + p.frame_of(p.Touch(KEYS, hint=(True, float("nan"), 1.0))),
    "parent and parents": HELLO + p.frame_of(p.Reserve(1, KEYS, KEYS[0], SHARED, KEYS)),
}


@pytest.mark.parametrize("sent", REFUSED.values(), ids=REFUSED)
def test_what_is_no_request_ends_its_connection(
    path: Path, healthy: ServiceClient, sent: bytes
) -> None:
    with connect(path) as sock:
        sock.sendall(sent)
        assert is_ended(sock)
    assert still_serves(healthy)


def test_slow_loris_does_not_keep_a_message_open(path: Path, healthy: ServiceClient) -> None:
    with connect(path) as sock:
        sock.sendall(HELLO + struct.pack("<I", 1000))
        with contextlib.suppress(ConnectionError):
            for _ in range(400):  # 20 seconds
                sock.sendall(b"x")
                time.sleep(0.05)
            pytest.fail("the message was kept open")
    assert still_serves(healthy)


def test_a_client_cannot_end_what_another_began(path: Path, healthy: ServiceClient) -> None:
    other = ServiceClient(path, call_timeout_s=60.0)
    other.register(NAMESPACE, 5000)
    before = healthy.stats().reserved
    assert {answer.verdict for answer in healthy.reserve(OWN)} == {Verdict.RESERVED}
    link = other._life if other._life else None
    assert link is not None
    link.tell(p.Commit(OWN), 1.0)
    link.tell(p.Abandon(OWN), 1.0)
    link.tell(p.Settle(b"0" * 16), 1.0)
    assert other.find(OWN).blocks == 0
    assert other.stats().reserved == before + 3
    healthy.abandon(OWN)
    assert healthy.stats().reserved == before
    other.close()


def fake_service(
    path: Path, replies: Callable[[bytes], Iterable[bytes]], hello: bytes = b""
) -> socket.socket:
    """Sends ``hello`` to each client, then what ``replies`` gives for each of its messages."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                sock.sendall(hello)
                framer = p.Framer()
                while not hello and (data := sock.recv(1 << 16)):
                    framer.feed(data)
                    sock.sendall(b"".join(said for body in framer.take() for said in replies(body)))
                sock.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener


NO_TEXT = struct.pack("<I", 5) + b"\x95\x40\x01\xa1\xff"  # a welcome of no version


@pytest.mark.parametrize("reply", [b"\xff" * 100, struct.pack("<I", 5) + b"hello", NO_TEXT])
def test_a_service_that_talks_nonsense_is_no_service(tmp_path: Path, reply: bytes) -> None:
    path = tmp_path / "pool.sock"
    with fake_service(path, lambda _: (), reply):
        with pytest.raises(LinkLost):
            Link.open(path, 1.0)
        client = ServiceClient(path)
        client.register(NAMESPACE, 5000)
        assert client.find(KEYS).blocks == 0
        assert {answer.verdict for answer in client.reserve(KEYS)} == {Verdict.REFUSED}
        client.close()


def test_where_a_socket_cannot_be(tmp_path: Path, path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"socket: .* has mode .*chmod 700 .* folder of its own"):
        SocketLock(tmp_path / "pool.sock")
    with pytest.raises(ConfigError, match="relative"):
        SocketLock(Path("pool.sock"))
    with pytest.raises(ConfigError, match="longer than"):
        SocketLock(Path("/tmp") / ("x" * 200))
    with pytest.raises(TierError, match="is already served by process"):
        SocketLock(path)


def test_a_service_says_once_that_its_socket_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_PATH_S", 0.01)
    path = tmp_path / "pool.sock"
    service = ServiceThread(PoolConfig(16 * MIB), path)
    with connect(path):
        path.unlink()
        path.touch()
        wait_until(lambda: f"{path} was removed or replaced" in caplog.text)
    service.close()
    assert caplog.text.count("was removed or replaced") == 1
    assert path.exists(), "it is another program's"


def test_a_seat_is_one_process_s(path: Path, healthy: ServiceClient) -> None:
    """Another process that names it gets one of its own, and cannot end it."""
    life = healthy._life
    assert life is not None
    with connect(path) as own:
        assert seat_given(own, life.handle) == life.handle.seat, "the same process"
        with connect(path) as mine:
            assert seat_given(mine, replace(life.handle, boot="before")) != life.handle.seat
            assert seat_given(connect(path), replace(life.handle, seat=1 << 60)) < 1 << 20
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                os._exit(seat_given(connect(path), life.handle) == life.handle.seat)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def seat_given(sock: socket.socket, before: ArenaHandle) -> int:
    sock.sendall(p.frame_of(p.Hello(p.PROTOCOL, __version__, before.boot, before.seat)))
    framer = p.Framer()
    framer.feed(sock.recv(1 << 16))
    welcome = p.read_reply(next(framer.take()))
    assert isinstance(welcome, p.Welcome)
    return welcome.arena.seat


def conversation(*messages: p.Message) -> bytes:
    return HELLO + b"".join(p.frame_of(message) for message in messages)


OUT_OF_ORDER = [
    (p.Poll(1, 7),),
    (p.Release(7), p.Release(7)),
    (p.Commit(KEYS), p.Abandon(KEYS), p.Cancel(99)),
    (p.Reserve(1, KEYS, None, SHARED), p.Commit(KEYS), p.Commit(KEYS), p.Abandon(KEYS)),
    (p.Acquire(7, KEYS, 5.0, None, SHARED), p.Acquire(7, KEYS, 5.0, None, SHARED), p.Poll(1, 7)),
    (p.Acquire(7, KEYS, 0.0, KEYS[0], SHARED), p.Release(7), p.Poll(1, 7)),
    (p.Settle(b"x" * 16), p.Settle(b"x" * 16)),
    (p.Touch(KEYS * 5), p.Find(1, KEYS * 5)),
    (p.Reserve(1, KEYS, None, SHARED, KEYS[::-1]), p.Commit(KEYS), p.Touch((), KEYS * 5)),
    (p.Acquire(7, KEYS, 0.0, None, SHARED, (None, *KEYS[:2])), p.Poll(1, 7), p.Release(7)),
    (p.Locate(1, KEYS * 5), p.Locate(1, KEYS[::-1])),
    (p.Bye(1), p.Reserve(2, KEYS, None, SHARED), p.Bye(3)),
    (p.Flush(1, KEYS, 0.0),),
    (p.Administer(1, "Drop", msgspec.msgpack.encode(Drop(Query(), False))), p.Clear(2)),
    (p.Administer(1, "Stat", msgspec.msgpack.encode([])),),
]


@pytest.mark.parametrize("messages", OUT_OF_ORDER, ids=lambda ms: type(ms[0]).__name__)
def test_messages_that_are_right_but_out_of_order(
    path: Path, healthy: ServiceClient, messages: tuple[p.Message, ...]
) -> None:
    """They affect no other client, and the connection stays usable."""
    healthy.reserve(OWN)
    with connect(path) as sock:
        sock.sendall(conversation(*messages, p.Stats(50)))
        framer = p.Framer()
        numbers: list[int] = []
        while 50 not in numbers:
            framer.feed(sock.recv(1 << 16))
            replies = [p.read_reply(body) for body in framer.take()]
            numbers += [r.number for r in replies if not isinstance(r, p.Welcome | p.Rejection)]
    healthy.commit(OWN)
    assert healthy.find(OWN).blocks == 3
    healthy.clear()
    assert healthy.find(OWN).blocks == 0
    wait_until(lambda: healthy.stats().leases == 0)
    assert still_serves(healthy)


def test_a_request_that_fails_costs_its_own_connection_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = ServiceThread(PoolConfig(16 * MIB), tmp_path / "pool.sock")
    good, bad = (ServiceClient(tmp_path / "pool.sock", call_timeout_s=60.0) for _ in range(2))
    for client in (good, bad):
        client.register(NAMESPACE, 5000)
    assert len(good.reserve(KEYS)) == 3
    touch = service.pool.touch

    def fail(keys: tuple[BlockKey, ...], *more: tuple[BlockKey, ...]) -> None:
        if keys == OWN:
            raise RuntimeError("a bug")
        touch(keys, *more)

    monkeypatch.setattr(service.pool, "touch", fail)
    lost = bad._life
    bad.touch(OWN)
    wait_until(lambda: lost is not None and lost.is_lost)
    assert "a bug" in caplog.text
    good.touch(KEYS)
    good.commit(KEYS)
    assert good.find(KEYS).blocks == 3
    wait_until(lambda: bad.find(KEYS).blocks == 3)  # it has rejoined
    for client in (good, bad):
        client.close()
    service.close()


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_a_service_that_can_accept_none_pauses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not spin, and serves those who are connected."""
    asked: list[socket.socket] = []

    def admit(this: server.Server, sock: socket.socket) -> None:
        asked.append(sock)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pauses: list[Callable[[], None]] = []

    def call_later(seconds: float, then: Callable[..., None], *args: object) -> None:
        assert seconds == server._PAUSE_S
        pauses.append(partial(then, *args))

    place = path.with_name("paused.sock")
    with contextlib.closing(ServiceThread(PoolConfig(MIB), place)) as service:
        client = ServiceClient(place, call_timeout_s=60.0)
        client.register(NAMESPACE, 5000)
        monkeypatch.setattr(server.Server, "_admit", admit)
        monkeypatch.setattr(service._server.loop, "call_later", call_later)
        with connect(place), connect(place):
            wait_until(lambda: len(pauses) == 1)
            assert all(still_serves(client) for _ in range(10))
            assert len(asked) == 1
        client.close()


def test_a_service_that_ends_takes_no_connection(path: Path) -> None:
    """Its end, which may have begun, would not close it."""
    place = path.with_name("ends.sock")
    with contextlib.closing(ServiceThread(PoolConfig(MIB), place)) as service:
        running = service._server
        running.stopping.set()
        with connect(place):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), running.loop).result()
            assert not running._connections


@pytest.mark.parametrize(
    ("files", "why"), [(128, b"32 connections are open"), (1024, b"it has 64 connections open")]
)
def test_a_crowd_of_connections_is_refused_by_name(tmp_path: Path, files: int, why: bytes) -> None:
    """More than the service's open files allow, or than are one process's: it refuses the rest,
    keeps serving earlier ones, and accepts new ones when the crowd has disconnected."""
    with Service(tmp_path / "service", 16 * MIB, max_files=files) as service:
        client = service.client(NAMESPACE, 5000)
        at_rest = open_files(service.pid)
        crowd = [connect(service.socket) for _ in range(100)]
        for sock in crowd:
            with contextlib.suppress(ConnectionError):
                sock.sendall(HELLO)
        refusal = b""
        with contextlib.suppress(ConnectionError):
            refusal = crowd[-1].recv(1 << 16)
        assert why in refusal
        assert still_serves(client)
        for sock in crowd:
            sock.close()
        wait_until(lambda: open_files(service.pid) <= at_rest)
        assert service.client().is_connected


@pytest.mark.parametrize("offset", [-4096, 12, 16 * MIB, 1 << 60])
def test_a_service_that_names_bytes_outside_of_its_arena(tmp_path: Path, offset: int) -> None:
    """The engine must not copy there: the service counts as lost."""
    path = tmp_path / "pool.sock"
    arena = Arena.create(16 * MIB)

    def replies(body: bytes) -> Iterator[bytes]:
        said: p.Message | None = None
        if body == HELLO[4:]:
            said = p.Welcome(p.PROTOCOL, "x", b"t" * 16, arena.handle())
        else:
            match p.read_request(body):
                case p.Register(number):
                    said = p.Acknowledged(number)
                case p.Poll(number):
                    tiers = p.PLACES.pack([TierName.HOST])
                    said = p.RecallReply(number, True, (offset,), tiers)
                case p.Reserve(number):
                    said = p.ReserveReply(number, p.VERDICTS.pack([Verdict.RESERVED]), (offset,))
        if said is not None:
            yield p.frame_of(said)

    listener = fake_service(path, replies)
    for act in ("reserve", "poll"):
        client = ServiceClient(path, call_timeout_s=60.0)
        client.register(NAMESPACE, 5000)
        link = client._life if client._life else None
        assert link is not None
        if act == "reserve":
            assert client.reserve(KEYS[:1])[0].verdict is Verdict.REFUSED
        else:
            assert client.poll(client.acquire(KEYS[:1], 1.0)).offsets == ()
        assert link.why_lost == "the service names bytes outside of its arena"
        client.close()
    listener.close()
    arena.close()


def test_one_client_begins_a_bounded_number_of_requests(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_SLOW", 2)
    framer, replies = p.Framer(), list[p.Reply]()
    with connect(path) as sock:
        sock.sendall(conversation(*(p.Clear(number) for number in range(5))))
        while len(replies) < 6:
            framer.feed(sock.recv(1 << 16))
            replies += map(p.read_reply, framer.take())
    refused = [reply for reply in replies if isinstance(reply, p.Rejection)]
    assert [one.reason for one in refused] == ["more than 2 requests at once"] * 3


def test_a_client_that_reads_no_replies_is_ended(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "_MAX_UNSENT", 1 << 16)
    with connect(path) as sock:
        with contextlib.suppress(OSError):  # it may be ended before all is sent
            sock.sendall(conversation(*(p.Stats(number) for number in range(20_000))))
        wait_until(lambda: "the client does not read its replies" in caplog.text)


def as_nobody(act: Callable[[], object]) -> int:
    """Begins ``act`` in a process of another user; its number."""
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            os._exit(act() is not True)
        os._exit(2)
    return pid


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_refused_whatever_the_socket_lets_in() -> None:
    """And so is a service of another user."""
    folder = Path(tempfile.mkdtemp(prefix="kvrecall-test-"))
    path = folder / "pool.sock"
    service = ServiceThread(PoolConfig(1 * MIB), path)
    assert path.stat().st_mode & 0o777 == 0o600
    folder.chmod(0o777)
    path.chmod(0o666)
    refused = lambda: b"user 65534 may not use the pool" in connect(path).recv(1 << 16)  # noqa: E731
    assert os.waitstatus_to_exitcode(os.waitpid(as_nobody(refused), 0)[1]) == 0
    service.close()

    def serve() -> bool:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(folder / "early.sock"))
        listener.listen()
        (folder / "early.sock").rename(folder / "nobody.sock")
        return listener.accept()[0].recv(1) == b""  # no greeting

    pid = as_nobody(serve)
    wait_until((folder / "nobody.sock").exists)
    with pytest.raises(LinkLost, match="runs as user 65534, not as 0"):
        Link.open(folder / "nobody.sock", 30.0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_used(tmp_path: Path) -> None:
    disk = DiskConfig(tmp_path / "disk", 16 * MIB)
    DiskTier(disk).close()
    (disk.path / "index.sqlite").chmod(0o644)
    DiskTier(disk).close()
    assert oct((disk.path / "index.sqlite").stat().st_mode & 0o777) == "0o600"
    os.chown(disk.path / "index.sqlite", 65534, 65534)
    with pytest.raises(TierError, match=r"index.sqlite belongs to user 65534"):
        DiskTier(disk)
    lock = tmp_path / "pool.sock.lock"
    lock.touch()
    os.chown(lock, 65534, 65534)
    with pytest.raises(ConfigError, match=r"pool.sock.lock belongs to user 65534"):
        SocketLock(tmp_path / "pool.sock")


def test_a_start_waits_for_the_arena_of_the_dead_service_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It once waited for every process with any arena, so that other services and engines delayed a
    start with little memory by ten seconds."""
    monkeypatch.setattr(endpoint, "_LET_GO_S", 1e6)
    arena = Arena.create(MIB)
    other = Arena.create(MIB)
    code = (
        "import sys; from kvrecall.pool.arena import Arena; from kvrecall.pool.base import *\n"
        "a = Arena.attach(ArenaHandle(*map(int, sys.argv[1:])))\nprint('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    handle = arena.handle()
    words = [str(n) for n in (handle.pid, handle.fd, handle.nbytes)]
    mapper = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert mapper.stdout is not None
    assert mapper.stdin is not None
    assert mapper.stdout.readline() == b"ready\n"
    inode, gone = (os.fstat(one.handle().fd).st_ino for one in (arena, other))
    arena.close()
    other.close()
    impossible = 1 << 60
    started: list[str] = []
    looked_for: list[int] = []
    mappers_of = endpoint.mappers_of

    def looked(inode: int) -> object:
        looked_for.append(inode)
        return mappers_of(inode)

    monkeypatch.setattr(endpoint, "mappers_of", looked)

    def start(name: str, old: int | None) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: (wait_for_memory(impossible, old), started.append(name))
        )
        thread.start()
        return thread

    threads = [start("after another", gone), start("first of its kind", None)]
    wait_until(lambda: len(started) == 2)
    threads.append(start("after it", inode))
    wait_until(lambda: looked_for.count(inode) >= 3)
    assert len(started) == 2
    mapper.stdin.close()
    mapper.wait()
    wait_until(lambda: len(started) == 3)
    for thread in threads:
        thread.join()


def test_the_arena_of_a_dead_service_is_handed_down(tmp_path: Path) -> None:
    for old, new in ((None, 77), (77, 78)):
        lock = SocketLock(tmp_path / "pool.sock")
        assert lock.old_arena == old
        lock.note_arena(new)
        lock.release()
    lock = SocketLock(tmp_path / "pool.sock")  # one that dies before it has an arena
    lock.release()
    assert SocketLock(tmp_path / "pool.sock").old_arena == 78
