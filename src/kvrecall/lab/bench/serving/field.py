"""What all variants have in common, and how servers are started on it."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvrecall.errors import EngineError
from kvrecall.lab.engines.server import Progress, ServerProcess


@dataclass(frozen=True, slots=True)
class Field:
    """The model and the room each tier gets, in bytes."""

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


def servers(
    count: int = 1,
    arguments: Sequence[str] = (),
    pool: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Servers:
    """``count`` servers, each with a pool of its own with settings ``pool``, where ``host_size``,
    ``disk_path`` and ``disk_size`` stand for its share of the field's."""

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
                    place = given.index("--") if "--" in given else len(given)
                    given[place:place] = ["--pool-config", str(file)]
                log = field.folder / f"server{number}.log"
                server = ServerProcess(given, log, progress, environment)
                urls.append(stack.enter_context(server).url)
            yield urls

    return start


def _sized(key: str, value: object, field: Field, count: int) -> object:
    if key == "host_size":
        return field.host_bytes // count
    if key == "disk_size":
        return field.disk_bytes // count
    return value


def wait_for(
    address: str | tuple[str, int], process: subprocess.Popen[bytes], what: str, seconds: float
) -> None:
    """Until ``process`` listens at ``address``, a path or a host and port. Raises EngineError."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            raise EngineError(f"{what} ended while starting ({process.returncode})")
        with socket.socket(family) as probe:
            if probe.connect_ex(address) == 0:
                return
        time.sleep(0.1)
    raise EngineError(f"{what} is not ready after {seconds:.0f} s")


@contextlib.contextmanager
def beside(
    command: Sequence[str],
    address: str | tuple[str, int],
    log: Path,
    what: str,
    environment: Mapping[str, str],
) -> Iterator[None]:
    """A process that servers need, from when it listens to the end of the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
        )
        try:
            wait_for(address, process, what, 60.0)
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
