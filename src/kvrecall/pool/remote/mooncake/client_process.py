"""The process of Mooncake's client: executes the calls of the pool's process, one by one.

``python -m kvrecall.pool.remote.mooncake.client_process SETUP``. It is a separate process because
some of Mooncake's calls (setting up, closing) hold Python's lock for as long as the network is
silent, and because a call that never returns can be ended by ending the process, after which no
other process writes into its memory any more. It ends with the process that started it.

Both processes map the sections of ``StagedStore``, so no KV bytes travel between them; this one
knows no other memory of the pool. Each concurrent call uses its own pair of sockets, over which a
length and a MessagePack array go: one request, then one reply.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import mmap
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

M = TypeVar("M")

_LOOK_S = 1.0
_PATIENCE = 2.5  # times what a call is expected to take
_GRACE_S = 0.01
_FORGET = 1.1  # how fast a speed that was seen once is forgotten
_FIRST_ORDINARY, _MAX_ORDINARY = 4, 64  # calls
_LENGTH = struct.Struct("<I")


class ClientSetup(msgspec.Struct, frozen=True):
    """Arguments of the process. ``parent``: the process it ends with. ``memory``: file descriptor
    and size of the memory file, size 0 for none. ``device``: the network interface that the ports
    are for; "" for all. ``sockets``: file descriptors, one per thread. ``calls``: concurrent calls
    of Mooncake per direction; further ones wait in that process, ready to begin.
    """

    parent: int
    memory: tuple[int, int]
    device: str
    sockets: list[int]
    setup: dict[str, str]
    calls: int


class ClientRequest(msgspec.Struct, frozen=True, array_like=True):
    """``op``: exists, put, get, remove or close. ``offsets``, ``sizes``: where the value of each
    name is in the memory, or goes to, and its size, for a get the most."""

    op: str
    names: list[str]
    offsets: list[int] = []
    sizes: list[int] = []


class ClientReply(msgspec.Struct, frozen=True, array_like=True):
    """Mooncake's code for each name, or the error."""

    codes: list[int]
    error: str = ""


_ENCODER = msgspec.msgpack.Encoder()
REQUESTS: msgspec.msgpack.Decoder[ClientRequest] = msgspec.msgpack.Decoder(ClientRequest)
REPLIES: msgspec.msgpack.Decoder[ClientReply] = msgspec.msgpack.Decoder(ClientReply)


def send(sock: socket.socket, message: ClientRequest | ClientReply) -> None:
    body = _ENCODER.encode(message)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[M]) -> M | None:
    """Returns None if the other side is gone. Raises TimeoutError."""
    head = _exactly(sock, _LENGTH.size)
    body = None if head is None else _exactly(sock, min(_LENGTH.unpack(head)[0], 1 << 24))
    return None if body is None else decoder.decode(body)


