"""Probes of the pool on this machine: lookups, and the disk tier against the bare disk.

Each function returns a JSON-able dictionary of medians and ratios; sizes are in bytes, times in
seconds unless the name says otherwise, bandwidths in bytes per second.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrecall.block import BlockKey, Namespace
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.lab.bench.moves import get_all, put_all
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Verdict
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.seal import Seal
from kvrecall.pool.pool import Pool
from kvrecall.pool.slots import slot_bytes_of

_NAMESPACE = Namespace.of({"kvrecall": "measure"})
_RAW_BYTES = 4 << 20  # one raw system call
_MIB = 1 << 20


def measure_lookup(blocks: int = 1000, repeats: int = 200) -> dict[str, object]:
    """Microseconds of the pool's calls on chains of ``blocks`` keys that lie in the host; of
    ``find`` also with all of them on disk only, as half of them are."""
    block_bytes = 4096
    with tempfile.TemporaryDirectory(prefix="kvrecall-") as folder:
        disk = DiskConfig(Path(folder), 64 * _MIB + 8 * blocks * block_bytes)
        config = PoolConfig(4 * blocks * block_bytes, disk)
        keys = _chain(blocks)
        with Pool.open(config) as pool:
            pool.register(_NAMESPACE, block_bytes)
            pool.reserve(keys)
            pool.commit(keys)
            pool.flush(keys, 60.0)
            timings = {
                "find_host": _microseconds(repeats, lambda: pool.find(keys)),
                "acquire_release_host": _microseconds(
                    repeats, lambda: pool.release(pool.acquire(keys, 1.0))
                ),
                "touch": _microseconds(repeats, lambda: pool.touch(keys)),
                "reserve_present": _microseconds(repeats, lambda: pool.reserve(keys)),
            }
            timings |= _save_timings(pool, min(repeats, 20))
        with Pool.open(config) as pool:
            pool.register(_NAMESPACE, block_bytes)
            timings["find_disk"] = _microseconds(repeats, lambda: pool.find(keys))
            absent = _chain(blocks, "absent")
            timings["find_absent"] = _microseconds(repeats, lambda: pool.find(absent))
    return {"blocks": blocks, "repeats": repeats, "median_us": timings}


def _save_timings(pool: Pool, repeats: int) -> dict[str, float]:
    """Medians of ``reserve`` and ``commit`` of 64 new blocks."""
    reserving: list[float] = []
    committing: list[float] = []
    for number in range(repeats):
        keys = _chain(64, f"save{number}")
        began = time.perf_counter()
        answers = pool.reserve(keys)
        middle = time.perf_counter()
        pool.commit(keys)
        ended = time.perf_counter()
        if all(answer.verdict is Verdict.RESERVED for answer in answers):
            reserving.append(middle - began)
            committing.append(ended - middle)
        pool.flush(keys, 60.0)
    return {
        "reserve_64": statistics.median(reserving) * 1e6,
        "commit_64": statistics.median(committing) * 1e6,
    }


def measure_disk(
    path: Path, total_bytes: int, block_bytes: int, repeats: int = 5, seal: Seal | None = None
) -> dict[str, object]:
    """Bandwidth disk -> arena and arena -> disk through the disk tier, and of bare sequential
    direct I/O of the same number of bytes on the same file system, taken in turns.

    Writes about twice ``total_bytes`` below ``path`` and removes it again. All reads are direct,
    so the page cache holds none of it. ``seal``: how blocks lie on disk, by default as they are.
    """
    path.mkdir(parents=True, exist_ok=True)
    slot_bytes = slot_bytes_of(block_bytes)
    keys = _chain(max(1, total_bytes // slot_bytes))
    nbytes = len(keys) * slot_bytes
    with tempfile.TemporaryDirectory(prefix="kvrecall-", dir=path) as name:
        folder = Path(name)
        arena = Arena.create(nbytes, background=False)
        _scribble(arena)
        raw = _RawFile(folder / "raw", nbytes, arena)
        config = DiskConfig(folder / "tier", 2 * nbytes + 64 * _MIB, max_queued_bytes=2 * nbytes)
        tier = DiskTier(config, seal=seal)
        try:
            tier.register(_NAMESPACE, block_bytes)
            writes = [(raw.write(), _write(tier, arena, keys, block_bytes))]
            for _ in range(1, repeats):
                tier.clear()
                writes.append((raw.write(), _write(tier, arena, keys, block_bytes)))
            reads = [(raw.read(), get_all(tier, arena, keys, block_bytes)) for _ in range(repeats)]
            direct = tier.is_direct and raw.direct
        finally:
            tier.close()
            raw.close()
            arena.close()
    return {
        "bytes": nbytes,
        "block_bytes": block_bytes,
        "repeats": repeats,
        "direct": direct,
        "sealed": seal is not None and seal.hides,
        **_compare("read", nbytes, reads),
        **_compare("write", nbytes, writes),
    }


def _compare(name: str, nbytes: int, pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    return {
        f"{name}_raw_bytes_per_s": nbytes / statistics.median(raw for raw, _ in pairs),
        f"{name}_tier_bytes_per_s": nbytes / statistics.median(tier for _, tier in pairs),
        f"{name}_ratio": statistics.median(raw / tier for raw, tier in pairs),
    }


class _RawFile:
    """A preallocated file read and written from end to end, one system call after the other."""

    def __init__(self, path: Path, nbytes: int, arena: Arena) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError:
            self._fd = os.open(path, flags, 0o600)
            self.direct = False
        os.posix_fallocate(self._fd, 0, nbytes)
        self._steps = [
            (arena.view(at, min(_RAW_BYTES, nbytes - at)), at)
            for at in range(0, nbytes, _RAW_BYTES)
        ]

    def write(self) -> float:
        began = time.perf_counter()
        for view, at in self._steps:
            os.pwritev(self._fd, [view], at)
        os.fdatasync(self._fd)
        return time.perf_counter() - began

    def read(self) -> float:
        began = time.perf_counter()
        for view, at in self._steps:
            os.preadv(self._fd, [view], at)
        return time.perf_counter() - began

    def close(self) -> None:
        self._steps.clear()
        os.close(self._fd)


def _write(tier: DiskTier, arena: Arena, keys: Sequence[BlockKey], block_bytes: int) -> float:
    while tier.queued()[0]:  # what ``clear`` cancelled
        tier.poll(0.01)
    return put_all(tier, arena, keys, block_bytes)


def _scribble(arena: Arena) -> None:
    """Fills the arena with bytes that do not compress."""
    noise = mmap.mmap(-1, _MIB)
    noise.write(os.urandom(_MIB))
    with memoryview(noise) as view:
        for at in range(0, arena.nbytes, _MIB):
            length = min(_MIB, arena.nbytes - at)
            arena.view(at, length)[:] = view[:length]


def _chain(length: int, name: str = "") -> list[BlockKey]:
    return [
        _NAMESPACE.key(hashlib.sha256(f"{name}{place}".encode()).digest())
        for place in range(length)
    ]


def _microseconds(repeats: int, call: Callable[[], object]) -> float:
    """Median time of a call."""
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6
