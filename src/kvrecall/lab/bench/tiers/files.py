"""Stores of a file a block: plain files, and ``diskcache``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from kvrecall.lab.bench.tiers.base import Store, StoreError

_SUM_BYTES = 16


class PlainFiles(Store):
    """What one writes in an afternoon: write a file, rename it; open it, read it. Buffered.

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


class DiskCache(Store):
    """``diskcache.Cache``: SQLite with a file a value. It takes bytes and gives a file to read."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        import diskcache

        self._cache: Any = diskcache.Cache(str(folder), size_limit=2 * nbytes)
        self._values: dict[bytes, bytes] = {}

    def prepare(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        self._values = {n: bytes(block) for n, block in zip(names, blocks, strict=True)}

    def put(self, names: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for name in names:
            self._cache.set(name, self._values[name])

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        for name, place in zip(names, into, strict=True):
            with self._cache.get(name, read=True) as file:
                if file.readinto(place) != len(place):
                    raise StoreError("a file was read in part")

    def remove(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._cache.delete(name)

    def close(self) -> None:
        self._cache.close()
