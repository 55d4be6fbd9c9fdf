"""Attacks on what leaves the host: Mooncake's ports, object stores, folders of other users."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil

from kvrecall.block import BlockKey
from kvrecall.config import RecallSettings
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.base import RecallState
from kvrecall.pool.pool import Pool
from kvrecall.pool.remote.backends import make_store
from kvrecall.pool.remote.objects import path_of
from kvrecall.pool.remote.staged import SECTION_BYTES
from kvrecall.pool.remote.store import Object, Store
from kvrecall.pool.remote.tier import name_of
from kvrecall.processes.service import Master
from kvrecall.testing import chain, content, namespace, wait_until
from kvrecall_lab.hostile.attack import Crashed, GotIn, NotHere, attack
from kvrecall_lab.hostile.listeners import http_server

_NAMESPACE = namespace()
_NBYTES = 64 << 10
_MARK = b"another tenant's KV, which no store was ever given. "
_REQUEST = struct.Struct("<QQB7x")  # size, address, opcode
_CHUNK = 16 << 20
_PATIENCE_S = 5.0
_STRANGER = 54321  # a user
_READ, _WRITE = 0, 1
_METADATA = 1  # a request to the handshake port


class _Victim:
    """A pool over Mooncake whose memory holds a block that was never put to the store, and what
    a stranger on the network finds out about it."""

    def __init__(self, pool: Pool, key: BlockKey, offset: int) -> None:
        self.pool = pool
        self.key = key
        self._offset = offset
        self.client = max(
            (
                child
                for child in psutil.Process().children(recursive=True)
                if "client_process" in " ".join(child.cmdline())
            ),
            key=lambda child: child.create_time(),
        )
        self.data, self.handshake = self._ports()

    @property
    def block(self) -> bytes:
        return bytes(self.pool.arena.view(self._offset, _NBYTES))

    def _ports(self) -> tuple[int, int]:
        """The data port, which is IPv6 and IPv4, and the handshake port, which is IPv4 only."""
        listening = [one for one in self.client.net_connections("tcp") if one.status == "LISTEN"]
        data, handshake = sorted(listening, key=lambda one: one.family != socket.AF_INET6)
        return data.laddr.port, handshake.laddr.port

    def buffers(self) -> list[tuple[int, int]]:
        """Address and length of all memory that the client tells of to anyone who asks."""
        told = _metadata(self.handshake)["buffers"]
        return [(int(buffer["addr"]), int(buffer["length"])) for buffer in told]


@contextmanager
def _victim(folder: Path) -> Iterator[_Victim]:
    master = _master(folder)
    try:
        with _pool(master, 0, "off") as pool:
            [key] = chain(_NAMESPACE, 1, "secret")
            [reservation] = pool.reserve([key])
            text = _MARK * (_NBYTES // len(_MARK) + 1)
            pool.arena.view(reservation.offset, _NBYTES)[:] = text[:_NBYTES]
            pool.commit([key])
            yield _Victim(pool, key, reservation.offset)
    finally:
        master.kill()


@contextmanager
def _pool(master: Master, lends: int | str, write: str) -> Iterator[Pool]:
    """A pool whose client of Mooncake is connected."""
    settings = {
        "host_size": "48MiB",
        "remote_write": write,
        "remote": {"kind": "mooncake", **master.options(lends), "allow_plaintext": True},
    }
    with Pool.open(RecallSettings.from_mapping(settings).pool) as pool:
        pool.register(_NAMESPACE, _NBYTES)
        numbers = itertools.count()

        def is_connected() -> bool:
            pool.find(chain(_NAMESPACE, 1, f"absent {next(numbers)}"))
            return bool(pool.stats().histograms["remote_lookup_seconds"][-1][1])

        wait_until(is_connected)
        yield pool


def _master(folder: Path) -> Master:
    try:
        import mooncake.store  # noqa: F401
    except (ImportError, OSError) as error:
        raise NotHere(f"Mooncake does not run here: {error}") from None
    master = Master(folder / "master.log")
    master.start()
    return master


def _metadata(port: int) -> dict[str, Any]:
    """What the handshake port tells a stranger of the process's memory."""
    body = bytes([_METADATA]) + b"{}"
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as sock:
        sock.sendall(struct.pack("<Q", len(body)) + body)
        answer = sock.makefile("rb")
        [length] = struct.unpack("<Q", answer.read(8))
        return dict(json.loads(answer.read(length)[1:]))


