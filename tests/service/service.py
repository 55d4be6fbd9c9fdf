"""A real service process, to be killed and started again."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvrecall.lab.processes import as_child
from kvrecall.pool.service.admin import ServiceAdmin, Stat
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.inventory import Overview

MIB = 1 << 20
SERVE = """
import sys
from pathlib import Path
from kvrecall.config import DiskConfig, PoolConfig
from kvrecall.pool.service.endpoint import serve
folder, host = Path(sys.argv[1]), int(sys.argv[2])
serve(
    PoolConfig(host, DiskConfig(folder / "disk", 256 << 20)),
    folder / "pool.sock",
    lambda pool: print("ready", flush=True),
)
"""


class Service:
    """``kvrecall pool serve`` in a folder of its own, with a disk."""

    def __init__(
        self, folder: Path, host_bytes: int = 32 * MIB, most_files: int | None = None
    ) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        self.folder = folder
        self.socket = folder / "pool.sock"
        self._host_bytes = host_bytes
        self._most_files = most_files
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            as_child(sys.executable, "-c", SERVE, str(self.folder), str(self._host_bytes)),
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=self._bound_files if self._most_files else None,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def _bound_files(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._most_files, self._most_files))

    def kill(self) -> None:
        """kill -9"""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(60)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def client(self, call_timeout_s: float = 10.0) -> ServiceClient:
        return ServiceClient(self.socket, call_timeout_s)

    def look(self) -> Overview:
        with ServiceAdmin(self.socket) as admin:
            return admin.do(Stat())

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.kill()


class Stopwatch:
    """The calls it was put around. A machine may stand still in one or two of them: what every
    call costs shows in the third longest."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    @property
    def longest(self) -> float:
        return max(self._seconds)

    @property
    def third_longest(self) -> float:
        return sorted(self._seconds)[-3]

    def __enter__(self) -> Stopwatch:
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds.append(time.monotonic() - self._began)
