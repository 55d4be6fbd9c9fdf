"""Asks every question of a dataset under every variant, and reports what was right."""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.attention.split import split_of
from kvrecall.errors import ConfigError, EngineError
from kvrecall.lab.bench.model import BLOCK
from kvrecall.lab.bench.needle.dataset import (
    Dataset,
    PromptStyle,
    Sample,
    is_answered,
    request_of,
)
from kvrecall.lab.bench.needle.score import Record, Results, Variant, report_of, write_heatmap
from kvrecall.lab.bench.needle.servers import (
    CONCURRENT,
    Endpoint,
    OtherServers,
    Servers,
    SwitchedServer,
    local_server,
    model_config,
)
from kvrecall.lab.bench.needle.tasks import approximate_tokens
from kvrecall.lab.bench.needle.words import sentences
from kvrecall.lab.bench.report import Report
from kvrecall.lab.engines.server import Progress as Say

PLOT = Path("var/needle.png")

Advance = Callable[[str, int], None]
"""Called with what is being done, and how many replies just came."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What to measure. ``model``: a folder, or a name at ``endpoint``; None for the default.

    ``settings``: of retrieval, to compare, of a local model; at least one. ``endpoint``, ``dense``:
    servers to ask instead of a local model, with ``key``. ``plot``, ``records``: where to write a
    heat map (None: to ``PLOT``, if matplotlib is installed) and a line of JSON for every question.
    """

    model: str | None
    dataset: Dataset
    settings: tuple[RetrievalSettings, ...]
    bins: int = 10
    style: PromptStyle | None = None
    endpoint: str | None = None
    dense: str | None = None
    key: str | None = None
    plot: Path | None = None
    records: Path | None = None

    def __post_init__(self) -> None:
        if self.dense and not self.endpoint:
            raise ConfigError("--dense-endpoint is the other side of --endpoint; give both")


def measure_needle(wanted: Evaluation, say: Say) -> Report:
    """Asks, counts, writes. Raises KvrecallError, also if retrieval was to act and did not."""
    dataset = wanted.dataset
    with ExitStack() as stack:
        if wanted.endpoint is not None:
            model, servers = _others(wanted, stack)
        else:
            model, servers = _local(wanted, say, stack)
        recall = Path(model).name.startswith("recall-tiny")  # it knows one form of question
        style = wanted.style or (PromptStyle.RECALL if recall else PromptStyle.INSTRUCT)
        advance = stack.enter_context(_bar(dataset.question_count * len(servers.variants)))
        results = ask_all(servers, style, dataset, advance)
    results.require_active()
    facts: dict[str, object] = {
        "tasks": list(dataset.tasks),
        "samples": dataset.samples,
        "seed": dataset.seed,
        "asked_as": style.value,
    }
    if wanted.endpoint is None:
        settings = dataclasses.asdict(wanted.settings[0])
        for name in ("topk_share", "digest_tokens", "offload_boundary"):
            del settings[name]
        facts["settings"] = settings
    report = report_of(results, model, dataset.tasks, wanted.bins, facts)
    notes = list(report.notes)
    if wanted.records is not None:
        wanted.records.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(dataclasses.asdict(record)) for record in results.records]
        wanted.records.write_text("".join(f"{line}\n" for line in lines))
        notes.append(f"every question and reply: {wanted.records}")
    try:
        path = wanted.plot or PLOT
        write_heatmap(results, wanted.bins, Path(model).name, path)
        notes.append(f"heat map: {path}")
    except ConfigError as error:
        if wanted.plot is not None:
            raise
        notes.append(str(error))
    return dataclasses.replace(report, notes=tuple(notes))


