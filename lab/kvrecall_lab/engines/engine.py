"""The parent's side of engine processes (``kvrecall_lab.engines.host``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from kvrecall.errors import EngineError
from kvrecall.processes.child import ChildProcess, end_all, server_environment
from kvrecall_lab.engines.kv import Kv

START_S = 600.0
"""Maximum seconds for an engine's start, also on a busy machine."""

ONE_THREAD = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Environment of a small engine that shares the cores with others, where several threads slow each
other down."""

HOST = "kvrecall_lab.engines.host"
"""The module that an engine process runs."""

_SHM = Path("/dev/shm")
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request: ``prompt`` and ``salt`` as in vLLM; ``max_tokens``: of the answer. ``adapter``:
    name, number and folder of a LoRA adapter; ``images``: files that the prompt's image tokens
    stand for. ``samples``: greedy if 1; more are drawn, always the same. ``embeds``: which
    positions are embeddings. ``sampling``: further fields of vLLM's ``SamplingParams``.
    ``priority``: as in vLLM, the least first."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    salt: str | None = None
    adapter: tuple[str, int, str] | None = None
    images: tuple[str, ...] = ()
    samples: int = 1
    embeds: tuple[bool, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """``tokens``: of all samples, one after the other. ``sources``: prompt tokens by tier.
    ``keys``: its blocks saved to the pool, in hex. ``gaps``: each token's lead over the second
    choice, and ``scores``: its log-probability, if requested. ``cached``: prompt tokens that were
    not computed. ``prompt_scores``: log-probabilities of the prompt's tokens, if requested.
    ``decode_s``, ``decode_cpu_s``: between the first token and the last, by the clock and by the
    time of the engine's processors."""

    id: str
    tokens: tuple[int, ...]
    finish: str
    sources: Mapping[str, int]
    keys: tuple[str, ...]
    gaps: tuple[float, ...]
    ttft_s: float
    scores: tuple[float, ...] = ()
    cached: int = 0
    prompt_scores: tuple[float, ...] = ()
    decode_s: float = 0.0
    decode_cpu_s: float = 0.0

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Answer:
        return msgspec.convert(line, cls)

    def sure(self, deviation: float) -> int:
        """How many leading tokens lead by more than ``deviation``: no smaller change of the lead
        changes them."""
        return next((at for at, gap in enumerate(self.gaps) if gap <= deviation), len(self.gaps))


@dataclass(frozen=True, slots=True)
class Admission:
    """A request enters the batch, or enters it again after a preemption. ``start``: tokens that
    the device has; ``end``: of the prefix, with what the pool has; ``tokens``: of the request so
    far, prompt and answer."""

    id: str
    start: int
    end: int
    tokens: int


OnLine = Callable[["EngineProcess", Mapping[str, Any]], None]
"""Called for every line of a process, in its reader thread; ``{"ended": status}`` is the last."""


