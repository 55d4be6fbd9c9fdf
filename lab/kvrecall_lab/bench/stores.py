"""The store interface of ``bench tiers``, and the stores that need no other project: the machine's
limits, plain files, kvrecall's own tiers."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvrecall.bench.pool import NAMESPACE, get_all, put_all
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.pool import Pool

DEADLINE_S = 60.0
_SUM_BYTES = 16


@dataclass(frozen=True, slots=True)
class Space:
    """What a store has: its own folder, the memory that contains all blocks of the benchmark, and a
    capacity of ``nbytes`` for blocks of ``block_bytes``."""

    folder: Path
    memory: memoryview
    nbytes: int
    block_bytes: int

    @property
    def limit(self) -> int:
        """Bytes of memory that a store may use: 1.25 times its capacity."""
        return self.nbytes * 5 // 4 + (64 << 20)


class Store(ABC):
    """Blocks of one size under names, in one library. Called by one thread; closed once.

    ``put`` and ``get`` are timed. All raise the library's exceptions, and StoreError for a refusal
    by return value.
    """

    @abstractmethod
    def __init__(self, space: Space) -> None: ...

    @abstractmethod
    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Returns once the library reports the blocks as stored. ``names``: new, 32 bytes each."""

    @abstractmethod
    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Loads the blocks ``into`` their places."""

    @abstractmethod
    def remove(self, names: Sequence[bytes]) -> None:
        """Removes blocks and frees their space."""

    def close(self) -> None:
        return


class StoreError(Exception):
    """A library refused a request."""


def address_of(memory: memoryview) -> int:
    """Address of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Copy(Store):
    """The limit of memory tiers: a plain copy of the bytes by one thread."""

    def __init__(self, space: Space) -> None:
        self._memory = memoryview(mmap.mmap(-1, space.nbytes))
        self._places: dict[bytes, memoryview] = {}

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for name, block in zip(names, blocks, strict=True):
            start = len(self._places) * len(block)
            place = self._places[name] = self._memory[start : start + len(block)]
            place[:] = block

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, place in zip(names, into, strict=True):
            place[:] = self._places[name]

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            del self._places[name]


class Sequential(Store):
    """The limit of disk tiers: one file written and read from end to end by one thread, past the
    page cache where the file system allows. Adjacent blocks go in one call."""

    def __init__(self, space: Space) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(space.folder / "raw", flags | os.O_DIRECT, 0o600)
        except OSError:
            self._fd = os.open(space.folder / "raw", flags, 0o600)
        os.posix_fallocate(self._fd, 0, space.nbytes)
        self._places: dict[bytes, int] = {}

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        begin = len(self._places) * len(blocks[0])
        for name, block in zip(names, blocks, strict=True):
            self._places[name] = len(self._places) * len(block)
        if os.pwritev(self._fd, list(blocks), begin) != sum(map(len, blocks)):
            raise StoreError("the file was written in part")
        os.fdatasync(self._fd)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        if os.preadv(self._fd, list(into), self._places[names[0]]) != sum(map(len, into)):
            raise StoreError("the file was read in part")

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            del self._places[name]

    def close(self) -> None:
        os.close(self._fd)


class PlainFiles(Store):
    """The simplest store: write a file, rename it; open it, read it. Buffered."""

    checks = False

    def __init__(self, space: Space) -> None:
        self._folder = space.folder

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for name, block in zip(names, blocks, strict=True):
            parts: list[bytes | memoryview] = [block]
            if self.checks:
                parts.append(xxhash.xxh3_128_digest(block))
            path = self._folder / name.hex()
            unfinished = path.with_suffix(".tmp")
            with unfinished.open("xb", buffering=0) as file:
                if os.writev(file.fileno(), parts) != sum(map(len, parts)):
                    raise StoreError("a file was written in part")
            unfinished.rename(path)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, place in zip(names, into, strict=True):
            found = bytearray(_SUM_BYTES if self.checks else 0)
            with (self._folder / name.hex()).open("rb", buffering=0) as file:
                if os.readv(file.fileno(), [place, found]) != len(place) + len(found):
                    raise StoreError("a file was read in part")
            if self.checks and xxhash.xxh3_128_digest(place) != found:
                raise StoreError("a file has other bytes")

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            (self._folder / name.hex()).unlink()


class CheckedFiles(PlainFiles):
    """With an XXH3 of 128 bits behind each block, verified on reading."""

    checks = True


class HostStore(Store):
    """The pool's host memory: reserve, copy in, commit; acquire, copy out, release."""

    def __init__(self, space: Space) -> None:
        self._bytes = space.block_bytes
        self._pool = Pool.open(PoolConfig(space.limit))
        self._pool.register(NAMESPACE, self._bytes)
        self._pool.arena.wait_ready()

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        keys = [NAMESPACE.key(name) for name in names]
        for answer, block in zip(self._pool.reserve(keys), blocks, strict=True):
            if answer.verdict is not Verdict.RESERVED:
                raise StoreError(f"the pool says {answer.verdict.value}")
            self._pool.arena.view(answer.offset, self._bytes)[:] = block
        self._pool.commit(keys)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        ticket = self._pool.acquire([NAMESPACE.key(name) for name in names], DEADLINE_S)
        while (recall := self._pool.poll(ticket)).state is RecallState.PENDING:
            time.sleep(0.0001)
        for offset, place in zip(recall.offsets, into, strict=True):
            place[:] = self._pool.arena.view(offset, self._bytes)
        self._pool.release(ticket)

    def remove(self, names: Sequence[bytes]) -> None:
        self._pool.drop([NAMESPACE.key(name) for name in names])

    def close(self) -> None:
        self._pool.close()


class DiskStore(Store):
    """The disk tier alone, between memory and its slab files. A put ends when it is durable."""

    def __init__(self, space: Space) -> None:
        self._bytes = space.block_bytes
        room = space.nbytes * 2 + (64 << 20)
        self._tier = DiskTier(DiskConfig(space.folder, room, max_queued_bytes=space.nbytes))
        self._tier.register(NAMESPACE, self._bytes)

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        put_all(self._tier, [NAMESPACE.key(name) for name in names], blocks, self._bytes)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        get_all(self._tier, [NAMESPACE.key(name) for name in names], into)

    def remove(self, names: Sequence[bytes]) -> None:
        self._tier.drop([NAMESPACE.key(name) for name in names])

    def close(self) -> None:
        self._tier.close()
