"""A real ``kvrecall serve`` as a subprocess, with its log."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.warm import WarmServer

from kvrecall.processes.child import end_all
from kvrecall.processes.ports import free_port
from kvrecall.server.access import OWN_HEADER

KVRECALL = Path(sys.executable).parent / "kvrecall"
START_LIMIT_S = 600
OWN = {OWN_HEADER: "1"}
"""For requests whose body is not JSON."""


class LiveServer:
    """Started by the constructor; ``wait_ready`` before use; ``close`` leaves nothing behind.

    ``management`` is a client of the management plane, ``client`` by default; ``program`` is what
    ``words`` are given to. ``warm``: forked from a process that has imported vLLM, in place of the
    command; for tests of what a server does, not of how it starts and ends. ``environment`` is set
    beside that of the tests."""

    def __init__(
        self,
        folder: Path,
        words: list[str],
        url: str,
        verify: Any = True,
        management: httpx.Client | None = None,
        program: Sequence[str | Path] = (KVRECALL, "serve"),
        warm: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self.url = url
        self.verify = verify
        self.client = httpx.Client(base_url=url, timeout=120, verify=verify, headers=OWN)
        self.management = management or self.client
        self._log = folder / "server.log"
        surroundings = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1"}
        surroundings |= environment or {}
        # LMCache sets it when it is imported: a server would tell other processes' counters, too.
        surroundings.pop("PROMETHEUS_MULTIPROC_DIR", None)
        self.process: subprocess.Popen[bytes] | WarmServer
        if warm:
            self._log.write_bytes(b"")
            self.process = WarmServer([*program, *words], self._log, surroundings)
            return
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*program, *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=surroundings,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_ready(self) -> None:
        end, told = time.monotonic() + START_LIMIT_S, 0
        while time.monotonic() < end:
            if told != (told := self._log.stat().st_size):  # a busy machine starts it slowly
                end = time.monotonic() + START_LIMIT_S
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended at once:\n{self.log[-4000:]}")
            try:
                if self.management.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log[-4000:]}")

    def metric(self, name: str, **labels: str) -> float:
        """A figure of the metrics page, summed over the labels that are not given; 0 if it is not
        there (a counter of the connector is from its first count on)."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            wanted = all(f'{key}="{value}"' in line for key, value in labels.items())
            if wanted and line.startswith((f"{name}{{", f"{name} ")):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def forget_device(self) -> None:
        """Empties the device's cache, which is busy while blocks are still copied: a step ends."""
        for _ in range(100):
            if self.client.post("/reset_prefix_cache").json()["success"]:
                return
            self.client.post("/generate", json={"inputs": "a step"})
        raise AssertionError("the device's cache stays in use")

    def family(self) -> list[psutil.Process]:
        """The server's process and all below it."""
        main = psutil.Process(self.process.pid)
        return [main, *main.children(recursive=True)]

    def named(self, name: str) -> list[psutil.Process]:
        """Those of the family whose name begins so, without what they fork: a child has its
        parent's name until it runs a program of its own."""
        found = {}
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith(name):
                    found[process.pid] = process, process.ppid()
        return [process for process, parent in found.values() if parent not in found]

    def engine_core(self) -> psutil.Process:
        (core,) = self.named("VLLM::EngineCor")
        return core

    def worker(self) -> psutil.Process:
        (worker,) = self.named("VLLM::Worker")
        return worker

    def wait_end(self, timeout: float = 60) -> int:
        return self.process.wait(timeout)

    def close(self) -> None:
        """kill -9: its engine ends with it, and Python's tracker removes their shared memory."""
        self.client.close()
        self.management.close()
        if self.process.poll() is None:
            family = self.family()
            self.process.kill()
            self.process.wait()
            if not all_gone(family, 20):
                end_all(family, 0)


@contextlib.contextmanager
def serving(
    folder: Path,
    words: Sequence[str] = (),
    options: Sequence[str] = (),
    family: str = "qwen3",
    layers: int = 2,
    longest: int = 16384,
    sequences: int = 8,
    warm: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[LiveServer]:
    """A server that is ready, of a random model called ``tiny``, with 32 MiB of host memory, more
    ``words`` for serve and ``options`` for vLLM. ``sequences``: as many run at once."""
    from kvrecall_lab.models import write_model

    write_model(folder / "model", family, hidden=64, layers=layers, max_position=longest)
    port = free_port()
    own = [str(folder / "model"), "--port", str(port), "--served-model-name", "tiny"]
    own += ["--host-size", "32MiB", "--kv-cache-memory-bytes", "64MiB", *words]
    own += ["--", "--max-num-seqs", str(sequences), *options]
    url = f"http://127.0.0.1:{port}"
    live = LiveServer(folder, own, url, warm=warm, environment=environment)
    with contextlib.closing(live):
        live.wait_ready()
        yield live


def until(condition: Any, timeout: float = 60) -> bool:
    """Whether the condition holds in time."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def sse(reply: httpx.Response) -> list[Any]:
    """The events of a stream that are JSON."""
    parts = (part for part in reply.text.split("\n\n") if part.startswith("data: {"))
    return [json.loads(part[6:]) for part in parts]


def all_gone(processes: list[psutil.Process], timeout: float = 90) -> bool:
    """Whether these processes end (or are but zombies) in time."""

    def is_gone(one: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE
        return True

    return until(lambda: all(map(is_gone, processes)), timeout)


CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
).split()


@contextlib.contextmanager
def browsing(*flags: str) -> Iterator[Any]:
    """The browser, with more ``flags``, closed on leaving. Skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no browser at {CHROMIUM}; scripts/setup brings it")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, *flags])
        yield chromium
        chromium.close()
