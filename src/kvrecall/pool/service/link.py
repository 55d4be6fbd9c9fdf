"""One connection to a service, from the client's side: requests with deadlines, from any thread."""

from __future__ import annotations

import errno
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVarTuple

from kvrecall import __version__
from kvrecall.pool.base import NO_ARENA, ArenaHandle
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.peers import credentials

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
        self._lost = ""
        self._framer = p.Framer()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self.welcome: p.Welcome

    @classmethod
    def open(cls, path: Path, timeout_s: float, before: ArenaHandle = NO_ARENA) -> Link:
        """Connects and greets. ``before``: the arena of this client's last connection. Raises
        LinkLost if that does not succeed in time."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        until = time.monotonic() + timeout_s
        try:
            while not _connected(sock, path):  # too many others wait
                if time.monotonic() > until:
                    raise LinkLost(f"the service at {path} does not accept connections")
                time.sleep(_BUSY_S)
            _, uid = credentials(sock)
        except LinkLost:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            raise LinkLost(_why_not(path, error)) from error
        if uid != os.getuid():
            sock.close()
            raise LinkLost(f"the service at {path} runs as user {uid}, not as {os.getuid()}")
        link = cls(sock)
        try:
            link._greet(timeout_s, before)
        except LinkLate as error:
            link.close()
            raise LinkLost(f"the service at {path} does not answer") from error
        except LinkLost as error:
            link.close()
            raise LinkLost(f"the service at {path} ended the connection: {error}") from error
        return link

    def _greet(self, timeout_s: float, before: ArenaHandle) -> None:
        until = time.monotonic() + timeout_s
        hello = p.Hello(p.PROTOCOL, __version__, before.boot, before.seat)
        self._send(p.frame_of(hello), until)
        self._expected.add(0)
        welcome = self._await(0, until)
        assert isinstance(welcome, p.Welcome)
        self.welcome = welcome

    @property
    def is_lost(self) -> bool:
        return bool(self._lost)

    @property
    def why_lost(self) -> str:
        return self._lost

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
        number = next(self._numbers)
        frame = p.frame_of(kind(number, *fields))
        with self._changed:
            self._expected.add(number)
            if on_progress is not None:
                self._on_progress[number] = on_progress
        sent = False
        try:
            if not slow:
                self._check_owed()
            self._send(frame, until)
            sent = True
            while True:
                try:
                    return self._await(number, until)
                except LinkLate:
                    until = self._heard + timeout_s
                    if on_progress is None or until < time.monotonic():
                        raise
        except LinkLate:
            with self._changed:
                came = self._replies.pop(number, None) is not None  # in the meantime
                if sent and not (slow or came) and self._owed is None:
                    self._owed, self._owed_since = number, time.monotonic()
            raise LinkLate(str(number)) from None
        finally:
            with self._changed:
                self._expected.discard(number)
                self._on_progress.pop(number, None)

    def begin(self, kind: Callable[[int, *Ts], p.Message], *fields: *Ts, timeout_s: float) -> int:
        """Sends ``kind(number, *fields)`` and returns its number, for ``taken``. Raises LinkLate if
        a reply is owed, or LinkLost."""
        self._check_owed()
        number = next(self._numbers)
        with self._changed:
            self._expected.add(number)
        try:
            self._send(p.frame_of(kind(number, *fields)), time.monotonic() + timeout_s)
        except LinkLost:
            self.forget(number)
            raise
        return number

    def taken(self, number: int) -> p.Reply | None:
        """The reply to what ``begin`` sent, if it is there; does not wait for it."""
        with self._changed:
            reads = number not in self._replies and not (self._reading or self._lost)
            self._reading |= reads
        if reads:
            self._read(0.0)
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
        self._send(p.frame_of(message), time.monotonic() + timeout_s)

    def wait_lost(self, timeout_s: float) -> bool:
        """Waits until the other end hangs up. False if it has not in that time."""
        if self._lost:
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
            if not self._lost:
                self._lost = reason
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
        with self._changed:
            reader = not self._reading and not self._lost
            self._reading |= reader
        if reader:
            self._read(0.0)
        with self._changed:
            if self._owed is None:
                return
            late = time.monotonic() - self._owed_since
        if late > _LATE_LIMIT_S:
            self.fail(f"no reply for {late:.1f} s")
        raise LinkLate

    def _send(self, frame: bytes, until: float) -> None:
        view = memoryview(frame)
        with self._sending:
            if self._lost:
                raise LinkLost(self._lost)
            while view:
                try:
                    view = view[self._sock.send(view) :]
                except BlockingIOError:
                    left = until - time.monotonic()
                    writable = select.poll()
                    writable.register(self._sock, select.POLLOUT)
                    if left <= 0 or not writable.poll(left * 1000):
                        self.fail("the service does not read")
                        raise LinkLost(self._lost) from None
                except OSError as error:
                    self.fail(os.strerror(error.errno or 0))
                    raise LinkLost(self._lost) from None

    def _await(self, number: int, until: float) -> p.Reply:
        while True:
            with self._changed:
                if number in self._replies:
                    return self._replies.pop(number)
                if self._lost:
                    raise LinkLost(self._lost)
                left = until - time.monotonic()
                if left <= 0:
                    raise LinkLate
                if self._reading:
                    self._changed.wait(left)
                    continue
                self._reading = True
            self._read(left)

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


def _connected(sock: socket.socket, path: Path) -> bool:
    """False if the service has not accepted earlier connections yet."""
    try:
        sock.connect(str(path))
    except BlockingIOError:
        return False
    return True


def _why_not(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ECONNREFUSED):
        return f"no pool service at {path}; start one with: kvrecall pool serve --socket {path}"
    return f"no pool service at {path}: {error.strerror or error}"
