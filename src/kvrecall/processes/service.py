"""The services that engines share, as processes: the pool service and Mooncake's master."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrecall.errors import TierError
from kvrecall.pool.remote.mooncake.master import MasterFlags
from kvrecall.pool.service.admin import Overview, ServiceAdmin, Stat
from kvrecall.processes.child import ChildProcess
from kvrecall.processes.command import as_child, kvrecall
from kvrecall.processes.ports import free_port
from kvrecall.testing import wait_until

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


class Master(ChildProcess):
    """A master on its own port that can be killed and restarted, without its data. It ends with the
    thread that started it.

    ``prefix``: a command that runs another one, such as ``ip netns exec NAME``.
    """

    def __init__(
        self, log: Path, host: str = "127.0.0.1", port: int = 0, prefix: Sequence[str] = ()
    ) -> None:
        super().__init__(log)
        self.host = host
        self.port = port or free_port()
        self.metrics_port = free_port()
        self._prefix = list(prefix)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, client_ttl_s: int = 10) -> None:
        """Waits until it answers, except behind a ``prefix``. Raises TierError."""
        flags = MasterFlags(
            self.host, self.port, self.metrics_port, rpc_thread_num=8, allow_plaintext=True
        )
        program = as_child(*flags.command(), f"--client_ttl={client_ttl_s}")
        self.launch([*self._prefix, *program])
        if not self._prefix:
            wait_until(self._answers)

    def _answers(self) -> bool:
        if not self.is_alive:
            raise TierError(f"the master ended:\n{self.log_tail()}")
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0

    def freeze(self) -> None:
        """Suspends it: its connections stay open, but it does not answer."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def options(self, segment: int | str = 64 << 20) -> dict[str, object]:
        """A mooncake.json for a client on the master's host that lends ``nbytes`` of memory."""
        return {
            "local_hostname": "localhost",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": segment,
            "local_buffer_size": 16 << 20,
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": self.address,
            "allow_plaintext": True,
        }
