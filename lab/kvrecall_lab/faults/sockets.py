"""The sockets of a simulated machine, and an event loop that waits for them.

They are the kernel's own, of this process, and so have its meaning. Only who is at the other end,
when a wait ends, and how much of what is sent arrives at once are simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from kvrecall.pool.service import link, server
from kvrecall_lab.faults.machine import Machine, Names, Process, Task

T = TypeVar("T")
_PEER_PIDFD = 77


class Wire:
    """What processes of the machine know of each other. ``in_part``: how likely a call sends or
    receives less than it could; ``no_files``: how likely none can be opened for a connection."""

    in_part = 0.1
    no_files = 0.0

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.faults = 0
        self.numbers: dict[int, int] = {}  # of processes
        self._callers: deque[Process] = deque()  # not accepted yet
        self._waiting: list[Task] = []
        self._sockets: dict[Process, list[_Socket]] = {}
        self._ends: list[tuple[Process, Process, socket.socket, int]] = []
        self._kind: type[_Socket] = type("Socket", (_Socket,), {"wire": self})

    def number_of(self, process: Process) -> int:
        return self.numbers.setdefault(id(process), 1 << 22 | len(self.numbers))

    def hits(self, share: float) -> bool:
        return self.machine.chance.random() < share

    # -- waiting ---------------------------------------------------------------------------

    def wait(self, ready: Callable[[], T], timeout_s: float | None) -> T:
        """What ``ready`` returns, once that is true or the time is over."""
        machine = self.machine
        machine.turn()
        until = None if timeout_s is None else machine.now + timeout_s
        while not (found := ready()):
            left = None if until is None else until - machine.now
            if left is not None and left <= 0:
                break
            me = machine.me()
            self._waiting.append(me)
            try:
                machine.park(left)
            finally:
                self._waiting = [one for one in self._waiting if one is not me]
        return found

    def changed(self) -> None:
        """Whoever waits looks again."""
        for task in self._waiting:
            self.machine.wake(task)

    # -- processes -------------------------------------------------------------------------

    def opened(self, sock: _Socket) -> None:
        process = self.machine.me().process
        if process not in self._sockets:
            process.at_end.append(lambda: self.ended(process))
        self._sockets.setdefault(process, []).append(sock)

    def listener(self, path: Path) -> socket.socket:
        """Of the process that calls."""
        path.unlink(missing_ok=True)
        listener = self._kind(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(128)
        self._callers.clear()
        return listener

    def called(self) -> None:
        self._callers.append(self.machine.me().process)
        self.changed()

    def caller(self) -> Process:
        return self._callers.popleft()

    def end_of(self, process: Process) -> int:
        """A descriptor that becomes readable when the process ends. Its owner closes it."""
        if process.is_dead:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        ours, theirs = socket.socketpair()
        fd = theirs.detach()
        self._ends.append((process, self.machine.me().process, ours, fd))
        return fd

    def open_ends(self, owner: Process) -> int:
        """How many descriptors of ``end_of`` the owner has not closed. Closes them."""
        count, kept = 0, []
        for one in self._ends:
            _, whose, ours, fd = one
            if whose is not owner:
                kept.append(one)
            else:
                if not _is_hung_up(ours):
                    count += 1
                    os.close(fd)
                ours.close()
        self._ends = kept
        return count

    def ended(self, process: Process) -> None:
        for sock in self._sockets.pop(process, ()):
            sock.close()
        for whose, _, ours, _ in self._ends:
            if whose is process:
                with contextlib.suppress(OSError):  # the owner has closed its own
                    ours.shutdown(socket.SHUT_WR)
        self.changed()

    # -- in place of the real ones ---------------------------------------------------------

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        sockets = Names(socket, socket=self._kind)
        polls = Names(select, poll=lambda: _Poll(self))
        loops = Names(asyncio, SelectorEventLoop=lambda: _Loop(self))
        with (
            patch.object(link, "socket", sockets),
            patch.object(link, "select", polls),
            patch.object(server, "asyncio", loops),
        ):
            yield

    def call(self, path: Path) -> socket.socket:
        """A connection."""
        sock = self._kind(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect_ex(str(path))
        sock.setblocking(False)
        return sock


def _is_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(0))


class _Socket(socket.socket):
    wire: Wire
    other: Process | None = None  # at the other end

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.wire.opened(self)

    def connect_ex(self, address: Any) -> int:
        self.wire.machine.turn()
        status = super().connect_ex(address)
        if not status:
            self.wire.called()
        return status

    def accept(self) -> tuple[socket.socket, Any]:
        wire = self.wire
        if wire.hits(wire.no_files):
            wire.faults += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        fd, address = self._accept()  # type: ignore[attr-defined]
        sock = type(self)(self.family, self.type, self.proto, fileno=fd)
        sock.other = wire.caller()
        return sock, address

    def send(self, data: Any, flags: int = 0) -> int:
        self.wire.machine.turn()
        with memoryview(data) as view:
            size = len(view)
            if size > 1 and self.wire.hits(self.wire.in_part):
                size = self.wire.machine.chance.randrange(1, size)
            sent = super().send(view[:size], flags)
        self.wire.changed()
        return sent

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.wire.machine.turn()
        if self.wire.hits(self.wire.in_part):
            size = self.wire.machine.chance.randrange(1, 64)
        data = super().recv(size, flags)
        self.wire.changed()  # there is room to send
        return data

    def shutdown(self, how: int) -> None:
        super().shutdown(how)
        self.wire.changed()

    def close(self) -> None:
        super().close()
        self.wire.changed()

    def getsockopt(self, level: int, name: int, *size: int) -> Any:
        wire, other = self.wire, self.other
        if (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED):
            number = os.getpid() if other is None else wire.number_of(other)
            return struct.pack("iII", number, os.getuid(), os.getgid())
        if (level, name) == (socket.SOL_SOCKET, _PEER_PIDFD) and other is not None:
            return wire.end_of(other)
        return super().getsockopt(level, name, *size)


class _Poll:
    def __init__(self, wire: Wire) -> None:
        self._wire, self._poll = wire, select.poll()
        self.register = self._poll.register

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        return self._wire.wait(lambda: self._poll.poll(0), timeout_ms / 1000)


class _Selector(selectors.EpollSelector):
    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = self._wire.wait(lambda: super(_Selector, self).select(0), timeout)
        found.sort(key=lambda one: one[0].fd)
        self._wire.machine.chance.shuffle(found)
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, wire: Wire) -> None:
        super().__init__(_Selector(wire))
        self._wire = wire

    def time(self) -> float:
        return self._wire.machine.now

    def _write_to_self(self) -> None:
        super()._write_to_self()  # type: ignore[misc]
        self._wire.changed()