def _exactly(sock: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view: Any = memoryview(data)
    while view:
        try:
            got = sock.recv_into(view)
        except ConnectionError:
            return None
        if got == 0:
            return None
        view = view[got:]
    return data


def main(text: str) -> None:
    """Sets up the client, reports it on the first socket, then serves all sockets."""
    setup = msgspec.json.decode(text, type=ClientSetup)
    sockets = [socket.socket(fileno=fd) for fd in setup.sockets]
    threading.Thread(target=_end_with, args=(setup.parent,), daemon=True).start()
    try:
        client, memory = _client(setup)
    except (ImportError, OSError, RuntimeError) as error:
        send(sockets[0], ClientReply([], error=str(error)))
        return
    calls = _Calls(client, memory, setup.calls)
    for sock in sockets[1:]:
        threading.Thread(target=calls.serve, args=(sock,), daemon=True).start()
    send(sockets[0], ClientReply([0]))
    calls.serve(sockets[0])
    os._exit(0)


def _client(setup: ClientSetup) -> tuple[Any, ctypes.c_char | None]:
    """The client, and the first byte of the memory that it knows, which keeps all of it mapped.
    Raises ImportError, OSError, RuntimeError."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    code = client.setup(setup.setup)
    if code != 0:
        raise RuntimeError(f"Mooncake's client cannot be set up (code {code})")
    if setup.device:
        _confine(setup.device)
    fd, nbytes = setup.memory
    if not nbytes:
        return client, None
    memory = ctypes.c_char.from_buffer(mmap.mmap(fd, nbytes))
    code = client.register_buffer(ctypes.addressof(memory), nbytes)
    if code != 0:
        raise RuntimeError(f"Mooncake cannot register {nbytes} bytes of memory ({code})")
    return client, memory


def _confine(device: str) -> None:
    """Has the ports that Mooncake opened, on all interfaces whatever it is told, take connections
    over one interface only, and ends those there are from other hosts. Those of this host stay:
    its clients transfer as soon as the master knows this one, and Mooncake fails what is under way
    on a connection that ends. Raises RuntimeError if the system forbids it."""
    with _tcp_sockets() as sockets:
        listening = [s for s in sockets if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
        ports = {sock.getsockname()[1] for sock in listening}
        try:
            for sock in listening:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        except OSError as error:
            raise RuntimeError(
                "local_hostname is this machine's loopback, but the ports of Mooncake's client "
                f"cannot be bound to {device} ({error.strerror}); that takes Linux 5.7 or "
                "CAP_NET_RAW"
            ) from error
    with _tcp_sockets() as sockets:  # again: some were accepted meanwhile
        for sock in sockets:
            with contextlib.suppress(OSError):  # it is not connected (any more)
                if sock.getsockname()[1] in ports and not _is_loopback(sock.getpeername()[0]):
                    sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _tcp_sockets() -> Iterator[list[socket.socket]]:
    """This process's sockets of IP, as duplicates."""
    with contextlib.ExitStack() as stack:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        sockets = [
            stack.enter_context(socket.socket(fileno=os.dup(fd))) for fd in fds if _is_socket(fd)
        ]
        yield [sock for sock in sockets if sock.family in (socket.AF_INET, socket.AF_INET6)]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("::ffff:").partition("%")[0]).is_loopback


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # the one that listed them
        return False


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(0)


class _Calls:
    """Executes requests, of each direction at most ``calls`` at once. Thread-safe."""

    def __init__(self, client: Any, memory: ctypes.c_char | None, calls: int) -> None:
        self._client = client
        self._memory = memory
        self._turns = {way: threading.Semaphore(calls) for way in ("put", "get")}
        self._priority = SpinPriority()

    def serve(self, sock: socket.socket) -> None:
        """Serves the requests of a socket, one after the other, until it is closed."""
        while (request := receive(sock, REQUESTS)) is not None:
            try:
                reply = ClientReply(self._codes(request))
            except Exception as error:  # noqa: BLE001 - C++ may throw anything
                reply = ClientReply([], error=f"{type(error).__name__}: {error}")
            send(sock, reply)

    def _codes(self, request: ClientRequest) -> Any:
        client, names = self._client, request.names
        match request.op:
            case "exists":
                return client.batch_is_exist(names)
            case "remove":
                return client.batch_remove(names, True)
            case "close":
                return [client.close()]
        assert self._memory is not None
        base = ctypes.addressof(self._memory)
        places = [base + offset for offset in request.offsets]
        with self._turns[request.op], self._priority.call(request.op, sum(request.sizes)) as call:
            if request.op == "put":
                codes = client.batch_put_from(names, places, request.sizes)
                call.moved = not any(codes)
            else:
                codes = client.batch_get_into(names, places, request.sizes)
                call.moved = min(codes, default=0) > 0
            return codes


