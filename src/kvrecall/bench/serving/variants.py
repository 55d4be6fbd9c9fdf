"""The servers a workload is played against: no pool, and each kind of pool."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvrecall.bench.driver import Progress, ServerProcess, server_environment
from kvrecall.errors import EngineError
from kvrecall.testing.kin import kvrecall

_SERVICE_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Field:
    """What all variants have in common: the model and the room each tier gets, in bytes."""

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


Servers = Callable[[Field, Progress], AbstractContextManager[Sequence[str]]]
"""Starts servers; gives their addresses."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to serve: its name, what it is, and how its servers are started."""

    name: str
    story: str
    servers: Servers


def _one(*arguments: str, pool: dict[str, object] | None = None) -> Servers:
    return _several(1, arguments, pool)


def _several(
    count: int, arguments: Sequence[str] = (), pool: dict[str, object] | None = None
) -> Servers:
    """``count`` servers, each with a pool of its own with settings ``pool``, where
    ``"host"`` and ``"disk"`` stand for the field's sizes."""

    @contextlib.contextmanager
    def start(field: Field, progress: Progress) -> Iterator[Sequence[str]]:
        with ExitStack() as stack:
            urls = []
            for number in range(count):
                given = [*field.arguments(), *arguments]
                if pool is not None:
                    share = {key: _sized(key, value, field, count) for key, value in pool.items()}
                    if "disk_path" in share:
                        share["disk_path"] = str(field.folder / f"disk{number}")
                    file = field.folder / f"pool{number}.json"
                    file.write_text(json.dumps(share))
                    given += ["--pool-config", str(file)]
                log = field.folder / f"server{number}.log"
                server = stack.enter_context(ServerProcess(given, log, progress))
                urls.append(server.url)
            yield urls

    return start


def _sized(key: str, value: object, field: Field, count: int) -> object:
    if key == "host_size":
        return field.host_bytes // count
    if key == "disk_size":
        return field.disk_bytes // count
    return value


def _on_a_service(field: Field, progress: Progress) -> AbstractContextManager[Sequence[str]]:
    """Two servers on one pool service that has the memory of both."""

    @contextlib.contextmanager
    def start() -> Iterator[Sequence[str]]:
        path = field.folder / "service" / "pool.sock"
        with _service(path, field), _several(2, (), _client_of(path))(field, progress) as urls:
            yield urls

    return start()


def _client_of(path: Path) -> dict[str, object]:
    return {"backend": "service", "socket": str(path)}


@contextlib.contextmanager
def _service(path: Path, field: Field) -> Iterator[None]:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    command = kvrecall("pool", "serve", "--socket", str(path))
    command += ["--host-size", str(field.host_bytes)]
    with (field.folder / "service.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=server_environment()
        )
        try:
            _wait_for(path, process)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _SERVICE_START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise EngineError(f"the pool service ended while starting ({process.returncode})")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"the pool service is not ready after {_SERVICE_START_S:.0f} s")


HOST: dict[str, object] = {"host_size": 0}
DISK: dict[str, object] = {"host_size": 0, "disk_path": "", "disk_size": 0}

VARIANTS = (
    Variant(
        "none",
        "no pool, vLLM's prefix cache off",
        _one("--no-pool", "--", "--no-enable-prefix-caching"),
    ),
    Variant("device", "no pool, vLLM's prefix cache on the device", _one("--no-pool")),
    Variant("host", "host memory below the device", _one(pool=HOST)),
    Variant("disk", "host memory and disk below the device", _one(pool=DISK)),
    Variant("two", "two engines, a pool with half the memory each", _several(2, (), HOST)),
    Variant("service", "two engines on one pool service", _on_a_service),
)
"""In the order they are played. The last two have two engines on the same cores."""


def named(names: Sequence[str]) -> list[Variant]:
    """Variants by name. Raises EngineError for a name there is none of."""
    known = {variant.name: variant for variant in VARIANTS}
    for name in names:
        if name not in known:
            raise EngineError(f"there is no variant {name!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]
