"""The demo of the tiers: the same requests without a pool, from the device, the host, the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrecall.bench.report import engine_version
from kvrecall.engines.base import miss_text
from kvrecall.errors import EngineError
from kvrecall.processes.command import ProgressLines
from kvrecall.processes.server import Answer, ServerProcess

# -- what is asked ---------------------------------------------------------------------------

_FIRST_QUESTION = (
    "Question: Parents have complained to the principal about bullying during recess. The "
    "principal wants to quickly resolve this, instructing recess aides to be vigilant. Which "
    "situation should the aides report to the principal?\n"
    "a) An unengaged girl is sitting alone on a bench, engrossed in a book and showing no "
    "interaction with her peers.\n"
    "b) Two boys engaged in a one-on-one basketball game are involved in a heated argument "
    "regarding the last scored basket.\n"
    "c) A group of four girls has surrounded another girl and appears to have taken possession of "
    "her backpack.\n"
    "d) Three boys are huddled over a handheld video game, which is against the rules and not "
    "permitted on school grounds.\n"
    "Answer:"
)
_FIRST_ANSWER = (
    "c) A group of four girls has surrounded another girl and appears to have taken possession of "
    "her backpack.\n"
    "Explanation: The principal wants to quickly resolve this, instructing recess aides to be "
    "vigilant. The principal is concerned about bullying during recess. The principal wants the "
    "aides to report any bullying behavior to him. The principal is not concerned about the other "
    "situations.\n"
)
_SECOND_QUESTION = (
    "Question: If the aides confront the group of girls from situation (c) and they deny "
    "bullying, stating that they were merely playing a game, what specific evidence should the "
    "aides look for to determine if this is a likely truth or a cover-up for bullying?\n"
    "Answer:"
)

TURN_1 = _FIRST_QUESTION
"""First turn of the example conversation in MindIE's Prefix Cache guide, word for word."""

TURN_2 = _FIRST_QUESTION + _FIRST_ANSWER + _SECOND_QUESTION
"""Its second turn: the first question, the guide's answer, the second question."""

ANSWER = "417"
FACT = f"The code of amber falcon is {ANSWER}."

ANSWER_TOKENS = 32
WARM_UP = "One request before the others, so that no first-time cost is in their times. " * 20


