"""``python -m kvrecall_lab.bench``: the product's benchmarks, those that are ours, and all of them
in one run for the pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.bench import cli as product
from kvrecall.bench.report import names_in, progress
from kvrecall.errors import errors_shown
from kvrecall_lab.bench import suite

_OURS = {
    "step": ("What the connector adds to a step of vLLM's scheduler while sequences decode.", ""),
    "misses": (
        "Causes of misses brought about on live servers: is it the one that is reported?",
        "for explanations: one request at a time, each cause alone; against them: a small model, "
        "whose first token takes milliseconds",
    ),
    "launches": (
        "Calls, operations and waits that kvrecall asks of a device, counted without one.",
        "",
    ),
    "index": (
        "The disk tier's index at a size: memory a block, opening, look-ups, also beside eviction.",
        "for the index: blocks of one size and one namespace, in chains of 50",
    ),
    "tiers": (
        "Host and disk tier against other projects' libraries: same blocks, same bytes.",
        "for libraries of few, large calls (as ours is): requests of 16 blocks of 1 MiB, by one "
        "thread; against ours: of the libraries only it waits until a write is durable and "
        "verifies what it reads",
    ),
    "remote": (
        "Remote tier over Mooncake against its bare client; a remote hit against computing.",
        "for both alike: loopback instead of a network, one request at a time",
    ),
    "decode": (
        "Attention of a decoded token: dense, and by retrieval with its defaults.",
        "for retrieval: long contexts, attention alone and not the rest of the model; against it: "
        "random keys, among which no block stands out",
    ),
    "long": (
        "Decoding behind up to a million tokens, off the device and from disk, and dense.",
        "for retrieval: a small model, whose steps are attention; against it: random KV",
    ),
    "router": (
        "Agents' sessions before two engines: which of them a router chooses, and what it knows.",
        "for prefix maps: sessions that come back, over system prompts that they share; against "
        "them: two engines on the same cores, so that a wrong choice makes no queue longer",
    ),
    "proxies": (
        "What a request of 100 KB spends in the router, beside other programs before engines.",
        "for what copies bytes: an engine that answers at once; against all: the generator and the "
        "engines are on the same cores",
    ),
    "needle": (
        "Does the model still answer? Facts in long texts, dense and by retrieval.",
        "for retrieval: few facts in much filler; against it: questions whose answer one block "
        "holds, so that a block not chosen is an answer lost",
    ),
}
"""What each does, and how it is biased."""

COMMANDS: product.Commands = {
    **product.COMMANDS,
    "chat": ("kvrecall_lab.bench.serving", *product.COMMANDS["chat"][1:]),
    "replay": ("kvrecall_lab.bench.replay", *product.COMMANDS["replay"][1:]),
    **{name: (f"kvrecall_lab.bench.{name}", *about) for name, about in _OURS.items()},
    "needle": ("kvrecall_lab.bench.needle.evaluate", *_OURS["needle"]),
}

app = product.benchmarks(COMMANDS)


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
    steps = suite.QUICK if quick else suite.FULL
    if only:
        known = [words.split()[0] for words, _ in steps]
        if unknown := sorted(set(names_in(only)) - set(known)):
            raise typer.BadParameter(f"{', '.join(unknown)}; known: {', '.join(known)}")
        steps = [one for one in steps if one[0].split()[0] in names_in(only)]
    failed = suite.run_all(steps, out, progress, add, note)  # the benchmarks say that they live
    raise typer.Exit(1 if failed else 0)


@app.command()
def publish(
    results: Annotated[Path, typer.Argument(help="Results of `bench all`.")] = suite.LATEST,
    root: Annotated[Path, typer.Option(help="The repository.")] = Path(),
) -> None:
    """Generates the tables of the documents from a run."""
    from kvrecall_lab.bench import tables  # imports this module

    with errors_shown():
        for path in tables.publish(results, root):
            typer.echo(str(path))


def main() -> None:
    app(prog_name="python -m kvrecall_lab.bench")
