"""``kvrecall bench``: each command prints a table and ends with one line of JSON."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.config import parse_size
from kvrecall.errors import ConfigError, KvrecallError
from kvrecall.lab.bench.needle.dataset import SEED, Dataset, PromptStyle
from kvrecall.lab.bench.needle.tasks import TASKS
from kvrecall.lab.bench.report import Report

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure recall on this machine."
)

Json = Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")]
Tokens = Annotated[int, typer.Option(min=128, help="Length of the prefix or document.")]


@app.command()
def restore(
    tokens: Tokens = 8192,
    repetitions: Annotated[int, typer.Option(min=1)] = 9,
    json: Json = False,
) -> None:
    """Time to first token on a prefix: computed, from device, host and disk."""
    from kvrecall.lab.bench.restore import measure_restore

    _run(lambda: measure_restore(tokens, repetitions, _progress), json)


@app.command()
def overhead(
    tokens: Tokens = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 8,
    json: Json = False,
) -> None:
    """Prefill throughput with the pool saving everything, against no pool."""
    from kvrecall.lab.bench.overhead import measure_overhead

    _run(lambda: measure_overhead(tokens, rounds, _progress), json)


@app.command()
def throttle(
    tokens: Tokens = 2048,
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    json: Json = False,
) -> None:
    """Load or recompute: a hit on a disk of several bandwidths, against computing it."""
    from kvrecall.lab.bench.throttle import measure_throttle

    _run(lambda: measure_throttle(tokens, repetitions, _progress), json)


@app.command()
def service(
    blocks: Annotated[int, typer.Option(min=1000, help="On disk, for the start-up.")] = 100_000,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    json: Json = False,
) -> None:
    """The pool service: look-ups, two clients restoring at once, start-up with a full disk."""
    from kvrecall.lab.bench.service import measure_service

    _run(lambda: measure_service(blocks, repetitions, _progress), json)


@app.command()
def lookup(json: Json = False) -> None:
    """How long the scheduler's look-up of 1,000 blocks takes."""
    from kvrecall.lab.bench.pool import measure_lookup

    _run(measure_lookup, json)


@app.command()
def disk(
    path: Annotated[
        Path, typer.Option(help="Folder on the file system to measure; a sub-folder is made.")
    ] = Path("var"),
    encrypted: Annotated[bool, typer.Option("--encrypted", help="With blocks sealed.")] = False,
    size: Annotated[str, typer.Option(help="Written and read each time.")] = "1GiB",
    json: Json = False,
) -> None:
    """Disk tier -> arena against a raw sequential read of the same file system."""
    from kvrecall.lab.bench.pool import measure_disk

    _run(lambda: measure_disk(path, parse_size(size, "--size"), encrypted), json)


@app.command()
def tiers(
    path: Annotated[
        Path, typer.Option(help="Folder on the file system to measure; a sub-folder is made.")
    ] = Path("var"),
    rounds: Annotated[int, typer.Option(min=2)] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests of 16 MiB a round.")] = 12,
    json: Json = False,
) -> None:
    """Host and disk tier against other projects' libraries: same blocks, same bytes."""
    from kvrecall.lab.bench.tiers.measure import CANDIDATES, Size, measure_tiers
    from kvrecall.lab.bench.tiers.peers import find_peers

    find_peers()
    size = Size(requests=requests, rounds=rounds)
    _run(lambda: measure_tiers(CANDIDATES, size, path, _progress), json)


@app.command()
def remote(
    tokens: Tokens = 8192,
    repetitions: Annotated[int, typer.Option(min=1)] = 5,
    engines: Annotated[
        bool, typer.Option("--engines/--no-engines", help="Also a remote hit against computing.")
    ] = True,
    json: Json = False,
) -> None:
    """Remote tier over Mooncake against its bare client; a remote hit against computing."""
    from kvrecall.lab.bench.remote import measure_remote

    _run(lambda: measure_remote(tokens, repetitions, engines, _progress), json)


