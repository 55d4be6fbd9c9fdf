"""The machine's, or container's, processors, memory, limits and namespaces. Linux."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvrecall.config import format_size
from kvrecall.pool.arena import available_memory
from kvrecall.server.checks import Finding, Health

_AREA = "machine"
_FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "aes",
    "asimd", "i8mm", "sve", "bf16",
)  # fmt: skip
"""Flags of /proc/cpuinfo that vLLM's CPU kernels, retrieval's int8 products (VNNI, AMX, i8mm) and
encryption (aes) are faster with."""
_LEAST_SHM = 256 << 20
_LEAST_FILES = 4096
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel


def check_machine() -> Iterator[Finding]:
    yield _cpu(Path("/proc/cpuinfo"))
    yield _memory()
    yield _shared_memory(Path("/dev/shm"))
    yield _locked_memory()
    yield _open_files()
    yield _processes(Path("/proc/self/ns/pid"))


def _cpu(cpuinfo: Path) -> Finding:
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    features = [name for name in _FEATURES if name in flags]
    cores = len(os.sched_getaffinity(0))
    name = fields.get("model name", os.uname().machine)
    figures = {"name": name, "cores": cores, "features": features}
    found = f"{name}, {cores} cores for this process; {', '.join(features) or 'no known features'}"
    if "aes" not in flags:
        found += "; without aes, encryption is slow"
    return Finding(_AREA, "cpu", Health.OK, found, figures=figures)


def _memory() -> Finding:
    total, room = psutil.virtual_memory().total, available_memory()
    free = psutil.virtual_memory().available
    is_limited = room < free - (free >> 6)  # a margin for changes between readings
    found = f"{format_size(room)} can be allocated, of {format_size(total)}"
    if is_limited:
        found += f"; limited by the cgroup, the machine has {format_size(free)} free"
    figures = {"total_bytes": total, "available_bytes": room, "cgroup_limited": is_limited}
    return Finding(_AREA, "memory", Health.OK, found, figures=figures)


def _shared_memory(folder: Path) -> Finding:
    try:
        system = os.statvfs(folder)
    except OSError as error:
        found, cure = f"{folder}: {error.strerror}", f"mount a tmpfs at {folder}"
        return Finding(_AREA, "shared memory", Health.WARNING, found, cure)
    total, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    figures = {"total_bytes": total, "free_bytes": free}
    found = f"{folder}: {format_size(free)} of {format_size(total)} free"
    if free >= _LEAST_SHM:
        return Finding(_AREA, "shared memory", Health.OK, found, figures=figures)
    found += "; vLLM's worker processes exchange messages there (the pool itself does not use it)"
    cure = "give the container more: --shm-size 2g, or an emptyDir with medium Memory"
    return Finding(_AREA, "shared memory", Health.WARNING, found, cure, figures)


def _limit(number: int) -> tuple[int | None, int | None]:
    """Soft and hard limit; None: unlimited."""
    soft, hard = resource.getrlimit(number)
    unlimited = resource.RLIM_INFINITY
    return (None if soft == unlimited else soft, None if hard == unlimited else hard)


def _locked_memory() -> Finding:
    soft, hard = _limit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft is None else f"{format_size(soft)}; RDMA transfers need more"
    figures = {"soft_bytes": soft, "hard_bytes": hard}
    state = Health.OK if soft is None else Health.NOTE
    return Finding(_AREA, "locked memory", state, found, figures=figures)


def _open_files() -> Finding:
    soft, hard = _limit(resource.RLIMIT_NOFILE)
    figures = {"soft": soft, "hard": hard}
    found = "unlimited" if hard is None else f"{hard:,} at most"
    if hard is None or hard >= _LEAST_FILES:
        return Finding(_AREA, "open files", Health.OK, found, figures=figures)
    found += "; servers need one for each connection"
    cure = f"raise it to {_LEAST_FILES} or more (ulimit -Hn, LimitNOFILE)"
    return Finding(_AREA, "open files", Health.WARNING, found, cure, figures)


def _processes(namespace: Path) -> Finding:
    is_own = namespace.stat().st_ino != _FIRST_PID_NAMESPACE
    figures = {"own_namespace": is_own, "user": os.getuid()}
    if not is_own:
        return Finding(
            _AREA, "processes", Health.OK, "the machine's own PID namespace", "", figures
        )
    found = "a PID namespace of its own (a container): a pool service and its engines must share "
    found += "the PID namespace and the user"
    cure = "across containers, use --pid container:NAME or shareProcessNamespace"
    return Finding(_AREA, "processes", Health.NOTE, found, cure, figures)
