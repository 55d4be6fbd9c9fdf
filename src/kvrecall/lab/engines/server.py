"""Drives a real ``kvrecall serve`` process over HTTP, as a person with curl would."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

from kvrecall.errors import EngineError
from kvrecall.lab.ports import free_port
from kvrecall.lab.processes import kvrecall

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 60.0
_CAUSE = 150
"""Lines of a log that hold why a worker of the engine failed, below which its end is told twice."""
QUEUED_WRITES = "kvrecall_queued_writes"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gave.

    ``recalled`` maps device, host, disk, remote, computed to numbers of prompt tokens.
    ``ttft_s``, ``last_s``: seconds from sending the request to its first and to its last token, as
    the client sees them.
    """

    prompt_tokens: int
    recalled: Mapping[str, int]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ttft_s: float
    last_s: float


class ServerProcess:
    """A ``kvrecall serve`` process on a free port of the loopback interface.

    Use as a context manager: leaving it ends the server and every process it started, however
    the block ends; it ends by itself when this process does. ``arguments`` are those of
    ``kvrecall serve``; ``log`` takes its output; ``environment`` stands in place of
    ``server_environment()``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        progress: Progress,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = list(arguments)
        self._environment = server_environment() if environment is None else environment
        self._log = log
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> ServerProcess:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log_tail(self, lines: int = 30) -> str:
        """The last lines the server printed."""
        if not self._log.exists():
            return ""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _start(self) -> None:
        self.port = free_port()
        command = kvrecall("serve", *_with_port(self._arguments, self.port))
        self._output = self._log.open("ab")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**self._environment, "VLLM_SERVER_DEV_MODE": "1"},
            start_new_session=True,  # Ctrl-C is for us; we then end the server in order
        )
        begin = said = time.monotonic()
        while not self._healthy():
            now = time.monotonic()
            if self._process.poll() is not None:
                raise EngineError(f"the server ended while starting:\n{self.log_tail(_CAUSE)}")
            if now - begin > START_TIMEOUT_S:
                raise EngineError(f"the server is not ready after {now - begin:.0f} s")
            if now - said >= 10:
                self._progress(f"  still starting ({now - begin:.0f} s)")
                said = now
            time.sleep(0.25)

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Ends the server: politely, then by force. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            family = _family(process.pid)
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            finally:
                _end(family)
        if self._output is not None:
            self._output.close()

    def cpu_seconds(self) -> float:
        """Processor time the server and the processes it started have used so far."""
        assert self._process is not None
        family = [psutil.Process(self._process.pid), *_family(self._process.pid)]
        times = [process.cpu_times() for process in family]
        return float(sum(time.user + time.system for time in times))

    def ask(self, prompt: str, max_new_tokens: int) -> Answer:
        """Sends a prompt to /generate_stream (TGI form, greedy) and reads the answer."""
        body = {
            "inputs": prompt,
            "parameters": {"max_new_tokens": max_new_tokens, "details": True},
        }
        events: list[dict[str, Any]] = []
        ttft = last = 0.0
        begin = time.perf_counter()
        with httpx.stream("POST", f"{self.url}/generate_stream", json=body, timeout=600) as reply:
            if reply.status_code != 200:
                raise EngineError(f"HTTP {reply.status_code}: {reply.read().decode()}")
            for line in reply.iter_lines():
                if not line.startswith("data:"):
                    continue
                last = time.perf_counter() - begin
                ttft = ttft or last
                events.append(json.loads(line.removeprefix("data:")))
        return _answer(events, ttft, last)

    def settle(self) -> None:
        """Waits until the pool has written what it was given, so that it costs nobody time.

        Metrics move with engine steps; a prompt too short to be a block makes some.
        """
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < end:
            self.ask("settle", 4)
            if self.metric(QUEUED_WRITES) == 0:
                return
            time.sleep(0.1)
        raise EngineError(f"the pool is still writing after {SETTLE_TIMEOUT_S:.0f} s")

    def metric(self, name: str) -> float:
        """A metric as of the last engine step, summed over its labels; 0 if it is not there."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def forget_device(self) -> None:
        """Empties the engine's own prefix cache; the pool keeps its blocks."""
        reply = httpx.post(f"{self.url}/reset_prefix_cache", timeout=60)
        reply.raise_for_status()


def _answer(events: Sequence[dict[str, Any]], ttft: float, last: float) -> Answer:
    final = events[-1] if events else {}
    if "token" not in final or not final.get("details"):
        raise EngineError(f"the answer broke off: {json.dumps(final)[:500]}")
    details = final["details"]
    return Answer(
        prompt_tokens=details["prompt_tokens"],
        recalled=details["recall"],
        tokens=tuple(event["token"]["id"] for event in events),
        logprobs=tuple(event["token"]["logprob"] for event in events),
        text=final["generated_text"],
        ttft_s=ttft,
        last_s=last,
    )


def server_environment() -> dict[str, str]:
    """Environment for a server process: this one's, no compiling on a CPU, and no spinning, with a
    pool or without (see engines/vllm/waits.py), and counters of its own, whatever LMCache, imported
    in this process, has set.

    Compiling sampling functions (which vLLM does even in eager mode) costs the first request of
    every server tens of seconds, whether it is measured or not.
    """
    environment = {"KVRECALL_WAITS": "sleep", **os.environ, "VLLM_NO_USAGE_STATS": "1"}
    if shutil.which("nvidia-smi") is None:
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    return environment


def _with_port(arguments: list[str], port: int) -> list[str]:
    """``--port`` goes before the ``--`` that starts vLLM's own options."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:place], "--port", str(port), *arguments[place:]]


def _family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(processes: Sequence[psutil.Process]) -> None:
    """Kills what is left of these processes. psutil tells a reused pid from the process meant."""
    _, left = psutil.wait_procs(processes, timeout=5)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)
