"""The system calls on slab files, in one place so that tests can make them fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class FileIo:
    """Plain system calls. Subclass it to inject faults. All may raise OSError."""

    def open(self, path: Path, direct: bool) -> int:
        """Opens a slab for reading and writing, creating it with mode 0600."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)

    def allocate(self, fd: int, nbytes: int) -> None:
        """Reserves the file's room on the medium."""
        os.posix_fallocate(fd, 0, nbytes)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read; less than asked means that the file ends there."""
        return os.preadv(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)
