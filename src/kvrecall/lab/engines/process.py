"""The near end of an engine process (``kvrecall.lab.engines.host``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from kvrecall.errors import EngineError
from kvrecall.lab.engines.server import server_environment

START_S = 600.0
"""Longest an engine may take to start; busy machines are slow."""

HOST = "kvrecall.lab.engines.host"
"""The module that a process runs."""

_SHM = Path("/dev/shm")
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request: ``prompt`` and ``salt`` as in vLLM; ``max_tokens`` are asked for. ``adapter``:
    name, number and folder of a LoRA adapter; ``images``: files that the prompt's image tokens
    stand for."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str | None = None
    adapter: tuple[str, int, str] | None = None
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """``sources``: prompt tokens by tier. ``keys``: blocks of it that went to the pool, in hex.
    ``gaps``: by token, lead over the second choice, and ``scores``: its log-probability; where
    they were asked for."""

    id: str
    tokens: tuple[int, ...]
    finish: str
    sources: Mapping[str, int]
    keys: tuple[str, ...]
    gaps: tuple[float, ...]
    ttft_s: float
    scores: tuple[float, ...] = ()

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Answer:
        return cls(
            line["id"],
            tuple(line["tokens"]),
            line["finish"] or "",
            line["from"] or {},
            tuple(line["keys"]),
            tuple(line["gaps"]),
            line["ttft_s"],
            tuple(line["scores"]),
        )


OnLine = Callable[["EngineProcess", Mapping[str, Any]], None]
"""Called for every line of a process, by its reader's thread; ``{"ended": status}`` is the last."""


class EngineProcess:
    """One process, from its start to its end. It ends by itself when this process does.

    ``prefix``: a command that runs another one, such as ``ip netns exec NAME``. ``module``: what
    to run in place of ``HOST``.
    """

    def __init__(
        self,
        name: str,
        setup: Mapping[str, Any],
        log: Path,
        on_line: OnLine | None = None,
        prefix: Sequence[str] = (),
        module: str = HOST,
    ) -> None:
        self.name = name
        self.log = log
        self._on_line = on_line
        self._lines: list[Mapping[str, Any]] = []
        self._came = threading.Condition()
        self._out = log.open("ab")
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._out,
            env=server_environment(),
            start_new_session=True,  # Ctrl-C is for us
        )
        self._sending = threading.Lock()
        self._send(dict(setup))
        self._reader = threading.Thread(target=self._read, name=f"engine-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: Question, logprobs: bool = False) -> None:
        """Sends a request. Nothing if the process has ended."""
        order = {"do": "ask", "id": question.id, "prompt": question.prompt, "logprobs": logprobs}
        order |= {"max_tokens": question.max_tokens, "salt": question.salt}
        self._send({**order, "adapter": question.adapter, "images": question.images})

    def forget_device(self) -> None:
        """Empties the engine's own prefix cache; the pool keeps its blocks."""
        self._send({"do": "forget"})

    def answers(self, questions: Sequence[Question], seconds: float = START_S) -> list[Answer]:
        """Asks all at once and waits (without ``on_line``). Raises EngineError."""
        for question in questions:
            self.ask(question, logprobs=True)
        got: dict[str, Answer] = {}
        until = time.monotonic() + seconds
        while len(got) < len(questions):
            line = self.next_line(until)
            if "id" in line:
                got[line["id"]] = Answer.read(line)
        return [got[question.id] for question in questions]

    def metrics(self, seconds: float = _END_S) -> Mapping[str, float]:
        """What Prometheus would scrape, ``name`` or ``name:tier`` (without ``on_line``). Raises
        EngineError."""
        self._send({"do": "metrics"})
        until = time.monotonic() + seconds
        while "metrics" not in (line := self.next_line(until)):
            pass
        found: Mapping[str, float] = line["metrics"]
        return found

    def wait_ready(self, seconds: float = START_S) -> None:
        """Waits until it takes requests (without ``on_line``). Raises EngineError."""
        until = time.monotonic() + seconds
        while "ready" not in self.next_line(until):
            pass

    def next_line(self, until: float) -> Mapping[str, Any]:
        """The next line it said. Raises EngineError if there is none or it ended."""
        with self._came:
            if not self._came.wait_for(lambda: self._lines, max(0.0, until - time.monotonic())):
                raise EngineError(f"{self.name} says nothing; see {self.log}")
            line = self._lines.pop(0)
        if "error" in line or "ended" in line:
            raise EngineError(f"{self.name} ended: {line.get('error', '')}\n{self.log_tail()}")
        return line

    def family(self) -> list[psutil.Process]:
        """The process and its workers."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def shared_files(self) -> set[Path]:
        """Files in /dev/shm that the engine and its workers map now: vLLM's own."""
        found: set[Path] = set()
        for process in self.family():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            except OSError:
                continue
            for line in maps.splitlines():
                place = line.split(None, 5)[5:]
                if place and place[0].startswith(f"{_SHM}/"):
                    found.add(Path(place[0].removesuffix(" (deleted)")))
        return found

    def where(self) -> None:
        """Has the process write its stacks to its log."""
        self._signal(self.pid, signal.SIGUSR1)

    def kill(self, which: str = "group") -> None:
        """kill -9 of the ``engine`` process, of its ``worker``, or of the whole ``group``."""
        workers = [one.pid for one in self.family()[1:] if _is_worker(one)]
        if which == "worker" and workers:
            self._signal(workers[0], signal.SIGKILL)
        elif which == "group":
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return
        else:
            self._signal(self.pid, signal.SIGKILL)

    def end(self, seconds: float = _END_S) -> bool:
        """Ends it in order; by force if it does not. Returns whether it ended in order."""
        family = self.family()
        self._send({"do": "close"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        in_order = self._process.poll() == 0
        self.bury(family)
        return in_order

    def bury(self, family: Sequence[psutil.Process] = ()) -> None:
        """Waits for the end of a process that was told to, and of its ``family``; then forces."""
        _, left = psutil.wait_procs(list(family), timeout=20)
        for process in left:
            self._signal(process.pid, signal.SIGKILL)
        self.kill()
        self._process.wait()
        self._reader.join(10)
        self._out.close()

    def log_tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._sending:
            try:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError):
                return

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard(json.loads(line))
        self._heard({"ended": self._process.wait()})

    def _heard(self, line: Mapping[str, Any]) -> None:
        if self._on_line is not None:
            self._on_line(self, line)
            return
        with self._came:
            self._lines.append(line)
            self._came.notify_all()

    @staticmethod
    def _signal(pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False
