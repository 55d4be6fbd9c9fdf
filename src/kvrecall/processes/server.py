"""Drives a real ``kvrecall serve`` process over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvrecall.errors import EngineError
from kvrecall.processes.child import ChildProcess, server_environment
from kvrecall.processes.command import kvrecall
from kvrecall.processes.ports import free_port
from kvrecall.server.access import OWN_HEADER

START_TIMEOUT_S = 600.0
SETTLE_TIMEOUT_S = 60.0
_CAUSE = 150
"""Last lines of a log that contain the cause of a worker's failure."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a request.

    ``recalled``: prompt tokens by tier, and computed; ``missed``: why these. ``ttft_s``,
    ``last_s``: seconds from sending the request to its first and last token at the client;
    ``tpot_s``: per token after the first. Behind a long prompt of random weights it may be the
    decoder's: vLLM's reads all of it for each token until an answer's bytes are characters.
    """

    prompt_tokens: int
    recalled: Mapping[str, int]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    ttft_s: float
    last_s: float
    missed: Mapping[str, object] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.ttft_s) / max(1, len(self.tokens) - 1)


class ServerProcess(ChildProcess):
    """A ``kvrecall serve`` process on a free port of the loopback interface.

    A context manager: leaving it ends the server and its descendants. The server also ends when
    this process does. ``arguments``: those of ``kvrecall serve``; ``log``: its output;
    ``environment``: instead of ``server_environment()``.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        progress: Progress,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(log)
        self._arguments = list(arguments)
        self._environment = server_environment() if environment is None else environment
        self._progress = progress
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

    def _start(self) -> None:
        self.port = free_port()
        command = kvrecall("serve", *_with_port(self._arguments, self.port))
        self.launch(command, {**self._environment, "VLLM_SERVER_DEV_MODE": "1"})
        begin = time.monotonic()
        while not is_healthy(self.url):
            now = time.monotonic()
            if not self.is_alive:
                raise EngineError(f"the server ended while starting:\n{self.log_tail(_CAUSE)}")
            if now - begin > START_TIMEOUT_S:
                raise EngineError(f"the server is not ready after {now - begin:.0f} s")
            time.sleep(0.25)
        self._progress(f"  the server is ready, after {time.monotonic() - begin:.0f} s")

    def cpu_seconds(self) -> float:
        """Processor time of the server and its descendants so far."""
        times = [process.cpu_times() for process in self.family()]
        return float(sum(time.user + time.system for time in times))

    def ask(self, prompt: str, max_new_tokens: int, ignore_eos: bool = False) -> Answer:
        """See ``generate``."""
        return generate(httpx, self.url, prompt, max_new_tokens, ignore_eos=ignore_eos)

    def tokens(self, prompt: Sequence[int], most: int) -> Iterator[int]:
        """The numbers of tokens that come at a time, of an answer of ``most`` that is not decoded.
        Needs ``--enable-scale-out``. Raises EngineError if the server refuses it."""
        sampling = {"max_tokens": most, "ignore_eos": True, "detokenize": False, "temperature": 0.0}
        body = {"token_ids": list(prompt), "sampling_params": sampling, "stream": True}
        url = f"{self.url}/inference/v1/generate"
        with httpx.stream("POST", url, json=body, timeout=600) as reply:
            _require_ok(reply)
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line.removeprefix("data:"))["choices"]
                    yield len(choice["token_ids"])

    def settle(self) -> None:
        """Waits until the pool has finished writing, so that writes slow no request.

        Metrics update with engine steps; a prompt shorter than a block triggers some.
        """
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < end:
            self.ask("settle", 4)
            if self.metric("kvrecall_queued_writes") == 0:
                return
            time.sleep(0.1)
        raise EngineError(f"the pool is still writing after {SETTLE_TIMEOUT_S:.0f} s")

    def metric(self, name: str) -> float:
        """A metric as of the last engine step, summed over its labels; 0 if absent."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def forget_device(self) -> None:
        """Empties the engine's own prefix cache; the pool keeps its blocks. Waits for blocks that
        are still copied. Raises EngineError if the engine does not let go of them."""
        end = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < end:
            url = f"{self.url}/reset_prefix_cache"
            reply = httpx.post(url, timeout=60, headers={OWN_HEADER: "1"}).raise_for_status()
            if reply.json()["success"]:
                return
            self.ask("settle", 4)  # copies are reported with steps
        raise EngineError(f"the engine still holds blocks after {SETTLE_TIMEOUT_S:.0f} s")


def is_healthy(url: str) -> bool:
    """Whether the server at ``url`` is ready."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def generate(
    client: Any,
    url: str,
    prompt: str,
    max_new_tokens: int,
    timeout_s: float = 600.0,
    ignore_eos: bool = False,
) -> Answer:
    """Sends a prompt to /generate_stream (TGI form, greedy) and reads the answer. ``client``: an
    httpx.Client, or httpx itself. ``ignore_eos``: it has ``max_new_tokens`` tokens, whatever the
    model says. Raises EngineError if the server refuses it or the stream ends early."""
    parameters = {"max_new_tokens": max_new_tokens, "details": True, "ignore_eos": ignore_eos}
    body = {"inputs": prompt, "parameters": parameters}
    events: list[dict[str, Any]] = []
    times: list[float] = []
    begin = time.perf_counter()
    with client.stream("POST", f"{url}/generate_stream", json=body, timeout=timeout_s) as reply:
        _require_ok(reply)
        for line in reply.iter_lines():
            if line.startswith("data:"):
                times.append(time.perf_counter() - begin)
                events.append(json.loads(line.removeprefix("data:")))
    final = events[-1] if events else {}
    if "token" not in final or not final.get("details"):
        raise EngineError(f"the stream ended early: {json.dumps(final)[:500]}")
    recalled = final["details"]["recall"]
    return Answer(
        missed=recalled.pop("missed", None) or {},
        prompt_tokens=final["details"]["prompt_tokens"],
        recalled=recalled,
        tokens=tuple(event["token"]["id"] for event in events),
        logprobs=tuple(event["token"]["logprob"] for event in events),
        text=final["generated_text"],
        ttft_s=times[0],
        last_s=times[-1],
    )


def _require_ok(reply: httpx.Response) -> None:
    if reply.status_code != 200:
        raise EngineError(f"HTTP {reply.status_code}: {reply.read().decode()[:500]}")


def _with_port(arguments: list[str], port: int) -> list[str]:
    """``--port`` goes before the ``--`` that starts vLLM's own options."""
    place = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:place], "--port", str(port), *arguments[place:]]
