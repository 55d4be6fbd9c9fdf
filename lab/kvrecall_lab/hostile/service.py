"""Attacks on the pool service of a node: its socket, its lock, its arena and its event ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as chain_of
from itertools import islice, repeat
from pathlib import Path

import psutil

from kvrecall import __version__
from kvrecall.block import BlockKey, Namespace
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Verdict
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.admin import ServiceAdmin, Stat
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread, listener_at
from kvrecall.processes.command import as_child, kvrecall
from kvrecall.processes.ports import two_ports
from kvrecall.testing import chain, namespace
from kvrecall_lab.hostile.attack import Crashed, GotIn, NotHere, Stalled, attack
from kvrecall_lab.hostile.listeners import frame, said_by, shake_hands, until

_NAMESPACE = namespace("hostile service")
_BLOCK = 1 << 20
_WATCH_S = 2.0
_PATIENCE_S = 20.0
_HOST = 16
_KEPT = 32 << 20

_ENGINE = """
import subprocess, sys, time
from pathlib import Path
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread, listener_at
from kvrecall.testing import chain, namespace

client = ServiceClient(Path(sys.argv[1]), call_timeout_s=20.0)
client.register(namespace("hostile service"), 1 << 20)
offset = client.reserve(chain(namespace("hostile service"), 1, "of the dead engine"))[0].offset
words = repr(client.arena_handle()), str(offset)
worker = subprocess.Popen([sys.executable, "-c", sys.argv[2], *words], stdin=subprocess.PIPE)
print(worker.pid, flush=True)
time.sleep(60)
"""
_WORKER = """
import os, signal, sys, time
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle

handle, offset = eval(sys.argv[1]), int(sys.argv[2])
{first}
arena = Arena.attach(handle)
{then}
arena.view(offset, 64)[:] = b"X" * 64
time.sleep(60)
"""
_STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"


@dataclass(frozen=True, slots=True)
class _Service:
    process: subprocess.Popen[bytes]
    socket: Path


@contextlib.contextmanager
def _service(place: Path, *words: str, under: Sequence[str] = ()) -> Iterator[_Service]:
    """A real service, started with the command ``under``."""
    place.mkdir(mode=0o700, exist_ok=True)
    path = place / "pool.sock"
    command = [*under, *kvrecall("pool", "serve", "--socket", str(path), *words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise AssertionError("the service did not start")
        yield _Service(process, path)
        if process.poll():
            raise Crashed(f"the service ended with status {process.returncode}")
    finally:
        process.kill()
        process.wait()


def _state(pid: int) -> str:
    """The letter of /proc; X if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@contextlib.contextmanager
def _dead_engine(socket: Path, worker: str, under: Sequence[str] = ()) -> Iterator[int]:
    """The worker, stopped, of an engine that was killed while it filled one block."""
    command = [*under, *as_child(sys.executable, "-c", _ENGINE, str(socket), worker)]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert engine.stdout is not None
    pid = int(engine.stdout.readline())
    try:
        until(lambda: _state(pid) in "TX", _PATIENCE_S, "the worker did not stop")
        engine.kill()
        engine.wait()
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _overwritten(socket: Path, worker: int, watch_s: float) -> bool:
    """Whether a block saved by another engine within that time has the bytes of the worker, which
    then goes on."""
    client = ServiceClient(socket, call_timeout_s=20.0)
    client.register(_NAMESPACE, _BLOCK)
    arena = Arena.attach(client.arena_handle())
    written: list[int] = []
    end = time.monotonic() + watch_s
    while time.monotonic() < end:
        keys = chain(_NAMESPACE, _HOST, str(time.monotonic_ns()))
        for key, answer in zip(keys, client.reserve(keys), strict=True):
            if answer.verdict is Verdict.RESERVED:
                arena.view(answer.offset, 64)[:] = b"0" * 64
                written.append(answer.offset)
                client.commit([key])
        time.sleep(0.1)
    os.kill(worker, signal.SIGCONT)
    time.sleep(0.5)
    found = any(bytes(arena.view(offset, 64)) == b"X" * 64 for offset in written)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGKILL)
    lost = "the slots of the dead engine are lost for good"
    until(lambda: client.stats().reserved == 0, _PATIENCE_S, lost)
    arena.close()
    client.close()
    return found


