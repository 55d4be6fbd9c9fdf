"""Kills a process while it saves, and checks what a new one finds.

The child (this file as a program) saves chains into a pool and notes in an oracle
file, after ``flush`` said that they are durable, which blocks must survive. It is killed at a
random time or at a chosen system call of the disk tier.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvrecall.block import tenant_of
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import ConfigError
from kvrecall.pool.arena import Arena
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.slabs import FileIo
from kvrecall.pool.pool import Pool
from kvrecall.testing import chain, namespace
from kvrecall.testing.pool_contract import Engine

BLOCK_BYTES = 20_000
CHAIN_BLOCKS = 8
HOST_BYTES = 4 << 20
NAMESPACE = namespace("crash")
_NOTED = 4  # lines of the oracle that a child writes before it may be killed by the clock
_WAIT_S = 240.0


class _DeadlyIo(FileIo):
    """Kills its own process at the given system call, counted from 1; 0 = never."""

    def __init__(self, at: int) -> None:
        self._left = at

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._count()
        super().allocate(fd, nbytes)
        self._count()

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._count()
        half = buffers[: max(1, len(buffers) // 2)]
        super().write(fd, half, offset)  # torn: only a part has arrived
        self._count()
        return super().write(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)
        self._count()


def save_for_ever(folder: Path, oracle: Path, life: int, die_at: int, disk_bytes: int) -> None:
    """The child: saves and notes durable blocks until it is killed."""
    tier = DiskTier(DiskConfig(folder, disk_bytes), io=_DeadlyIo(die_at))
    pool = Pool(Arena.create(HOST_BYTES), tier)
    pool.register(NAMESPACE, BLOCK_BYTES)
    engine = Engine(pool, BLOCK_BYTES)
    log = os.open(oracle, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for number in range(1_000_000):
        name = f"{life}-{number}"
        keys = chain(NAMESPACE, CHAIN_BLOCKS, name)
        pool.reserve(chain(NAMESPACE, CHAIN_BLOCKS, f"never-{name}"))
        engine.save(keys, tenant_of(str(number % 3)))
        if number % 2 and pool.flush(keys, 20.0):
            os.write(log, f"{name}\n".encode())
            with contextlib.suppress(ConfigError):  # enough are pinned
                if number % 8 == 1:
                    pool.admin.pin(keys)
                    os.write(log, f"{name} pinned\n".encode())
                if number % 8 == 5:
                    tier.resize(disk_bytes * (3 + number // 8 % 2) // 4)
        pool.abandon(chain(NAMESPACE, CHAIN_BLOCKS, f"never-{name}"))


def run_and_kill(
    folder: Path, oracle: Path, life: int, dice: random.Random, disk_bytes: int
) -> None:
    """Runs the child and lets it die: every other life by a system call, else by the clock, when
    it has noted some chains."""
    die_at = dice.randrange(1, 40) if life % 2 else 0
    arguments = [str(folder), str(oracle), str(life), str(die_at), str(disk_bytes)]
    before = _lines(oracle)
    child = subprocess.Popen([sys.executable, __file__, *arguments])
    try:
        if not die_at:
            until = time.monotonic() + _WAIT_S
            while len(_lines(oracle)) < len(before) + _NOTED and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(dice.random() * 0.3)
            child.kill()
        child.wait(timeout=_WAIT_S)
    finally:
        child.kill()
        child.wait()
    if child.returncode != -signal.SIGKILL:
        raise AssertionError(f"the child ended by itself: {child.returncode}")


def _lines(oracle: Path) -> list[str]:
    return oracle.read_text().splitlines() if oracle.exists() else []


def survivors(folder: Path, oracle: Path, disk_bytes: int) -> tuple[int, int, int]:
    """Opens the folder and checks it against the oracle.

    Returns how many blocks had to survive, how many of those are lost, and how many blocks are
    there that were never committed. Raises AssertionError on wrong bytes, and where a block that
    was pinned is lost or not pinned any more.
    """
    lines = _lines(oracle)
    names = [line for line in lines if not line.endswith(" pinned")]
    pinned = [line.removesuffix(" pinned") for line in lines if line not in names]
    lost = strange = 0
    config = PoolConfig(HOST_BYTES, DiskConfig(folder, disk_bytes))
    with Pool.open(config) as pool, contextlib.closing(Engine(pool, BLOCK_BYTES)) as engine:
        pool.register(NAMESPACE, BLOCK_BYTES)
        disk = pool.admin.disk
        assert disk is not None
        for name in pinned:
            keys = chain(NAMESPACE, CHAIN_BLOCKS, name)
            assert all(disk.contains(key) for key in keys), "a pinned block is lost"
            assert disk.catalog.pinned_keys().issuperset(keys), "a pin is lost"
        for name in names:
            keys = chain(NAMESPACE, CHAIN_BLOCKS, name)
            lost += CHAIN_BLOCKS - len(engine.recall(keys))
            for key in chain(NAMESPACE, CHAIN_BLOCKS, f"never-{name}"):
                strange += pool.find([key]).blocks
    return len(names) * CHAIN_BLOCKS, lost, strange


if __name__ == "__main__":
    save_for_ever(
        Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    )
