"""One connection to a service, from the client's side: requests with deadlines, from any thread."""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVarTuple

from kvrecall import __version__
from kvrecall.pool.base import NO_ARENA, ArenaHandle
from kvrecall.pool.service import protocol as p

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_PEER_PIDFD = 77  # SO_PEERPIDFD, Linux 6.5
_PROC = Path("/proc")
_ARENA_NAME = "/memfd:kvrecall-arena"


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """The process at the other end of a connection. ``descriptor`` becomes readable when it has
    ended, and never means a later process of its number. The owner closes it."""

    pid: int
    descriptor: int

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Raises ProcessLookupError if the process has ended, or OSError."""
        pid, _ = credentials(connection)
        try:
            return cls(pid, connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD))
        except OSError as error:
            if error.errno == errno.EINVAL:  # ended, as some kernels say it
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
            if error.errno != errno.ENOPROTOOPT:
                raise
        # An older kernel: if the number was given out again by now, the later process's end is
        # waited for as well.
        return cls(pid, os.pidfd_open(pid))

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; a zombie does not."""
        ended = select.poll()
        ended.register(self.descriptor, select.POLLIN)
        return not ended.poll(0)

    def close(self) -> None:
        os.close(self.descriptor)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process number (0: in another PID namespace) and user id at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def mappers_of(inode: int) -> set[int]:
    """Processes that map the arena with that inode, as far as they can be inspected. Milliseconds;
    blocks."""
    found = set()
    for name in filter(str.isdecimal, os.listdir(_PROC)):
        try:
            with (_PROC / name / "maps").open(errors="replace") as maps:
                for line in maps:
                    if _ARENA_NAME in line and line.split(None, 5)[4] == str(inode):
                        found.add(int(name))
                        break
        except OSError:
            continue
    return found


Ts = TypeVarTuple("Ts")

_CHUNK = 1 << 18
_BUSY_S = 0.01
_LATE_LIMIT_S = 3.0
"""Time after which a service that owes a reply counts as lost."""


class LinkLost(Exception):
    """There is no service at the other end (any more); the text says why."""


class LinkLate(Exception):
    """The reply did not come in time, or an earlier one is still owed."""


