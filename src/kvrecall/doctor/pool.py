"""Whether a pool with these settings can be opened here, and what it already contains. Changes
nothing: trial files have no name (O_TMPFILE)."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from kvrecall.config import DiskConfig, RecallSettings, RemoteConfig, option_of
from kvrecall.errors import ConfigError, KvrecallError, TierError
from kvrecall.jsonfile import read_under
from kvrecall.pool.disk.folder import standing_part
from kvrecall.pool.disk.index import INDEX_NAME, counts_in
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.pool.service.admin import ServiceAdmin, Stat, model_of
from kvrecall.pool.service.link import credentials
from kvrecall.server.checks import Finding, Health, pool_findings

_AREA = "pool"
_IN_MEMORY = ("tmpfs", "ramfs")
_OVER_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre", "glusterfs")
_OF_CONTAINER = ("overlay", "aufs")
_PROBE_S = 1.0


def read_settings(
    file: Path | None, options: Mapping[str, object]
) -> tuple[RecallSettings | None, Finding]:
    """The settings in ``file`` under ``options`` (None if they are wrong), as ``kvrecall serve``
    takes them."""
    source = "options" if file is None else str(file)
    try:
        given, place = read_under(file, options, option_of)
        settings = RecallSettings.from_mapping(given, place)
    except ConfigError as error:
        return None, Finding(_AREA, "settings", Health.BROKEN, str(error), "correct it")
    figures: dict[str, object] = {"source": source, "backend": settings.backend}
    found = f"{source}: {settings.backend}" if given else "the defaults"
    return settings, Finding(_AREA, "settings", Health.OK, found, figures=figures)


def check_pool(settings: RecallSettings) -> Iterator[Finding]:
    """The server's checks of a pool, and what a person would want to know beside them."""
    if settings.service is not None:
        yield _service(settings.service.socket)
        return
    pool = settings.pool
    for each in pool_findings(pool):
        yield each
        if each.check == "disk" and each.figures and pool.disk is not None:
            yield from check_folder(pool.disk)
        if each.check == "remote" and each.state is Health.OK and pool.remote is not None:
            yield from _master(pool.remote)


def check_folder(disk: DiskConfig) -> Iterator[Finding]:
    """The file system of a disk tier's folder, which need not exist yet, and what lies in it."""
    folder = disk.path.expanduser().absolute()
    standing = standing_part(folder)
    yield _file_system(standing)
    if disk.direct_io:
        yield _direct_io(standing)
    if (folder / INDEX_NAME).exists():
        yield _stored(folder)


def _file_system(folder: Path) -> Finding:
    kind = file_system_of(folder, psutil.disk_partitions(all=True))
    figures = {"type": kind}
    if kind in _IN_MEMORY:
        found, cure = f"{kind}: blocks are in memory and lost at a reboot", "use a disk"
    elif kind in _OVER_NETWORK:
        found = f"{kind}: a network file system; two hosts must not share a folder"
        cure = "use a local disk, or a remote tier for a shared folder"
    elif kind in _OF_CONTAINER:
        found = f"{kind}: the container's own layer, deleted with the container"
        cure = "mount a volume there"
    else:
        return Finding(_AREA, "file system", Health.OK, kind or "unknown", figures=figures)
    return Finding(_AREA, "file system", Health.WARNING, found, cure, figures)


def file_system_of(folder: Path, mounts: Sequence[Any]) -> str:
    """The type of the file system that ``folder`` is on; "" if it is on none of ``mounts``,
    psutil's, of which the last at a point hides the others."""
    path = Path(os.path.realpath(folder))
    inside = [each for each in reversed(mounts) if path.is_relative_to(each.mountpoint)]
    nearest = max(inside, key=lambda each: len(each.mountpoint), default=None)
    return "" if nearest is None else str(nearest.fstype)


def _direct_io(folder: Path) -> Finding:
    """Whether O_DIRECT works in ``folder``, tried on a file without a name."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            found = f"cannot create a file in {folder}: {error.strerror}"
            return Finding(_AREA, "direct I/O", Health.BROKEN, found, "use another disk_path")
        found = "not supported by this file system; reads and writes go through the page cache"
        return Finding(_AREA, "direct I/O", Health.NOTE, found, figures={"direct": False})
    return Finding(_AREA, "direct I/O", Health.OK, "works (O_DIRECT)", figures={"direct": True})


def _stored(folder: Path) -> Finding:
    """The stored blocks by model, from the index."""
    try:
        stored = [{"model": model_of(parts), "blocks": n} for parts, n in counts_in(folder)]
    except TierError as error:
        return Finding(_AREA, "stored", Health.WARNING, str(error), "the pool starts empty")
    models = "; ".join(f"{each['blocks']} of {each['model']}" for each in stored)
    found = f"blocks by namespace: {models or 'none'}. An engine hits blocks of its own namespace"
    return Finding(_AREA, "stored", Health.OK, found, figures={"namespaces": stored})


def _service(path: Path) -> Finding:
    """Whether the node's pool service answers, in this PID namespace."""
    start = f"start one: kvrecall pool serve --socket {path}"
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(str(path))
            seen, user = credentials(probe)
        with ServiceAdmin(path) as admin:
            overview = admin.do(Stat())
    except (OSError, KvrecallError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        found = f"no pool service at {path}: {reason}; engines run without a pool"
        return Finding(_AREA, "service", Health.WARNING, found, start)
    figures = {"socket": str(path), "pid": overview.pid, "version": overview.version}
    if seen != overview.pid:
        found = f"the service at {path} is in another PID namespace; its memory cannot be mapped "
        found += "here"
        cure = "share one: --pid container:NAME, or shareProcessNamespace"
        return Finding(_AREA, "service", Health.BROKEN, found, cure, figures)
    if user != os.getuid():
        found = f"the service at {path} runs as user {user}, and this process as {os.getuid()}"
        return Finding(_AREA, "service", Health.BROKEN, found, "run both as one user", figures)
    found = f"{path}: process {overview.pid}, kvrecall {overview.version}"
    return Finding(_AREA, "service", Health.OK, found, figures=figures)


def _master(remote: RemoteConfig) -> Iterator[Finding]:
    if remote.kind != "mooncake":
        return
    settings = MooncakeSettings.of(remote.options)
    host, port = settings.master
    where = f"Mooncake's master at {host}:{port}"
    figures = {"host": host, "port": port, "protocol": settings.setup["protocol"]}
    try:
        socket.create_connection((host, port), _PROBE_S).close()
    except OSError as error:
        found = f"{where}: {error.strerror or error}; the remote tier works once it runs"
        cure = f"start it (kvrecall pool master --host {host} --port {port}), or open its port"
        yield Finding(_AREA, "remote master", Health.WARNING, found, cure, figures)
    else:
        yield Finding(_AREA, "remote master", Health.OK, f"{where} is reachable", figures=figures)
