"""A real ``mooncake_master`` for tests, demo and benchmarks."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from kvrecall.errors import TierError
from kvrecall.pool.remote.mooncake.master import MasterFlags
from kvrecall.processes.child import ChildProcess
from kvrecall.processes.command import as_child
from kvrecall.processes.ports import free_port
from kvrecall.testing.blocks import wait_until


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
        self._metrics_port = free_port()
        self._prefix = list(prefix)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self, client_ttl_s: int = 10) -> None:
        """Waits until it answers, except behind a ``prefix``. Raises TierError."""
        flags = MasterFlags(
            self.host, self.port, self._metrics_port, rpc_thread_num=8, allow_plaintext=True
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
