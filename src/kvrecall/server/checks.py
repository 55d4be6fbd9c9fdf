"""What can be checked before an engine is started: the model, the port, and each setting of the
pool once, with its message and its cure. ``kvrecall serve`` makes all of them, ``kvrecall config
check`` those that any machine can make, and ``kvrecall doctor`` shows what each found. They change
nothing on disk."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvrecall.config import DiskConfig, PoolConfig, RemoteConfig, format_size
from kvrecall.engines.base import ServeSpec
from kvrecall.errors import ConfigError, KvrecallError, TierError
from kvrecall.modelconfig import HUB_ID
from kvrecall.pool.arena import available_memory, check_memory
from kvrecall.pool.cipher import read_cipher
from kvrecall.pool.compression import check_compression
from kvrecall.pool.disk.folder import LOCK_NAME, MediumFails, check_room, own_bytes, standing_part
from kvrecall.pool.eviction import make_policy
from kvrecall.pool.lockfile import signer
from kvrecall.pool.remote.backends import check_store, doubt_of
from kvrecall.server.plan import vllm_options


class Health(StrEnum):
    OK = "ok"
    NOTE = "note"  # worth knowing; nothing to do
    WARNING = "warning"  # works, but not as well or as far as it could
    BROKEN = "broken"  # the subject of the check does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. ``found``: what is there, in words; ``cure``: what to do, "" if
    nothing; ``figures``: the same for programs (bytes, versions, flags). ``error``: what a server
    that is to be started ends with; None if it can start."""

    area: str  # installed, engine, machine, pool, model, doctor
    check: str
    state: Health
    found: str
    cure: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)
    error: KvrecallError | None = None

    def as_dict(self) -> dict[str, Any]:
        shown = ("area", "check", "state", "found", "cure")
        return {name: getattr(self, name) for name in shown} | {"figures": dict(self.figures)}


def check_model(model: str) -> None:
    """Raises ConfigError unless ``model`` is a model folder or may be the id of a hub model."""
    path = Path(model).expanduser()
    try:
        if path.is_dir():
            if not (path / "config.json").is_file():
                raise ConfigError(f"model: {model} is not a model folder: it has no config.json")
            return
        if path.is_file():
            if path.suffix == ".gguf":
                return
            raise ConfigError(f"model: {model} is a file; it must be a model folder")
    except OSError as error:
        raise ConfigError(f"model: {model} cannot be read: {error.strerror}") from error
    local = path.is_absolute() or model.startswith((".", "~"))
    if local or Path(*path.parts[:1]).is_dir() or not HUB_ID.fullmatch(model):
        raise ConfigError(f"model: there is no folder {model}")


JOIN_HOSTS = "to join several, give each -- --data-parallel-rank 0 --data-parallel-address HOST"


def joins_hosts(told: Iterable[tuple[str, object]]) -> bool:
    """Whether options of vLLM make this engine a part of one on several hosts."""
    return not {"nnodes", "data-parallel-rank", "data-parallel-address"}.isdisjoint(dict(told))


def check_devices(spec: ServeSpec, there: Path = Path("/dev")) -> None:
    """Raises ConfigError if the model is spread over more accelerators than this host has."""
    told = dict([*spec.options.items(), *vllm_options(spec.extra_args)])
    sizes = [str(told.get(f"{kind}-parallel-size")) for kind in ("tensor", "pipeline", "data")]
    wanted = math.prod(int(size) for size in sizes if size.isdecimal())
    found = max(len(list(there.glob(f"{kind}[0-9]*"))) for kind in ("nvidia", "davinci"))
    if 0 < found < wanted and not joins_hosts(told.items()):
        why = f"the model is spread over {wanted} devices, and this host has {found}"
        raise ConfigError(f"{why}; {JOIN_HOSTS}")


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen on ``host``:``port``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        shown = host or repr(host)
        raise ConfigError(f"{shown} is not an address of this machine: {error}") from error
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            reasons = {
                errno.EADDRINUSE: f"port {port} on {host} is in use; stop its server or choose "
                "another",
                errno.EACCES: f"port {port} requires more privileges than this user has",
                errno.EADDRNOTAVAIL: f"{host} is not an address of this machine",
            }
            message = f"cannot listen on {host}:{port}: {error.strerror}"
            raise ConfigError(reasons.get(error.errno or 0, message)) from error


