"""Checks before an engine is started. They change nothing on disk."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from pathlib import Path

from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.arena import check_memory
from kvrecall.pool.cipher import read_cipher
from kvrecall.pool.compression import check_compression
from kvrecall.pool.disk.folder import LOCK_NAME, check_room
from kvrecall.pool.eviction import make_policy
from kvrecall.pool.remote.backends import check_store, doubt_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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
    if local or Path(*path.parts[:1]).is_dir() or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"model: there is no folder {model}")


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen on ``host``:``port``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"{host or repr(host)} is not an address of this machine: {error}"
        ) from error
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
            said = f"cannot listen on {host}:{port}: {error.strerror}"
            raise ConfigError(reasons.get(error.errno or 0, said)) from error


def check_pool(pool: PoolConfig) -> None:
    """Raises ConfigError or TierError if the pool cannot be opened as configured."""
    check_memory(pool.host_bytes, "set a smaller host_size")
    check_terms(pool)
    if pool.disk is not None:
        _check_disk(pool.disk)


def check_terms(pool: PoolConfig) -> None:
    """Raises ConfigError for settings that only their parts of the pool can check: policy, key
    file, remote store. Connects to nothing."""
    make_policy(pool.policy, 1)
    read_cipher(pool.encryption_key_file)
    if pool.disk is not None:
        check_compression(pool.disk.compression)
    if pool.remote is not None:
        check_store(pool.remote, sealed=pool.encryption_key_file is not None)
        check_compression(pool.remote.compression)


def doubts(pool: PoolConfig) -> tuple[str, ...]:
    """What of ``pool`` will not work here and leaves the rest working, a line each."""
    return tuple(filter(None, [doubt_of(pool.remote)])) if pool.remote is not None else ()


def _check_disk(disk: DiskConfig) -> None:
    folder = disk.path.expanduser().absolute()
    check_room(folder, disk.capacity_bytes)
    if holder := holder_of(folder / LOCK_NAME):
        raise TierError(
            f"disk_path: {folder} is in use by process {holder}; stop it or use another folder"
        )


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
        return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
    finally:
        os.close(fd)
    return ""