@app.command()
def decode(
    context: Annotated[int, typer.Option(min=128, help="Tokens of the sequence.")] = 65536,
    share: Annotated[float, typer.Option(help="Share of the middle blocks chosen.")] = 0.2,
    digest: Annotated[str, typer.Option(help="bounds or mean.")] = "bounds",
    digest_tokens: Annotated[
        int, typer.Option(help="Keys a digest stands for; 0: by the share.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    cosine: Annotated[
        float, typer.Option(min=0, max=1, help="How much a query resembles the one before.")
    ] = 0.9,
    json: Json = False,
) -> None:
    """Attention of a decoded token: dense, and by retrieval with RetrievalKV's defaults; from
    65,536 tokens on also with the middle blocks off the device."""
    from kvrecall.attention.settings import RetrievalSettings
    from kvrecall.lab.bench.decode import measure_decode_report

    def measure() -> Report:
        settings = RetrievalSettings(topk_share=share, digest=digest, digest_tokens=digest_tokens)
        return measure_decode_report(context, settings, rounds, threads, cosine)

    _run(measure, json)


@app.command()
def regimes(
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    lengths: Annotated[str, typer.Option(help="These only, such as 12K,64K.")] = "",
    json: Json = False,
) -> None:
    """Attention of a decoded token at many lengths and shares, as an engine serves it, against
    dense; fails where it is slower than 1.05 of dense."""
    from kvrecall.lab.bench.decode import CONTEXTS, measure_grid

    def measure() -> Report:
        contexts = _lengths(lengths) if lengths else CONTEXTS
        return measure_grid(rounds, threads, _progress, contexts)

    _run(measure, json)


@app.command()
def crowd(
    context: Annotated[int, typer.Option(min=2048, help="Tokens of each prompt.")] = 16384,
    sequences: Annotated[int, typer.Option(min=1, help="Prompts.")] = 8,
    decoded: Annotated[int, typer.Option(min=2, help="Tokens each decodes.")] = 128,
    dense_fits: Annotated[
        int, typer.Option(min=1, help="Whole sequences the device cache holds.")
    ] = 2,
    pooled: Annotated[
        bool, typer.Option(help="The prompts are in the pool, with random KV, and not computed.")
    ] = False,
    json: Json = False,
) -> None:
    """Long sequences that decode at once in a fixed device cache, dense and by retrieval."""
    from kvrecall.lab.bench.concurrency import Load, measure_concurrency

    load = Load(context, sequences, decoded, dense_fits, pooled)
    _run(lambda: measure_concurrency(load, _progress), json)


Variants = Annotated[str, typer.Option(help="Which servers, by name.")]


Budget = Annotated[
    float, typer.Option(min=0, help="Seconds in all; servers for which none are left are left out.")
]


@app.command()
def chat(
    sessions: Annotated[int, typer.Option(min=1)] = 32,
    turns: Annotated[int, typer.Option(min=1)] = 3,
    variants: Variants = "none,device,host,disk,mooncake,lmcache,two,service",
    seed: int = 0,
    budget: Budget = math.inf,
    json: Json = False,
) -> None:
    """Conversations and questions over long texts against servers with each kind of pool."""
    from kvrecall.lab.bench.serving.deployments import named
    from kvrecall.lab.bench.serving.measure import Capacity, measure_serving
    from kvrecall.lab.bench.serving.workload import conversations

    def measure() -> Report:
        workload = conversations(sessions, turns, seed)
        return measure_serving(workload, named(_names(variants)), Capacity(), _progress, budget)

    _run(measure, json)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's format.")],
    requests: Annotated[int, typer.Option(min=2, help="How many, from its beginning.")] = 100,
    block_tokens: Annotated[int, typer.Option(min=1, help="Tokens for a block of 512.")] = 32,
    seconds: Annotated[float, typer.Option(min=0, help="From first to last arrival.")] = 60.0,
    every: Annotated[int, typer.Option(min=1, help="Of so many sessions one is played.")] = 12,
    variants: Variants = "device,host,disk",
    budget: Budget = math.inf,
    json: Json = False,
) -> None:
    """A slice of a recorded trace, made small, against live servers."""
    from kvrecall.lab.bench.serving.deployments import named
    from kvrecall.lab.bench.serving.measure import Capacity, measure_serving
    from kvrecall.lab.bench.serving.workload import replay as slice_of

    def measure() -> Report:
        workload = slice_of(trace, requests, block_tokens, seconds, every)
        return measure_serving(workload, named(_names(variants)), Capacity(), _progress, budget)

    _run(measure, json)


