"""Processes of vLLM that are forked from one that has only imported it: imports are four fifths of
the time that an engine takes to start."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
     "vllm.model_executor.models.qwen3", "vllm.models.deepseek_v4", "vllm.model_executor.warmup",
     "kvrecall.engines.vllm.serving.app", "kvrecall.server.application",
     "kvrecall.engines.vllm.connector.connector", "kvrecall.engines.vllm.connector.worker",
     "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"]
)  # fmt: skip


def share() -> tuple[str | None, bytes | None]:
    """Begins the imports, once for all workers of pytest-xdist, who ``join``."""
    forkserver.ensure_running()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    return server._forkserver_address, getattr(server, "_forkserver_authkey", None)


def join(shared: tuple[str | None, bytes | None]) -> None:
    """Has processes forked from the one that another process shares, which outlives this one."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_authkey = shared
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running


def begin(log: str, environment: Mapping[str, str]) -> None:
    """Detaches this forked process from the one that runs the tests, as if a shell had started it.
    Its output goes to ``log``. Processes of its engine are forked from it."""
    import setproctitle  # of vLLM

    gc.freeze()  # a collection would copy the memory of all that is imported
    os.setsid()
    with open(log, "a") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    setproctitle.getproctitle()  # finds its place by the environment that there still is
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process().name = "MainProcess"
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    _fork_and_not_spawn()
    if "vllm" in sys.modules:  # what is imported before it may change it
        inspect_here()


def inspect_here() -> None:
    """Has vLLM look at a class of models where it is imported already. It would start a process
    that imports it anew, for fifteen seconds of each class that this user never had."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


class WarmServer:
    """A command of kvrecall or vllm, as a ``Popen`` of it."""

    def __init__(
        self, command: Sequence[str | Path], log: Path, environment: Mapping[str, str]
    ) -> None:
        words = [Path(command[0]).name, *map(str, command[1:])]
        self._process = CONTEXT.Process(target=_run, args=(words, str(log), dict(environment)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("serve", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(words: list[str], log: str, environment: Mapping[str, str]) -> None:
    begin(log, environment)
    sys.argv = words
    module = {"kvrecall": "kvrecall.cli", "vllm": "vllm.entrypoints.cli.main"}[words[0]]
    importlib.import_module(module).main()


def _fork_and_not_spawn(_get: Any = multiprocessing.get_context) -> None:
    """Has vLLM fork the processes that it would spawn on a CPU."""
    multiprocessing.get_context = lambda method=None: _get(  # type: ignore[assignment]
        "fork" if method == "spawn" else method
    )
    os.register_at_fork(after_in_child=_as_if_spawned)


def _as_if_spawned() -> None:
    from vllm import plugins

    plugins.plugins_loaded = False
    signal.set_wakeup_fd(-1)  # its signals are none of a server's event loop
