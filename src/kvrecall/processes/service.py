"""The pool service process: started, killed, stalled, restarted."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from kvrecall.errors import TierError
from kvrecall.pool.service.admin import Overview, ServiceAdmin, Stat
from kvrecall.processes.child import ChildProcess
from kvrecall.processes.command import kvrecall

_READY_S = 120.0


class ServiceProcess(ChildProcess):
    """``kvrecall pool serve`` in a folder of its own, without a disk unless ``disk_bytes`` is
    given. ``more``: other settings. A context manager that stops it."""

    def __init__(
        self,
        folder: Path,
        host_bytes: int,
        disk_bytes: int = 0,
        more: Mapping[str, object] | None = None,
    ) -> None:
        folder.mkdir(mode=0o700)
        super().__init__(folder / "service.log")
        self.folder = folder
        self.socket = folder / "pool.sock"
        self.disk = folder / "disk"
        self.ready_at = 0.0
        settings: dict[str, object] = {"socket": str(self.socket), "host_size": host_bytes}
        settings |= more or {}
        if disk_bytes:
            settings |= {"disk_path": str(self.disk), "disk_size": disk_bytes}
        self._config = folder / "pool.json"
        self._config.write_text(json.dumps(settings))

    def __enter__(self) -> ServiceProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it; returns when it serves. Raises TierError if it does not."""
        command = kvrecall("pool", "serve", "--config", str(self._config))
        process = self.launch(command, stdout=subprocess.PIPE)
        watchdog = threading.Timer(_READY_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        if not line.startswith(b"kvrecall: pool service on"):
            self.kill()
            raise TierError(f"the pool service did not start:\n{self.log_tail()}")
        self.ready_at = time.monotonic()

    def stall(self, seconds: float, stop: threading.Event) -> None:
        """Suspends the process, as swapping would, and resumes it."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stop.wait(seconds)
        self._process.send_signal(signal.SIGCONT)

    def look(self, timeout_s: float = 5.0) -> Overview:
        """The data of ``kvrecall pool stat``. Raises TierError."""
        with ServiceAdmin(self.socket, timeout_s) as admin:
            return admin.do(Stat())
