"""The demo of the remote tier: two servers, one Mooncake Store, and a master that is killed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from kvrecall.demo.tiers import (
    ANSWER_TOKENS,
    TURN_2,
    WARM_UP,
    DemoVerdict,
    Row,
    Subject,
    long_question,
    times,
)
from kvrecall.errors import EngineError
from kvrecall.pool.cipher import make_key_file
from kvrecall.processes.command import ProgressLines
from kvrecall.processes.server import Answer, ServerProcess
from kvrecall.processes.service import Master

_SEGMENT = "512MB"  # bytes of memory that each server lends to the store
_TRIES = 8  # texts sent after the master's restart, until the servers have rejoined it
_PAUSE_S = 2.0


class MooncakeDemo:
    """Runs the demo in a folder of its own, which the caller removes."""

    def __init__(self, subject: Subject, folder: Path, progress: ProgressLines) -> None:
        self._model = subject.model
        self._folder = folder
        self._progress = progress
        self._master = Master(folder / "master.log")
        self._key = folder / "key"
        self._long = long_question(subject.characters)
        self.servers: dict[str, ServerProcess] = {}
        self.rows: list[Row] = []
        self.failed = 0
        self.master_restarted = False

    def run(self) -> None:
        """Fills ``rows``. Raises EngineError or TierError with the output of the process that did
        not start."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._master.kill)
            self._progress(
                "1/4 a Mooncake master, and two servers that share a key and nothing else"
            )
            self._master.start()
            make_key_file(self._key)
            self._progress.now("waiting until both servers are ready")
            for name in ("A", "B"):
                self.servers[name] = stack.enter_context(self._server(name))
            for server in self.servers.values():
                server.ask(WARM_UP, 4)
                server.settle()  # B can find what A writes
            self._progress("2/4 A computes a text, B recalls it from the store")
            self._ask("A", "long text", self._long, "new")
            self.servers["A"].settle()
            self._ask("B", "long text", self._long, "stored by A")
            self._progress("3/4 the master is killed")
            self._master.kill()
            for name in self.servers:
                self._ask(name, "conversation", TURN_2, "no master")
            self.servers["B"].forget_device()
            self._ask("B", "long text", self._long, "no master")
            self._progress("4/4 a new master, which knows nothing")
            self._master.start()
            self.master_restarted = True
            self._after_restart()

    def _server(self, name: str) -> ServerProcess:
        pool = self._folder / f"pool-{name}.json"
        remote = {"kind": "mooncake", **self._master.options(_SEGMENT)}
        del remote["allow_plaintext"]  # nor is it needed
        settings = {"host_size": "1GiB", "encryption_key_file": str(self._key), "remote": remote}
        pool.write_text(json.dumps(settings))
        arguments = [str(self._model), "--dtype", "float32", "--max-model-len", "32768"]
        arguments += ["--kv-cache-memory-bytes", "1GiB", "--pool-config", str(pool)]
        return ServerProcess(arguments, self._folder / f"{name}.log", self._progress)

    def _ask(self, name: str, text: str, prompt: str, when: str) -> Answer | None:
        self._progress.now(f"{text}, {name}, {when}: waiting for the answer")
        try:
            answer = self.servers[name].ask(prompt, ANSWER_TOKENS)
        except (EngineError, httpx.HTTPError) as error:
            self.failed += 1
            self._progress(f"  {text}, {name}, {when}: FAILED: {error}")
            return None
        self.rows.append(Row(text, when, answer, name))
        remote = answer.recalled.get("remote", 0)
        self._progress(
            f"  {text}, {name}, {when}: first token after {answer.ttft_s:.3f} s, "
            f"{remote} of {answer.prompt_tokens} tokens from the store"
        )
        return answer

    def _after_restart(self) -> None:
        """Sends new texts until B recalls one that A stored: servers rejoin the master
        automatically."""
        for number in range(_TRIES):
            time.sleep(_PAUSE_S)
            text, prompt = f"text {number + 1}", f"Note {number + 1}. " + self._long[:36_000]
            self._ask("A", text, prompt, "master restarted")
            self.servers["A"].settle()
            answer = self._ask("B", text, prompt, "master restarted")
            if answer is not None and answer.recalled.get("remote", 0):
                return


class MooncakeVerdict(DemoVerdict):
    """The verdict on a finished demo."""

    labels = ("request", "server", "when")
    tiers = ("device", "host", "remote")

    def __init__(self, demo: MooncakeDemo) -> None:
        super().__init__(demo.rows, "two servers over Mooncake Store")
        self._demo = demo

    def labels_of(self, row: Row) -> Sequence[str]:
        return row.text, row.server, row.when

    def summary(self) -> dict[str, object]:
        """The line of JSON. ``ok``: equal tokens, no failed request, and the store was hit before
        and after the restart of its master."""
        demo = self._demo
        hits = [self.recalled("remote", when) for when in ("stored by A", "master restarted")]
        return {
            "ok": self.all_equal and all(hits) and demo.master_restarted and not demo.failed,
            "tokens_equal": self.all_equal,
            "remote_hit_tokens": self.recalled("remote"),
            "engines": len(demo.servers),
            "ttft_recompute_s": self.ttft("new"),
            "ttft_remote_s": self.ttft("stored by A"),
            "master_restarted": demo.master_restarted,
            "requests_failed": demo.failed,
        }

    def headline(self) -> str:
        faster = times(self.faster("stored by A", "new"))
        return (
            f"First token of the long text at server B: {faster} as fast with what A stored; "
            f"{self.identical}, {self._demo.failed} requests failed."
        )
