"""The machine, or container: what is installed, by its metadata; whether the engine starts to
load, in a child process; processors, memory, limits and namespaces. Linux."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil

import kvrecall
from kvrecall.config import format_size
from kvrecall.engines.vllm.compat.versions import (
    BUILT_ON,
    DISTRIBUTIONS,
    SUPPORTED,
    Fit,
    fit_of,
    installed_version,
)
from kvrecall.engines.vllm.probe import MARK
from kvrecall.pool.arena import available_memory
from kvrecall.server.checks import Finding, Health
from kvrecall.server.servable import Machine, processor

_INSTALLED = "installed"
_ENGINE = "engine"
_GET_VLLM = (
    "pip install 'kvrecall[cuda]' (NVIDIA GPU) or 'kvrecall[cpu]' (no GPU), in an environment of "
    "its own"
)
_GET_SUPPORTED = f"install vllm {BUILT_ON}"
_MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
)
EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "mooncake": (_MOONCAKE, "remote tier on Mooncake Store"),
    "objects": (("obstore",), "remote tier on S3, Google Cloud, Azure or a shared folder"),
    "encryption": (("cryptography",), "encryption_key_file"),
    "compression": (("numcodecs",), "disk_compression, remote_compression"),
    "router": (("fastapi", "uvicorn", "httptools"), "kvrecall router without vLLM"),
}
"""Optional extras: their packages (of Mooncake's any one) and their purpose."""
_PATIENCE_S = 180.0
_MACHINE = "machine"
_FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "aes",
    "asimd", "i8mm", "sve", "bf16",
)  # fmt: skip
"""Flags of /proc/cpuinfo that vLLM's CPU kernels, retrieval's int8 products (VNNI, AMX, i8mm) and
encryption (aes) are faster with."""
_LEAST_SHM = 256 << 20
_LEAST_FILES = 4096
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of the kernel


def check_packages(serves: bool) -> Iterator[Finding]:
    """``serves``: whether this machine is to serve a model, which requires vLLM."""
    where = str(Path(kvrecall.__file__).parent)
    yield Finding(
        _INSTALLED, "kvrecall", Health.OK, f"{kvrecall.__version__} in {where}",
        figures={"version": kvrecall.__version__, "path": where},
    )  # fmt: skip
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        _INSTALLED, "python", Health.OK, f"{python}, {sys.executable}", figures={"version": python}
    )
    version = installed_version(*DISTRIBUTIONS)
    yield _vllm(version, serves)
    yield _needed_by_vllm("torch", version, "")
    yield _needed_by_vllm("triton", version, "; retrieval on a GPU needs it")
    for extra, (names, purpose) in EXTRAS.items():
        yield _extra(extra, names, purpose)
    if sglang := installed_version("sglang"):
        yield Finding(_INSTALLED, "sglang", Health.OK, sglang, figures={"version": sglang})


def _vllm(version: str | None, serves: bool) -> Finding:
    figures = {"version": version, "supported": SUPPORTED}
    if version is None:
        state = Health.BROKEN if serves else Health.WARNING
        found = "not installed; required by `kvrecall serve` and the connector, but not by a pool "
        found += "service, the router, plan and simulate"
        return Finding(_INSTALLED, "vllm", state, found, _GET_VLLM, figures)
    match fit_of(version):
        case Fit.TESTED:
            ours = entry_points(group="vllm.general_plugins")
            names = ", ".join(one.name for one in ours if one.value.startswith("kvrecall."))
            found = f"{version}, whose processes all load kvrecall's plug-ins {names}"
            return Finding(_INSTALLED, "vllm", Health.OK, found, figures=figures)
        case Fit.UNNUMBERED:
            found = f"{version} does not say which version it is"
            return Finding(_INSTALLED, "vllm", Health.WARNING, found, _GET_SUPPORTED, figures)
        case Fit.REFUSED:
            found = f"{version}; kvrecall is for {SUPPORTED} and refuses others"
            return Finding(_INSTALLED, "vllm", Health.BROKEN, found, _GET_SUPPORTED, figures)


def _needed_by_vllm(name: str, vllm: str | None, why: str) -> Finding:
    version = installed_version(name)
    figures = {"version": version}
    if version is not None:
        return Finding(_INSTALLED, name, Health.OK, version, figures=figures)
    state = Health.NOTE if vllm is None or name == "triton" else Health.BROKEN
    cure = "" if state is Health.NOTE else _GET_VLLM
    return Finding(_INSTALLED, name, state, f"not installed{why}", cure, figures)