def _read(port: int, address: int, nbytes: int) -> bytes:
    """Memory of the process behind a data port; short if it refuses."""
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as sock:
        sock.sendall(_REQUEST.pack(nbytes, address, _READ))
        with contextlib.suppress(OSError):
            return sock.makefile("rb").read(nbytes)
    return b""


def _write(port: int, address: int, data: bytes) -> None:
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as sock,
    ):
        sock.sendall(_REQUEST.pack(len(data), address, _WRITE) + data)


@attack()
def mooncake_data_port_read(folder: Path) -> str:
    """A stranger reads all memory that Mooncake's data port serves, looking for a block that was
    never stored."""
    with _victim(folder) as victim:
        found = sum(
            _MARK in _read(victim.data, address + at, min(_CHUNK, nbytes - at) + len(_MARK))
            or _MARK in _read(victim.data, address + at, min(_CHUNK, nbytes - at))
            for address, nbytes in victim.buffers()
            for at in range(0, nbytes, _CHUNK)
        )
        if found:
            raise GotIn("read another tenant's block out of the arena")
        total = sum(nbytes for _, nbytes in victim.buffers())
        return f"the port serves {total >> 20} MiB of sections and none of the arena"


@attack()
def mooncake_data_port_overwrite(folder: Path) -> str:
    """A stranger overwrites all memory that Mooncake's data port serves, and hopes that a block in
    the host is recalled with its bytes."""
    with _victim(folder) as victim:
        before = victim.block
        for address, nbytes in victim.buffers():
            for at in range(0, nbytes, _CHUNK):
                _write(victim.data, address + at, b"forged" * (min(_CHUNK, nbytes - at) // 6))
        ticket = victim.pool.acquire([victim.key], 5.0)
        wait_until(lambda: victim.pool.poll(ticket).state is RecallState.READY)
        if victim.block != before:
            raise GotIn("a block in the host is recalled with a stranger's bytes")
        return "every byte that the port serves was overwritten, and no block of the host changed"


@attack()
def mooncake_arena_address(folder: Path) -> str:
    """A stranger asks the handshake port where memory is and compares with the arena."""
    with _victim(folder) as victim:
        mapped = victim.client.memory_maps(grouped=False)
        arena = os.fstat(victim.pool.arena_handle().fd).st_ino
        text = Path(f"/proc/{victim.client.pid}/maps").read_text().split("\n")
        if any(line.split()[4:5] == [str(arena)] for line in text):
            raise GotIn("the process behind the ports has the arena mapped, and tells its address")
        return f"none of its {len(mapped)} mappings is the arena"


@attack(limit_s=120.0)
def mooncake_in_transit(folder: Path) -> str:
    """While blocks are recalled from the store, a stranger overwrites the memory they arrive in
    without a pause."""
    master = _master(folder)
    done = threading.Event()
    with contextlib.ExitStack() as stack:
        stack.callback(master.kill)
        other = stack.enter_context(_pool(master, "256MB", "through"))
        keys = chain(_NAMESPACE, 400, "stored")
        for key, reservation in zip(keys, other.reserve(keys), strict=True):
            other.arena.view(reservation.offset, _NBYTES)[:] = content(key, _NBYTES)
        other.commit(keys)
        other.flush(keys, 20.0)
        pool = stack.enter_context(_pool(master, 0, "off"))
        victim = _Victim(pool, keys[0], 0)

        def forge() -> None:
            while not done.is_set():
                for address, nbytes in victim.buffers():
                    for at in range(0, nbytes, SECTION_BYTES):
                        forged = b"forged" * (min(16 << 20, nbytes - at) // 6)
                        _write(victim.data, address + at, forged)

        stranger = threading.Thread(target=forge, daemon=True)
        stranger.start()
        stack.callback(stranger.join)
        stack.callback(done.set)
        wrong = recalled = 0
        for at in range(0, len(keys), 20):
            some = keys[at : at + 20]
            wait_until(lambda some=some: not pool.find(some).pending)  # type: ignore[misc]
            ticket = pool.acquire(some, 5.0)
            wait_until(lambda t=ticket: pool.poll(t).state is RecallState.READY)  # type: ignore[misc]
            time.sleep(0.05)  # as long as an engine may copy them
            offsets = pool.poll(ticket).offsets
            recalled += len(offsets)
            for key, offset in zip(some, offsets, strict=False):
                wrong += bytes(pool.arena.view(offset, _NBYTES)) != content(key, _NBYTES)
            pool.release(ticket)
    if wrong:
        raise GotIn(f"{wrong} of {recalled} blocks were recalled with a stranger's bytes")
    return f"{recalled} blocks recalled, all right; what was hit on its way is a miss"


@attack()
def mooncake_from_another_machine(folder: Path) -> str:
    """A stranger on another machine connects to the ports of a client whose local_hostname is
    localhost."""
    space = f"kvr{os.getpid()}h"
    inner, outer = f"{space}i", f"{space}o"
    commands = (
        f"netns add {space}",
        f"link add {outer} type veth peer name {inner} netns {space}",
        f"addr add 10.213.9.1/30 dev {outer}",
        f"link set {outer} up",
        f"-n {space} addr add 10.213.9.2/30 dev {inner}",
        f"-n {space} link set {inner} up",
    )
    try:
        for command in commands:
            if shutil.which("ip") is None or _ip(command).returncode:
                raise NotHere(f"another machine cannot be made here: ip {command}")
        with _victim(folder) as victim:
            reached = [port for port in (victim.data, victim.handshake) if _reaches(space, port)]
            if reached:
                raise GotIn(f"connected to {len(reached)} ports of a client meant for loopback")
            return "both ports take connections over loopback only"
    finally:
        _ip(f"netns del {space}")
        _ip(f"link del {outer}")


def _ip(command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *command.split()], capture_output=True, timeout=10)


def _reaches(space: str, port: int) -> bool:
    program = f"import socket; socket.create_connection(('10.213.9.1', {port}), 2)"
    command = ["ip", "netns", "exec", space, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, timeout=20).returncode == 0


@attack()
def plaintext_without_consent(folder: Path) -> str:
    """An operator sets up stores that speak in the clear, on loopback or elsewhere, without a key
    and without consent: does the pool send tenants' KV all the same?"""
    own = {"kind": "mooncake", "local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    own["master_server_address"] = "127.0.0.1:50051"
    s3 = {"kind": "objects", "url": "s3://bucket/kv", "region": "eu"}
    stores = {
        "Mooncake on localhost": own,
        "a metadata server elsewhere": {**own, "metadata_server": "http://10.0.0.1:8080/metadata"},
        "a master elsewhere": {**own, "master_server_address": "10.0.0.1:50051"},
        "http:// to another machine": {**s3, "endpoint": "http://10.0.0.1:9000"},
    }
    for what, remote in stores.items():
        settings = RecallSettings.from_mapping({"host_size": "4MiB", "remote": remote})
        try:
            Pool.open(settings.pool).close()
        except ConfigError as error:
            if "allow_plaintext" not in str(error) or "encryption_key_file" not in str(error):
                raise GotIn(f"{what}: the error names no cure: {error}") from error
            continue
        raise GotIn(f"{what}: a pool opened that sends blocks in the clear")
    return f"{len(stores)} set-ups refused until there is a key or consent"


@attack()
def folder_of_a_stranger(folder: Path) -> str:
    """Another user owns the folder of a file:// store, may write to it, or has it lead elsewhere by
    a link."""
    if os.geteuid() != 0:
        raise NotHere("only root can make a folder of another user")
    theirs, shared, linked = folder / "theirs", folder / "shared", folder / "linked"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, _STRANGER, _STRANGER)
    shared.mkdir()
    shared.chmod(0o777)
    linked.symlink_to(folder)
    for place in (theirs, shared, linked):
        try:
            make_store("objects", {"url": f"file://{place}"}).close()
        except ConfigError:
            continue
        raise GotIn(f"a store opened in {place.name}")
    return "three folders that others can change were refused"


@attack()
def folder_links(folder: Path) -> str:
    """Symbolic links, a pipe and a device lie where objects of a file:// store should be; and
    another user reads objects that the store wrote."""
    if os.geteuid() != 0:
        raise NotHere("only root can try it as another user")
    folder.chmod(0o755)
    name = _block_name(0)
    secret = folder / "secret"
    secret.write_bytes(bytes(range(256)) * 16)
    place = folder / "store"
    place.mkdir(mode=0o755)
    store = make_store("objects", {"url": f"file://{place}"})
    where = place / path_of(name)
    where.parent.mkdir(parents=True)
    room = memoryview(bytearray(4096))
    for plant, target in (
        (os.symlink, secret),
        (os.symlink, "/dev/zero"),
        (os.link, _fifo(folder)),
    ):
        plant(target, where)
        if store.get([Object(name, (room,))]) != [False] or store.exists([name]) != [False]:
            raise GotIn("what a link leads to came back as an object")
        where.unlink()
    (place / "v1").rename(folder / "elsewhere")
    (place / "v1").symlink_to(folder / "elsewhere")
    with contextlib.suppress(Exception):
        store.put([Object(name, (room,))])
    if where.exists():
        raise GotIn("an object was written through a link to another folder")
    (place / "v1").unlink()
    store.put([Object(name, (room,))])
    store.close()
    program = f"import os; os.seteuid({_STRANGER}); open({str(where)!r}, 'rb')"
    if subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0:
        raise GotIn("another user reads an object")
    return "links and pipes count as absent, and objects are their owner's"


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@attack(limit_s=120)
def object_of_any_size(folder: Path) -> str:
    """A server of an object store answers a GET with far more than it states, and with a value that
    unpacks to far more; its errors, pages, listings and replies to deletions do not end."""
    del folder
    item = Object(_block_name(0), (memoryview(bytearray(_NBYTES)),))
    many = [name_of(key) for key in chain(_NAMESPACE, 8)]
    error, larger = partial(_without_end, status=500), partial(_without_end, told=_NBYTES)
    asked: list[tuple[Callable[..., None], Callable[[Store], Any], int]] = [
        (larger, lambda store: store.get([item]), 32),
        (_bomb, lambda store: store.get([item]), 32),
        (error, lambda store: store.get([item]), 1024),
        (error, lambda store: store.put([item]), 1024),
        (_without_end, lambda store: store.remove(many[:1]), 1024),
        (_without_end, lambda store: store.exists(many), 1024),
        (_pages, lambda store: store.exists(many), 32),
    ]
    for answer, ask, most in asked:
        with http_server(answer) as endpoint:
            keys = {"access_key_id": "a", "secret_access_key": "b"}
            options = {"url": "s3://b/kv", "region": "eu", "endpoint": endpoint, "options": keys}
            store = make_store("objects", {**options, "retries": 0, "timeout": 8, "concurrency": 1})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with contextlib.suppress(TierError):
                if any(ask(store) or ()):
                    raise GotIn("a value of another size came back as the block, or is there")
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
            store.close()
            if grown > most:
                raise Crashed(f"{grown} MiB were kept of an answer; block: {_NBYTES >> 10} KiB")
    return "no more than a chunk beyond the block was read, and no answer to its end"


def _block_name(place: int) -> str:
    return name_of(chain(_NAMESPACE, place + 1)[place])


def _head(handler: BaseHTTPRequestHandler, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("ETag", '"x"')
    handler.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")


def _pages(handler: BaseHTTPRequestHandler) -> None:
    """Empty ones, each of which has a next one."""
    body = f"<NextContinuationToken>{time.monotonic()}</NextContinuationToken>"
    body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{body}</ListBucketResult>"
    handler.send_response(404 if handler.command == "HEAD" else 200)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body.encode())  # of no meaning to a HEAD


def _without_end(
    handler: BaseHTTPRequestHandler, status: int = 200, told: int | None = None
) -> None:
    _head(handler, status)
    if told is not None:
        handler.send_header("Content-Length", str(told))
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    chunk = b"%x\r\n%b\r\n" % (1 << 20, bytes(1 << 20))
    for _ in range(2048):
        handler.wfile.write(chunk)


def _bomb(handler: BaseHTTPRequestHandler) -> None:
    _head(handler)
    body = gzip.compress(bytes(60 << 20))  # less than a block
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@attack()
def shared_store_after_a_ttl(folder: Path) -> str:
    """One host expires its blocks by a short TTL; the store holds them for all the others."""
    remote = {"kind": "objects", "url": f"file://{folder}/store"}
    settings = {"host_size": "4MiB", "ttl": "1s", "remote": remote}
    keys = chain(_NAMESPACE, 8)
    with Pool.open(RecallSettings.from_mapping(settings).pool) as pool:
        pool.register(_NAMESPACE, _NBYTES)
        pool.reserve(keys)
        pool.commit(keys)
        pool.flush(keys, 10.0)
        wait_until(lambda: not any(pool.is_in_host(key) for key in keys), 20.0)
        time.sleep(0.5)  # for the thread that would remove them
    left = make_store("objects", {"url": f"file://{folder}/store"})
    there = left.exists([name_of(key) for key in keys])
    left.close()
    if not all(there):
        raise GotIn(f"{there.count(False)} of {len(keys)} blocks were removed for all hosts")
    return "they left this host and stayed in the store"
