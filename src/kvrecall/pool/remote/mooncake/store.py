"""``MooncakeStore``: values in the memory of Mooncake's clients, located by its master."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvrecall.errors import TierError
from kvrecall.pool.remote.mooncake.client_process import (
    REPLIES,
    ClientReply,
    ClientRequest,
    ClientSetup,
    receive,
    send,
)
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings, why_unfit
from kvrecall.pool.remote.store import Object

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
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_LANES_PER_PEER": "3",
}
"""Defaults unless the operator's environment sets them: quiet, short time limits, and persistent
connections, of which three are faster than two or four for values of one piece."""
_AT_ONCE = 512
"""Objects in one call. Mooncake's client queues some 1,000 transfers to a host, of all calls
together; it fails those beyond, and may not answer at all."""
_SETUP_S = 30.0
_CALL_S = 40.0  # beyond all of Mooncake's own time limits
_PROBE_S = 1.0
_CALLS = {"tcp": 1}
"""Concurrent calls of one direction, by protocol. Over TCP a call of Mooncake's client polls
without a pause for the end of its transfers: a second call takes the processor that the first one's
bytes need."""
_READY = 1
"""Further calls that wait in the client's process, so that one begins when another ends."""
_OTHERWISE = 8
_RPC_FAILED = range(-999, -899)  # the master does not answer
_SILENCE_S = 600.0
_CAUSES = {
    -200: "no room: no client lends memory, or what they lend is full of blocks that were just "
    "used; raise global_segment_size on the hosts that lend (docs/remote.md)",
    -800: "a transfer failed: a host that lends memory is gone or cannot be reached (check its "
    "process and the network), or a value has another size than a block. These are misses",
}
"""Causes, with their cures, of codes that are no failure of a whole call. Each is logged once, then
not for ``_SILENCE_S`` seconds."""
_PATIENCE = 4  # failures with a master that is reachable, until the client is made anew


class MooncakeStore:
    """A ``Store`` on Mooncake. It connects at the first call; a lost client is replaced by a new
    one at the next call. A call ends within ``_CALL_S`` seconds: if Mooncake hangs, the process of
    its client is ended. The memory that this host lends to the cluster (``global_segment_size``) is
    in that process."""

    def __init__(self, settings: MooncakeSettings) -> None:
        self._settings = settings
        self._memory = memoryview(b"")
        self._fd = -1
        self._lock = threading.Lock()  # over starting and ending the client
        self._calls = _CALLS.get(settings.setup["protocol"], _OTHERWISE)
        calls = self._calls + _READY
        self._turns = {way: threading.Semaphore(calls) for way in ("put", "get")}
        self._client: Client | None = None
        self._failures = 0
        self._silent_until: dict[int, float] = {}
        self._closed = False

    @property
    def exposed(self) -> str:
        where = self._settings.setup["local_hostname"]
        return (
            f"local_hostname is {where!r}: Mooncake sends KV blocks in the clear, and anyone who "
            "reaches its ports, other users of this host too, can read and change blocks"
        )

    def attach(self, memory: memoryview, fd: int) -> None:
        self._memory, self._fd = memory, fd
        threading.Thread(target=self._begin, name="kvrecall-mooncake", daemon=True).start()

    def _begin(self) -> None:
        """Thread: prepares the client in advance, if the master answers."""
        with contextlib.suppress(TierError):
            self._connected()

    def exists(self, names: Sequence[str]) -> list[bool]:
        return [code == 1 for code in self._call(ClientRequest("exists", list(names)))]

    def put(self, objects: Sequence[Object]) -> list[bool]:
        return [code == 0 for code in self._move("put", objects)]

    def get(self, objects: Sequence[Object]) -> list[bool]:
        sizes = self.get_up_to(objects)
        return [size == item.nbytes for size, item in zip(sizes, objects, strict=True)]

    def get_up_to(self, objects: Sequence[Object]) -> list[int]:
        return [max(-1, code) for code in self._move("get", objects)]

    def _move(self, way: str, objects: Sequence[Object]) -> Iterator[int]:
        """Mooncake's codes."""
        for start in range(0, len(objects), _AT_ONCE):
            some = objects[start : start + _AT_ONCE]
            names = [item.name for item in some]
            offsets = [self._offset(item) for item in some]
            request = ClientRequest(way, names, offsets, [item.nbytes for item in some])
            with self._turns[way]:
                yield from self._call(request)

    def remove(self, names: Sequence[str]) -> None:
        self._call(ClientRequest("remove", list(names)))

    def close(self) -> None:
        self._closed = True
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _call(self, request: ClientRequest) -> list[int]:
        """Mooncake's codes. Raises TierError if its master or its client does not answer."""
        if not request.names:
            return []
        codes = self._connected().call(request, _CALL_S).codes
        if codes and all(code in _RPC_FAILED for code in codes):
            self._failed()
            host, port = self._settings.master
            raise TierError(
                f"Mooncake's master at {host}:{port} does not answer (code {codes[0]}); "
                "start it again; pools rejoin on their own"
            )
        self._failures = 0
        for code, cause in _CAUSES.items():
            if code in codes:
                self._warn(code, f"{codes.count(code)} of {len(codes)}", cause)
        return codes

    def _warn(self, code: int, how_many: str, cause: str) -> None:
        now = time.monotonic()
        with self._lock:
            if now < self._silent_until.get(code, now):
                return
            self._silent_until[code] = now + _SILENCE_S
        _LOG.warning("remote tier: Mooncake did not move %s blocks: %s", how_many, cause)

    def _failed(self) -> None:
        """Called on failure: after several while the master answers, the client has lost its
        session."""
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
            memory = self._fd, self._memory.nbytes
            self._client = Client(self._settings, memory, self._calls)
            return self._client

    def _is_master_there(self) -> bool:
        try:
            socket.create_connection(self._settings.master, _PROBE_S).close()
        except OSError:
            return False
        return True

    def _offset(self, item: Object) -> int:
        [part] = item.parts
        offset = _address_of(part) - _address_of(self._memory)
        if not 0 <= offset <= self._memory.nbytes - part.nbytes:
            raise ValueError("a value lies outside the memory that was attached")
        return offset


