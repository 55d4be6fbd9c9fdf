"""A process that a command starts, watches and ends, however its ``with`` block ends."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import IO, Any

import psutil

from kvrecall.environment import WAITS
from kvrecall.processes.command import end_with


class ChildProcess:
    """One process in a group of its own, with a log. May be started again after its end."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[Any] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts ``command``. Standard error, and standard output unless given, go to the log."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process, which ends the child
            )
        return self._process

    def log_tail(self, lines: int = 30) -> str:
        """The last lines it printed."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def family(self) -> list[psutil.Process]:
        """The process and its descendants; empty once it has ended."""
        if not self.is_alive:
            return []
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """kill -9 of the process; waits for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self, seconds: float = 60.0) -> bool:
        """SIGTERM, then SIGKILL after ``seconds``; also ends its descendants. Returns whether it
        ended orderly; True if it was never started. Idempotent."""
        if self._process is None:
            return True
        family = self.family()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)  # in case it is stopped
            self._process.terminate()
        try:
            in_order = self._process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            in_order = False
            self.kill()
        finally:
            end_all(family)
        return in_order


def end_all(processes: Sequence[psutil.Process], seconds: float = 5.0) -> None:
    """Waits ``seconds`` for these to end, then kills the rest. psutil detects a reused pid."""
    _, left = psutil.wait_procs(processes, timeout=seconds)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)


def server_environment() -> dict[str, str]:
    """Environment for a process with an engine: this one's, without compiling on a CPU, without
    spinning (see engines/vllm/compat/waits.py), and with its own Prometheus counters, whatever
    LMCache has set in this process.

    Compiling sampling functions (which vLLM does even in eager mode) takes tens of seconds in the
    first request of every engine.
    """
    environment = {WAITS: "sleep", **os.environ, "VLLM_NO_USAGE_STATS": "1"}
    if shutil.which("nvidia-smi") is None:
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    return environment


def one_process(prepare: Callable[..., None], *arguments: object) -> ProcessPoolExecutor:
    """Calls are made in a process of its own, after ``prepare(*arguments)``. It ends with this
    one."""
    begin = functools.partial(_prepare, os.getpid(), prepare, *arguments)
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), begin)


def _prepare(parent: int, prepare: Callable[..., None], *arguments: object) -> None:
    end_with(parent)
    prepare(*arguments)