class EngineProcess(ChildProcess):
    """An engine process, from start to end. It ends when this process does.

    ``prefix``: a command that runs another one, such as ``ip netns exec NAME``. ``module``: runs
    instead of ``HOST``; ``environment``: instead of ``server_environment()``. Methods that wait for
    lines cannot be combined with ``on_line``.
    """

    def __init__(
        self,
        name: str,
        setup: Mapping[str, Any],
        log: Path,
        on_line: OnLine | None = None,
        prefix: Sequence[str] = (),
        module: str = HOST,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(log)
        self.name = name
        self._on_line = on_line
        self._lines: list[Mapping[str, Any]] = []
        self._came = threading.Condition()
        self._sending = threading.Lock()
        # From its start: a module may import torch, which reads the number of threads once.
        own = server_environment() if environment is None else environment
        process = self.launch(
            [*prefix, sys.executable, "-m", module],
            {**own, **setup.get("env", {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders, self._replies = process.stdin, process.stdout
        self.send(setup)
        self._reader = threading.Thread(target=self._read, name=f"engine-{name}", daemon=True)
        self._reader.start()

    # -- asking ----------------------------------------------------------------------------

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends a line. Does nothing if the process has ended."""
        with self._sending, contextlib.suppress(BrokenPipeError, ValueError):
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()

    def ask(self, question: Question, logprobs: bool = False) -> None:
        """Sends a request."""
        self.send({"do": "ask", **asdict(question), "logprobs": logprobs})

    def cancel(self, question_id: str, when: str = "") -> None:
        """Aborts a request. It may have been answered; if not, it is not any more. ``when``: once
        it is in that state, of ``host.STATES``; ``{"cancelled": id}`` comes in its place."""
        self.send({"do": "cancel", "id": question_id, "when": when})

    def forget_device(self, running: bool = False, pool: bool = False) -> None:
        """Empties the engine's own prefix cache; ``pool``: the pool, too, which else keeps its
        blocks. ``running``: all running requests are preempted for it; else nothing happens while
        there are any."""
        self.send({"do": "forget", "running": running, "pool": pool})

    def answers(self, questions: Sequence[Question], seconds: float = START_S) -> list[Answer]:
        """Sends all at once and waits for the answers. Raises EngineError."""
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
        """The Prometheus metrics, ``name`` or ``name:tier``. Raises EngineError."""
        self.send({"do": "metrics"})
        found: Mapping[str, float] = self.await_reply("metrics", seconds)
        return found

    def memory(self, seconds: float = _END_S) -> Mapping[str, Any]:
        """Its device cache: ``blocks``, ``held``, ``hybrid_manager``, ``groups``. Raises
        EngineError."""
        self.send({"do": "memory"})
        found: Mapping[str, Any] = self.await_reply("memory", seconds)
        return found

    def device_kv(self, seconds: float = _END_S) -> Kv:
        """The KV on the device of the request that ended last, with a pool. Raises EngineError."""
        self.send({"do": "kv"})
        layers = self.await_reply("kv", seconds)
        return {
            name: {int(end): heads for end, heads in blocks.items()}
            for name, blocks in layers.items()
        }

    def admissions(self, seconds: float = _END_S) -> list[Admission]:
        """The requests admitted since the last call, with a pool. Raises EngineError."""
        self.send({"do": "admissions"})
        return [Admission(*each) for each in self.await_reply("admissions", seconds)]

    def wait_ready(self, seconds: float = START_S) -> None:
        """Waits until it accepts requests. Raises EngineError."""
        self.await_reply("ready", seconds)

    def await_reply(self, key: str, seconds: float) -> Any:
        """The value of the next line that has ``key``; others are dropped. Raises EngineError."""
        until = time.monotonic() + seconds
        while key not in (line := self.next_line(until)):
            pass
        return line[key]

    def next_line(self, until: float) -> Mapping[str, Any]:
        """The next line of its output. Raises EngineError if none arrives by ``until`` or it
        ended."""
        with self._came:
            if not self._came.wait_for(lambda: self._lines, max(0.0, until - time.monotonic())):
                raise EngineError(f"{self.name} printed nothing; see {self.log}")
            line = self._lines.pop(0)
        if "error" in line or "ended" in line:
            raise EngineError(f"{self.name} ended: {line.get('error', '')}\n{self.log_tail()}")
        return line

    def _read(self) -> None:
        assert self._process is not None
        for line in self._replies:
            self._heard(json.loads(line))
        self._heard({"ended": self._process.wait()})

    def _heard(self, line: Mapping[str, Any]) -> None:
        if self._on_line is not None:
            self._on_line(self, line)
            return
        with self._came:
            self._lines.append(line)
            self._came.notify_all()

    # -- its process -----------------------------------------------------------------------

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
        """Makes the process write its stacks to its log."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self, which: str = "group") -> None:
        """kill -9 of the ``engine`` process, of its ``worker``, or of the whole ``group``. Returns
        at once."""
        workers = [one.pid for one in self.family()[1:] if _is_worker(one)]
        with contextlib.suppress(ProcessLookupError):
            if which == "group":
                os.killpg(self.pid, signal.SIGKILL)
            else:
                target = workers[0] if which == "worker" and workers else self.pid
                os.kill(target, signal.SIGKILL)

    def end(self, seconds: float = _END_S) -> bool:
        """Ends it orderly, or by force. Returns whether it ended orderly."""
        assert self._process is not None
        family = self.family()
        self.send({"do": "close"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        in_order = self._process.poll() == 0
        self.bury(family)
        return in_order

    def bury(self, family: Sequence[psutil.Process] = ()) -> None:
        """Waits for the end of a process and its ``family``, then kills the rest."""
        assert self._process is not None
        end_all(family, 20.0)
        self.kill()
        self._process.wait()
        self._reader.join(10)


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "resource_tracker" not in " ".join(process.cmdline())
    except psutil.Error:
        return False


class Engines:
    """Starts engine processes, in any thread, and ends them. Logs are in ``folder/logs``."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder / "logs"
        self._lock = threading.Lock()
        self._count = 0
        self._running: set[EngineProcess] = set()
        self.is_stopped = False

    def start(self, name: str, arguments: Mapping[str, Any], **options: Any) -> EngineProcess:
        """Starts one, to be ended by ``end`` or ``stop``. ``options``: of ``EngineProcess``. Raises
        EngineError once all are stopped."""
        with self._lock:
            if self.is_stopped:
                raise EngineError(f"{name}: stopped")
            self._count += 1
            self._logs.mkdir(parents=True, exist_ok=True)
            log = self._logs / f"{self._count:03}-{name}.log"
            engine = EngineProcess(name, arguments, log, **options)
            self._running.add(engine)
        return engine

    def end(self, engine: EngineProcess) -> None:
        if engine.is_alive:
            engine.end()
        engine.bury()
        with self._lock:
            self._running.discard(engine)

    @contextmanager
    def running(
        self, name: str, arguments: Mapping[str, Any], **options: Any
    ) -> Iterator[EngineProcess]:
        """One that is ready, until the end of the block. Raises EngineError."""
        engine = self.start(name, arguments, **options)
        try:
            engine.wait_ready()
            yield engine
        finally:
            self.end(engine)

    def stop(self) -> None:
        """Kills all engines; waiting callers get EngineError, and no engine starts any more."""
        with self._lock:
            self.is_stopped = True
            running = list(self._running)
        for engine in running:
            engine.kill()
            engine.bury()
