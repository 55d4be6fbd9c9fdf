"""A real ``mooncake_master`` for tests, demo and benchmarks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kvrecall.errors import TierError
from kvrecall.lab.ports import free_port
from kvrecall.lab.processes import as_child
from kvrecall.pool.remote.mooncake.master import MasterFlags
from kvrecall.testing.blocks import wait_until


class Master:
    """A master on a port of its own, that may be killed, stopped and started again. It ends with
    the thread that started it.

    ``prefix``: a command that runs another one, such as ``ip netns exec NAME``.
    """

    def __init__(
        self, log: Path, host: str = "127.0.0.1", port: int = 0, prefix: Sequence[str] = ()
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self._metrics_port = free_port()
        self._log = log
        self._prefix = list(prefix)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, client_ttl_s: int = 10) -> None:
        """Waits until it answers, but for a master behind a ``prefix``. Raises TierError."""
        flags = MasterFlags(
            self.host, self.port, self._metrics_port, rpc_thread_num=8, allow_plaintext=True
        )
        program = as_child(*flags.command(), f"--client_ttl={client_ttl_s}")
        command = [*self._prefix, *program]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        if not self._prefix:
            wait_until(self._answers)

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise TierError(f"the master ended:\n{self._log.read_text(errors='replace')[-2000:]}")
        with socket.socket() as probe:
            return probe.connect_ex((self.host, self.port)) == 0

    def kill(self) -> None:
        """As ``kill -9``: what it knew is forgotten. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It hangs: its connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def options(self, segment: int | str = 64 << 20) -> dict[str, object]:
        """A mooncake.json for a client on the master's host that lends so much memory."""
        return {
            "local_hostname": "localhost",
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": segment,
            "local_buffer_size": 16 << 20,
            "protocol": "tcp",
            "device_name": "",
            "master_server_address": self.address,
        }