def _option(panel: str, text: str, **bounds: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, **bounds)


_RETRIEVAL = "Retrieval"
_SERVERS = "Servers instead of a local model"
_OUT = "What is written"


@app.command()
def needle(
    model: Annotated[
        str | None,
        typer.Option(help="Model folder; with --endpoint its name there. Default: the example."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts: 4K,16K,65536.")] = "2K,8K",
    tasks: Annotated[str, typer.Option(help="Which tasks.")] = ",".join(TASKS),
    samples: Annotated[int, typer.Option(help="Questions a task and length.", min=1)] = 16,
    documents: Annotated[
        int | None,
        typer.Option(help="Texts a length at most. Default: one for eight of each task.", min=1),
    ] = None,
    depths: Annotated[int, typer.Option(help="Parts of the text, by depth.", min=1, max=50)] = 10,
    seed: Annotated[int, typer.Option(help="Another seed makes other texts.")] = SEED,
    ask: Annotated[
        PromptStyle | None,
        typer.Option(help="As recall-tiny was trained, or in plain language. Default: by model."),
    ] = None,
    share: Annotated[
        str, _option(_RETRIEVAL, "Share of the middle blocks chosen; several: 0.2,0.05.")
    ] = "0.2",
    digest: Annotated[str, _option(_RETRIEVAL, "bounds or mean.")] = "bounds",
    digest_tokens: Annotated[
        str, _option(_RETRIEVAL, "Keys to a digest; several: 16,8. Default: by the share.")
    ] = "",
    least: Annotated[
        int, _option(_RETRIEVAL, "Fewest blocks chosen, at any share. 0: by the share.", min=0)
    ] = 0,
    init: Annotated[int, _option(_RETRIEVAL, "First tokens that always take part.")] = 128,
    local: Annotated[int, _option(_RETRIEVAL, "Last tokens that always take part.")] = 256,
    dense_boundary: Annotated[int, _option(_RETRIEVAL, "Shorter sequences stay dense.")] = 512,
    dense_layers: Annotated[
        int, _option(_RETRIEVAL, "First layers that attend to everything; 0 is the hard case.")
    ] = 0,
    endpoint: Annotated[
        str | None, _option(_SERVERS, "URL of an OpenAI-compatible server to measure.")
    ] = None,
    dense_endpoint: Annotated[
        str | None, _option(_SERVERS, "URL of one that attends densely, to compare with.")
    ] = None,
    plot: Annotated[Path | None, _option(_OUT, "Heat map (PNG). Default: var/needle.png.")] = None,
    records: Annotated[
        Path | None, _option(_OUT, "Every question and reply, lines of JSON.")
    ] = None,
    json: Json = False,
) -> None:
    """Does the model still answer? Facts in long texts, asked densely and by retrieval in one run.

    A local model is started once, computes every text once, and answers every question densely and
    with each share. Fails if retrieval was to act and chose no block. The key of an --endpoint is
    taken from OPENAI_API_KEY.
    """
    from kvrecall.attention.settings import RetrievalSettings
    from kvrecall.lab.bench.needle.evaluate import Evaluation, measure_needle

    def measure() -> Report:
        settings = tuple(
            RetrievalSettings(
                init_tokens=init, local_tokens=local, dense_boundary=dense_boundary,
                offload_boundary=2**40, dense_layers=dense_layers, gate=False, digest=digest,
                least_blocks=least, topk_share=chosen, digest_tokens=size,
            )
            for size in _digest_sizes(digest_tokens) or (0,)
            for chosen in _shares(share)
        )  # fmt: skip
        wanted = Evaluation(
            model,
            Dataset(_lengths(lengths), _names(tasks), samples, documents, seed),
            settings,
            depths,
            ask,
            endpoint,
            dense_endpoint,
            os.environ.get("OPENAI_API_KEY"),
            plot,
            records,
        )
        return measure_needle(wanted, _progress)

    _run(measure, json)


@app.command("all")
def run_suite(
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes, some minutes; figures mean little.")
    ] = False,
    out: Annotated[Path, typer.Option(help="File of results.")] = Path("bench/results/latest.json"),
    only: Annotated[str, typer.Option(help="These benchmarks only, comma-separated.")] = "",
    add: Annotated[
        bool, typer.Option("--add", help="Keep other results that the file holds.")
    ] = False,
    note: Annotated[str, typer.Option(help="What a reader has to know of this run.")] = "",
) -> None:
    """All benchmarks with their peers, one after the other; what fails is recorded."""
    from kvrecall.lab.bench import suite

    steps = suite.quick() if quick else suite.full()
    if only:
        wanted = _names(only)
        unknown = sorted(set(wanted) - {step.name for step in steps})
        if unknown:
            names = ", ".join(step.name for step in steps)
            raise typer.BadParameter(f"{', '.join(unknown)}; there are: {names}")
        steps = [step for step in steps if step.name in wanted]
    failed = suite.run_all(steps, out, "quick" if quick else "full", _progress, add, note)
    raise typer.Exit(1 if failed else 0)


@app.command()
def publish(
    results: Annotated[Path, typer.Argument(help="What `bench all` wrote.")] = Path(
        "bench/results/latest.json"
    ),
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Plots and tables of README and documents, made from a run."""
    from kvrecall.lab.bench.tables import publish as write

    try:
        for path in write(results, root):
            typer.echo(str(path))
    except KvrecallError as error:
        typer.echo(f"kvrecall: {error}", err=True)
        raise typer.Exit(1) from error


def _names(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _lengths(text: str) -> tuple[int, ...]:
    """Tokens; ``4K`` is 4,096. Raises ConfigError."""
    lengths = []
    for name in _names(text):
        number, scale = (name[:-1], 1024) if name[-1] in "kK" else (name, 1)
        if not number.isdigit():
            raise ConfigError(f"--lengths: {name!r} is no number of tokens; write 4K or 4096")
        lengths.append(int(number) * scale)
    return tuple(lengths)


def _shares(text: str) -> tuple[float, ...]:
    """At least one, each in (0, 1]. Raises ConfigError."""
    shares = []
    for name in _names(text):
        try:
            shares.append(float(name))
        except ValueError:
            raise ConfigError(f"--share: {name!r} is no number") from None
        if not 0 < shares[-1] <= 1:
            raise ConfigError(f"--share: {name} is not in (0, 1]; 0.2 chooses a fifth")
    if not shares:
        raise ConfigError("--share: name at least one, such as 0.2")
    return tuple(shares)


def _digest_sizes(text: str) -> tuple[int, ...]:
    """Tokens of a digest, each a divisor of 128; maybe none. Raises ConfigError."""
    names = _names(text)
    for name in names:
        if not name.isdigit() or not int(name) or 128 % int(name):
            raise ConfigError(f"--digest-tokens: {name!r} does not divide a block of 128 tokens")
    return tuple(map(int, names))


def _run(measure: Callable[[], Report], as_json: bool) -> None:
    try:
        report = measure()
    except KvrecallError as error:
        typer.echo(f"kvrecall: {error}", err=True)
        raise typer.Exit(1) from error
    report.print(as_json)


def _progress(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