class Link:
    """A greeted connection. ``ask`` waits for the reply at most its deadline. Any waiting caller
    reads for all others, so that a lone caller gets its reply without a thread switch.

    After a late reply every ``ask`` fails at once with LinkLate, until the reply arrives: a service
    that stalls costs its client one deadline, not one per call.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # guards what follows
        self._reading = False
        self._expected: set[int] = set()
        self._replies: dict[int, p.Reply] = {}
        self._heard = 0.0  # when the last Progress came
        self._on_progress: dict[int, Callable[[p.Progress], None]] = {}
        self._owed: int | None = None  # the request whose reply is late
        self._owed_since = 0.0
        self.why_lost = ""
        self._framer = p.Framer()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.welcome: p.Welcome

    @classmethod
    def open(cls, path: Path, timeout_s: float, before: ArenaHandle = NO_ARENA) -> Self:
        """Connects and greets. ``before``: the arena of this client's last connection. Raises
        LinkLost if that does not succeed in time."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        until = time.monotonic() + timeout_s
        try:
            while (status := sock.connect_ex(str(path))) == errno.EAGAIN:  # too many others wait
                if time.monotonic() > until:
                    raise LinkLost(f"the service at {path} does not accept connections")
                time.sleep(_BUSY_S)
            if status:
                raise OSError(status, os.strerror(status))
            _, uid = credentials(sock)
            if uid != os.getuid():
                raise LinkLost(f"the service at {path} runs as user {uid}, not as {os.getuid()}")
        except LinkLost:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            why = f": {error.strerror or error}"
            if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
                why = f"; start one with: kvrecall pool serve --socket {path}"
            raise LinkLost(f"no pool service at {path}{why}") from error
        link = cls(sock)
        try:
            until = time.monotonic() + timeout_s
            link._send(p.Hello(p.PROTOCOL, __version__, before.boot, before.seat), until)
            link._expected.add(0)
            welcome = link._await(0, until)
            if not isinstance(welcome, p.Welcome):
                raise LinkLost("it does not greet")
        except LinkLate as error:
            link.close()
            raise LinkLost(f"the service at {path} does not answer") from error
        except LinkLost as error:
            link.close()
            raise LinkLost(f"the service at {path} ended the connection: {error}") from error
        link.welcome = welcome
        return link

    @property
    def is_lost(self) -> bool:
        return bool(self.why_lost)

    def ask(
        self,
        kind: Callable[[int, *Ts], p.Message],
        *fields: *Ts,
        timeout_s: float,
        slow: bool = False,
        on_progress: Callable[[p.Progress], None] | None = None,
    ) -> p.Reply:
        """Sends ``kind(number, *fields)`` and returns its reply. Raises LinkLate or LinkLost if
        there is none. ``slow``: the request takes the service long, so a late reply means nothing;
        its timeout then counts from the last ``on_progress``, which is called for every
        Progress."""
        until = time.monotonic() + timeout_s
        number = self.begin(kind, *fields, timeout_s=timeout_s, slow=slow)
        if on_progress is not None:
            self._on_progress[number] = on_progress
        try:
            while True:
                try:
                    return self._await(number, until)
                except LinkLate:
                    until = self._heard + timeout_s
                    if on_progress is None or until < time.monotonic():
                        raise
        except LinkLate:
            with self._changed:
                has_come = number in self._replies  # in the meantime
                if not (slow or has_come) and self._owed is None:
                    self._owed, self._owed_since = number, time.monotonic()
            raise
        finally:
            self._on_progress.pop(number, None)
            self.forget(number)

    def begin(
        self,
        kind: Callable[[int, *Ts], p.Message],
        *fields: *Ts,
        timeout_s: float,
        slow: bool = False,
    ) -> int:
        """Sends ``kind(number, *fields)`` and returns its number, for ``taken``. Raises LinkLate if
        a reply is owed and this one is not ``slow``, or LinkLost."""
        if not slow:
            self._check_owed()
        number = next(self._numbers)
        with self._changed:
            self._expected.add(number)
        try:
            self._send(kind(number, *fields), time.monotonic() + timeout_s)
        except BaseException:
            self.forget(number)
            raise
        return number

    def taken(self, number: int) -> p.Reply | None:
        """The reply to what ``begin`` sent, if it is there; does not wait for it."""
        if number not in self._replies:
            self._look()
        with self._changed:
            reply = self._replies.pop(number, None)
            if reply is not None:
                self._expected.discard(number)
            return reply

    def forget(self, number: int) -> None:
        """The reply to what ``begin`` sent is not wanted any more."""
        with self._changed:
            self._expected.discard(number)
            self._replies.pop(number, None)

    def tell(self, message: p.Message, timeout_s: float) -> None:
        """Sends a message that has no reply. LinkLost if it cannot be sent."""
        self._send(message, time.monotonic() + timeout_s)

    def wait_lost(self, timeout_s: float) -> bool:
        """Waits until the other end hangs up. False if it has not in that time."""
        if self.why_lost:
            return True
        watch = select.poll()
        watch.register(self._sock, select.POLLRDHUP)
        if not watch.poll(timeout_s * 1000):
            return False
        self.fail("the connection ended")
        return True

    def fail(self, reason: str) -> None:
        """Closes the connection; waiting callers get LinkLost. Idempotent, from any thread."""
        with self._changed:
            if not self.why_lost:
                self.why_lost = reason
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError as error:
                    if error.errno != errno.ENOTCONN:
                        raise
            self._changed.notify_all()

    def close(self) -> None:
        """Closes the connection, after all callers are done."""
        self.fail("closed")
        with self._sending:
            self._sock.close()

    # -- inside ----------------------------------------------------------------------------

    def _check_owed(self) -> None:
        if self._owed is None:
            return
        self._look()
        with self._changed:
            if self._owed is None:
                return
            late = time.monotonic() - self._owed_since
        if late > _LATE_LIMIT_S:
            self.fail(f"no reply for {late:.1f} s")
        raise LinkLate

    def _send(self, message: p.Message, until: float) -> None:
        view = memoryview(p.frame_of(message))
        with self._sending:
            if self.why_lost:
                raise LinkLost(self.why_lost)
            while view:
                try:
                    view = view[self._sock.send(view) :]
                except BlockingIOError:
                    left = until - time.monotonic()
                    writable = select.poll()
                    writable.register(self._sock, select.POLLOUT)
                    if left <= 0 or not writable.poll(left * 1000):
                        self.fail("the service does not read")
                        raise LinkLost(self.why_lost) from None
                except OSError as error:
                    self.fail(os.strerror(error.errno or 0))
                    raise LinkLost(self.why_lost) from None

    def _await(self, number: int, until: float) -> p.Reply:
        while True:
            with self._changed:
                if number in self._replies:
                    return self._replies.pop(number)
                if self.why_lost:
                    raise LinkLost(self.why_lost)
                left = until - time.monotonic()
                if left <= 0:
                    raise LinkLate
                if self._reading:
                    self._changed.wait(left)
                    continue
                self._reading = True
            self._read(left)

    def _look(self) -> None:
        """Processes what has arrived, unless another caller does."""
        with self._changed:
            is_mine = not (self._reading or self.why_lost)
            self._reading |= is_mine
        if is_mine:
            self._read(0.0)

    def _read(self, timeout_s: float) -> None:
        """Processes messages that arrive within the time. The caller has set ``_reading``."""
        try:
            if self._readable.poll(timeout_s * 1000):
                data = self._sock.recv(_CHUNK)
                self._framer.feed(data)
                for body in self._framer.take():
                    self._sort(p.read_reply(body))
                if not data:
                    self.fail("the connection ended")
        except BlockingIOError:
            return
        except OSError as error:
            self.fail(os.strerror(error.errno or 0))
        except p.ProtocolError as error:
            self.fail(f"invalid message from the service: {error}")
        finally:
            with self._changed:
                self._reading = False
                self._changed.notify_all()

    def _sort(self, reply: p.Reply) -> None:
        if isinstance(reply, p.Rejection):
            self.fail(reply.reason)
            return
        number = 0 if isinstance(reply, p.Welcome) else reply.number
        if isinstance(reply, p.Progress):
            on_progress = self._on_progress.get(number)
            self._heard = time.monotonic()
            if on_progress is not None:
                on_progress(reply)
            return
        with self._changed:
            if number == self._owed:
                self._owed = None
            if number in self._expected:
                self._replies[number] = reply
