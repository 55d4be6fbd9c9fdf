"""``kvrecall bench``: each command prints a table and ends with one line of JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.bench.report import Report
from kvrecall.errors import KvrecallError

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
    from kvrecall.bench.restore import BLOCK, measure_restore

    _run(lambda: measure_restore(tokens // BLOCK * BLOCK, repetitions, _progress), json)


@app.command()
def overhead(
    tokens: Tokens = 4096,
    rounds: Annotated[int, typer.Option(min=1)] = 8,
    json: Json = False,
) -> None:
    """Prefill throughput with the pool saving everything, against no pool."""
    from kvrecall.bench.overhead import measure_overhead

    _run(lambda: measure_overhead(tokens, rounds, _progress), json)


@app.command()
def lookup(json: Json = False) -> None:
    """How long the scheduler's look-up of 1,000 blocks takes."""
    from kvrecall.bench.pool import lookup_report

    _run(lookup_report, json)


@app.command()
def disk(
    path: Annotated[
        Path, typer.Option(help="Folder on the file system to measure; a sub-folder is made.")
    ] = Path("var"),
    json: Json = False,
) -> None:
    """Disk tier -> arena against a raw sequential read of the same file system."""
    from kvrecall.bench.pool import disk_report

    _run(lambda: disk_report(path), json)


@app.command()
def decode(
    context: Annotated[int, typer.Option(min=128, help="Tokens of the sequence.")] = 65536,
    share: Annotated[float, typer.Option(help="Share of the middle blocks chosen.")] = 0.2,
    digest: Annotated[str, typer.Option(help="bounds, deviation or mean.")] = "bounds",
    digest_tokens: Annotated[int, typer.Option(help="Keys a digest stands for.")] = 16,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    json: Json = False,
) -> None:
    """Attention of a decoded token: dense, and by retrieval with RetrievalKV's defaults."""
    from kvrecall.bench.decode import measure_decode_report
    from kvrecall.retrieval.settings import RetrievalSettings

    def measure() -> Report:
        settings = RetrievalSettings(topk_share=share, digest=digest, digest_tokens=digest_tokens)
        return measure_decode_report(context, settings, rounds, threads)

    _run(measure, json)


def _run(measure: Callable[[], Report], as_json: bool) -> None:
    try:
        report = measure()
    except KvrecallError as error:
        typer.echo(f"kvrecall: {error}", err=True)
        raise typer.Exit(1) from error
    report.print(as_json)


def _progress(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