class CallTimes:
    """Durations of calls of one direction, and whether the next one may begin at low priority. Not
    thread-safe."""

    def __init__(self) -> None:
        self._seconds_a_byte: float | None = None
        self._ordinary = 0  # calls that still begin at the ordinary priority
        self._next_ordinary = _FIRST_ORDINARY

    def limit_of(self, nbytes: int) -> float | None:
        """Seconds after which a call of ``nbytes`` at low priority is late; None if it must
        not begin at that."""
        if self._ordinary or self._seconds_a_byte is None:
            self._ordinary = max(0, self._ordinary - 1)
            return None
        return _PATIENCE * nbytes * self._seconds_a_byte + _GRACE_S

    def ended(self, nbytes: int, seconds: float) -> None:
        """A call moved ``nbytes``, at least one, in ``seconds`` and was not late."""
        seen = seconds / nbytes
        known = self._seconds_a_byte
        self._seconds_a_byte = seen if known is None else min(seen, _FORGET * known)

    def in_time(self) -> None:
        """A call at low priority ended before its limit."""
        self._next_ordinary = _FIRST_ORDINARY

    def late(self) -> None:
        """A call at low priority had to be raised: others need the processors."""
        self._ordinary = self._next_ordinary
        self._next_ordinary = min(_MAX_ORDINARY, 2 * self._next_ordinary)


@dataclass(slots=True)
class Call:
    """A call in flight. ``moved``: whether it moved all its bytes, set by its caller. A call that
    did not says nothing about durations."""

    moved: bool = False


class SpinPriority:
    """Lowers the priority of threads that only poll for the end of a call, and raises late ones.
    Thread-safe.

    While a call moves bytes, Mooncake's client polls without a pause for its end. That takes the
    processor from the threads that move the bytes, here and in other processes; and a thread that
    never gets a processor does not notice the end. A call therefore begins at the system's lowest
    priority and is raised to the ordinary one when it takes longer than usual; the next calls begin
    at the ordinary priority until there is reason to think that processors are free.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._changed = threading.Condition()  # guards everything below
        self._times: dict[str, CallTimes] = {}
        self._limits: dict[int, float] = {}  # thread at low priority -> when it is late
        self._lowers = can_raise()
        if self._lowers:
            threading.Thread(target=self._watch, daemon=True).start()

    @contextlib.contextmanager
    def call(self, way: str, nbytes: int) -> Iterator[Call]:
        """Wraps a call in direction ``way`` of ``nbytes``, in the calling thread."""
        call = Call()
        if not self._lowers:
            yield call
            return
        thread, began = threading.get_native_id(), self._monotonic()
        with self._changed:
            times = self._times.setdefault(way, CallTimes())
            limit_s = times.limit_of(nbytes)
            if limit_s is not None:
                _set_low(thread, True)
                self._limits[thread] = began + limit_s
                self._changed.notify()
        try:
            yield call
        finally:
            seconds = self._monotonic() - began
            with self._changed:
                if limit_s is not None and self._limits.pop(thread, None) is None:
                    times.late()
                else:
                    if call.moved and nbytes:
                        times.ended(nbytes, seconds)
                    if limit_s is not None:
                        _set_low(thread, False)
                        times.in_time()

    def _watch(self) -> None:
        """Thread: raises threads that are late."""
        with self._changed:
            while True:
                now = self._monotonic()
                for thread in [t for t, limit in self._limits.items() if limit <= now]:
                    del self._limits[thread]
                    _set_low(thread, False)
                nearest = min(self._limits.values(), default=None)
                self._changed.wait(None if nearest is None else nearest - now)


def can_raise() -> bool:
    """Whether this process may restore a thread's ordinary priority (CAP_SYS_NICE)."""

    def attempt() -> bool:
        me = threading.get_native_id()
        try:
            _set_low(me, True)
            _set_low(me, False)
        except (OSError, AttributeError):
            return False
        return True

    with ThreadPoolExecutor(1) as thread:  # not this one, which might stay low
        return thread.submit(attempt).result()


def _set_low(thread: int, low: bool) -> None:
    policy = os.SCHED_IDLE if low else os.SCHED_OTHER
    os.sched_setscheduler(thread, policy, os.sched_param(0))


if __name__ == "__main__":
    main(sys.argv[1])
