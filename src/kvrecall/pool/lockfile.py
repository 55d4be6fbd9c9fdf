"""A lock of one process on a path."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path


class LockHeld(Exception):
    """Another process holds the lock. Its text is what that one wrote into the file."""


def lock_path(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Opens ``path``, a file (created with mode 0600) or a folder, and locks it for this process;
    returns its descriptor, whose closing, or any exit, releases the lock.

    The lock is on what ``path`` leads to on return: what was replaced meanwhile is opened again.
    Never follows a symbolic link at the end of ``path``. Raises LockHeld, or OSError.
    """
    while True:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if leads_to(path, fd):
                return fd
        except BlockingIOError:
            said = "" if flags & os.O_DIRECTORY else os.pread(fd, 64, 0).decode("ascii", "replace")
            os.close(fd)
            raise LockHeld(said.strip()) from None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def leads_to(path: Path, fd: int) -> bool:
    """Whether ``path`` is still the file (or folder) of ``fd``: who holds a descriptor asks before
    removing the path, which may be another's by now."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def sign(fd: int) -> None:
    """Writes into a lock file who holds it: this process, and its host, which may share the folder
    with others."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)


def signer(text: str) -> str:
    """What ``sign`` wrote, for people: the process, and its host if that is another one."""
    pid, _, host = text.strip().partition(" ")
    return f"{pid} on {host}" if host not in ("", socket.gethostname()) else pid or "unknown"
