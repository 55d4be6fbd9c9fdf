"""Mooncake's client, which runs in a process of its own: how it is started, asked and ended.

Both processes map the arena, so no KV bytes travel between them. Over a pair of sockets for each
call that is under way go a length and a MessagePack array: one request, then one reply.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrecall.errors import TierError

_LOG = logging.getLogger(__name__)
_MODULE = "kvrecall.pool.remote.mooncake.client_process"
_SOCKETS = 8  # calls at once
_CLOSE_S = 4.0
ENVIRONMENT = {
    "GLOG_minloglevel": "2",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_SLICE_TIMEOUT": "5",
    "MC_TCP_LANES_PER_PEER": "2",
}
"""Unless the operator's environment says otherwise: quiet, and quick to give up. Values of several
pieces, as ours are, go over lasting connections: over two they get 5 % faster than over four."""
_LENGTH = struct.Struct("<I")

SMALL_BYTES = 64
"""Pieces of a value up to this size travel with the request; larger ones lie in the arena."""
BUFFER_BYTES = 1 << 20
"""Of small pieces in one request: they lie in memory of the client that Mooncake knows."""

Piece = tuple[int, int] | bytes | int
"""Of a value: offset and length in the arena; or bytes to put; or how many bytes to get."""


class ClientSetup(msgspec.Struct, frozen=True):
    """What the process is started with. ``parent``: the process it ends with. ``arena``:
    file descriptor, offset and size. ``sockets``: file descriptors, one per thread. ``calls``:
    of Mooncake in one direction at once; further ones wait in that process, ready to begin."""

    parent: int
    arena: tuple[int, int, int]
    sockets: list[int]
    setup: dict[str, str]
    calls: int


class Request(msgspec.Struct, frozen=True, array_like=True):
    """``op``: exists, put, get, remove or close. ``values`` has the pieces of each name."""

    op: str
    names: list[str]
    values: list[list[Piece]] = []


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Mooncake's code for each name, the small pieces that were got, or what went wrong."""

    codes: list[int]
    smalls: list[list[bytes]] = []
    error: str = ""


_ENCODER = msgspec.msgpack.Encoder()
_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def send(sock: socket.socket, message: Request | Reply) -> None:
    body = _ENCODER.encode(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_request(sock: socket.socket) -> Request | None:
    """Returns None if the other side is gone."""
    body = _receive(sock)
    return None if body is None else _REQUEST.decode(body)


def receive_reply(sock: socket.socket) -> Reply | None:
    """Returns None if the other side is gone. Raises TimeoutError."""
    body = _receive(sock)
    return None if body is None else _REPLY.decode(body)


def _receive(sock: socket.socket) -> bytearray | None:
    head = _exactly(sock, _LENGTH.size)
    return None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view: Any = memoryview(data)
    while view:
        try:
            got = sock.recv_into(view)
        except (ConnectionError, BrokenPipeError):
            return None
        if got == 0:
            return None
        view = view[got:]
    return data


class ClientLost(TierError):
    """Mooncake's client does not answer, or its process is gone."""


def shared_file_of(memory: memoryview) -> tuple[int, int]:
    """File descriptor and offset of the shared memory file that ``memory`` (whole pages) maps.

    Raises TierError if it is memory that no other process can map.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode = line.split()[:5]
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last and inode != "0":
            major, minor = (int(part, 16) for part in device.split(":"))
            fd = _descriptor(os.makedev(major, minor), int(inode))
            if fd is not None:
                return fd, int(offset, 16) + address - first
    raise TierError("Mooncake needs memory in a shared file, such as the pool's arena")


def _descriptor(device: int, inode: int) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if (status.st_dev, status.st_ino) == (device, inode):
                return int(name)
    return None


class Client:
    """A process of Mooncake's client that is set up. Thread-safe; ``close`` ends it and the calls
    under way."""

    def __init__(
        self, setup: Mapping[str, str], memory: memoryview, calls: int, limit_s: float
    ) -> None:
        """Starts the process and waits at most ``limit_s`` until it is set up. It makes
        ``calls`` calls of one direction at once. Raises ClientLost, TierError."""
        if importlib.util.find_spec("mooncake") is None:
            raise TierError("Mooncake is not installed; pip install 'kvrecall[mooncake]'")
        fd, offset = shared_file_of(memory)
        pairs = [socket.socketpair() for _ in range(_SOCKETS)]
        their = [there for _, there in pairs]
        start = ClientSetup(
            os.getpid(),
            (fd, offset, memory.nbytes),
            [sock.fileno() for sock in their],
            dict(setup),
            calls,
        )
        self._said: deque[str] = deque(maxlen=20)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, msgspec.json.encode(start).decode()],
            pass_fds=[fd, *start.sockets],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                **ENVIRONMENT,
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            process_group=0,  # Ctrl-C is not for it; a session of its own would be scheduled apart
        )
        for sock in their:
            sock.close()
        self._all = [here for here, _ in pairs]
        self._idle: queue.LifoQueue[socket.socket] = queue.LifoQueue()
        threading.Thread(target=self._listen, name="kvrecall-mooncake-log", daemon=True).start()
        first = self._all[0]
        reply = self._receive(first, limit_s)
        if reply.error:
            self._kill()
            raise ClientLost(reply.error + self._last_words())
        for sock in self._all:
            self._idle.put(sock)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: Request, limit_s: float) -> Reply:
        """Raises ClientLost, and then nothing of the call goes on; TierError if it failed."""
        try:
            sock = self._idle.get(timeout=limit_s)
        except queue.Empty:
            raise ClientLost("Mooncake's client is busy with calls that do not end") from None
        try:
            send(sock, request)
            reply = self._receive(sock, limit_s)
        except OSError as error:
            self._kill()
            raise ClientLost(f"Mooncake's client is gone: {error}") from error
        self._idle.put(sock)
        if reply.error:
            raise TierError(f"Mooncake's client: {reply.error}")
        return reply

    def _receive(self, sock: socket.socket, limit_s: float) -> Reply:
        sock.settimeout(limit_s)
        try:
            reply = receive_reply(sock)
        except TimeoutError:
            self._kill()
            raise ClientLost(f"Mooncake's client did not answer within {limit_s:.0f} s") from None
        if reply is None:
            self._kill()
            raise ClientLost("Mooncake's client ended" + self._last_words())
        return reply

    def close(self) -> None:
        """Takes the client out of the cluster if it answers; ends the process. Idempotent."""
        if self.is_alive:
            with contextlib.suppress(TierError):
                self.call(Request("close", []), _CLOSE_S)
        self._kill()
        for sock in self._all:
            sock.close()

    def _kill(self) -> None:
        """After this no other process touches the memory."""
        self._process.kill()
        self._process.wait()
        for sock in self._all:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # ends the calls of other threads

    def _last_words(self) -> str:
        return "".join(f"\n  {line}" for line in list(self._said)[-3:])

    def _listen(self) -> None:
        """Thread: keeps the last of what the process prints."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self._said.append(line)
                _LOG.debug("mooncake: %s", line)
