"""``MooncakeStore``: values in the memory of Mooncake's clients, found by its master."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
from collections.abc import Iterator, Sequence

from kvrecall.errors import TierError
from kvrecall.pool.remote.mooncake.client import (
    BUFFER_BYTES,
    SMALL_BYTES,
    Client,
    ClientLost,
    Piece,
    Reply,
    Request,
)
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.pool.remote.store import Object

_AT_ONCE = 512
"""Objects in one call. Mooncake's client queues some 1,000 transfers to a host, of all calls
together; it fails those beyond, and may not answer at all."""
assert 4 * _AT_ONCE * SMALL_BYTES <= BUFFER_BYTES
_SETUP_S = 30.0
_CALL_S = 40.0  # beyond all of Mooncake's own time limits
_PROBE_S = 1.0
_CALLS = {"tcp": 1}
"""Calls of one direction under way, by protocol. Over TCP a call of Mooncake's client looks again
and again, without a pause, whether its transfers have ended: a second one takes from the first
the processor that its bytes need."""
_READY = 1
"""Further calls that wait in the client's process, so that one begins when another ends."""
_OTHERWISE = 8
_RPC_FAILED = range(-999, -899)  # the master does not answer
_PATIENCE = 4  # failures with a master that is reachable, until the client is made anew


class MooncakeStore:
    """A ``Store`` on Mooncake. Nothing is connected before the first call; a client that is lost
    is replaced by a new one at the next.

    A call ends within ``_CALL_S`` seconds: if Mooncake hangs, the process of its client is ended.
    The memory this host lends to the cluster (``global_segment_size``) lies in that process.
    """

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._memory = memoryview(b"")
        self._address = 0
        self._lock = threading.Lock()  # over starting and ending the client
        self._calls = _CALLS.get(settings.setup["protocol"], _OTHERWISE)
        self._putting = threading.Semaphore(self._calls + _READY)
        self._getting = threading.Semaphore(self._calls + _READY)
        self._client: Client | None = None
        self._failures = 0
        self._closed = False

    def attach(self, memory: memoryview) -> None:
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        threading.Thread(target=self._begin, name="kvrecall-mooncake", daemon=True).start()

    def _begin(self) -> None:
        """Thread: has the client ready when it is needed, if the master is there."""
        with contextlib.suppress(TierError):
            self._connected()

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [code == 1 for code in self._call(Request("exists", list(names))).codes]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        there: list[bool] = []
        for some in _parts(objects):
            values = [[self._piece(part) for part in item.parts] for item in some]
            request = Request("put", [item.name for item in some], values)
            with self._putting:
                reply = self._call(request)
            there += [code == 0 for code in reply.codes]
        return there

    def get(self, objects: Sequence[Object]) -> list[bool]:
        there: list[bool] = []
        for some in _parts(objects):
            values = [[_wanted(self._piece(part)) for part in item.parts] for item in some]
            request = Request("get", [item.name for item in some], values)
            with self._getting:
                reply = self._call(request)
            for item, code, smalls in zip(some, reply.codes, reply.smalls, strict=True):
                there.append(code == item.nbytes)
                _fill(item, smalls)
        return there

    def remove(self, names: Sequence[str]) -> None:
        self._call(Request("remove", list(names)))

    def close(self) -> None:
        self._closed = True
        with self._lock:
            client, self._client = self._client, None
            self._memory = memoryview(b"")
        if client is not None:
            client.close()

    def _call(self, request: Request) -> Reply:
        """Mooncake's answer. Raises TierError if its master or its client does not answer."""
        if not request.names:
            return Reply([])
        reply = self._connected().call(request, _CALL_S)
        if reply.codes and all(code in _RPC_FAILED for code in reply.codes):
            self._failed()
            raise TierError(f"Mooncake's master does not answer (code {reply.codes[0]})")
        self._failures = 0
        return reply

    def _failed(self) -> None:
        """After some failures although the master is there, the client has lost its session."""
        with self._lock:
            self._failures += 1
            if self._failures >= _PATIENCE and self._is_master_there():
                self._failures = 0
                client, self._client = self._client, None
                if client is not None:
                    client.close()

    def _connected(self) -> Client:
        with self._lock:
            if self._closed:
                raise ClientLost("closed")
            if self._client is not None and self._client.is_alive:
                return self._client
            host, port = self._settings.master
            if not self._is_master_there():
                raise TierError(f"there is no Mooncake master at {host}:{port}")
            self._client = Client(self._settings.setup, self._memory, self._calls, _SETUP_S)
            return self._client

    def _is_master_there(self) -> bool:
        try:
            socket.create_connection(self._settings.master, _PROBE_S).close()
        except OSError:
            return False
        return True

    def _piece(self, part: memoryview) -> Piece:
        if part.nbytes <= SMALL_BYTES:
            return bytes(part)
        offset = ctypes.addressof(ctypes.c_char.from_buffer(part)) - self._address
        if not 0 <= offset <= self._memory.nbytes - part.nbytes:
            raise ValueError("a part lies outside the memory that was attached")
        return offset, part.nbytes


def _wanted(piece: Piece) -> Piece:
    return len(piece) if isinstance(piece, bytes) else piece


def _fill(item: Object, smalls: Sequence[bytes]) -> None:
    rest = iter(smalls)
    for part in item.parts:
        if part.nbytes <= SMALL_BYTES:
            part[:] = next(rest)


def _parts(objects: Sequence[Object]) -> Iterator[Sequence[Object]]:
    for start in range(0, len(objects), _AT_ONCE):
        yield objects[start : start + _AT_ONCE]
