"""``bench needle``: asks every question of a dataset with every variant, by one local server whose
retrieval settings are switched, so that every prompt is computed once; and the report."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kvrecall.attention import PREFIX
from kvrecall.attention.selection import split_of
from kvrecall.attention.settings import MODES, RETRIEVALKV, RetrievalSettings
from kvrecall.bench.model import BLOCK
from kvrecall.bench.report import Report, names_in, progress
from kvrecall.demo.cli import TRAINED
from kvrecall.environment import PLUGINS
from kvrecall.errors import ConfigError, EngineError, KvrecallError
from kvrecall.plan.model import read_shape
from kvrecall.processes.child import server_environment
from kvrecall.processes.server import ServerProcess
from kvrecall_lab.bench.decode import lengths_in, shares_in
from kvrecall_lab.bench.needle.tasks import (
    SEED,
    TASKS,
    Dataset,
    Document,
    PromptStyle,
    approximate_tokens,
    is_right,
    request_of,
)
from kvrecall_lab.bench.needle.words import sentences

NEVER = 2**40
"""A boundary no sequence reaches."""

_EXTENSION = "kvrecall_lab.engines.switching.SwitchExtension"
_CONCURRENT = 8
_Z = 1.96  # for a 95 % interval


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant under comparison. ``settings``: those of retrieval; None for dense attention."""

    name: str
    settings: RetrievalSettings | None = None


DENSE = Variant("dense")


@dataclass(frozen=True, slots=True)
class Record:
    """One question. ``right``: whether each variant's reply was right, in their order."""

    length: int
    task: str
    question: str
    expected: tuple[str, ...]
    right: tuple[bool, ...]
    replies: tuple[str, ...]


@dataclass(slots=True)
class Results:
    """Replies of all variants, the first of which is dense. ``selected``: blocks selected under
    each of the others."""

    variants: Sequence[Variant]
    records: list[Record] = field(default_factory=list)
    selected: Counter[str] = field(default_factory=Counter)