def long_question(characters: int) -> str:
    """``characters`` of Python's language reference with a fact in the middle, and a question.

    The text is that of ``help()``, which every machine with Python has.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))[:characters]
    middle = text.index("\n\n", len(text) // 2)
    document = f"{text[:middle]} {FACT}{text[middle:]}"
    return f"{document}\n\nQuestion: What is the code of amber falcon?\nAnswer:"


# -- the demo --------------------------------------------------------------------------------

_SIZES = ("--host-size", "1GiB", "--disk-size", "2GiB")
_DEVICE = ("--kv-cache-memory-bytes", "1GiB")
"""Sizes with which host and device hold everything that the demo computes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, the length of its text in characters, and its longest sequence. ``trained``: its
    answers are meaningful."""

    model: Path
    characters: int
    max_model_len: int
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """A request of a demo: its text, the preceding event, its answer, and the server."""

    text: str
    when: str
    answer: Answer
    server: str = ""


class TierDemo:
    """Runs in a folder of its own, which the caller removes."""

    def __init__(self, subject: Subject, folder: Path, progress: ProgressLines) -> None:
        self._subject = subject
        self._folder = folder
        self._progress = progress
        self._prompts = {
            "conversation, turn 1": TURN_1,
            "conversation, turn 2": TURN_2,
            "long text": long_question(subject.characters),
        }
        self.rows: list[Row] = []

    def run(self) -> None:
        """Fills ``rows``, in the order of the table. Raises EngineError with the server's
        message."""
        self._progress("1/3 a server without pool and without prefix cache, for comparison")
        with self._server("without.log", pool=False) as server:
            self._ask(server, "no pool", list(self._prompts))
        self._progress("2/3 the server with its pool")
        with self._server("with.log", pool=True) as server:
            self._progress(f"  its dashboard, for as long as it runs: {server.url}/dashboard")
            self._ask(server, "new", list(self._prompts))
            self._progress.now("waiting until the pool has written to disk")
            server.settle()
            self._ask(server, "asked again", ["long text"])
            server.forget_device()
            self._ask(server, "device cache emptied", ["conversation, turn 2", "long text"])
        self._progress("3/3 the server process again: its memory is gone, its disk is not")
        with self._server("again.log", pool=True) as server:
            self._ask(server, "server restarted", ["conversation, turn 2", "long text"])

    def _server(self, log: str, pool: bool) -> ServerProcess:
        self._progress.now("waiting until the server is ready")
        model = self._subject.model
        arguments = [str(model), "--served-model-name", model.name, "--dtype", "float32", *_DEVICE]
        arguments += ["--max-model-len", str(self._subject.max_model_len)]
        if pool:
            arguments += [*_SIZES, "--disk-path", str(self._folder / "pool")]
        else:
            arguments += ["--no-pool", "--", "--no-enable-prefix-caching"]
        return ServerProcess(arguments, self._folder / log, self._progress)

    def _ask(self, server: ServerProcess, when: str, names: Sequence[str]) -> None:
        try:
            if when in ("no pool", "new", "server restarted"):
                server.ask(WARM_UP, 4)
            for name in names:
                self._progress.now(f"{name}, {when}: waiting for the answer")
                answer = server.ask(self._prompts[name], ANSWER_TOKENS)
                self.rows.append(Row(name, when, answer))
                self._progress(f"  {name}, {when}: first token after {answer.ttft_s:.3f} s")
            self._progress.now("ending the server")  # unless more requests follow
        except (EngineError, httpx.HTTPError) as error:
            raise EngineError(f"{when}: {error}\n{server.log_tail(60)}") from error


class DemoVerdict:
    """What is said of a finished demo. The first answer to a text was computed; the others must
    have its tokens. ``labels``: columns before the tokens by ``tiers``."""

    labels: Sequence[str]
    tiers: Sequence[str]

    def __init__(self, rows: Sequence[Row], title: str) -> None:
        self.rows = rows
        self.title = title
        self.first: dict[str, Answer] = {}
        for row in rows:
            self.first.setdefault(row.text, row.answer)

    def summary(self) -> dict[str, object]:
        """The line of JSON. ``ok``: the demo shows what it should."""
        raise NotImplementedError

    def headline(self) -> str:
        """The last line."""
        raise NotImplementedError

    def remarks(self) -> Iterator[str]:
        """Lines below the table; here, why prompts were computed that had been seen before."""
        for row in self.rows:
            if row.answer.missed.get("reason", "new") != "new":
                yield f"{', '.join(self.labels_of(row))}: {miss_text(row.answer.missed)}"

    def labels_of(self, row: Row) -> Sequence[str]:
        raise NotImplementedError

    def equal(self, row: Row) -> bool:
        return row.answer.tokens == self.first[row.text].tokens

    @property
    def all_equal(self) -> bool:
        return bool(self.rows) and all(map(self.equal, self.rows))

    @property
    def identical(self) -> str:
        """The number of answers with the same tokens as the first one to their text."""
        return f"{sum(map(self.equal, self.rows))} of {len(self.rows)} answers identical"

    def faster(self, when: str, computed: str) -> float:
        """The speed-up of the long text's first token; 0 if a time is missing."""
        then, now = self.ttft(computed), self.ttft(when)
        return then / now if then and now else 0.0

    def recalled(self, tier: str, when: str = "") -> int:
        """Prompt tokens from the tier, in total or in the requests sent ``when``."""
        rows = (row for row in self.rows if when in ("", row.when))
        return sum(row.answer.recalled.get(tier, 0) for row in rows)

    def ttft(self, when: str) -> float | None:
        """Seconds to the first token of the long text."""
        times = (r.answer.ttft_s for r in self.rows if (r.text, r.when) == ("long text", when))
        return next((round(seconds, 4) for seconds in times), None)

    def print(self, console: Console, as_json: bool = False) -> None:
        """Prints the table, remarks and the headline; or the line of JSON."""
        text, style = json.dumps(self.summary(), separators=(",", ":")), ""
        if not as_json:
            console.print(self._table())
            for line in self.remarks():
                console.print(line, markup=False)
            text, style = f"\n{self.headline()}", "bold"
        console.print(text, style=style, soft_wrap=True, markup=False, highlight=False)

    def _table(self) -> Table:
        """A row for each answer: its labels, tokens by tier, and whether its tokens are equal."""
        table = Table(title=Text(f"{self.title}, vLLM {engine_version()}"))
        for name in self.labels:
            table.add_column(name)
        for name in ("prompt", *self.tiers, "computed", "first token", "tokens"):
            table.add_column(name, justify="right")
        for row in self.rows:
            answer = row.answer
            counts = (answer.recalled.get(name, 0) for name in (*self.tiers, "computed"))
            figures = (str(answer.prompt_tokens), *map(str, counts), f"{answer.ttft_s:.3f} s")
            verdict = "equal" if self.equal(row) else "[red]DIFFER[/red]"
            table.add_row(*self.labels_of(row), *figures, verdict)
        return table


