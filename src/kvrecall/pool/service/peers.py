"""What the kernel knows of the processes at the other end: their identity, whether they live, and
which of them map the arena. Linux only; reads /proc.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid
_PROC = Path("/proc")
_ENDED = (FileNotFoundError, ProcessLookupError, PermissionError)
_ARENA_NAME = "/memfd:kvrecall-arena"


@dataclass(frozen=True, slots=True)
class Peer:
    """A process. ``born`` (clock ticks since boot) distinguishes it from a later one of the same
    number."""

    pid: int
    born: int

    @property
    def is_alive(self) -> bool:
        """Whether it still runs (a zombie does not), or may still run because it cannot be
        inspected now."""
        try:
            status = _status(self.pid)
        except OSError:
            return True
        return status is not None and status.born == self.born and status.state not in "ZXx"


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process number (0: in another PID namespace) and user id at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def peer_of(pid: int) -> Peer | None:
    """None if there is no such process. OSError if that cannot be seen now."""
    status = _status(pid)
    return None if status is None else Peer(pid, status.born)


def mappers_of(inode: int, but: Iterable[int] = ()) -> set[int]:
    """Processes of this user that map the arena with that inode. Milliseconds; blocks. OSError if
    that cannot be seen now (too many open files)."""
    skipped = set(but)
    found = set()
    for pid in _pids():
        if pid in skipped:
            continue
        try:
            with (_PROC / str(pid) / "maps").open(errors="replace") as maps:
                for line in maps:
                    if _ARENA_NAME in line and line.split(None, 5)[4] == str(inode):
                        found.add(pid)
                        break
        except _ENDED:
            continue  # or of another user: it cannot have opened the arena
    return found


def families_of(roots: Iterable[int]) -> dict[int, set[int]]:
    """Each root with all its living descendants. Milliseconds; blocks. OSError as above."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        status = _status(pid)
        if status is not None:
            children.setdefault(status.parent, []).append(pid)
    families: dict[int, set[int]] = {}
    for root in roots:
        family = {root}
        edge = [root]
        while edge:
            edge = [child for pid in edge for child in children.get(pid, ()) if child not in family]
            family.update(edge)
        families[root] = family
    return families


@dataclass(frozen=True, slots=True)
class _Status:
    state: str
    parent: int
    born: int


def _status(pid: int) -> _Status | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except _ENDED:
        return None
    fields = text.rpartition(")")[2].split()
    return _Status(fields[0], int(fields[1]), int(fields[19]))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