@attack()
def worker_with_a_capability(place: Path) -> str:
    """A stopped worker that the service may not inspect outlives its engine, and writes where
    another engine has saved a block by then."""
    setpriv = shutil.which("setpriv")
    if os.getuid() != 0 or setpriv is None:
        raise NotHere("needs root and setpriv to start processes of different capabilities")
    both = "--bounding-set=-sys_ptrace,-perfmon,-sys_admin"  # which let a process inspect others
    less, more = [setpriv, f"{both},-ipc_lock"], [setpriv, both]
    with (
        _service(place / "pool", f"--host-size={_HOST}MiB", under=less) as service,
        _dead_engine(service.socket, _WORKER.format(first="", then=_STOPPED), more) as worker,
    ):
        if _overwritten(service.socket, worker, _WATCH_S):
            raise GotIn("a worker of a dead engine overwrote another engine's block")
    return "its slot stays its own until the last process that maps it has ended"


@attack()
def late_worker(place: Path) -> str:
    """A worker maps the arena after its engine died and the slots went to another engine."""
    with (
        _service(place / "pool", f"--host-size={_HOST}MiB") as service,
        _dead_engine(service.socket, _WORKER.format(first=_STOPPED, then="")) as worker,
    ):
        if _overwritten(service.socket, worker, _WATCH_S):
            raise GotIn("a late worker of a dead engine overwrote another engine's block")
    return "the dead engine's seat is closed: the arena is not mapped"


@attack()
def second_service(place: Path) -> str:
    """A cleaner removes the lock of a running service, and another one is started on its socket."""
    with _service(place / "pool", "--host-size=16MiB") as first:
        first.socket.with_name("pool.sock.lock").unlink()
        command = kvrecall("pool", "serve", "--socket", str(first.socket), "--host-size=16MiB")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as second:
            try:
                _, said = second.communicate(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                second.kill()
                raise GotIn("a second service took the socket of a running one") from None
    if "already served by process" not in said:
        raise GotIn(f"the second service ended for another reason: {said[-300:]}")
    return "refused: the socket answers"


@attack()
def socket_of_the_next(place: Path) -> str:
    """A cleaner removes the socket and the lock of a running service, whose end then takes those
    of its successor along."""
    words = place / "pool", "--host-size=16MiB"
    with contextlib.ExitStack() as after, _service(*words) as first:
        first.socket.unlink()
        first.socket.with_name("pool.sock.lock").unlink()
        second = after.enter_context(_service(*words))
        first.process.terminate()
        first.process.wait(_PATIENCE_S)
        if listener_at(second.socket) != str(second.process.pid):
            raise GotIn("the end of one service removed the socket of another")
    return "a service removes its own socket only"


def _peer_of_zeromq(port: int, kind: bytes) -> socket.socket:
    """A connection whose handshake is done, so that ZeroMQ takes what comes next for messages."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=5.0)
    shake_hands(peer, kind)
    return peer


def _fill(place: Path, which: int, kind: bytes, parts: Iterable[bytes]) -> str:
    """``_fill_memory`` of a service."""
    port = two_ports()
    with _service(place / "pool", "--host-size=16MiB", f"--events={port}") as service:
        return _fill_memory(service.process.pid, port, which, kind, parts)


def _fill_memory(pid: int, port: int, which: int, kind: bytes, parts: Iterable[bytes]) -> str:
    """Sends ``parts`` to an event port of a process (0: subscriptions, 1: replay) over several
    connections; it must not keep them, and must answer afterwards."""
    process = psutil.Process(pid)
    before = process.memory_info().rss
    held = [_peer_of_zeromq(port + which, kind) for _ in range(3)]
    refused = 0
    for part in parts:
        for peer in held:
            try:
                peer.sendall(part)
            except OSError:
                refused += 1
        if refused > 10:
            break
    time.sleep(0.5)
    kept = process.memory_info().rss - before
    if kept > _KEPT:
        raise GotIn(f"the process kept {kept >> 20} MiB of a stranger's")
    try:
        _peer_of_zeromq(port, b"SUB")
    except OSError as error:
        raise Stalled("a reader that comes afterwards is not answered") from error
    return f"the connection ends; {kept >> 20} MiB kept"


def _small_parts() -> Iterable[bytes]:
    """A message of ever more parts of a kilobyte."""
    return repeat(frame(bytes(1000), more=True) * 1000, 130)


@attack()
def unfinished_frame(place: Path) -> str:
    """A reader announces a request of 400 MiB at the replay port, and sends most of it."""
    head = frame(b"")[:1] + (400 << 20).to_bytes(8, "big")
    return _fill(place, 1, b"DEALER", chain_of([head], repeat(bytes(1 << 20), 130)))


@attack()
def unfinished_message(place: Path) -> str:
    """A reader asks for a replay in a message of ever more small parts."""
    return _fill(place, 1, b"DEALER", _small_parts())


@attack()
def endless_subscriptions(place: Path) -> str:
    """A reader subscribes to one topic after the other."""
    topics = (
        b"\x00\x65\x01" + struct.pack(">QQ", number, 7).ljust(100, b"t")
        for number in range(130_000)
    )
    return _fill(place, 0, b"SUB", iter(lambda: b"".join(islice(topics, 1000)), b""))


@attack()
def unfinished_message_to_an_engine(place: Path) -> str:
    """The same, to vLLM's publisher as an engine with the connector makes it."""
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import EventPublisherFactory

    from kvrecall.engines.vllm.compat.events import replay_everything

    port = two_ports()
    replay_everything()
    publisher = EventPublisherFactory.create(
        KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{port}",
            replay_endpoint=f"tcp://*:{port + 1}",
        )
    )
    try:
        return _fill_memory(os.getpid(), port, 1, b"DEALER", _small_parts())
    finally:
        publisher.shutdown()