class TierVerdict(DemoVerdict):
    """The verdict on a finished demo of the tiers."""

    labels = ("request", "server")
    tiers = ("device", "host", "disk")

    def __init__(self, rows: Sequence[Row], model: str, trained: bool = True) -> None:
        """``trained``: whether the model's answers are meaningful."""
        super().__init__(rows, model)
        self._trained = trained
        self._long = [row for row in rows if row.text == "long text"]

    def labels_of(self, row: Row) -> Sequence[str]:
        return row.text, row.when

    def summary(self) -> dict[str, object]:
        """The line of JSON. ``ok``: all tokens equal and every tier was hit."""
        hits = {tier: self.recalled(tier) for tier in self.tiers}
        return {
            "ok": self.all_equal and all(hits.values()),
            "tokens_equal": self.all_equal,
            **{f"{tier}_hit_tokens": count for tier, count in hits.items()},
            "ttft_recompute_s": self.ttft("no pool"),
            "ttft_device_s": self.ttft("asked again"),
            "ttft_host_s": self.ttft("device cache emptied"),
            "ttft_disk_s": self.ttft("server restarted"),
            "answers_right": self._right() if self._trained else None,
            "times_as_fast": {tier: round(value, 1) for tier, value in self._gains().items()},
            "model": self.title,
            "vllm": engine_version(),
        }

    def _gains(self) -> dict[str, float]:
        whens = (("host", "device cache emptied"), ("disk", "server restarted"))
        return {tier: self.faster(when, "no pool") for tier, when in whens}

    def _right(self) -> bool:
        """Whether every reply over the long text names the value that the text states."""
        return all(ANSWER in row.answer.text.strip().split("\n")[0] for row in self._long)

    def headline(self) -> str:
        host, disk = map(times, self._gains().values())
        return (
            f"First token of the long text: {host} as fast from host memory, {disk} from disk "
            f"after a restart; {self.identical}."
        )

    def remarks(self) -> Iterator[str]:
        yield "device, host, disk, computed: where each prompt's tokens came from"
        yield from super().remarks()
        hits = {row.answer.logprobs for row in self._long if row.when not in ("no pool", "new")}
        same = "bit-identical" if len(hits) == 1 else "NOT bit-identical"
        yield f"log-probabilities after a device, host and disk hit: {same}"
        if self._trained:
            answer = self.first["long text"].text.strip().splitlines()
            verdict = "right, each time" if self._right() else "not what the text says"
            yield f"answer about the long text: {answer[0] if answer else ''!r}, {verdict}"
        else:
            yield "the weights are random: only the equality of answers is meaningful"
        if missed := [tier for tier in self.tiers if not self.recalled(tier)]:
            yield f"nothing came from {' and '.join(missed)}: the reasons are above"


def times(factor: float) -> str:
    """A factor, rounded for display."""
    return f"{factor:.0f} times" if factor >= 9.95 else f"{factor:.1f} times"