def _local(wanted: Evaluation, say: Say, stack: ExitStack) -> tuple[str, Servers]:
    """Raises ConfigError before anything starts where the model cannot read so much, or retrieval
    could not act at any of the lengths."""
    from kvrecall.server.launch import default_model

    model, settings = wanted.model or default_model(), wanted.settings[0]
    longest = max(wanted.dataset.lengths)
    allowed = model_config(Path(model)).get("max_position_embeddings")
    if allowed is not None and longest > allowed:
        raise ConfigError(
            f"--lengths: {longest} tokens are more than {model} can read "
            f"(max_position_embeddings {allowed})"
        )
    if longest < settings.dense_boundary:
        raise ConfigError(
            f"--dense-boundary {settings.dense_boundary} leaves all lengths dense; lower it"
        )
    if not split_of(longest, BLOCK, settings).middle:
        raise ConfigError(
            f"--lengths: {longest} tokens leave nothing to choose from, as the first "
            f"{settings.init_tokens} and the last {settings.local_tokens} always take part"
        )
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrecall-needle-")))
    say(f"starting {model}, once for all lengths and settings")
    server = local_server(model, longest, settings, folder / "server.log", say)
    stack.enter_context(server)

    @contextmanager
    def with_log() -> Iterator[None]:  # which goes with the folder
        try:
            yield
        except EngineError as error:
            raise EngineError(f"{error}\n{server.log_tail(60)}") from error

    stack.enter_context(with_log())
    endpoint = stack.enter_context(Endpoint(server.url))
    return model, SwitchedServer(endpoint, wanted.settings)


def _others(wanted: Evaluation, stack: ExitStack) -> tuple[str, Servers]:
    assert wanted.endpoint is not None
    measured = stack.enter_context(Endpoint(wanted.endpoint, wanted.model, wanted.key))
    dense = None
    if wanted.dense is not None:
        dense = stack.enter_context(Endpoint(wanted.dense, wanted.model, wanted.key))
    return measured.model, OtherServers(measured, dense)


def ask_all(servers: Servers, style: PromptStyle, dataset: Dataset, advance: Advance) -> Results:
    """Replies to all lengths, short ones first, document by document. Raises EngineError."""
    short = min(dataset.lengths)
    text = " ".join(islice(sentences(random.Random(1)), min(120, short // 24)))
    endpoint = servers.turn_to(servers.variants[0])
    ratio = 1.005 * endpoint.tokens_of(text) / approximate_tokens(text)

    def measure(line: str) -> int:  # as the server's tokenizer does, to about half a per cent
        return round(approximate_tokens(line) * ratio)

    results = Results(servers.variants)
    for length in sorted(dataset.lengths):
        for sample in dataset.at(length, style.reserve, measure):
            replies = [
                _replies(servers, variant, style, sample, results, advance)
                for variant in servers.variants
            ]
            for question, said in zip(sample.questions, zip(*replies, strict=True), strict=True):
                right = tuple(is_answered(style, question, reply) for reply in said)
                results.records.append(
                    Record(
                        length, question.task, question.depth, question.text,
                        question.expected, right, said,
                    )
                )  # fmt: skip
    return results


def _replies(
    servers: Servers,
    variant: Variant,
    style: PromptStyle,
    sample: Sample,
    results: Results,
    advance: Advance,
) -> list[str]:
    """Of one variant to a document's questions. The first is asked alone, so that the document is
    computed once. Adds the blocks chosen to ``results``."""
    endpoint = servers.turn_to(variant)
    before = servers.blocks_selected(variant) if variant.retrieval else None
    doing = f"{sample.length:,} tokens, {variant.name}"
    requests = [request_of(style, sample.document, question) for question in sample.questions]
    advance(doing, 0)
    replies = [endpoint.ask(requests[0])]
    advance(doing, 1)
    with ThreadPoolExecutor(CONCURRENT) as pool:
        for reply in pool.map(endpoint.ask, requests[1:]):
            replies.append(reply)
            advance(doing, 1)
    if variant.retrieval:
        after, total = servers.blocks_selected(variant), results.selected.get(variant.name, 0)
        known = before is not None and after is not None and total is not None
        results.selected[variant.name] = total + after - before if known else None  # type: ignore[operator]
    return replies


@contextmanager
def _bar(total: int) -> Iterator[Advance]:
    """A bar on standard error; where that is no terminal, a line for every text and variant."""
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