def _extra(extra: str, names: tuple[str, ...], purpose: str) -> Finding:
    versions = {name: installed_version(name) for name in names}
    there = [f"{name} {version}" for name, version in versions.items() if version]
    is_whole = bool(there) and (extra == "mooncake" or len(there) == len(names))
    if is_whole:
        return Finding(_INSTALLED, extra, Health.OK, ", ".join(there), figures=versions)
    return Finding(
        _INSTALLED,
        extra,
        Health.NOTE,
        f"not installed; for: {purpose}",
        f"pip install 'kvrecall[{extra}]'",
        versions,
    )


def check_engine(model: str | None, uses_mooncake: bool = False) -> Iterator[Finding]:
    """Imports torch, vLLM and the connector in a child process, and has vLLM configure ``model``
    there, without its weights. Takes about ten seconds. ``uses_mooncake``: whether the pool has a
    Mooncake Store."""
    if installed_version(*DISTRIBUTIONS) is None:
        return
    stages, ending = _probe(model)
    readers = {
        "torch": ("import torch", _GET_VLLM, _gpu),
        "vllm": ("import vllm", _GET_VLLM, _import),
        "connector": ("kvrecall's connector", _GET_SUPPORTED, _connector),
        "model": ("vLLM's configuration of it", "see vLLM's supported models", _model),
    }
    for name, (what, cure, read) in readers.items():
        facts = stages.get(name)
        if facts is not None and "error" in facts:
            found = f"{what} fails: {facts['error']}"
            yield Finding(_ENGINE, name, Health.BROKEN, found, cure)
        elif facts is not None:
            yield read(facts)
    if "mooncake" in stages and "error" in stages["mooncake"]:
        state = Health.BROKEN if uses_mooncake else Health.WARNING
        cure = "see docs/remote.md; other versions of Mooncake's package need other libraries"
        found = f"import mooncake.store fails: {stages['mooncake']['error']}"
        yield Finding(_ENGINE, "mooncake", state, found, cure)
    if ending:
        yield Finding(_ENGINE, "process", Health.BROKEN, ending, _GET_VLLM)


def _probe(model: str | None) -> tuple[dict[str, dict[str, Any]], str]:
    """What each stage of the child process found, and how it failed, "" if it did not."""
    command = [sys.executable, "-m", "kvrecall.engines.vllm.probe", *([model] if model else [])]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
        printed, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        printed, status = error.stdout or b"", 0
    lines = printed.decode(errors="replace").splitlines()
    reports = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    stages = {str(each.pop("stage")): each for each in reports}
    after = f"after {', '.join(stages)}" if stages else "before anything was imported"
    if status < 0:
        name = signal.Signals(-status).name
        why = " (a library uses instructions that this CPU lacks)" if name == "SIGILL" else ""
        return stages, f"the engine's process was killed by {name} {after}{why}"
    expected = {"torch", "vllm", "connector", *(["model"] if model else [])}
    if expected - stages.keys():
        late = "" if status else f" within {_PATIENCE_S:g} s"
        return stages, f"the engine's process made no progress {after}{late}"
    return stages, ""


def _gpu(facts: Mapping[str, Any]) -> Finding:
    devices, built_for = facts["devices"], facts["built_for"]
    figures = {"built_for": built_for, "devices": devices}
    if devices:
        names = ", ".join(
            f"{one['name']} ({format_size(one['nbytes'])}, {format_size(one['free_bytes'])} free)"
            for one in devices
        )
        return Finding(_ENGINE, "gpu", Health.OK, names, figures=figures)
    if built_for:
        found = f"torch is built for {built_for} but finds no device"
        cure = "check the driver and the environment (CUDA_VISIBLE_DEVICES on NVIDIA), or install "
        cure += "'kvrecall[cpu]'"
        return Finding(_ENGINE, "gpu", Health.WARNING, found, cure, figures)
    return Finding(_ENGINE, "gpu", Health.NOTE, "none: torch is built for CPUs", figures=figures)


def _import(facts: Mapping[str, Any]) -> Finding:
    if not facts["platform"]:
        found = "vLLM finds no platform to run on"
        return Finding(_ENGINE, "vllm", Health.BROKEN, found, _GET_VLLM, facts)
    found = f"platform {facts['platform']}, {facts['device']}"
    return Finding(_ENGINE, "platform", Health.OK, found, figures=facts)