def check_pool(pool: PoolConfig, here: bool = True) -> tuple[str, ...]:
    """Raises ConfigError or TierError if the pool cannot be opened as configured. Returns a warning
    for each part that will not work and leaves the rest working. ``here``: as in
    ``pool_findings``."""
    warnings = []
    for each in pool_findings(pool, here):
        if each.error is not None:
            raise each.error
        if each.state in (Health.WARNING, Health.BROKEN):
            warnings.append("; ".join(filter(None, (each.found, each.cure))))
    return tuple(warnings)


def pool_findings(pool: PoolConfig, here: bool = True) -> Iterator[Finding]:
    """What each setting of a pool amounts to. ``here``: also whether this machine has the memory
    and the disk. Connects to nothing."""
    if here:
        yield _host(pool.host_bytes)
    yield _tried("policy", pool.policy, lambda: make_policy(pool.policy, 1))
    key_file = pool.encryption_key_file
    if key_file is not None:
        yield _tried("encryption", f"key file {key_file}", lambda: read_cipher(key_file))
    if pool.disk is not None:
        if here:
            yield _disk(pool.disk)
        yield from _compression(pool.disk.compression)
    if pool.remote is not None:
        yield from _remote(pool.remote, key_file is not None)
        yield from _compression(pool.remote.compression)


def _tried(check: str, found: str, attempt: Callable[[], object]) -> Finding:
    try:
        attempt()
    except KvrecallError as error:
        return Finding("pool", check, Health.BROKEN, str(error), error=error)
    return Finding("pool", check, Health.OK, found)


def _compression(compression: str) -> Iterator[Finding]:
    if compression != "none":
        yield _tried("compression", compression, lambda: check_compression(compression))


def _host(nbytes: int) -> Finding:
    figures = {"bytes": nbytes, "available_bytes": available_memory()}
    cure = "set a smaller host_size"
    try:
        check_memory(nbytes, cure)
    except ConfigError as error:
        found = str(error).removesuffix(f"; {cure}")
        return Finding("pool", "host", Health.BROKEN, found, cure, figures, error)
    return Finding("pool", "host", Health.OK, f"{format_size(nbytes)} of memory fit", "", figures)


def _disk(disk: DiskConfig) -> Finding:
    """Of the folder of a disk tier, which need not exist yet."""
    folder = disk.path.expanduser().absolute()
    try:
        doubt = check_room(folder, disk.capacity_bytes)
        system = os.statvfs(standing_part(folder))
    except (KvrecallError, OSError) as error:
        cure = "use another disk_path, or another disk_size"
        ends = None if isinstance(error, MediumFails | OSError) else error
        return Finding("pool", "disk", Health.BROKEN, str(error), cure, error=ends)
    free, held = system.f_bavail * system.f_frsize, own_bytes(folder)
    figures: dict[str, object] = {
        "path": str(folder), "bytes": disk.capacity_bytes, "free_bytes": free, "held_bytes": held,
    }  # fmt: skip
    if holder := holder_of(folder / LOCK_NAME):
        figures["holder"] = holder
        used = f"{folder} is in use by process {holder}"
        ends = TierError(f"disk_path: {used}; stop it or use another folder")
        return Finding("pool", "disk", Health.NOTE, used, "", figures, ends)
    if doubt:
        cure = "free some room, or set a smaller disk_size"
        return Finding("pool", "disk", Health.WARNING, doubt, cure, figures)
    found = f"{folder}: {format_size(disk.capacity_bytes)} fit ({format_size(free)} free, "
    found += f"{format_size(held)} its own)"
    return Finding("pool", "disk", Health.OK, found, "", figures)


def _remote(remote: RemoteConfig, sealed: bool) -> Iterator[Finding]:
    found = _tried("remote", remote.kind, lambda: check_store(remote, sealed))
    is_mooncake = found.error is None and remote.kind == "mooncake"
    if is_mooncake and not find_spec("mooncake"):
        why, cure = "mooncake is not installed", "pip install 'kvrecall[mooncake]'"
        found = Finding("pool", "remote", Health.BROKEN, why, cure)
    yield found
    if is_mooncake and (doubt := doubt_of(remote)):
        yield Finding("pool", "remote protocol", Health.WARNING, doubt)


def holder_of(lock: Path) -> str:
    """The process that holds the lock file, "" if none. Does not change the file.

    For an early error message only; the pool takes the lock when it is opened.
    """
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return signer(os.pread(fd, 64, 0).decode("ascii", "replace"))
    finally:
        os.close(fd)
    return ""
