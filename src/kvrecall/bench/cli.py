"""``kvrecall bench``: each command prints a table and ends with one line of JSON."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, get_origin

import typer

from kvrecall.bench.report import BIAS, Report, progress
from kvrecall.commands import add_lazily
from kvrecall.errors import errors_shown

COMMANDS: Mapping[str, tuple[str, str]] = {
    "restore": (
        "kvrecall.bench.restore",
        "Time to first token on a prefix: computed, from device, host and disk.",
    ),
    "overhead": (
        "kvrecall.bench.overhead",
        "Prefill throughput with the pool saving everything, against no pool.",
    ),
    "service": (
        "kvrecall.bench.service",
        "The pool service: look-ups, two clients restoring at once, start-up with a full disk.",
    ),
    "lookup": ("kvrecall.bench.pool", "How long the scheduler's look-up of 1,000 blocks takes."),
    "disk": (
        "kvrecall.bench.pool",
        "Disk tier -> arena against a raw sequential read of the same file system.",
    ),
    "chat": (
        "kvrecall.bench.serving",
        "Conversations and questions over long texts against servers with each kind of pool.",
    ),
}
"""Benchmarks by name, each with the module of its function, ``measure_NAME``, which is imported
when it is called, and its help. Annotated parameters are options; the others are for tests and for
the laboratory."""


def benchmark(
    name: str,
    commands: Mapping[str, tuple[str, str]] = COMMANDS,
    biases: Mapping[str, str] = BIAS,
) -> typer.Typer:
    """A benchmark of ``commands`` with its options."""
    module = importlib.import_module(commands[name][0])
    one = typer.Typer(add_completion=False)
    one.command()(_with_json(getattr(module, f"measure_{name}"), biases))
    return one


def benchmarks(
    commands: Mapping[str, tuple[str, str]], biases: Mapping[str, str] = BIAS
) -> typer.Typer:
    """All of ``commands`` as one application."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, help="Measure recall on this machine."
    )
    for name, (_, text) in commands.items():
        add_lazily(app, name, text, partial(benchmark, name, commands, biases))
    return app


def _with_json(measure: Callable[..., Report], biases: Mapping[str, str]) -> Callable[..., None]:
    """A benchmark as a function of its options and ``--json`` that prints the report."""

    def run(json: bool, **options: Any) -> None:
        with errors_shown(), progress.alive():
            report = measure(**options)
        report.print(json, biases)

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


app = benchmarks(COMMANDS)
