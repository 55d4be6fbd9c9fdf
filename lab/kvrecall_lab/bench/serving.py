"""``bench chat`` with the deployments that need other projects."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvrecall.bench import serving
from kvrecall.bench.report import Report, Times
from kvrecall.bench.serving import BLOCK, Budget, Deployment, Sizes, Variants, servers
from kvrecall.errors import EngineError
from kvrecall.processes.child import ChildProcess, server_environment
from kvrecall.processes.command import as_child
from kvrecall.processes.ports import free_port
from kvrecall.processes.service import Master
from kvrecall_lab.bench.peers import PEERS


@contextlib.contextmanager
def _on_mooncake(sizes: Sizes) -> Iterator[Sequence[str]]:
    """One server with host memory, and a Mooncake Store with as many bytes of memory as the
    disk."""
    master = Master(sizes.folder / "master.log")
    try:
        master.start()
    except OSError as error:
        raise EngineError(f"Mooncake's master cannot be started: {error}") from error
    remote = {"kind": "mooncake", **master.options(sizes.disk_bytes)}
    try:
        with servers(pool={"host_size": 0, "remote": remote})(sizes) as urls:
            yield urls
    finally:
        master.kill()


@contextlib.contextmanager
def _on_lmcache(sizes: Sizes) -> Iterator[Sequence[str]]:
    """One server with LMCache's multi-process connector instead of kvrecall's, on LMCache's server,
    which has the host's memory and no disk. Raises EngineError without LMCache."""
    environment = server_environment()
    folders = [Path(p) for p in (*sys.path, str(PEERS)) if (Path(p) / "lmcache").is_dir()]
    if not folders:
        raise EngineError("LMCache is not installed")
    paths = [*filter(None, [environment.get("PYTHONPATH")]), str(folders[0])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(http_port)]
    command += ["--l1-size-gb", f"{sizes.host_bytes / 2**30:.3f}", "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(BLOCK), "--disable-metrics"]
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
    server = ChildProcess(sizes.folder / "lmcache.log")
    try:
        server.launch(as_child(*command), environment)
        _await_port(server, port)
        with servers(arguments=arguments, environment=environment)(sizes) as urls:
            yield urls
    finally:
        server.stop(30.0)


def _await_port(server: ChildProcess, port: int) -> None:
    """Waits until LMCache's server listens. Raises EngineError if it ends or times out."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end and server.is_alive:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"LMCache's server is not ready:\n{server.log_tail()}")


DEPLOYMENTS: Mapping[str, Deployment] = {
    **serving.DEPLOYMENTS,
    "mooncake": Deployment("kvrecall: host and Mooncake Store", _on_mooncake),
    "lmcache": Deployment("LMCache's connector and server: host", _on_lmcache),
}


def measure_chat(
    sessions: Times = 32,
    turns: Times = 3,
    variants: Variants = "",
    budget: Budget = math.inf,
) -> Report:
    """The product's ``bench chat``, with these deployments, too."""
    return serving.measure_chat(sessions, turns, variants, budget, DEPLOYMENTS)
