"""``kvrecall gpu-check``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvrecall.engines.vllm.compat.versions import SUPPORTED, minor
from kvrecall.lab.bench.concurrency import Load
from kvrecall.lab.bench.report import engine_version, machine
from kvrecall.lab.gpu_check import servers
from kvrecall.lab.gpu_check.outcome import Outcome, State, tried
from kvrecall.lab.gpu_check.part import run_part
from kvrecall.lab.progress import ProgressLines

app = typer.Typer(add_completion=False)

_DEVICE = "cuda"
_NOTHING = "; nothing was checked"
_PARTS = ("copies", "bandwidth", "retrieval", "decode")
_CONTEXTS = (8192, 16384, 32768, 65536, 131072)
_QUICK_CONTEXTS = (8192,)
_DECODE_CONTEXTS = (32768, 131072)
_LOAD = Load(65536, 8, 128, 2)
_QUICK_LOAD = Load(16384, 4, 32, 1)

Json = Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")]


@app.command()
def gpu_check(
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: takes a few minutes.")
    ] = False,
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Also write the line of JSON to this file.")
    ] = None,
    require: Annotated[
        bool, typer.Option("--require", help="Exit with 1 if there is nothing to check.")
    ] = False,
) -> None:
    """Check kvrecall on this machine's GPU, and measure it.

    Exits with 1 if a check failed. Without a GPU or vLLM, reports that and exits with 0.
    """

    progress = ProgressLines("gpu-check")
    with progress.alive():
        outcomes = list(_outcomes(quick, progress))
    report = summary(outcomes)
    if not as_json and report["ran"]:
        _show(outcomes)
    line = json.dumps(report, separators=(",", ":"))
    if out is not None:
        out.write_text(line + "\n")
    typer.echo(line)
    raise typer.Exit(status(outcomes, require))


def status(outcomes: list[Outcome], require: bool) -> int:
    """0 if nothing failed and, with ``require``, something was checked."""
    if any(each.state is State.FAIL for each in outcomes):
        return 1
    return int(require and outcomes[0].state is not State.PASS)


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """The line of JSON. ``ran``: whether there was a device to check."""
    return {
        "check": "gpu",
        "ran": outcomes[0].state is State.PASS,
        "why_not": "" if outcomes[0].state is State.PASS else outcomes[0].note,
        "failed": [each.check for each in outcomes if each.state is State.FAIL],
        "checks": {
            each.check: {"state": each.state, "note": each.note, **each.figures}
            for each in outcomes
        },
        **machine(),
    }


def _outcomes(quick: bool, progress: Callable[[str], None]) -> Iterator[Outcome]:
    """The outcomes; the first is whether there is a device, and without one the only one."""
    found = without_engine() or run_part("device", _DEVICE)
    progress(found.note + ("" if found.state is State.PASS else _NOTHING))
    yield found
    if found.state is not State.PASS:
        return
    for name in _PARTS:
        progress(f"{name} ...")
        yield run_part(name, _DEVICE, quick)
    for form in ["piecewise"] if quick else list(servers.FORMS):
        yield tried(f"tokens, {form}", progress, partial(servers.check_tokens, form, progress))
    contexts, repetitions = (_QUICK_CONTEXTS, 2) if quick else (_CONTEXTS, 5)
    first = partial(servers.measure_first_token, contexts, servers.LARGE, repetitions, progress)
    yield tried("first token", progress, first)
    tokens = partial(servers.check_retrieval_tokens, _DEVICE, progress)
    yield tried("retrieval tokens", progress, tokens)
    lengths = _DECODE_CONTEXTS[: 1 if quick else None]
    decode = partial(servers.measure_decode, lengths, servers.LARGE, _DEVICE, progress)
    yield tried("decode, engine", progress, decode)
    load = _QUICK_LOAD if quick else _LOAD
    sequences = partial(servers.measure_sequences, load, servers.SHALLOW, _DEVICE, progress)
    yield tried("sequences", progress, sequences)


def without_engine() -> Outcome | None:
    """Why nothing can be checked here, found without torch; None if it can."""
    version = engine_version()
    if version == "not installed":
        return Outcome("device", State.SKIP, "vLLM is not installed here")
    if minor(version) != SUPPORTED:
        note = f"vLLM {version} is installed; kvrecall is for {SUPPORTED}"
        return Outcome("device", State.SKIP, note)
    return None


def _show(outcomes: list[Outcome]) -> None:
    table = Table(title="kvrecall gpu-check")
    for column in ("check", "", "what was found"):
        table.add_column(column)
    for each in outcomes:
        table.add_row(each.check, each.state.value, each.note)
    Console().print(table)
