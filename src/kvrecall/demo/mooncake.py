"""The demo of the remote tier: two servers, one Mooncake Store, and a master that is killed."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import httpx
from rich.console import Console

from kvrecall.bench.report import engine_version
from kvrecall.demo.tiers import (
    ANSWER_TOKENS,
    TURN_2,
    WARM_UP,
    Row,
    Rows,
    answers_table,
    long_question,
    print_headline,
    print_line,
    times,
)
from kvrecall.errors import EngineError
from kvrecall.pool.cipher import make_key_file
from kvrecall.processes.master import Master
from kvrecall.processes.progress import ProgressLines
from kvrecall.processes.server import Answer, ServerProcess

_SEGMENT = "512MB"  # bytes of memory that each server lends to the store
_TRIES = 8  # texts sent after the master's restart, until the servers have rejoined it
_PAUSE_S = 2.0


class MooncakeDemo:
    """Runs the demo in a folder of its own, which the caller removes."""

    def __init__(self, model: Path, characters: int, folder: Path, progress: ProgressLines) -> None:
        self._model = model
        self._folder = folder
        self._progress = progress
        self._master = Master(folder / "master.log")
        self._key = folder / "key"
        self._long = long_question(characters)
        self.rows: list[Row] = []
        self.failed = 0
        self.engines = 0
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
            servers = {name: stack.enter_context(self._server(name)) for name in ("A", "B")}
            self.engines = len(servers)
            for server in servers.values():
                server.ask(WARM_UP, 4)
                server.settle()  # B can find what A writes
            self._progress("2/4 A computes a text, B recalls it from the store")
            self._ask(servers, "A", "long text", self._long, "new")
            servers["A"].settle()
            self._ask(servers, "B", "long text", self._long, "stored by A")
            self._progress("3/4 the master is killed")
            self._master.kill()
            for name in servers:
                self._ask(servers, name, "conversation", TURN_2, "no master")
            servers["B"].forget_device()
            self._ask(servers, "B", "long text", self._long, "no master")
            self._progress("4/4 a new master, which knows nothing")
            self._master.start()
            self.master_restarted = True
            self._after_restart(servers)

    def _server(self, name: str) -> ServerProcess:
        pool = self._folder / f"pool-{name}.json"
        remote = {"kind": "mooncake", **self._master.options(_SEGMENT)}
        del remote["allow_plaintext"]  # nor is it needed
        settings = {"host_size": "1GiB", "encryption_key_file": str(self._key), "remote": remote}
        pool.write_text(json.dumps(settings))
        arguments = [str(self._model), "--dtype", "float32", "--max-model-len", "32768"]
        arguments += ["--kv-cache-memory-bytes", "1GiB", "--pool-config", str(pool)]
        return ServerProcess(arguments, self._folder / f"{name}.log", self._progress)

    def _ask(
        self, servers: dict[str, ServerProcess], name: str, text: str, prompt: str, when: str
    ) -> Answer | None:
        self._progress.now(f"{text}, {name}, {when}: waiting for the answer")
        try:
            answer = servers[name].ask(prompt, ANSWER_TOKENS)
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

    def _after_restart(self, servers: dict[str, ServerProcess]) -> None:
        """Sends new texts until B recalls one that A stored: servers rejoin the master
        automatically."""
        for number in range(_TRIES):
            time.sleep(_PAUSE_S)
            text, prompt = f"text {number + 1}", f"Note {number + 1}. " + self._long[:12_000]
            self._ask(servers, "A", text, prompt, "master restarted")
            servers["A"].settle()
            answer = self._ask(servers, "B", text, prompt, "master restarted")
            if answer is not None and answer.recalled.get("remote", 0):
                return


class MooncakeVerdict:
    """The verdict on a finished demo."""

    def __init__(self, demo: MooncakeDemo) -> None:
        self._demo = demo
        self._rows = Rows(demo.rows)

    def summary(self) -> dict[str, object]:
        """The line of JSON. ``ok``: equal tokens, no failed request, and the store was hit before
        and after the restart of its master."""
        demo, rows = self._demo, self._rows
        hit = rows.recalled("remote", "stored by A") and rows.recalled("remote", "master restarted")
        ok = rows.all_equal and bool(hit) and demo.master_restarted and not demo.failed
        return {
            "ok": ok,
            "tokens_equal": rows.all_equal,
            "remote_hit_tokens": rows.recalled("remote"),
            "engines": demo.engines,
            "ttft_recompute_s": rows.ttft("new"),
            "ttft_remote_s": rows.ttft("stored by A"),
            "master_restarted": demo.master_restarted,
            "requests_failed": demo.failed,
        }

    def headline(self) -> str:
        """The last line."""
        faster = self._rows.faster("stored by A", "new")
        return (
            f"First token of the long text at server B: {times(faster)} as fast with what A "
            f"stored; {self._rows.identical}, {self._demo.failed} requests failed."
        )

    def print(self, console: Console, as_json: bool = False) -> None:
        """Prints the table, the line of JSON and the last line; or only the line of JSON."""
        if as_json:
            print_line(console, self.summary())
            return
        rows = [
            ((row.text, row.server, row.when), row.answer, self._rows.equal(row))
            for row in self._rows.all
        ]
        title = f"two servers over Mooncake Store, vLLM {engine_version()}"
        labels, tiers = ("request", "server", "when"), ("device", "host", "remote")
        console.print(answers_table(title, labels, tiers, rows))
        print_line(console, self.summary())
        print_headline(console, self.headline())
