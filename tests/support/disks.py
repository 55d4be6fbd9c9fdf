"""Disk tiers with a bench, and their system calls with faults injected."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.config import DEFAULT_POLICY, DiskConfig
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import BlockCodec
from kvrecall.pool.disk.slabs import FileIo
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, Bench


class DiskBench(Bench):
    tier: DiskTier


OPENED: list[DiskBench] = []
"""What ``open_disk`` opened, for the fixture that closes it."""


def open_disk(
    folder: Path,
    nbytes: int = 64 << 20,
    block_bytes: int = BLOCK_BYTES,
    policy: str = DEFAULT_POLICY,
    io: FileIo | None = None,
    clock: Clock | None = None,
    codec: BlockCodec | None = None,
    **settings: Any,
) -> DiskBench:
    """A tier for blocks of ``NAMESPACE``, and a bench on it. ``settings``: of ``DiskConfig``."""
    tier = DiskTier(DiskConfig(folder, nbytes, **settings), policy, io, clock, codec)
    tier.register(NAMESPACE, block_bytes)
    OPENED.append(DiskBench(tier, slots=512, block_bytes=block_bytes))
    return OPENED[-1]


@dataclass(slots=True)
class DiskFaults:
    """What goes wrong. May be changed while the disk is in use."""

    no_direct: bool = False  # the file system refuses O_DIRECT
    no_room: bool = False  # nothing can be allocated
    full: bool = False  # writes fail with ENOSPC
    read_error: int = 0  # errno of reads
    write_error: int = 0  # errno of writes
    sync_error: int = 0  # errno of fdatasync
    short_read: int = 0  # bytes missing at the end of each read
    flip_bit: bool = False  # one bit of each read is wrong
    read_delay_s: float = 0.0
    write_delay_s: float = 0.0


class FaultyIo(FileIo):
    """Real system calls, except where ``faults`` says otherwise. While ``gate`` is cleared writes
    wait for it, while ``read_gate`` is, reads do."""

    def __init__(self, faults: DiskFaults | None = None) -> None:
        self.faults = faults or DiskFaults()
        self.gate = threading.Event()
        self.gate.set()
        self.read_gate = threading.Event()
        self.read_gate.set()
        self.writes_begun = 0
        self.read_sizes: list[int] = []
        self.write_sizes: list[int] = []

    def open(self, path: Path, direct: bool) -> int:
        if direct and self.faults.no_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, direct)

    def allocate(self, fd: int, nbytes: int) -> None:
        _fail(errno.ENOSPC if self.faults.no_room else 0)
        super().allocate(fd, nbytes)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.writes_begun += 1
        self.gate.wait()
        time.sleep(self.faults.write_delay_s)
        _fail(errno.ENOSPC if self.faults.full else self.faults.write_error)
        self.write_sizes.append(sum(len(buffer) for buffer in buffers))
        return super().write(fd, buffers, offset)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.read_gate.wait()
        time.sleep(self.faults.read_delay_s)
        _fail(self.faults.read_error)
        got = super().read(fd, buffers, offset)
        self.read_sizes.append(got)
        if self.faults.flip_bit:
            buffers[0][7] ^= 1
        return max(0, got - self.faults.short_read)

    def sync(self, fd: int) -> None:
        _fail(self.faults.sync_error)
        super().sync(fd)


def _fail(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
