"""The pool service process: started, killed, stalled, started again."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from pathlib import Path

from kvrecall.errors import TierError
from kvrecall.lab.processes import kvrecall
from kvrecall.pool.service.admin import ServiceAdmin
from kvrecall.pool.service.views import Overview

_READY_S = 120.0


class ServiceProcess:
    """``kvrecall pool serve`` in a folder of its own, as a person would run it."""

    def __init__(self, folder: Path, host_bytes: int, disk_bytes: int) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.socket = folder / "pool.sock"
        self.disk = folder / "disk"
        self.log = folder / "service.log"
        self._config = folder / "pool.json"
        settings = {"socket": str(self.socket), "disk_path": str(self.disk)}
        sizes = {"host_size": host_bytes, "disk_size": disk_bytes}
        self._config.write_text(json.dumps({**settings, **sizes}))
        self._process: subprocess.Popen[str] | None = None
        self.ready_at = 0.0

    def start(self) -> None:
        """Returns when it serves. Raises TierError if it does not come up."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                kvrecall("pool", "serve", "--config", str(self._config)),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._process = process
        watchdog = threading.Timer(_READY_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        if not line.startswith("kvrecall: pool service on"):
            raise TierError(f"the pool service did not start:\n{self.log_tail()}")
        self.ready_at = time.monotonic()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9"""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stall(self, seconds: float, stop: threading.Event) -> None:
        """Stops it, as a machine that swaps would, and has it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        stop.wait(seconds)
        self._process.send_signal(signal.SIGCONT)

    def stop(self, seconds: float = 30.0) -> bool:
        """SIGTERM; by force if that does not help. Returns whether it ended in order."""
        if self._process is None:
            return True
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            return self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            self.kill()
            return False

    def look(self, timeout_s: float = 5.0) -> Overview:
        """What ``kvrecall pool stat`` shows. Raises TierError."""
        with ServiceAdmin(self.socket, timeout_s) as admin:
            return admin.look()

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