def _connector(facts: Mapping[str, Any]) -> Finding:
    return Finding(_ENGINE, "connector", Health.OK, f"{facts['class']} loads", figures=facts)


def _model(facts: Mapping[str, Any]) -> Finding:
    if not facts["generates"]:
        found = "it does not generate text, which kvrecall serve requires"
        return Finding(_ENGINE, "model", Health.BROKEN, found, "use vllm serve", facts)
    if not facts["prefix_caching"]:
        found = "vLLM disables prefix caching for it here, and the pool requires prefix caching"
        return Finding(_ENGINE, "model", Health.BROKEN, found, "serve it with --no-pool", facts)
    found = f"vLLM accepts it: {facts['architecture']}, {facts['dtype']}, up to "
    found += f"{facts['max_model_len']:,} tokens, with prefix caching and the pool"
    return Finding(_ENGINE, "model", Health.OK, found, figures=facts)


# -- the machine itself -------------------------------------------------------------------------


def check_machine() -> Iterator[Finding]:
    yield _cpu()
    yield _memory()
    yield _shared_memory(Path("/dev/shm"))
    yield _locked_memory()
    yield _open_files()
    yield _processes(Path("/proc/self/ns/pid"))


def _cpu() -> Finding:
    flags = Machine.this().features
    features = [name for name in _FEATURES if name in flags]
    cores = len(os.sched_getaffinity(0))
    name = processor().get("model name", os.uname().machine)
    figures = {"name": name, "cores": cores, "features": features}
    found = f"{name}, {cores} cores for this process; {', '.join(features) or 'no known features'}"
    if "aes" not in flags:
        found += "; without aes, encryption is slow"
    return Finding(_MACHINE, "cpu", Health.OK, found, figures=figures)


def _memory() -> Finding:
    total, room = psutil.virtual_memory().total, available_memory()
    free = psutil.virtual_memory().available
    is_limited = room < free - (free >> 6)  # a margin for changes between readings
    found = f"{format_size(room)} can be allocated, of {format_size(total)}"
    if is_limited:
        found += f"; limited by the cgroup, the machine has {format_size(free)} free"
    figures = {"total_bytes": total, "available_bytes": room, "cgroup_limited": is_limited}
    return Finding(_MACHINE, "memory", Health.OK, found, figures=figures)


def _shared_memory(folder: Path) -> Finding:
    try:
        system = os.statvfs(folder)
    except OSError as error:
        found, cure = f"{folder}: {error.strerror}", f"mount a tmpfs at {folder}"
        return Finding(_MACHINE, "shared memory", Health.WARNING, found, cure)
    total, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    figures = {"total_bytes": total, "free_bytes": free}
    found = f"{folder}: {format_size(free)} of {format_size(total)} free"
    if free >= _LEAST_SHM:
        return Finding(_MACHINE, "shared memory", Health.OK, found, figures=figures)
    found += "; vLLM's worker processes exchange messages there (the pool itself does not use it)"
    cure = "give the container more: --shm-size 2g, or an emptyDir with medium Memory"
    return Finding(_MACHINE, "shared memory", Health.WARNING, found, cure, figures)


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
    return Finding(_MACHINE, "locked memory", state, found, figures=figures)


def _open_files() -> Finding:
    soft, hard = _limit(resource.RLIMIT_NOFILE)
    figures = {"soft": soft, "hard": hard}
    found = "unlimited" if hard is None else f"{hard:,} at most"
    if hard is None or hard >= _LEAST_FILES:
        return Finding(_MACHINE, "open files", Health.OK, found, figures=figures)
    found += "; servers need one for each connection"
    cure = f"raise it to {_LEAST_FILES} or more (ulimit -Hn, LimitNOFILE)"
    return Finding(_MACHINE, "open files", Health.WARNING, found, cure, figures)


def _processes(namespace: Path) -> Finding:
    is_own = namespace.stat().st_ino != _FIRST_PID_NAMESPACE
    figures = {"own_namespace": is_own, "user": os.getuid()}
    if not is_own:
        return Finding(
            _MACHINE, "processes", Health.OK, "the machine's own PID namespace", "", figures
        )
    found = "a PID namespace of its own (a container): a pool service and its engines must share "
    found += "the PID namespace and the user"
    cure = "across containers, use --pid container:NAME or shareProcessNamespace"
    return Finding(_MACHINE, "processes", Health.NOTE, found, cure, figures)