@attack()
def events_off_loopback(place: Path) -> str:
    """A neighbour on the network reads the events of a service that was given a port alone."""
    port = two_ports()
    with _service(place / "pool", "--host-size=16MiB", f"--events={port}"):
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                address, number = line.split()[1].split(":")
                if int(number, 16) in (port, port + 1) and address != "0100007F":
                    raise GotIn(f"port {int(number, 16)} is open at {address}")
    return "both ports are at 127.0.0.1"


_STRANGER = """
import os, socket, struct, sys, time
from kvrecall import __version__
from kvrecall.pool.service import protocol as p
from kvrecall.testing import chain, namespace

def connect():
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    return sock

hello = p.frame_of(p.Hello(p.PROTOCOL, __version__))
{what}
print("done", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def _stranger(socket: Path, what: str) -> Iterator[str]:
    """Another process of this user, connected to the service while it lives; what it said."""
    command = as_child(sys.executable, "-c", _STRANGER.format(what=what), str(socket))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def _serves(socket: Path, otherwise: str) -> None:
    """Raises Stalled unless a client can join, save and store."""
    client = ServiceClient(socket, call_timeout_s=5.0)
    if not client.is_connected:
        raise Stalled(f"{otherwise}: no client can join")
    client.register(_NAMESPACE, _BLOCK)
    keys = chain(_NAMESPACE, 2, "of the victim")
    answers = client.reserve(keys)
    client.commit(keys)
    stored = client.flush(keys, 10.0)
    client.close()
    if {answer.verdict for answer in answers} != {Verdict.RESERVED} or not stored:
        raise Stalled(f"{otherwise}: another client's blocks were not stored")


@attack()
def flooding_flushes(place: Path) -> str:
    """A client waits in all flush threads for blocks that a slow disk takes minutes to store."""
    place.chmod(0o700)
    hers = frozenset(chain(_NAMESPACE, 1, "slow"))

    def open_slow(config: PoolConfig) -> Pool:
        pool = Pool.open(config)
        flush = pool.flush

        def slow(keys: Sequence[BlockKey], deadline_s: float) -> bool:
            if not hers.isdisjoint(keys):
                time.sleep(deadline_s)
                return False
            return flush(keys, deadline_s)

        pool.flush = slow  # type: ignore[method-assign]
        return pool

    disk = DiskConfig(place / "disk", 64 << 20)
    service = ServiceThread(PoolConfig(_HOST << 20, disk), place / "pool.sock", make=open_slow)
    what = """
