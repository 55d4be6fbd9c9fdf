"""What the machine itself gives: a copy in memory, and one file read and written in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvrecall.lab.bench.tiers.base import Store, StoreError


class Copy(Store):
    """The limit of memory tiers: a plain copy of the bytes by one thread."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._places: dict[bytes, memoryview] = {}
        self._next = 0

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for name, block in zip(names, blocks, strict=True):
            place = self._memory[self._next : self._next + len(block)]
            self._next += len(block)
            place[:] = block
            self._places[name] = place

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, place in zip(names, into, strict=True):
            place[:] = self._places[name]

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            del self._places[name]
        self._next = 0

    def close(self) -> None:
        return


class Sequential(Store):
    """The limit of disk tiers: one file written and read from end to end by one thread, past the
    page cache where the file system allows. Blocks that lie side by side go in one call."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(folder / "raw", flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(folder / "raw", flags, 0o600)
        os.posix_fallocate(self._fd, 0, nbytes)
        self._places: dict[bytes, int] = {}
        self._next = 0

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        begin = self._next
        for name, block in zip(names, blocks, strict=True):
            self._places[name] = self._next
            self._next += len(block)
        if os.pwritev(self._fd, list(blocks), begin) != self._next - begin:
            raise StoreError("the file was written in part")
        os.fdatasync(self._fd)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        if os.preadv(self._fd, list(into), self._places[names[0]]) != sum(map(len, into)):
            raise StoreError("the file was read in part")

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            del self._places[name]
        self._next = 0

    def close(self) -> None:
        os.close(self._fd)
