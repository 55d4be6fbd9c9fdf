"""``bench needle``: runs every question of a dataset with every variant and reports the
results.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.attention.selection import split_of
from kvrecall.attention.settings import MODES, RETRIEVALKV, RetrievalSettings
from kvrecall.bench.model import BLOCK
from kvrecall.bench.report import Report, names_in, progress
from kvrecall.errors import ConfigError, EngineError
from kvrecall.server.launch import default_model
from kvrecall_lab.bench.lengths import lengths_in
from kvrecall_lab.bench.needle.dataset import (
    SEED,
    Dataset,
    PromptStyle,
    Sample,
    is_answered,
    request_of,
)
from kvrecall_lab.bench.needle.score import Record, Results, Variant, report_of
from kvrecall_lab.bench.needle.servers import (
    CONCURRENT,
    NEVER,
    Endpoint,
    SwitchedServer,
    local_server,
    model_config,
)
from kvrecall_lab.bench.needle.tasks import TASKS, approximate_tokens
from kvrecall_lab.bench.needle.words import sentences

Advance = Callable[[str, int], None]
"""Called with the current step and the number of new replies."""


def _option(panel: str, text: str, **bounds: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **bounds)


_RETRIEVAL = "Retrieval"
_OUT = "What is written"


def measure_needle(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder; default: the example model."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts: 4K,16K,65536.")] = "8K,16K",
    tasks: Annotated[str, typer.Option(help="Which tasks.")] = ",".join(TASKS),
    samples: Annotated[int, typer.Option(help="Questions per task and length.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = SEED,
    share: Annotated[
        str, _option(_RETRIEVAL, "Share of the middle blocks selected; several: 0.2,0.05.")
    ] = "0.2",
    digest: Annotated[str, _option(_RETRIEVAL, "bounds or mean.")] = "bounds",
    digest_tokens: Annotated[
        str, _option(_RETRIEVAL, "Keys to a digest; several: 16,8. Default: by the share.")
    ] = "",
    least: Annotated[
        int, _option(_RETRIEVAL, "Minimum number of selected blocks. 0: by the share.", min=0)
    ] = 0,
    init: Annotated[int, _option(_RETRIEVAL, "First tokens that are always attended to.")] = 128,
    local: Annotated[int, _option(_RETRIEVAL, "Last tokens that are always attended to.")] = 256,
    dense_boundary: Annotated[int, _option(_RETRIEVAL, "Shorter sequences stay dense.")] = 512,
    dense_layers: Annotated[
        int, _option(_RETRIEVAL, "First layers that attend to all tokens; 0 is the hard case.")
    ] = 0,
    reference: Annotated[
        bool, _option(_RETRIEVAL, "With each share also VLLM_RETRIEVAL_MODE=retrievalkv.")
    ] = False,
    records: Annotated[
        Path | None, _option(_OUT, "File for all questions and replies, JSON lines.")
    ] = None,
) -> Report:
    """Does the model still answer? Facts in long texts, dense and by retrieval in one run.

    A local model is started once, computes every text once, and answers every question densely and
    with each share. Fails if retrieval should act and selected no block.
    """
    settings = [
        RetrievalSettings(
            init_tokens=init, local_tokens=local, dense_boundary=dense_boundary,
            offload_boundary=NEVER, dense_layers=dense_layers, gate=False, digest=digest,
            least_blocks=least, topk_share=chosen, digest_tokens=size,
        )
        for size in _digest_sizes(digest_tokens) or (0,)
        for chosen in _shares(share)
    ]  # fmt: skip
    if reference:
        fixed: dict[str, Any] = {"mode": RETRIEVALKV, **MODES[RETRIEVALKV]}
        settings += [
            dataclasses.replace(settings[0], topk_share=chosen, **fixed)
            for chosen in _shares(share)
        ]
    dataset = Dataset(lengths_in(lengths), names_in(tasks), samples, seed)
    model = model or default_model()
    recall = Path(model).name.startswith("recall-tiny")  # the model knows one form of question
    style = PromptStyle.RECALL if recall else PromptStyle.INSTRUCT
    with ExitStack() as stack:
        server = _started(model, max(dataset.lengths), settings, stack)
        advance = _counting(dataset.question_count * len(server.variants))
        results = ask_all(server, style, dataset, advance)
    results.require_active()
    facts: dict[str, object] = {
        "tasks": list(dataset.tasks),
        "samples": samples,
        "seed": seed,
        "settings": {
            name: value
            for name, value in dataclasses.asdict(settings[0]).items()
            if name not in ("topk_share", "digest_tokens", "offload_boundary")
        },
        "asked_as": style.value,
    }
    report = report_of(results, model, dataset.tasks, facts)
    notes = list(report.notes)
    if records is not None:
        records.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(dataclasses.asdict(record)) for record in results.records]
        records.write_text("".join(f"{line}\n" for line in lines))
        notes.append(f"every question and reply: {records}")
    return dataclasses.replace(report, notes=tuple(notes))


def _shares(text: str) -> tuple[float, ...]:
    """At least one, each in (0, 1]. Raises ConfigError."""
    shares = []
    for name in names_in(text):
        try:
            shares.append(float(name))
        except ValueError:
            raise ConfigError(f"--share: {name!r} is not a number") from None
        if not 0 < shares[-1] <= 1:
            raise ConfigError(f"--share: {name} is not in (0, 1]; 0.2 selects a fifth")
    if not shares:
        raise ConfigError("--share: name at least one, such as 0.2")
    return tuple(shares)


def _digest_sizes(text: str) -> tuple[int, ...]:
    """Digest sizes in tokens, divisors of 128; may be empty. Raises ConfigError."""
    names = names_in(text)
    for name in names:
        if not name.isdigit() or not int(name) or 128 % int(name):
            raise ConfigError(f"--digest-tokens: {name!r} does not divide a block of 128 tokens")
    return tuple(map(int, names))


def _started(
    model: str, longest: int, variants: Sequence[RetrievalSettings], stack: ExitStack
) -> SwitchedServer:
    """Starts a server. Before that, raises ConfigError if the lengths exceed the model's context or
    retrieval could not act at any of them."""
    settings = variants[0]
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
            f"--lengths: {longest} tokens leave no blocks to select from, because the first "
            f"{settings.init_tokens} and the last {settings.local_tokens} are always "
            "attended to"
        )
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrecall-needle-")))
    progress(f"starting {model}, once for all lengths and settings")
    server = stack.enter_context(local_server(model, longest, settings, folder / "server.log"))

    @contextmanager
    def with_log() -> Iterator[None]:  # which goes with the folder
        try:
            yield
        except EngineError as error:
            raise EngineError(f"{error}\n{server.log_tail(60)}") from error

    stack.enter_context(with_log())
    return SwitchedServer(stack.enter_context(Endpoint(server.url)), variants)


def ask_all(
    server: SwitchedServer, style: PromptStyle, dataset: Dataset, advance: Advance
) -> Results:
    """Replies to all lengths, short ones first, document by document. Raises EngineError."""
    short = min(dataset.lengths)
    text = " ".join(islice(sentences(random.Random(1)), min(120, short // 24)))
    endpoint = server.turn_to(server.variants[0])
    ratio = 1.005 * endpoint.tokens_of(text) / approximate_tokens(text)

    def measure(line: str) -> int:  # within about half a per cent of the server's tokenizer
        return round(approximate_tokens(line) * ratio)

    results = Results(server.variants)
    for length in sorted(dataset.lengths):
        for sample in dataset.at(length, style.reserve, measure):
            replies = [
                _replies(server, variant, style, sample, results, advance)
                for variant in server.variants
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
    server: SwitchedServer,
    variant: Variant,
    style: PromptStyle,
    sample: Sample,
    results: Results,
    advance: Advance,
) -> list[str]:
    """A variant's replies to a document's questions. The first is sent alone, so that the document
    is computed once. Adds the selected blocks to ``results``."""
    endpoint = server.turn_to(variant)
    before = server.blocks_selected()
    doing = f"{sample.length:,} tokens, {variant.name}"
    requests = [request_of(style, sample.document, question) for question in sample.questions]
    advance(doing, 0)
    replies = [endpoint.ask(requests[0])]
    advance(doing, 1)
    with ThreadPoolExecutor(CONCURRENT) as pool:
        for reply in pool.map(endpoint.ask, requests[1:]):
            replies.append(reply)
            advance(doing, 1)
    if variant.settings is not None:
        results.selected[variant.name] += server.blocks_selected() - before
    return replies


def _counting(total: int) -> Advance:
    """Reports the number of replies so far, a line per text and variant."""
    come = 0

    def advance(doing: str, replies: int) -> None:
        nonlocal come
        come += replies
        say = progress.now if replies else progress
        say(f"{doing}: {come} of {total} replies so far")

    return advance
