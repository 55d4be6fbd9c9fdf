"""``kvrecall bench needle``: from options to a report."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.attention.split import split_of
from kvrecall.errors import ConfigError, EngineError
from kvrecall.lab.bench.needle.arms import Arms, Endpoints, OneEngine, local_server, require_length
from kvrecall.lab.bench.needle.endpoint import Endpoint
from kvrecall.lab.bench.needle.examination import Advance, Examiner, Findings
from kvrecall.lab.bench.needle.heatmap import write_heatmap
from kvrecall.lab.bench.needle.papers import Syllabus
from kvrecall.lab.bench.needle.prompts import Manner
from kvrecall.lab.bench.needle.summary import report_of
from kvrecall.lab.bench.report import Report
from kvrecall.lab.engines.server import Progress as Say
from kvrecall.lab.engines.server import ServerProcess


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of others to ask instead of a local model."""

    measured: str
    dense: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure. ``model``: a folder, or a name at ``servers``; None for the default.

    ``variants``: settings of retrieval to compare, of a local model; at least one.
    """

    model: str | None
    syllabus: Syllabus
    variants: tuple[RetrievalSettings, ...]
    bins: int = 10
    manner: Manner | None = None
    servers: Servers | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """What is written: a heat map, and a line of JSON for every question."""

    plot: Path | None = None
    records: Path | None = None
    must_plot: bool = field(default=False)


def measure_needle(wanted: Wanted, keep: Keep, say: Say) -> Report:
    """Asks, counts, writes. Raises KvrecallError, also if retrieval was to act and did not."""
    with ExitStack() as stack:
        if wanted.servers is not None:
            model, arms = _theirs(wanted, stack)
        else:
            model, arms = _ours(wanted, say, stack)
        manner = wanted.manner or _manner_of(model)
        advance = stack.enter_context(_progress(wanted.syllabus.questions * len(arms.arms)))
        found = Examiner(arms, manner, wanted.syllabus, advance).run()
    if any(arm.retrieval for arm in found.arms):
        found.require_active()
    report = report_of(found, model, wanted.syllabus.tasks, wanted.bins, _facts(wanted, manner))
    return _write(report, found, wanted.bins, keep)


def _ours(wanted: Wanted, say: Say, stack: ExitStack) -> tuple[str, Arms]:
    from kvrecall.server.launch import default_model

    model = wanted.model or default_model()
    longest = max(wanted.syllabus.lengths)
    require_length(Path(model), longest)
    _require_choice(wanted, longest)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrecall-needle-")))
    say(f"starting {model}, once for all lengths and settings")
    server = local_server(model, longest, wanted.variants[0], folder / "server.log", say)
    stack.enter_context(server)
    stack.enter_context(_with_log_of(server))
    endpoint = stack.enter_context(Endpoint(server.url))
    return model, OneEngine(endpoint, wanted.variants)


@contextmanager
def _with_log_of(server: ServerProcess) -> Iterator[None]:
    """Adds what the server last printed to an error, as its log goes with it."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{error}\n{server.log_tail(60)}") from error


def _theirs(wanted: Wanted, stack: ExitStack) -> tuple[str, Arms]:
    servers = wanted.servers
    assert servers is not None
    measured = stack.enter_context(Endpoint(servers.measured, wanted.model, servers.key))
    dense = None
    if servers.dense is not None:
        dense = stack.enter_context(Endpoint(servers.dense, wanted.model, servers.key))
    return measured.model, Endpoints(measured, dense)


def _require_choice(wanted: Wanted, longest: int) -> None:
    """Raises ConfigError where retrieval could not act at any of the lengths."""
    settings = wanted.variants[0]
    if longest < settings.dense_boundary:
        raise ConfigError(
            f"--dense-boundary {settings.dense_boundary} leaves all lengths dense; lower it"
        )
    if not split_of(longest, 128, settings).middle:
        raise ConfigError(
            f"--lengths: {longest} tokens leave nothing to choose from, as the first "
            f"{settings.init_tokens} and the last {settings.local_tokens} always take part"
        )


def _manner_of(model: str) -> Manner:
    """recall-tiny knows one form of question; every other model is asked in plain language."""
    return Manner.RECALL if Path(model).name.startswith("recall-tiny") else Manner.INSTRUCT


def _facts(wanted: Wanted, manner: Manner) -> dict[str, object]:
    facts: dict[str, object] = {
        "tasks": list(wanted.syllabus.tasks),
        "samples": wanted.syllabus.samples,
        "seed": wanted.syllabus.seed,
        "asked_as": manner.value,
    }
    if wanted.servers is None:
        settings = dataclasses.asdict(wanted.variants[0])
        for name in ("topk_share", "digest_tokens", "offload_boundary"):
            del settings[name]
        facts["settings"] = settings
    return facts


def _write(report: Report, found: Findings, bins: int, keep: Keep) -> Report:
    """Writes what is to be kept; the report says where."""
    notes: Sequence[str] = report.notes
    if keep.records is not None:
        keep.records.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(dataclasses.asdict(record)) for record in found.records]
        keep.records.write_text("".join(f"{line}\n" for line in lines))
        notes = [*notes, f"every question and reply: {keep.records}"]
    if keep.plot is not None:
        try:
            title = Path(str(report.figures["model"])).name
            write_heatmap(found.records, found.arms, bins, title, keep.plot)
            notes = [*notes, f"heat map: {keep.plot}"]
        except ConfigError as error:
            if keep.must_plot:
                raise
            notes = [*notes, str(error)]
    return dataclasses.replace(report, notes=tuple(notes))


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar on standard error; where that is no terminal, a line for every text and arm."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console) as bar:
        job = bar.add_task("asking", total=total)

        def advance(doing: str, replies: int) -> None:
            bar.update(job, description=doing, advance=replies)
            if not replies and not console.is_terminal:
                console.print(
                    f"bench: {doing}: {int(bar.tasks[0].completed)} of {total} replies so far"
                )

        yield advance
