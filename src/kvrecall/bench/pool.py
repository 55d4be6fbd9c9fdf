"""``kvrecall bench lookup`` and ``disk``: the pool's calls, its disk tier against a bare disk."""

from __future__ import annotations

import hashlib
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import typer

from kvrecall.bench.report import Folder, Report, timed
from kvrecall.block import BlockKey, Namespace
from kvrecall.config import Compression, DiskConfig, PoolConfig, parse_size
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Verdict
from kvrecall.pool.cipher import KEY_BYTES, Cipher
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import make_codec
from kvrecall.pool.pool import Pool
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Get, Outcome, Put, Tier

NAMESPACE = Namespace.of({"kvrecall": "bench"})
LOOKUP_GOAL_US = 1000.0
READ_GOAL = 0.85

_LIMIT_S = 120.0
_RAW_BYTES = 4 << 20  # one raw system call
_MIB = 1 << 20
_CALLS = {
    "find_host": "find, all in host memory",
    "acquire_release_host": "acquire and release, in host memory",
    "touch": "touch",
    "reserve_present": "reserve, all there already",
    "reserve_64": "reserve 64 new blocks",
    "commit_64": "commit 64 new blocks",
    "find_disk": "find, all on disk",
    "find_absent": "find, none there",
}


def keys_of(length: int, name: str = "") -> list[BlockKey]:
    """Keys of a chain, distinct for each name."""
    digests = (hashlib.sha256(f"{name}{place}".encode()).digest() for place in range(length))
    return [NAMESPACE.key(digest) for digest in digests]


# -- a tier ---------------------------------------------------------------------------------


def slots_of(arena: Arena, count: int, block_bytes: int) -> list[memoryview]:
    """The first slots of an arena."""
    slot_bytes = slot_bytes_of(block_bytes)
    return [arena.view(n * slot_bytes, slot_bytes) for n in range(count)]


def put_all(
    tier: Tier, keys: Sequence[BlockKey], blocks: Sequence[memoryview], block_bytes: int
) -> float:
    """Seconds until the tier has stored the chain ``keys``. Raises TierError if a block is not
    stored, or after two minutes."""
    puts = [
        Put(key, keys[n - 1] if n else None, n, block, block_bytes)
        for n, (key, block) in enumerate(zip(keys, blocks, strict=True))
    ]
    began = time.perf_counter()
    tier.submit_put(puts)
    _await_all(tier, len(keys), Outcome.STORED)
    return time.perf_counter() - began


