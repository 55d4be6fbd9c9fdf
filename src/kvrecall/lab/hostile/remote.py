"""Attacks on what leaves the host: Mooncake's ports, object stores, folders of other users."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from kvrecall.block import BlockKey
from kvrecall.config import RecallSettings
from kvrecall.lab.hostile.attack import GotIn, NotHere, attack
from kvrecall.lab.masters import Master
from kvrecall.pool.base import RecallState
from kvrecall.pool.pool import Pool
from kvrecall.testing.blocks import chain, content, namespace, wait_until

_NAMESPACE = namespace()
_NBYTES = 64 << 10
_MARK = b"another tenant's KV, which no store was ever given. "
_REQUEST = struct.Struct("<QQB7x")  # size, address, opcode
_CHUNK = 16 << 20
_PATIENCE_S = 5.0
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


@attack()
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
                    _write(victim.data, address, b"forged" * (min(nbytes, 8 << 20) // 6))

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
            offsets = pool.poll(ticket).offsets
            recalled += len(offsets)
            for key, offset in zip(some, offsets, strict=False):
                wrong += bytes(pool.arena.view(offset, _NBYTES)) != content(key, _NBYTES)
            pool.release(ticket)
    if wrong:
        raise GotIn(f"{wrong} of {recalled} blocks were recalled with a stranger's bytes")
    return f"{recalled} blocks recalled, all right; what was hit on its way is a miss"
