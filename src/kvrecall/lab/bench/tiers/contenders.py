"""Who takes part: limits of the machine, our tiers, other projects' libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvrecall.lab.bench.tiers.base import Medium, Store
from kvrecall.lab.bench.tiers.files import DiskCache, PlainFiles
from kvrecall.lab.bench.tiers.limits import Copy, Sequential
from kvrecall.lab.bench.tiers.lmcache import LmcacheCpu, LmcacheDisk
from kvrecall.lab.bench.tiers.mooncake import MooncakeClient
from kvrecall.lab.bench.tiers.native import NativeFs
from kvrecall.lab.bench.tiers.ours import DiskStore, HostStore, Unchecked
from kvrecall.pool.disk.seal import Checksum

PEERS = Path(sys.prefix) / "peers" / "bench"
"""Where set-up puts libraries that would change packages of the environment; may be absent."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What every store gets: a folder of its own, memory in which all blocks of the benchmark lie,
    room for ``nbytes`` of blocks of ``block_bytes``."""

    folder: Path
    memory: memoryview
    nbytes: int
    block_bytes: int

    @property
    def room(self) -> int:
        """Bytes of memory that a store may take: what it shall hold, and a quarter more."""
        return self.nbytes * 5 // 4 + (64 << 20)

    def piece(self) -> memoryview:
        """Memory for a copy of everything."""
        import mmap

        return memoryview(mmap.mmap(-1, self.nbytes))


@dataclass(frozen=True, slots=True)
class Contender:
    """``checks``: whether a get verifies what was put. ``limit``: it is what others are compared
    with."""

    name: str
    medium: Medium
    checks: bool
    story: str
    open: Callable[[Ground], Store]
    limit: bool = False


_MEMORY, _DISK = Medium.MEMORY, Medium.DISK

CONTENDERS = (
    Contender(
        "memory copy",
        _MEMORY,
        False,
        "one thread copies the bytes",
        lambda g: Copy(g.piece()),
        True,
    ),
    Contender(
        "kvrecall host",
        _MEMORY,
        False,
        "the pool's arena: found, leased, copied, released",
        lambda g: HostStore(g.room, g.block_bytes),
    ),
    Contender(
        "LMCache CPU",
        _MEMORY,
        False,
        "LocalCPUBackend",
        lambda g: LmcacheCpu(g.room, g.block_bytes),
    ),
    Contender(
        "Mooncake client",
        _MEMORY,
        False,
        "batch_put_from and batch_get_into; this process lends the memory, so it is copied locally",
        lambda g: MooncakeClient(g.folder, g.nbytes, g.memory),
    ),
    Contender(
        "sequential file",
        _DISK,
        False,
        "one preallocated file, direct I/O, a request in one call, fdatasync after each",
        lambda g: Sequential(g.folder, g.nbytes),
        limit=True,
    ),
    Contender(
        "kvrecall disk",
        _DISK,
        True,
        "the disk tier as it is: XXH3 verified, direct I/O, a put ends when it is durable",
        lambda g: DiskStore(g.folder, g.nbytes, g.block_bytes, Checksum()),
    ),
    Contender(
        "kvrecall disk, no checksums",
        _DISK,
        False,
        "only here: the price of the checksum",
        lambda g: DiskStore(g.folder, g.nbytes, g.block_bytes, Unchecked()),
    ),
    Contender(
        "plain files",
        _DISK,
        False,
        "a file a block, buffered, renamed into place",
        lambda g: PlainFiles(g.folder, checks=False),
    ),
    Contender(
        "plain files, checksums",
        _DISK,
        True,
        "the same with an XXH3 behind each block",
        lambda g: PlainFiles(g.folder, checks=True),
    ),
    Contender(
        "diskcache",
        _DISK,
        False,
        "diskcache.Cache, read as a file",
        lambda g: DiskCache(g.folder, g.nbytes),
    ),
    Contender(
        "LMCache disk",
        _DISK,
        False,
        "LocalDiskBackend as it comes: buffered, 4 threads",
        lambda g: LmcacheDisk(g.folder, g.room, g.block_bytes, direct=False),
    ),
    Contender(
        "LMCache disk, direct",
        _DISK,
        False,
        "LocalDiskBackend with use_odirect",
        lambda g: LmcacheDisk(g.folder, g.room, g.block_bytes, direct=True),
    ),
    Contender(
        "vLLM file system",
        _DISK,
        False,
        "vLLM's FileSystemTierManager: direct I/O, a request a job",
        lambda g: NativeFs(g.folder, g.memory, g.block_bytes),
    ),
)


def find_peers() -> None:
    """Makes packages in ``PEERS`` importable, behind everything that is installed."""
    if PEERS.is_dir() and str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
