"""``python -m kvrecall_lab.bench``: the product's benchmarks, those that are ours, and all of them
in one run for the pages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.bench import cli as product
from kvrecall.bench import report
from kvrecall.bench.report import names_in, progress
from kvrecall.errors import errors_shown
from kvrecall_lab.bench import suite

BIAS: Mapping[str, str] = {
    **report.BIAS,
    "replay": (
        "for caches: the beginning of a trace, before anything has to be evicted for long; against "
        "them: blocks of 512 tokens shrunk to a few dozen, so a hit saves little computing"
    ),
    "throttle": "for neither: a disk of known bandwidth, one hit at a time",
    "misses": (
        "for explanations: one request at a time, each cause alone; against them: a small model, "
        "whose first token takes milliseconds"
    ),
    "index": "for the index: blocks of one size and one namespace, in chains of 50",
    "soak": "for neither: nothing is compared; one process, blocks of 64 KiB, a steady rate",
    "tiers": (
        "for libraries of few, large calls (as ours is): requests of 16 blocks of 1 MiB, by one "
        "thread; for buffered files: what is read warm comes from the page cache; against ours: "
        "of the libraries only it waits until a write is durable and verifies what it reads"
    ),
    "remote": "for both alike: loopback instead of a network, one request at a time",
    "decode": (
        "for retrieval: long contexts, attention alone and not the rest of the model; against it: "
        "random keys, among which no block stands out"
    ),
    "generate": (
        "for retrieval: a model with little but attention to do; against it: random keys and "
        "weights, so that steps select other blocks than the steps before them"
    ),
    "router": (
        "for prefix maps: sessions that come back, over system prompts that they share; against "
        "them: two engines on the same cores, so that a wrong choice makes no queue longer"
    ),
    "needle": (
        "for retrieval: few facts in much filler; against it: questions whose answer one block "
        "holds, so that a block not chosen is an answer lost"
    ),
}
"""What each benchmark favours, by the name of its report."""

COMMANDS: Mapping[str, tuple[str, str]] = {
    **product.COMMANDS,
    "chat": ("kvrecall_lab.bench.serving", product.COMMANDS["chat"][1]),
    "throttle": (
        "kvrecall_lab.bench.throttle",
        "Load or recompute: a hit on a disk of several bandwidths, against computing it.",
    ),
    "step": (
        "kvrecall_lab.bench.step",
        "What the connector adds to a step of vLLM's scheduler while sequences decode.",
    ),
    "misses": (
        "kvrecall_lab.bench.misses",
        "Causes of misses brought about on live servers: is it the one that is reported?",
    ),
    "launches": (
        "kvrecall_lab.bench.launches",
        "Calls, operations and waits that kvrecall asks of a device, counted without one.",
    ),
    "index": (
        "kvrecall_lab.bench.index",
        "The disk tier's index at a size: memory a block, opening, look-ups, pauses.",
    ),
    "soak": (
        "kvrecall_lab.bench.soak",
        "A pool on a full disk for an hour: memory, drift of latencies, lost and wrong blocks.",
    ),
    "tiers": (
        "kvrecall_lab.bench.tiers",
        "Host and disk tier against other projects' libraries: same blocks, same bytes.",
    ),
    "remote": (
        "kvrecall_lab.bench.remote",
        "Remote tier over Mooncake against its bare client; a remote hit against computing.",
    ),
    "decode": (
        "kvrecall_lab.bench.decode",
        "Attention of a decoded token: dense, and by retrieval with RetrievalKV's defaults.",
    ),
    "generate": (
        "kvrecall_lab.bench.generate",
        "Tokens a second and device memory of whole engines with long sequences, dense and by "
        "retrieval.",
    ),
    "replay": (
        "kvrecall_lab.bench.serving",
        "A slice of a recorded trace, scaled down, against live servers.",
    ),
    "router": (
        "kvrecall_lab.bench.router",
        "Agents' sessions before two engines: which of them a router chooses, and what it knows.",
    ),
    "needle": (
        "kvrecall_lab.bench.needle.evaluate",
        "Does the model still answer? Facts in long texts, dense and by retrieval.",
    ),
}

app = product.benchmarks(COMMANDS, BIAS)


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
    from kvrecall_lab.bench import tables  # imports this module

    with errors_shown():
        for path in tables.publish(results, root):
            typer.echo(str(path))


def main() -> None:
    app(prog_name="python -m kvrecall_lab.bench")
