"""``kvrecall bench``: each command prints a table and ends with one line of JSON."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from kvrecall.cli import add_lazily
from kvrecall.errors import errors_shown
from kvrecall.lab.bench import suite
from kvrecall.lab.bench.report import Report, names_in, progress
from kvrecall.lab.bench.tables import publish as publish_run

COMMANDS = {
    "restore": (
        "restore",
        "Time to first token on a prefix: computed, from device, host and disk.",
    ),
    "overhead": (
        "overhead",
        "Prefill throughput with the pool saving everything, against no pool.",
    ),
    "throttle": (
        "throttle",
        "Load or recompute: a hit on a disk of several bandwidths, against computing it.",
    ),
    "service": (
        "service",
        "The pool service: look-ups, two clients restoring at once, start-up with a full disk.",
    ),
    "step": (
        "step",
        "What the connector adds to a step of vLLM's scheduler while sequences decode.",
    ),
    "misses": (
        "misses",
        "Every cause of a miss brought about on live servers: is it the one that is reported?",
    ),
    "launches": (
        "launches",
        "Calls, operations and waits that kvrecall asks of a device, counted without one.",
    ),
    "lookup": ("pool", "How long the scheduler's look-up of 1,000 blocks takes."),
    "index": (
        "index",
        "The disk tier's index at a size: memory a block, opening, look-ups, pauses.",
    ),
    "soak": (
        "soak",
        "A pool on a full disk for an hour: memory, drift of latencies, lost and wrong blocks.",
    ),
    "disk": ("pool", "Disk tier -> arena against a raw sequential read of the same file system."),
    "tiers": (
        "tiers",
        "Host and disk tier against other projects' libraries: same blocks, same bytes.",
    ),
    "remote": (
        "remote",
        "Remote tier over Mooncake against its bare client; a remote hit against computing.",
    ),
    "compression": (
        "compression",
        "Lossless compression of KV: ratios, speeds, and what a hit takes behind links of several "
        "speeds.",
    ),
    "decode": (
        "decode",
        "Attention of a decoded token: dense, and by retrieval with RetrievalKV's defaults.",
    ),
    "regimes": (
        "decode",
        "The same at many lengths and shares, as an engine serves it; fails above 1.05 of dense.",
    ),
    "vectors": (
        "vectors",
        "Vector indexes in place of the exact search for blocks: found, time, memory.",
    ),
    "generate": (
        "generate",
        "Tokens a second and device memory of whole engines with long sequences, dense and by "
        "retrieval.",
    ),
    "chat": (
        "serving",
        "Conversations and questions over long texts against servers with each kind of pool.",
    ),
    "replay": ("serving", "A slice of a recorded trace, scaled down, against live servers."),
    "router": (
        "router",
        "Agents' sessions before two engines: which of them a router chooses, and what it knows.",
    ),
    "needle": (
        "needle.evaluate",
        "Does the model still answer? Facts in long texts, dense and by retrieval.",
    ),
}
"""Benchmarks by name, each with its help and the module of its function, ``measure_NAME``, which is
imported when it is called. Annotated parameters are options; the others are for tests."""

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure recall on this machine."
)


def benchmark(name: str) -> typer.Typer:
    """A benchmark with its options."""
    room = importlib.import_module(f"kvrecall.lab.bench.{COMMANDS[name][0]}")
    one = typer.Typer(add_completion=False)
    one.command()(_with_json(getattr(room, f"measure_{name}")))
    return one


def _with_json(measure: Callable[..., Report]) -> Callable[..., None]:
    """A benchmark as a function of its options and ``--json`` that prints the report."""

    def run(json: bool, **options: Any) -> None:
        with errors_shown(), progress.alive():
            report = measure(**options)
        report.print(json)

    signature = inspect.signature(measure, eval_str=True)
    options = [
        one for one in signature.parameters.values() if get_origin(one.annotation) is Annotated
    ]
    json = inspect.Parameter(
        "json",
        inspect.Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")],
    )
    run.__signature__ = inspect.Signature([*options, json])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*options, json)}
    run.__doc__ = measure.__doc__
    return run


for _name, (_, _text) in COMMANDS.items():
    add_lazily(app, _name, _text, partial(benchmark, _name))


@app.command("all")
def run_suite(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Small sizes: takes minutes; figures are not representative."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Results file.")] = suite.LATEST,
    only: Annotated[str, typer.Option(help="These benchmarks only, comma-separated.")] = "",
    add: Annotated[bool, typer.Option("--add", help="Keep the other results in the file.")] = False,
    note: Annotated[str, typer.Option(help="A note for readers of the results.")] = "",
) -> None:
    """Runs all benchmarks, with their peers, one after the other; records failures."""
    steps = suite.quick() if quick else suite.full()
    if only:
        wanted = names_in(only)
        unknown = sorted(set(wanted) - {step.name for step in steps})
        if unknown:
            names = ", ".join(step.name for step in steps)
            raise typer.BadParameter(f"{', '.join(unknown)}; known: {names}")
        steps = [step for step in steps if step.name in wanted]
    with progress.alive(beats=False):  # the benchmarks that it runs do
        failed = suite.run_all(steps, out, "quick" if quick else "full", progress, add, note)
    raise typer.Exit(1 if failed else 0)


@app.command()
def publish(
    results: Annotated[Path, typer.Argument(help="Results of `bench all`.")] = suite.LATEST,
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Generates the plots and tables of README and documents from a run."""
    with errors_shown():
        for path in publish_run(results, root):
            typer.echo(str(path))
