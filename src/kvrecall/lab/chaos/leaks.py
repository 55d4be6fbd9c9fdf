"""The leak check: memory, slots and files that a run leaves behind. Everything is attributed to the
run by what its own processes held, since others work on the same machine."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from kvrecall.lab.chaos.faults import stored_blocks
from kvrecall.lab.engines.service import ServiceProcess
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.disk.folder import LOCK_NAME
from kvrecall.pool.disk.index import INDEX_NAME

_ARENA = "/memfd:kvrecall-arena"
_IDLE_S = 30.0


def slots_held(service: ServiceProcess, seconds: float = _IDLE_S) -> tuple[int, str]:
    """Leases and slots being filled that an idle service still counts ``seconds`` after its last
    engine ended, as a number and in words. Raises TierError."""
    until = time.monotonic() + seconds
    while True:
        stats = service.look().stats
        held = stats.leases + stats.reserved
        if not held:
            return 0, ""
        if time.monotonic() > until:
            return held, f"{stats.leases} leases, {stats.reserved} slots being filled"
        time.sleep(0.2)


def arenas_held(arenas: Iterable[ArenaHandle]) -> list[tuple[ArenaHandle, int]]:
    """Arenas that are still in memory, each with a process that has it open or mapped."""
    wanted = {arena.inode: arena for arena in arenas}
    held = []
    for process in Path("/proc").glob("[0-9]*"):
        for inode in _arena_inodes(process):
            if inode in wanted:
                held.append((wanted.pop(inode), int(process.name)))
    return held


def _arena_inodes(process: Path) -> set[int]:
    """Of arenas open or mapped in a process, as far as it lets itself be looked at."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(process / "fd"):
            if os.readlink(process / "fd" / name).startswith(_ARENA):
                found.add(os.stat(process / "fd" / name).st_ino)
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        found |= {int(line.split(None, 5)[4]) for line in lines if _ARENA in line}
    return found


def stray_files(service: ServiceProcess) -> list[tuple[Path, int]]:
    """Files of a stopped service, with their sizes, that are neither the run's own nor part of its
    disk tier: in its folder, and slabs without a row in the index."""
    own = {"pool.json", "service.log", "pool.sock.lock", service.disk.name}
    slabs = {f"slab-{block.slab:06d}.kv" for block in stored_blocks(service.disk, in_use=False)}
    strays = [file for file in service.folder.iterdir() if file.name not in own]
    strays += [
        file
        for file in service.disk.iterdir()
        if not file.name.startswith(INDEX_NAME) and file.name not in {LOCK_NAME, *slabs}
    ]
    return [(file, size_of(file)) for file in strays]


def size_of(file: Path) -> int:
    """Bytes of a leaked file; at least one, so that an empty one counts."""
    try:
        return max(1, file.stat().st_size)
    except FileNotFoundError:
        return 1
