"""The demo: the same requests without a pool, from the device, from the host, from disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from kvrecall.errors import EngineError
from kvrecall.lab.bench.report import engine_version
from kvrecall.lab.demo import shot
from kvrecall.lab.demo.prompts import ANSWER, TURN_1, TURN_2, long_question
from kvrecall.lab.engines.server import Answer, Progress, ServerProcess

ANSWER_TOKENS = 32
WARM_UP = "One request before the others, so that no first-time cost is in their times. " * 20


@dataclass(frozen=True, slots=True)
class Stage:
    """What to run: a model, a text of so many characters, and room for its tokens.

    ``host_size`` and ``device_size`` hold everything the demo computes.
    """

    model: Path
    characters: int
    max_model_len: int
    host_size: str = "1GiB"
    disk_size: str = "2GiB"
    device_size: str = "1GiB"


@dataclass(frozen=True, slots=True)
class Row:
    """One request of the demo: which one, what the server's memory was like, and its answer."""

    request: str
    memory: str
    answer: Answer


class Play:
    """Runs the demo in a folder of its own, which the caller removes."""

    def __init__(
        self, stage: Stage, folder: Path, progress: Progress, picture: Path | None = None
    ) -> None:
        """``picture``: where to put one of the dashboard; None: nowhere."""
        self._picture = picture
        self._stage = stage
        self._folder = folder
        self._progress = progress
        self._prompts = {
            "conversation, turn 1": TURN_1,
            "conversation, turn 2": TURN_2,
            "long text": long_question(stage.characters),
        }
        self.rows: list[Row] = []

    def run(self) -> None:
        """Fills ``rows``, in the order of the table. Raises EngineError with the server's words."""
        self._progress("1/3 a server without pool and without prefix cache, for comparison")
        with self._server("without.log", pool=False) as server:
            self._ask(server, "no pool", list(self._prompts))
        self._progress("2/3 the server with its pool")
        with self._server("with.log", pool=True) as server:
            dashboard = f"{server.url}/dashboard"
            self._progress(f"  its dashboard, for as long as it runs: {dashboard}")
            self._ask(server, "new", list(self._prompts))
            server.settle()
            self._ask(server, "asked again", ["long text"])
            server.forget_device()
            self._ask(server, "device cache emptied", ["conversation, turn 2", "long text"])
            if self._picture is not None:
                shot.take(dashboard, self._picture)
                self._progress(f"  a picture of the dashboard is in {self._picture}")
        self._progress("3/3 the server process again: its memory is gone, its disk is not")
        with self._server("again.log", pool=True) as server:
            self._ask(server, "server restarted", ["conversation, turn 2", "long text"])

    def _server(self, log: str, pool: bool) -> ServerProcess:
        stage = self._stage
        arguments = [str(stage.model), "--served-model-name", stage.model.name]
        arguments += ["--dtype", "float32", "--max-model-len", str(stage.max_model_len)]
        arguments += ["--kv-cache-memory-bytes", stage.device_size]
        if pool:
            arguments += ["--host-size", stage.host_size, "--disk-size", stage.disk_size]
            arguments += ["--disk-path", str(self._folder / "pool")]
        else:
            arguments += ["--no-pool", "--", "--no-enable-prefix-caching"]
        return ServerProcess(arguments, self._folder / log, self._progress)

    def _ask(self, server: ServerProcess, memory: str, names: Sequence[str]) -> None:
        try:
            if memory in ("no pool", "new", "server restarted"):
                server.ask(WARM_UP, 4)
            for name in names:
                answer = server.ask(self._prompts[name], ANSWER_TOKENS)
                self.rows.append(Row(name, memory, answer))
                self._progress(f"  {name}, {memory}: first token after {answer.ttft_s:.3f} s")
        except (EngineError, httpx.HTTPError) as error:
            raise EngineError(f"{memory}: {error}\n{server.log_tail(60)}") from error


class Verdict:
    """What the rows of a finished play show."""

    def __init__(self, rows: Sequence[Row], model: str) -> None:
        self._rows = rows
        self._model = model
        self._expected = {row.request: row.answer for row in rows if row.memory == "no pool"}

    def equal(self, row: Row) -> bool:
        """Whether a row's tokens are those of the run without a pool."""
        return row.answer.tokens == self._expected[row.request].tokens

    def _is_hit(self, row: Row) -> bool:
        return row.request == "long text" and row.memory not in ("no pool", "new")

    def summary(self) -> dict[str, object]:
        """The last line of the demo. ``ok``: all tokens equal and every tier was hit."""
        hits = {
            tier: sum(row.answer.recalled.get(tier, 0) for row in self._rows)
            for tier in ("device", "host", "disk")
        }
        equal = all(map(self.equal, self._rows))
        return {
            "ok": equal and all(hits.values()),
            "tokens_equal": equal,
            **{f"{tier}_hit_tokens": count for tier, count in hits.items()},
            "ttft_recompute_s": self._ttft("no pool"),
            "ttft_device_s": self._ttft("asked again"),
            "ttft_host_s": self._ttft("device cache emptied"),
            "ttft_disk_s": self._ttft("server restarted"),
            "answers_right": self._right(),
            "model": self._model,
            "vllm": engine_version(),
        }

    def _right(self) -> bool:
        """Whether every reply over the long text names the value that the text states."""
        replies = [row.answer.text for row in self._rows if row.request == "long text"]
        return all(ANSWER in reply.strip().split("\n")[0] for reply in replies)

    def _ttft(self, memory: str) -> float:
        """Seconds to the first token of the long text."""
        rows = [r for r in self._rows if r.request == "long text" and r.memory == memory]
        return round(rows[0].answer.ttft_s, 4)

    def print(self, console: Console) -> None:
        """The table for people, what the answers were, and the line of JSON."""
        table = Table(title=f"{self._model} on vLLM {engine_version()}")
        for name in ("request", "server"):
            table.add_column(name)
        for name in ("prompt", "device", "host", "disk", "computed", "first token", "tokens"):
            table.add_column(name, justify="right")
        for row in self._rows:
            recalled = row.answer.recalled
            counts = (recalled.get(k, 0) for k in ("device", "host", "disk", "computed"))
            table.add_row(
                row.request,
                row.memory,
                str(row.answer.prompt_tokens),
                *map(str, counts),
                f"{row.answer.ttft_s:.3f} s",
                "equal" if self.equal(row) else "[red]DIFFER[/red]",
            )
        console.print(table)
        console.print("device, host, disk, computed: where each prompt's tokens came from")
        hits = [r.answer.logprobs for r in self._rows if self._is_hit(r)]
        same = "bit-identical" if len(set(hits)) == 1 else "NOT bit-identical"
        console.print(f"log-probabilities after a device, host and disk hit: {same}")
        answer = self._expected["long text"].text.strip().splitlines()
        verdict = "right, each time" if self._right() else "not what the text says"
        said = answer[0] if answer else ""
        console.print(f"answer over the long text: {said!r}, {verdict}", markup=False)
        line = json.dumps(self.summary(), separators=(",", ":"))
        console.print(line, soft_wrap=True, markup=False, highlight=False)
