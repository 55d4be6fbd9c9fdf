"""The name of a service's arena: unlike a process number, it never comes again."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle


@dataclass(frozen=True, slots=True)
class ServedArena(ArenaHandle):
    """``pid`` and ``fd`` are the service's. A service that is started again may well get the same
    process number and file descriptor (in a container it usually does), so the handle also carries
    the memory file's ``inode`` and the ``boot`` id of that life of the service: equal handles mean
    the same memory.
    """

    inode: int = 0
    boot: str = ""


NO_ARENA = ServedArena(pid=0, fd=-1, nbytes=0)
"""No service was ever found: there are no offsets into this arena, so nobody maps it."""


def open_file(handle: ServedArena) -> int:
    """A descriptor of the arena's memory file, for reading. Raises TierError if it is gone."""
    try:
        file = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise TierError(f"the arena of process {handle.pid} is gone") from error
    if os.fstat(file).st_ino != handle.inode:
        os.close(file)
        raise TierError(f"the arena of process {handle.pid} is gone")
    return file


def attach(handle: ArenaHandle) -> Arena:
    """Maps the arena of ``handle``, and no other that has taken its place. Raises TierError."""
    arena = Arena.attach(handle)
    if isinstance(handle, ServedArena) and os.fstat(arena.handle().fd).st_ino != handle.inode:
        arena.close()
        raise TierError(f"the arena of process {handle.pid} is gone")
    return arena