def get_all(tier: Tier, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> float:
    """Seconds until the blocks ``keys`` are loaded. Raises TierError as ``put_all``."""
    gets = [Get(key, place) for key, place in zip(keys, into, strict=True)]
    began = time.perf_counter()
    tier.submit_get(gets)
    _await_all(tier, len(keys), Outcome.LOADED)
    return time.perf_counter() - began


def checked_compression(name: str) -> Compression:
    """``--compression``. Raises ConfigError."""
    for known in get_args(Compression):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise ConfigError(f"--compression: {name!r}; allowed: {', '.join(get_args(Compression))}")


def kv_like(nbytes: int) -> bytes:
    """Normally distributed numbers in bfloat16, which compress about as KV does."""
    numbers = np.random.default_rng(1).standard_normal(nbytes // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def _await_all(tier: Tier, count: int, outcome: Outcome) -> None:
    until = time.monotonic() + _LIMIT_S
    while count:
        for done in tier.poll(1.0):
            if done.outcome is not outcome:
                raise TierError(f"a block was {done.outcome.value}, not {outcome.value}")
            count -= 1
        if time.monotonic() > until:
            raise TierError(f"{count} blocks are not {outcome.value} after {_LIMIT_S:.0f} s")


# -- bench lookup ---------------------------------------------------------------------------


def measure_lookup(blocks: int = 1000, repeats: int = 200) -> Report:
    """How long the scheduler's look-up of 1,000 blocks takes."""
    block_bytes = 4096
    keys, absent = keys_of(blocks), keys_of(blocks, "absent")
    with tempfile.TemporaryDirectory(prefix="kvrecall-") as folder:
        disk = DiskConfig(Path(folder), 64 * _MIB + 8 * blocks * block_bytes)
        config = PoolConfig(4 * blocks * block_bytes, disk)
        with Pool.open(config) as pool:
            pool.register(NAMESPACE, block_bytes)
            pool.reserve(keys)
            pool.commit(keys)
            pool.flush(keys, 60.0)
            acts: dict[str, Callable[[], object]] = {
                "find_host": lambda: pool.find(keys),
                "acquire_release_host": lambda: pool.release(pool.acquire(keys, 1.0)),
                "touch": lambda: pool.touch(keys),
                "reserve_present": lambda: pool.reserve(keys),
            }
            seconds = {name: [timed(act) for _ in range(repeats)] for name, act in acts.items()}
            seconds |= _save(pool, min(repeats, 20))
        with Pool.open(config) as pool:
            pool.register(NAMESPACE, block_bytes)
            seconds["find_disk"] = [timed(lambda: pool.find(keys)) for _ in range(repeats)]
            seconds["find_absent"] = [timed(lambda: pool.find(absent)) for _ in range(repeats)]
    medians = {name: statistics.median(seconds[name]) * 1e6 for name in _CALLS}
    return Report(
        "lookup",
        (f"call, on {blocks} blocks unless it says otherwise", "median us"),
        tuple((_CALLS[name], f"{value:.0f}") for name, value in medians.items()),
        {"blocks": blocks, "repeats": repeats, "median_us": medians},
        (f"goal: looking up {blocks} blocks within {LOOKUP_GOAL_US:.0f} us, median",),
    )


def _save(pool: Pool, repeats: int) -> dict[str, list[float]]:
    """Seconds of ``reserve`` and ``commit`` of 64 new blocks."""
    seconds: dict[str, list[float]] = {"reserve_64": [], "commit_64": []}
    for number in range(repeats):
        keys = keys_of(64, f"save{number}")
        began = time.perf_counter()
        answers = pool.reserve(keys)
        reserved = time.perf_counter()
        pool.commit(keys)
        if all(answer.verdict is Verdict.RESERVED for answer in answers):
            seconds["reserve_64"].append(reserved - began)
            seconds["commit_64"].append(time.perf_counter() - reserved)
        pool.flush(keys, 60.0)
    return seconds


# -- bench disk -----------------------------------------------------------------------------


def measure_disk(
    path: Folder = Path("var"),
    encrypted: Annotated[bool, typer.Option("--encrypted", help="With encrypted blocks.")] = False,
    size: Annotated[str, typer.Option(help="Written and read each time.")] = "1GiB",
    block_bytes: int = _MIB,
    repeats: int = 5,
    compression: Annotated[
        str, typer.Option(help="Compress blocks like KV: lz4, zstd or auto.")
    ] = "none",
) -> Report:
    """Disk tier -> arena, and back, against raw sequential direct I/O on the same file system.

    The two alternate. Writes about twice the size below the path and removes it afterwards; no
    read comes from the page cache.
    """
    path.mkdir(parents=True, exist_ok=True)
    cipher = Cipher([secrets.token_bytes(KEY_BYTES)]) if encrypted else None
    codec = make_codec(cipher, checked_compression(compression))
    keys = keys_of(max(1, parse_size(size, "--size") // slot_bytes_of(block_bytes)))
    nbytes = len(keys) * slot_bytes_of(block_bytes)
    with tempfile.TemporaryDirectory(prefix="kvrecall-", dir=path) as name:
        folder = Path(name)
        arena = Arena.create(nbytes)
        arena.wait_ready()
        noise = os.urandom(_MIB) if compression == "none" else kv_like(_MIB)
        for at in range(0, nbytes, _MIB):
            arena.view(at, min(_MIB, nbytes - at))[:] = noise[: nbytes - at]
        slots = slots_of(arena, len(keys), block_bytes)
        raw = RawFile(folder / "raw", arena)
        config = DiskConfig(folder / "tier", 2 * nbytes + 64 * _MIB, max_queued_bytes=2 * nbytes)
        tier = DiskTier(config, codec=codec)
        pairs: dict[str, list[tuple[float, float]]] = {"read": [], "write": []}
        try:
            tier.register(NAMESPACE, block_bytes)
            for number in range(repeats):
                if number:
                    tier.clear()
                bare = timed(raw.write)
                while tier.queued()[0]:  # cancelled by ``clear``
                    tier.poll(0.01)
                pairs["write"].append((bare, put_all(tier, keys, slots, block_bytes)))
            for _ in range(repeats):
                bare = timed(raw.read)
                pairs["read"].append((bare, get_all(tier, keys, slots)))
            direct = tier.is_direct and raw.direct
            stats = tier.stats()
        finally:
            tier.close()
            raw.close()
            slots.clear()
            arena.close()
    figures: dict[str, object] = {
        "compression": compression,
        "compressed_to": round(stats.compressed_bytes / max(1, stats.given_bytes), 3),
        "bytes": nbytes,
        "block_bytes": block_bytes,
        "repeats": repeats,
        "direct": direct,
        "sealed": encrypted,
    }
    rows = []
    for way, label in (("read", "disk -> arena"), ("write", "arena -> disk")):
        rates = [nbytes / statistics.median(seconds) for seconds in zip(*pairs[way], strict=True)]
        ratio = statistics.median(bare / tiered for bare, tiered in pairs[way])
        figures[f"{way}_raw_bytes_per_s"], figures[f"{way}_tier_bytes_per_s"] = rates
        figures[f"{way}_ratio"] = ratio
        rows.append((label, f"{rates[1] / 2**30:.2f}", f"{rates[0] / 2**30:.2f}", f"{ratio:.2f}"))
    notes = (
        f"{nbytes >> 20} MiB in blocks of {block_bytes >> 10} KiB, "
        f"{'encrypted with AES-256-GCM' if encrypted else 'checksums verified'}, "
        f"{'direct I/O' if direct else 'no direct I/O on this file system'}",
        *(
            [f"compressed to {stats.compressed_bytes / stats.given_bytes:.0%} ({compression})"]
            if stats.given_bytes
            else []
        ),
        f"goal: reads at least {READ_GOAL} of the bare ones",
    )
    return Report("disk", ("", "tier GiB/s", "bare GiB/s", "ratio"), tuple(rows), figures, notes)


class RawFile:
    """A preallocated file read and written from end to end, one system call after the other."""

    def __init__(self, path: Path, arena: Arena) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o600)
            self.direct = True
        except OSError:
            self._fd = os.open(path, flags, 0o600)
            self.direct = False
        nbytes = arena.nbytes
        os.posix_fallocate(self._fd, 0, nbytes)
        self._steps = [
            (arena.view(at, min(_RAW_BYTES, nbytes - at)), at)
            for at in range(0, nbytes, _RAW_BYTES)
        ]

    def write(self) -> None:
        for view, at in self._steps:
            os.pwritev(self._fd, [view], at)
        os.fdatasync(self._fd)

    def read(self) -> None:
        for view, at in self._steps:
            os.preadv(self._fd, [view], at)

    def close(self) -> None:
        self._steps.clear()
        os.close(self._fd)