keys = tuple(chain(namespace("hostile service"), 1, "slow"))
flushes = b"".join(p.frame_of(p.Flush(number, keys, 600.0)) for number in range(16))
many = [connect() for _ in range(4)]
for one in many:
    one.sendall(hello + flushes)
"""
    with _stranger(place / "pool.sock", what):
        _serves(place / "pool.sock", "all flush threads wait for one client")
    service.close()
    return "a client has a part of the threads only"


@attack()
def flooding_requests(place: Path) -> str:
    """A client sends requests faster than they are answered, so that others wait."""
    count = 20_000
    with (
        _service(place / "pool", "--host-size=16MiB") as service,
        ServiceAdmin(service.socket, _PATIENCE_S) as admin,
        socket.socket(socket.AF_UNIX) as flood,
    ):
        admin.do(Stat())
        flood.connect(str(service.socket))
        flood.sendall(p.frame_of(p.Hello(p.PROTOCOL, __version__)))
        flood.sendall(b"".join(p.frame_of(p.Stats(number)) for number in range(count)))
        done = max(client.requests for client in admin.do(Stat()).clients)
        if done > count // 2:
            raise Stalled(f"another client waited for {done} requests of one that floods")
    return f"another client is answered after {done} of {count} requests"


@attack()
def another_user(place: Path) -> str:
    """Another user of the machine connects to a socket whose folder an administrator has opened."""
    if os.getuid() != 0:
        raise NotHere("needs root to become another user")
    what = """
sock = socket.socket(socket.AF_UNIX)
os.chdir(os.path.dirname(sys.argv[1]))  # its folders above may be closed
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock.connect("pool.sock")
print(sock.recv(4096).hex(), flush=True)
"""
    with _service(place / "pool", f"--host-size={_HOST}MiB") as service:
        for path, mode in ((service.socket, 0o600), (service.socket.parent, 0o700)):
            if stat.S_IMODE(path.stat().st_mode) != mode:
                raise GotIn(f"{path} is open to others")
            path.chmod(0o777)
        with _stranger(service.socket, what) as said:
            if b"may not use the pool" not in bytes.fromhex(said):
                raise GotIn(f"the service answers user 65534: {bytes.fromhex(said)[:80]!r}")
    return "refused by its user id"


@attack()
def names_for_a_terminal(place: Path) -> str:
    """Clients describe their namespaces with commands to an administrator's terminal, and with JSON
    that no parser takes."""
    told = (
        ("model", "\x1b]0;owned\x07\x1b[2J"),
        ("architecture", "[" * 100_000),
        ("architecture", '{"architectures": 5}'),
        ("architecture", '{"architectures": ["\\u001b[2J"]}'),
    )
    with _service(place / "pool", f"--host-size={_HOST}MiB") as service:
        client = ServiceClient(service.socket, call_timeout_s=5.0)
        for part in told:
            client.register(Namespace.of(dict([part])), _BLOCK)
        command = kvrecall("pool", "ls", "--socket", str(service.socket))
        try:
            done = said_by(*command, timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise Stalled("`kvrecall pool ls` is not answered") from None
        client.close()
        if done.returncode:
            raise Crashed(f"`kvrecall pool ls` ended with {done.returncode}: {done.stderr[-200:]}")
        if "\x1b" in done.stdout or "\x07" in done.stdout:
            raise GotIn(f"control characters were printed: {done.stdout!r}")
    return "listed without them"
