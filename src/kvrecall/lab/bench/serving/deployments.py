"""The servers a workload is played against: no pool, each kind of pool, and LMCache."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvrecall.errors import EngineError
from kvrecall.lab.bench.tiers.peers import PEERS
from kvrecall.lab.engines.child import ChildProcess, server_environment
from kvrecall.lab.engines.server import Progress, ServerProcess
from kvrecall.lab.engines.service import ServiceProcess
from kvrecall.lab.masters import Master
from kvrecall.lab.ports import free_port
from kvrecall.lab.processes import as_child

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The model, and the bytes each tier gets: the same for all deployments."""

    model: Path
    folder: Path
    max_model_len: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    block_size: int
    dtype: str = "auto"

    def arguments(self) -> list[str]:
        """Options of ``kvrecall serve`` without those of the pool."""
        arguments = [str(self.model), "--max-model-len", str(self.max_model_len)]
        arguments += ["--block-size", str(self.block_size), "--dtype", self.dtype]
        return [*arguments, "--kv-cache-memory-bytes", str(self.device_bytes)]


Servers = Callable[[Sizes, Progress], AbstractContextManager[Sequence[str]]]
"""Starts servers; gives their addresses."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A way to serve: its name, what it is, and how its servers are started."""

    name: str
    story: str
    servers: Servers


def servers(
    count: int = 1,
    arguments: Sequence[str] = (),
    pool: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Servers:
    """``count`` servers, each with a pool of its own with settings ``pool``, where ``host_size``,
    ``disk_path`` and ``disk_size`` stand for its share of the sizes."""

    @contextlib.contextmanager
    def start(sizes: Sizes, progress: Progress) -> Iterator[Sequence[str]]:
        with ExitStack() as stack:
            urls = []
            for number in range(count):
                words = [*sizes.arguments(), *arguments]
                if pool is not None:
                    share = {
                        "host_size": sizes.host_bytes // count,
                        "disk_path": str(sizes.folder / f"disk{number}"),
                        "disk_size": sizes.disk_bytes // count,
                    }
                    file = sizes.folder / f"pool{number}.json"
                    file.write_text(json.dumps({k: share.get(k, v) for k, v in pool.items()}))
                    place = words.index("--") if "--" in words else len(words)
                    words[place:place] = ["--pool-config", str(file)]
                log = sizes.folder / f"server{number}.log"
                server = ServerProcess(words, log, progress, environment)
                urls.append(stack.enter_context(server).url)
            yield urls

    return start


@contextlib.contextmanager
def _on_a_service(sizes: Sizes, progress: Progress) -> Iterator[Sequence[str]]:
    """Two servers on one pool service that has the memory of both."""
    with ServiceProcess(sizes.folder / "service", sizes.host_bytes) as service:
        pool = {"backend": "service", "socket": str(service.socket)}
        with servers(2, pool=pool)(sizes, progress) as urls:
            yield urls


@contextlib.contextmanager
def _on_mooncake(sizes: Sizes, progress: Progress) -> Iterator[Sequence[str]]:
    """One server with host memory, and a Mooncake Store that has the disk's bytes in memory."""
    master = Master(sizes.folder / "master.log")
    try:
        master.start()
    except OSError as error:
        raise EngineError(f"Mooncake's master cannot be started: {error}") from error
    remote = {"kind": "mooncake", **master.options(sizes.disk_bytes)}
    try:
        with servers(pool={"host_size": 0, "remote": remote})(sizes, progress) as urls:
            yield urls
    finally:
        master.kill()


@contextlib.contextmanager
def _on_lmcache(sizes: Sizes, progress: Progress) -> Iterator[Sequence[str]]:
    """One server with LMCache's multi-process connector, none of ours, on LMCache's server, which
    has the host's memory and no disk. Raises EngineError without LMCache."""
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
    port = free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--http-host", "127.0.0.1", "--http-port", str(free_port())]
    command += ["--l1-size-gb", f"{sizes.host_bytes / 2**30:.3f}", "--eviction-policy", "LRU"]
    command += ["--chunk-size", str(sizes.block_size), "--disable-metrics"]
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
        _wait_for(port, server, "LMCache's server")
        with servers(arguments=arguments, environment=environment)(sizes, progress) as urls:
            yield urls
    finally:
        server.stop(30.0)


def _wait_for(port: int, process: ChildProcess, what: str) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if not process.is_alive:
            raise EngineError(f"{what} ended while starting:\n{process.log_tail()}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"{what} is not ready after {_START_S:.0f} s")


HOST: dict[str, object] = {"host_size": 0}
DISK: dict[str, object] = {"host_size": 0, "disk_path": "", "disk_size": 0}

DEPLOYMENTS = (
    Deployment(
        "none",
        "no pool, vLLM's prefix cache off",
        servers(arguments=("--no-pool", "--", "--no-enable-prefix-caching")),
    ),
    Deployment(
        "device", "no pool, vLLM's prefix cache on the device", servers(arguments=("--no-pool",))
    ),
    Deployment("host", "host memory below the device", servers(pool=HOST)),
    Deployment("disk", "host memory and disk below the device", servers(pool=DISK)),
    Deployment("mooncake", "host memory and a Mooncake Store on this host", _on_mooncake),
    Deployment("lmcache", "LMCache's multi-process connector, with the host's memory", _on_lmcache),
    Deployment("two", "two engines, a pool with half the memory each", servers(2, pool=HOST)),
    Deployment("service", "two engines on one pool service", _on_a_service),
)
"""In the order they are played. The last two have two engines on the same cores."""


def named(names: Sequence[str]) -> list[Deployment]:
    """Deployments by name. Raises EngineError for an unknown name."""
    known = {deployment.name: deployment for deployment in DEPLOYMENTS}
    for name in names:
        if name not in known:
            raise EngineError(f"there is no variant {name!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]
