"""Servers on a store beside them: the pool service, Mooncake Store, LMCache's server."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvrecall.errors import EngineError
from kvrecall.lab.bench.serving.field import Field, beside, servers
from kvrecall.lab.bench.tiers.contenders import PEERS
from kvrecall.lab.engines.server import Progress, server_environment
from kvrecall.lab.masters import Master
from kvrecall.lab.ports import free_port
from kvrecall.lab.processes import as_child, kvrecall


@contextlib.contextmanager
def on_a_service(field: Field, progress: Progress) -> Iterator[Sequence[str]]:
    """Two servers on one pool service that has the memory of both."""
    path = field.folder / "service" / "pool.sock"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    command = kvrecall("pool", "serve", "--socket", str(path))
    command += ["--host-size", str(field.host_bytes)]
    log = field.folder / "service.log"
    pool = {"backend": "service", "socket": str(path)}
    with (
        beside(command, str(path), log, "the pool service", server_environment()),
        servers(2, pool=pool)(field, progress) as urls,
    ):
        yield urls


@contextlib.contextmanager
def on_mooncake(field: Field, progress: Progress) -> Iterator[Sequence[str]]:
    """One server with host memory, and a Mooncake Store that has the disk's room in memory."""
    master = Master(field.folder / "master.log")
    try:
        master.start()
    except OSError as error:
        raise EngineError(f"Mooncake's master cannot be started: {error}") from error
    remote = {"kind": "mooncake", **master.options(field.disk_bytes)}
    try:
        with servers(pool={"host_size": 0, "remote": remote})(field, progress) as urls:
            yield urls
    finally:
        master.kill()


@contextlib.contextmanager
def on_lmcache(field: Field, progress: Progress) -> Iterator[Sequence[str]]:
    """One server with LMCache's multi-process connector, none of ours, on LMCache's server, which
    has the host's and no disk. Raises EngineError without LMCache."""
    environment = _with_peers()
    port = free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(free_port())]
    command += ["--l1-size-gb", f"{field.host_bytes / 2**30:.3f}", "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(field.block_size), "--disable-metrics"]
    command += ["--supported-transfer-mode", "engine_driven"]
    connector = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
        },
    }
    arguments = ["--no-pool", "--", "--kv-transfer-config", json.dumps(connector)]
    log = field.folder / "lmcache.log"
    address = ("127.0.0.1", port)
    with (
        beside(as_child(*command), address, log, "LMCache's server", environment),
        servers(arguments=arguments, environment=environment)(field, progress) as urls,
    ):
        yield urls


def _with_peers() -> dict[str, str]:
    """The servers' environment, with the folder of peers behind what it has."""
    environment = server_environment()
    folders = [Path(p) for p in (*sys.path, str(PEERS)) if (Path(p) / "lmcache").is_dir()]
    if not folders:
        raise EngineError("LMCache is not installed")
    paths = [*filter(None, [environment.get("PYTHONPATH")]), str(folders[0])]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }
