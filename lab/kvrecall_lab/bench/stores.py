"""The store interface of this benchmark, and the stores that need no other project: the
machine's limits, plain files, kvrecall's own tiers.
"""

from __future__ import annotations

import ctypes
import enum
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from kvrecall.bench.pool import NAMESPACE, get_all, put_all
from kvrecall.block import BlockKey
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.pool import Pool

_DEADLINE_S = 60.0
_SUM_BYTES = 16


class Medium(enum.StrEnum):
    """The medium on which a library keeps the blocks."""

    MEMORY = "memory"
    DISK = "disk"


class Store(ABC):
    """Blocks of one size under names, in one library. Called by one thread; closed once.

    Only ``put`` and ``get`` are timed. All raise the library's exceptions, and StoreError for a
    refusal by return value.
    """

    @abstractmethod
    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Returns once the library reports the blocks as stored. ``names``: new, 32 bytes each."""

    @abstractmethod
    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        """Loads the blocks ``into`` their places; complete after ``land``."""

    def prepare(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        """Called before ``put``: a library that writes only from its own memory copies here."""
        return

    def land(self, into: Sequence[memoryview]) -> None:
        """Called after ``get``: a library that reads only to its own memory copies here."""
        return

    @abstractmethod
    def remove(self, names: Sequence[bytes]) -> None:
        """Removes blocks and frees their space."""

    @abstractmethod
    def close(self) -> None: ...


class StoreError(Exception):
    """A library refused a request."""


def address_of(memory: memoryview) -> int:
    """Address of its first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def make_durable(folder: Path) -> None:
    """Waits until every file below ``folder`` is on the medium."""
    _each_file(folder, os.fsync)


def drop_from_memory(folder: Path) -> None:
    """Drops every file below ``folder`` from the page cache; they must be durable."""
    _each_file(folder, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))


def _each_file(folder: Path, act: Callable[[int], None]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                act(file.fileno())


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
    page cache where the file system allows. Adjacent blocks go in one call."""

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


class PlainFiles(Store):
    """The simplest store: write a file, rename it; open it, read it. Buffered.

    ``checks``: with an XXH3 of 128 bits behind each block, verified on reading.
    """

    def __init__(self, folder: Path, checks: bool) -> None:
        self._folder = folder
        self._checks = checks

    def _path(self, name: bytes) -> Path:
        return self._folder / name.hex()

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for name, block in zip(names, blocks, strict=True):
            path = self._path(name)
            parts: list[bytes | memoryview] = [block]
            if self._checks:
                parts.append(xxhash.xxh3_128_digest(block))
            unfinished = path.with_suffix(".tmp")
            with unfinished.open("xb", buffering=0) as file:
                if os.writev(file.fileno(), parts) != sum(map(len, parts)):
                    raise StoreError("a file was written in part")
            unfinished.rename(path)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, place in zip(names, into, strict=True):
            with self._path(name).open("rb", buffering=0) as file:
                found = bytearray(_SUM_BYTES)
                parts: list[bytearray | memoryview] = [place]
                if self._checks:
                    parts.append(found)
                if os.readv(file.fileno(), parts) != sum(map(len, parts)):
                    raise StoreError("a file was read in part")
                if self._checks and xxhash.xxh3_128_digest(place) != found:
                    raise StoreError("a file has other bytes")

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._path(name).unlink()

    def close(self) -> None:
        return


class HostStore(Store):
    """The pool's host memory: reserve, copy in, commit; acquire, copy out, release."""

    def __init__(self, nbytes: int, block_bytes: int) -> None:
        self._bytes = block_bytes
        self._pool = Pool.open(PoolConfig(nbytes))
        self._pool.register(NAMESPACE, block_bytes)
        self._pool.arena.wait_ready()

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        keys = _keys(names)
        for answer, block in zip(self._pool.reserve(keys), blocks, strict=True):
            if answer.verdict is not Verdict.RESERVED:
                raise StoreError(f"the pool says {answer.verdict.value}")
            self._pool.arena.view(answer.offset, self._bytes)[:] = block
        self._pool.commit(keys)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        ticket = self._pool.acquire(_keys(names), _DEADLINE_S)
        while (recall := self._pool.poll(ticket)).state is RecallState.PENDING:
            time.sleep(0.0001)
        for offset, place in zip(recall.offsets, into, strict=True):
            place[:] = self._pool.arena.view(offset, self._bytes)
        self._pool.release(ticket)

    def remove(self, names: Sequence[bytes]) -> None:
        self._pool.drop(_keys(names))

    def close(self) -> None:
        self._pool.close()


class DiskStore(Store):
    """The disk tier alone, between memory and its slab files. A put ends when it is durable."""

    def __init__(self, folder: Path, nbytes: int, block_bytes: int) -> None:
        self._bytes = block_bytes
        config = DiskConfig(folder, nbytes * 2 + (64 << 20), max_queued_bytes=nbytes)
        self._tier = DiskTier(config)
        self._tier.register(NAMESPACE, block_bytes)

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        put_all(self._tier, _keys(names), blocks, self._bytes)

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        get_all(self._tier, _keys(names), into)

    def remove(self, names: Sequence[bytes]) -> None:
        self._tier.drop(_keys(names))

    def close(self) -> None:
        self._tier.close()


def _keys(names: Sequence[bytes]) -> list[BlockKey]:
    return [NAMESPACE.key(name) for name in names]
