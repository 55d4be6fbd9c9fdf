"""The process of Mooncake's client, seen from the pool's process."""

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
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvrecall.errors import TierError
from kvrecall.pool.remote.mooncake.wire import Orders, Reply, Request, receive_reply, send

_LOG = logging.getLogger(__name__)
_PORTER = "kvrecall.pool.remote.mooncake.porter"
_WIRES = 8  # calls at once
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


class PorterLost(TierError):
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


class Porter:
    """A client that is set up. Thread-safe; ends with ``close``, which ends calls under way."""

    def __init__(
        self, setup: Mapping[str, str], memory: memoryview, at_a_time: int, limit_s: float
    ) -> None:
        """Starts the process and waits at most ``limit_s`` until it is set up. It makes
        ``at_a_time`` calls of one direction at once. Raises PorterLost, TierError."""
        if importlib.util.find_spec("mooncake") is None:
            raise TierError("Mooncake is not installed; pip install 'kvrecall[mooncake]'")
        fd, offset = shared_file_of(memory)
        pairs = [socket.socketpair() for _ in range(_WIRES)]
        theirs = [there for _, there in pairs]
        orders = Orders(
            os.getpid(),
            (fd, offset, memory.nbytes),
            [wire.fileno() for wire in theirs],
            dict(setup),
            at_a_time,
        )
        self._said: deque[str] = deque(maxlen=20)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PORTER, msgspec.json.encode(orders).decode()],
            pass_fds=[fd, *orders.wires],
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
        for wire in theirs:
            wire.close()
        self._all = [here for here, _ in pairs]
        self._wires: queue.LifoQueue[socket.socket] = queue.LifoQueue()
        threading.Thread(target=self._listen, name="kvrecall-mooncake-log", daemon=True).start()
        first = self._all[0]
        reply = self._receive(first, limit_s)
        if reply.error:
            self._kill()
            raise PorterLost(reply.error + self._last_words())
        for wire in self._all:
            self._wires.put(wire)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: Request, limit_s: float) -> Reply:
        """Raises PorterLost, and then nothing of the call goes on; TierError if it failed."""
        try:
            wire = self._wires.get(timeout=limit_s)
        except queue.Empty:
            raise PorterLost("Mooncake's client is busy with calls that do not end") from None
        try:
            send(wire, request)
            reply = self._receive(wire, limit_s)
        except OSError as error:
            self._kill()
            raise PorterLost(f"Mooncake's client is gone: {error}") from error
        self._wires.put(wire)
        if reply.error:
            raise TierError(f"Mooncake's client: {reply.error}")
        return reply

    def _receive(self, wire: socket.socket, limit_s: float) -> Reply:
        wire.settimeout(limit_s)
        try:
            reply = receive_reply(wire)
        except TimeoutError:
            self._kill()
            raise PorterLost(f"Mooncake's client did not answer within {limit_s:.0f} s") from None
        if reply is None:
            self._kill()
            raise PorterLost("Mooncake's client ended" + self._last_words())
        return reply

    def close(self) -> None:
        """Takes the client out of the cluster if it answers; ends the process. Idempotent."""
        if self.is_alive:
            with contextlib.suppress(TierError):
                self.call(Request("close", []), _CLOSE_S)
        self._kill()
        for wire in self._all:
            wire.close()

    def _kill(self) -> None:
        """After this nobody but us touches the memory."""
        self._process.kill()
        self._process.wait()
        for wire in self._all:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)  # ends the calls of other threads

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