def measure_needle(
    model: Annotated[
        str | None, typer.Option(help="Model folder; default: the example model.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts: 4K,16K,65536.")] = "8K,16K",
    tasks: Annotated[str, typer.Option(help="Which tasks.")] = ",".join(TASKS),
    samples: Annotated[int, typer.Option(help="Questions per task and length.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = SEED,
    shares: Annotated[
        str, typer.Option("--shares", "--share", help="Shares of the middle blocks: 0.2,0.05.")
    ] = "0.2",
    digest: Annotated[str, typer.Option(help="bounds or mean.")] = "bounds",
    digest_tokens: Annotated[
        str, typer.Option(help="Keys to a digest; several: 16,8. Default: by the share.")
    ] = "",
    least: Annotated[
        int, typer.Option(help="Minimum number of selected blocks. 0: by the share.", min=0)
    ] = 0,
    init: Annotated[int, typer.Option(help="First tokens that are always attended to.")] = 128,
    local: Annotated[int, typer.Option(help="Last tokens that are always attended to.")] = 256,
    dense_boundary: Annotated[int, typer.Option(help="Shorter sequences stay dense.")] = 512,
    dense_layers: Annotated[
        int, typer.Option(help="First layers that attend to all tokens; 0 is the hard case.")
    ] = 0,
    reference: Annotated[
        bool, typer.Option(help="With each share also VLLM_RETRIEVAL_MODE=retrievalkv.")
    ] = False,
    records: Annotated[
        Path | None, typer.Option(help="File for all questions and replies, JSON lines.")
    ] = None,
) -> Report:
    """Does the model still answer? Facts in long texts, dense and by retrieval in one run.

    A local model is started once, computes every text once, and answers every question densely and
    with each share. Fails if retrieval should act and selected no block.
    """
    for name in names_in(digest_tokens):
        if not name.isdigit() or not int(name) or 128 % int(name):
            raise ConfigError(f"--digest-tokens: {name!r} does not divide a block of 128 tokens")
    settings = [
        RetrievalSettings(
            init_tokens=init, local_tokens=local, dense_boundary=dense_boundary,
            offload_boundary=NEVER, dense_layers=dense_layers, gate=False, digest=digest,
            least_blocks=least, topk_share=share, digest_tokens=int(size),
        )
        for size in names_in(digest_tokens) or ("0",)
        for share in shares_in(shares)
    ]  # fmt: skip
    if reference:
        fixed: dict[str, Any] = {"mode": RETRIEVALKV, **MODES[RETRIEVALKV]}
        settings += [
            dataclasses.replace(settings[0], topk_share=share, **fixed)
            for share in shares_in(shares)
        ]
    dataset = Dataset(lengths_in(lengths), names_in(tasks), samples, seed)
    model = model or str(TRAINED)
    recall = Path(model).name.startswith("recall-tiny")  # the model knows one form of question
    style = PromptStyle.RECALL if recall else PromptStyle.INSTRUCT
    arguments = _server_arguments(model, max(dataset.lengths), settings[0])
    with tempfile.TemporaryDirectory(prefix="kvrecall-needle-") as folder:
        progress(f"starting {model}, once for all lengths and settings")
        log = Path(folder) / "server.log"
        with ServerProcess(arguments, log, progress, _environment(settings[0])) as server:
            try:
                results = ask_all(_Switched(server.url), settings, style, dataset)
            except EngineError as error:  # the log goes with the folder
                raise EngineError(f"{error}\n{server.log_tail(60)}") from error
    report = report_of(results, model, dataset, {"seed": seed, "asked_as": style.value})
    if records is not None:
        records.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(dataclasses.asdict(record)) for record in results.records]
        records.write_text("".join(f"{line}\n" for line in lines))
    return report


# -- the server ------------------------------------------------------------------------------


def _server_arguments(model: str, longest: int, settings: RetrievalSettings) -> list[str]:
    """Of a server for sequences of up to ``longest`` tokens whose settings can be switched. Raises
    ConfigError if the lengths exceed the model's context or retrieval could not act at any."""
    shape = read_shape(Path(model))
    if longest > shape.max_context:
        raise ConfigError(
            f"--lengths: {longest} tokens are more than {model} can read "
            f"(max_position_embeddings {shape.max_context})"
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
    cache = (2 * longest + _CONCURRENT * 2048) * shape.kv_bytes_per_token  # twice the longest
    arguments = [model, "--no-pool", "--max-model-len", str(longest)]
    arguments += ["--kv-cache-memory-bytes", str(max(256 << 20, cache))]
    return [*arguments, "--", "--worker-extension-cls", _EXTENSION, "--max-num-seqs", "8"]


def _environment(settings: RetrievalSettings) -> dict[str, str]:
    kept = {k: v for k, v in server_environment().items() if not k.startswith(PREFIX)}
    return {
        **kept,
        PLUGINS: "retrieval,waits",
        f"{PREFIX}DENSE_BOUNDARY": str(settings.dense_boundary),
        f"{PREFIX}OFFLOAD_BOUNDARY": str(NEVER),
        f"{PREFIX}DENSE_LAYERS": str(settings.dense_layers),
        f"{PREFIX}DIGEST": settings.digest,
        f"{PREFIX}DIGEST_TOKENS": str(settings.tokens_a_digest),
    }


class _Switched:
    """A client of the server, by OpenAI's protocol and vLLM's development routes. Safe to use from
    several threads. Raises EngineError with the server's message."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client(timeout=httpx.Timeout(3600.0, connect=20))
        self._model = str(self._call("/v1/models")["data"][0]["id"])

    def use(self, settings: RetrievalSettings) -> None:
        """From the next request on; none may be in flight."""
        self._workers("retrieval_use", settings=json.dumps(dataclasses.asdict(settings)))

    def blocks_selected(self) -> int:
        """Middle blocks selected so far."""
        return int(self._workers("retrieval_activity")["blocks_selected"])

    def complete(self, route: str, body: Mapping[str, object]) -> tuple[str, int]:
        """The text of the reply, and the prompt's tokens."""
        body = {"model": self._model, "temperature": 0, **body}
        reply = self._call(f"/v1{route}", body)
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return str(text), int(reply["usage"]["prompt_tokens"])

    def _workers(self, method: str, **arguments: str) -> Mapping[str, int]:
        """The first worker's reply."""
        body = {"method": method, "kwargs": arguments}
        return dict(self._call("/collective_rpc", body)["results"][0])

    def _call(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        try:
            verb = "GET" if body is None else "POST"
            reply = self._client.request(verb, f"{self._url}{path}", json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"no answer from {self._url}{path}: {error!r}") from error
        if reply.status_code != 200:
            raise EngineError(f"{self._url}{path}: HTTP {reply.status_code}: {reply.text[:500]}")
        return reply.json()


def ask_all(
    server: _Switched, settings: Sequence[RetrievalSettings], style: PromptStyle, dataset: Dataset
) -> Results:
    """Replies to all lengths, short ones first, document by document. Raises EngineError, and
    KvrecallError if a variant with retrieval selected no block."""
    several = (
        len({(one.digest, one.digest_tokens) for one in settings if one.mode != RETRIEVALKV}) > 1
    )
    results = Results([DENSE, *(Variant(_name(one, several), one) for one in settings)])
    dense = dataclasses.replace(settings[0], dense_boundary=NEVER)
    server.use(dense)
    text = " ".join(islice(sentences(random.Random(1)), min(120, min(dataset.lengths) // 24)))
    _, tokens = server.complete("/completions", {"prompt": text, "max_tokens": 1})
    ratio = 1.005 * tokens / approximate_tokens(text)

    def measure(line: str) -> int:  # within about half a per cent of the server's tokenizer
        return round(approximate_tokens(line) * ratio)

    for length in sorted(dataset.lengths):
        for document in dataset.at(length, style.reserve, measure):
            replies = []
            for variant in results.variants:
                progress(f"{length:,} tokens, {variant.name}: {len(results.records)} answered")
                server.use(variant.settings or dense)
                before = server.blocks_selected()
                replies.append(_replies(server, style, document))
                if variant.settings is not None:
                    results.selected[variant.name] += server.blocks_selected() - before
            for one, said in zip(document.questions, zip(*replies, strict=True), strict=True):
                right = tuple(is_right(style, one, reply) for reply in said)
                results.records.append(
                    Record(length, one.task, one.text, one.expected, right, said)
                )
    require_active(results)
    return results


def _name(settings: RetrievalSettings, several: bool) -> str:
    """``several``: kinds of digests are compared."""
    if settings.mode == RETRIEVALKV:
        return f"{RETRIEVALKV} {settings.topk_share:g}"
    digest = f", {settings.tokens_a_digest}" if several else ""
    return f"retrieval {settings.topk_share:g}{digest}"


def _replies(server: _Switched, style: PromptStyle, document: Document) -> list[str]:
    """To a document's questions. The first is sent alone, so that the document is computed once."""
    first, *others = (request_of(style, document, one) for one in document.questions)
    replies = [server.complete(*first)[0]]
    with ThreadPoolExecutor(_CONCURRENT) as pool:
        return replies + [text for text, _ in pool.map(lambda one: server.complete(*one), others)]


def require_active(results: Results) -> None:
    """Raises KvrecallError if a variant with retrieval selected no block."""
    for variant in results.variants:
        if variant.settings and not results.selected[variant.name]:
            raise KvrecallError(
                f"{variant.name}: retrieval did not act, no block was selected; the lengths may be "
                "within the dense boundary, or init and local tokens cover them"
            )


# -- the report ------------------------------------------------------------------------------


def interval(right: int, asked: int) -> tuple[float, float]:
    """Wilson's 95 % interval, in per cent."""
    if not asked:
        return (0.0, 100.0)
    p = right / asked
    middle = (p + _Z * _Z / (2 * asked)) / (1 + _Z * _Z / asked)
    half = _Z / (1 + _Z * _Z / asked)
    half *= math.sqrt(p * (1 - p) / asked + _Z * _Z / (4 * asked * asked))
    return (round(100 * max(0.0, middle - half), 1), round(100 * min(1.0, middle + half), 1))


def _score(records: Iterable[Record], variant: int) -> dict[str, float]:
    """A variant on these questions; ``lost``, ``gained``: those that only dense answered, and that
    only it did."""
    pairs = [(record.right[0], record.right[variant]) for record in records]
    right = sum(one for _, one in pairs)
    low, high = interval(right, len(pairs))
    return {
        "percent": round(100 * right / max(1, len(pairs)), 1),
        "right": right,
        "asked": len(pairs),
        "low": low,
        "high": high,
        "lost": pairs.count((True, False)),
        "gained": pairs.count((False, True)),
    }


def report_of(
    results: Results, model: str, dataset: Dataset, facts: Mapping[str, object]
) -> Report:
    """The table and the line of JSON, which contains ``facts`` unchanged."""
    lengths = sorted({record.length for record in results.records})
    scores: list[dict[str, Any]] = [
        {
            str(length): {
                name: _score(
                    (r for r in results.records if r.length == length and name in (r.task, "all")),
                    number,
                )
                for name in (*dataset.tasks, "all")
            }
            for length in lengths
        }
        for number in range(len(results.variants))
    ]
    arms = [
        {
            "name": one.name,
            "share": one.settings.topk_share,
            "digest": f"{one.settings.digest} of {one.settings.tokens_a_digest}",
            "blocks_selected": results.selected[one.name],
            "results": found,
        }
        for one, found in zip(results.variants, scores, strict=True)
        if one.settings is not None
    ]
    rows = []
    for length in map(str, lengths):
        for name in (*dataset.tasks, "all"):
            each = [found[length][name] for found in scores]
            cells = (f"{s['percent']:.1f} [{s['low']:.0f}-{s['high']:.0f}]" for s in each)
            lost = "; ".join(f"{one['lost']}, {one['gained']}" for one in each[1:])
            rows.append((f"{int(length):,}", f"{name} ({each[0]['asked']})", *cells, lost))
    columns = ("tokens", "task", *(one.name for one in results.variants), "lost, gained")
    notes = (
        "per cent right of the questions asked (in brackets), with Wilson's 95 % interval",
        "lost, gained: questions that only dense answered, and only the other",
        *(f"{one['name']}: {one['blocks_selected']} blocks chosen" for one in arms),
    )
    figures = {
        "model": model,
        "lengths": lengths,
        "dense": scores[0],
        "retrieval": arms[0]["results"],
        "share": arms[0]["share"],
        "active": all(one["blocks_selected"] for one in arms),
        "questions": len(results.records),
        "arms": arms,
        "tasks": list(dataset.tasks),
        "samples": dataset.samples,
        **facts,
    }
    return Report("needle", columns, tuple(rows), figures, notes)
