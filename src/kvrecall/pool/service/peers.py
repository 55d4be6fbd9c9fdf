"""What the kernel knows of the processes at the other end: their identity, whether they live, and
which of them map the arena. Linux only.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

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