def _address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_store(options: Mapping[str, object]) -> MooncakeStore:
    """Options: ``config``, the path of a mooncake.json; its keys, which override the file's;
    ``allow_plaintext``. Raises ConfigError."""
    return MooncakeStore(MooncakeSettings.of(options))


class ClientLost(TierError):
    """Mooncake's client does not answer, or its process is gone."""


class Client:
    """A process of Mooncake's client that is set up. Thread-safe; ``close`` ends it and the calls
    in flight."""

    def __init__(self, settings: MooncakeSettings, memory: tuple[int, int], calls: int) -> None:
        """Starts the process and waits until it is set up. ``memory``: file descriptor and size of
        all that it registers. It makes ``calls`` concurrent calls per direction. Raises ClientLost,
        TierError."""
        if importlib.util.find_spec("mooncake") is None:
            raise TierError("Mooncake is not installed; pip install 'kvrecall[mooncake]'")
        pairs = [socket.socketpair() for _ in range(_SOCKETS)]
        their = [there for _, there in pairs]
        start = ClientSetup(
            os.getpid(),
            memory,
            settings.device,
            [sock.fileno() for sock in their],
            dict(settings.setup),
            calls,
        )
        self._said: deque[str] = deque(maxlen=20)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, msgspec.json.encode(start).decode()],
            pass_fds=[*(fd for fd, nbytes in [memory] if nbytes), *start.sockets],
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
        reply = self._receive(self._all[0], _SETUP_S)
        if reply.error:
            self._kill()
            why = why_unfit(settings.setup["protocol"])
            raise ClientLost(reply.error + (f"; {why}" if why else "") + self._last_words())
        for sock in self._all:
            self._idle.put(sock)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: ClientRequest, limit_s: float) -> ClientReply:
        """Raises ClientLost, after which no part of the call continues; TierError if it failed."""
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

    def _receive(self, sock: socket.socket, limit_s: float) -> ClientReply:
        sock.settimeout(limit_s)
        try:
            reply = receive(sock, REPLIES)
        except (TimeoutError, ValueError):  # a ValueError: it answers nonsense
            self._kill()
            raise ClientLost(f"Mooncake's client did not answer within {limit_s:.0f} s") from None
        if reply is None:
            self._kill()
            raise ClientLost("Mooncake's client ended" + self._last_words())
        return reply

    def close(self) -> None:
        """Removes the client from the cluster if it answers; ends the process. Idempotent."""
        if self.is_alive:
            with contextlib.suppress(TierError):
                self.call(ClientRequest("close", []), _CLOSE_S)
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
        """Thread: keeps the last lines that the process prints."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode(errors="replace").rstrip()
                self._said.append(line)
                _LOG.debug("mooncake: %s", line)
