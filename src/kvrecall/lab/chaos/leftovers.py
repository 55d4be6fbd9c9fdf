"""What a run leaves behind: memory, slots, files. Everything is attributed to this run by what its
own processes held, since others work on the same machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from kvrecall.lab.chaos.damage import stored
from kvrecall.lab.engines.service import ServiceProcess
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.disk.folder import LOCK_NAME, own_bytes
from kvrecall.pool.disk.index import INDEX_NAME

_ENGINES_OWN = ("psm_", "vllm_dist_", "sem.")
"""Names of vLLM's (and Python's) shared memory; kvrecall has none with a name."""

_IDLE_S = 30.0


def slots_held(service: ServiceProcess, seconds: float = _IDLE_S) -> tuple[int, str]:
    """Leases and slots being filled that an idle service still counts ``seconds`` after its last
    engine ended, and who is said to hold them. Raises TierError."""
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
    """Arenas that are still in memory, each with a process that holds it."""
    wanted = {arena.inode: arena for arena in arenas}
    held = []
    for place in Path("/proc").glob("[0-9]*/fd"):
        for inode in _memory_files(place):
            if inode in wanted:
                held.append((wanted.pop(inode), int(place.parent.name)))
    for place in Path("/proc").glob("[0-9]*/maps"):
        for inode in _memory_maps(place):
            if inode in wanted:
                held.append((wanted.pop(inode), int(place.parent.name)))
    return held


def _memory_files(folder: Path) -> list[int]:
    found = []
    try:
        for name in os.listdir(folder):
            if os.readlink(folder / name).startswith("/memfd:kvrecall-arena"):
                found.append(os.stat(folder / name).st_ino)
    except OSError:
        return found
    return found


def _memory_maps(maps: Path) -> list[int]:
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return []
    return [int(line.split(None, 5)[4]) for line in lines if "/memfd:kvrecall-arena" in line]


def clear_shared(files: Iterable[Path]) -> tuple[int, list[Path]]:
    """Of files in /dev/shm that ended engines mapped, removes what vLLM left there when it was
    killed. Returns the bytes of those, and whatever else is left."""
    removed = 0
    others = []
    for file in files:
        if not file.exists():
            continue
        if file.name.startswith(_ENGINES_OWN):
            removed += file.stat().st_size
            file.unlink(missing_ok=True)
        else:
            others.append(file)
    return removed, others


def strays(service: ServiceProcess) -> list[tuple[Path, int]]:
    """Files of a stopped service that are neither the run's own nor part of its disk tier: in its
    folder, and slabs that no row of the index speaks of."""
    own = {"pool.json", "service.log", "pool.sock.lock"}
    found = [
        (file, _size(file))
        for file in service.folder.iterdir()
        if file.name not in own and file != service.disk
    ]
    slabs = {f"slab-{row.slab:06d}.kv" for row in stored(service.disk, in_use=False)}
    for file in service.disk.iterdir():
        tier = file.name.startswith(INDEX_NAME) or file.name == LOCK_NAME
        if not tier and file.name not in slabs:
            found.append((file, _size(file)))
    return found


def over_the_limit(service: ServiceProcess, disk_bytes: int) -> int:
    """Bytes that the disk tier takes beyond its size."""
    return max(0, own_bytes(service.disk) - disk_bytes)


def _size(file: Path) -> int:
    try:
        return max(1, file.stat().st_size)
    except FileNotFoundError:
        return 1
