"""``kvrecall bench``: each command prints a table, or with ``--json`` one line of JSON."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Annotated, Any, get_origin

import typer

from kvrecall.bench.report import progress
from kvrecall.commands import Json, add_lazily, take_options
from kvrecall.errors import ConfigError, errors_shown

Commands = Mapping[str, tuple[str, str, str]]
"""Benchmarks by name: the module of its function, ``measure_NAME``, imported when it is called, or
"" if another package's entry point names it; its help; and what it is biased towards. Annotated
parameters of the function are options; the others are for tests and for the laboratory."""

COMMANDS: Commands = {
    "restore": (
        "kvrecall.bench.restore",
        "Time to first token: computed, from device, host and disk.",
        "for recall: one request at a time, one long prefix that is hit as a whole; against it: a "
        "small model, so computing is cheap",
    ),
    "overhead": (
        "kvrecall.bench.restore",
        "Prefill throughput while the pool saves everything.",
        "against the pool: nothing is ever asked again, so saving can only cost",
    ),
    "service": (
        "kvrecall.bench.service",
        "The pool service: look-ups, two clients, start with a full disk.",
        "for the service: clients that do nothing else, few at once or at a steady rate",
    ),
    "lookup": (
        "kvrecall.bench.pool",
        "How long the scheduler's look-up of 1,000 blocks takes.",
        "for the pool: one caller, keys that are all there or all absent",
    ),
    "disk": (
        "kvrecall.bench.pool",
        "Disk tier to arena, against a raw sequential read.",
        "for the tier: large blocks in deep queues; against it: checksums, and durable writes",
    ),
    "chat": (
        "kvrecall.bench.serving",
        "Conversations and long texts, on servers with each kind of pool.",
        "for caches: every session asks again what it asked before, and the device holds a quarter "
        "of it; against them: a small model computes its prompts quickly, and clients, engines and "
        "stores share the cores",
    ),
    "replay": (
        "",  # of the repository's laboratory, which the wheel lacks
        "The middle of a recorded trace, on full pools (in a checkout).",
        "for the pool: one request at a time; against it: a small model, which computes quickly",
    ),
}


def benchmark(name: str, commands: Commands = COMMANDS) -> typer.Typer:
    """A benchmark with its options, and ``--json``; it prints its report."""
    module, _, bias = commands[name]
    with errors_shown():
        measure = getattr(importlib.import_module(module or _brought(name)), f"measure_{name}")

    def run(json: bool, **options: Any) -> None:
        with errors_shown(), progress.alive():
            report = measure(**options)
        report.print(json, bias)

    own = inspect.signature(measure, eval_str=True).parameters.values()
    options = {
        one.name: (one.annotation, one.default)
        for one in own
        if get_origin(one.annotation) is Annotated
    }
    take_options(run, {**options, "json": (Json, False)})
    run.__doc__ = measure.__doc__
    one = typer.Typer(add_completion=False)
    one.command()(run)
    return one


def _brought(name: str) -> str:
    """The module of a benchmark that another package brings. Raises ConfigError."""
    for found in entry_points(group="kvrecall.bench", name=name):
        return found.value
    raise ConfigError(
        f"bench {name}: not in kvrecall's package; run it in a copy of the repository: make setup, "
        f"then .venv/bin/kvrecall bench {name}"
    )


def benchmarks(commands: Commands) -> typer.Typer:
    """All of ``commands`` as one application."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, help="Measure recall on this machine."
    )
    for name, (_, text, _) in commands.items():
        add_lazily(app, name, text, partial(benchmark, name, commands))
    return app


app = benchmarks(COMMANDS)
