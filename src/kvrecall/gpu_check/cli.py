"""``kvrecall gpu-check``."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.bench.report import NO_ENGINE, engine_version, machine
from kvrecall.commands import Json
from kvrecall.engines.vllm.compat.versions import SUPPORTED, Fit, fit_of
from kvrecall.errors import ConfigError
from kvrecall.gpu_check import CheckOutcome, State
from kvrecall.gpu_check.part import NOT_QUICK, PARTS, Part, overdue, run_part
from kvrecall.processes.command import ProgressLines

app = typer.Typer(add_completion=False)

QUICK_S = 480.0
"""``--quick`` ends within so many seconds."""

_RESERVE_S = 10.0  # to end what runs, and to say so


@app.command()
def gpu_check(
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: takes at most eight minutes.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PART", help=f"Run this part; repeatable: {', '.join(PARTS)}."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="torch's name, such as cuda:1; cpu: a trial of the check. Default: the "
            "accelerator that torch finds."
        ),
    ] = "",
    as_json: Json = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append the results of each part to this file as lines of JSON, while it runs."
        ),
    ] = None,
) -> None:
    """Check kvrecall on this machine's GPU, and measure it.

    Parts that need an engine are skipped without a supported vLLM. Exits with 1 if a check failed,
    or if there is no GPU to check.
    """
    names = wanted(only or (), quick)
    progress = ProgressLines("gpu-check")
    outcomes = []
    opened: Any = contextlib.nullcontext() if out is None else out.open("a")
    with progress.alive(), opened as file:

        def write(facts: Mapping[str, object], shown: bool) -> None:
            """To standard output, and to the file, which ``kill -9`` leaves whole up to its last
            line."""
            line = json.dumps(facts, separators=(",", ":"))
            if shown:
                typer.echo(line)
            if file is not None:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())

        def add(outcome: CheckOutcome) -> None:
            """What a part has found, at its end or before."""
            is_running = outcome.state is State.RUNNING
            if is_running:
                progress(f"  {outcome.note}")
            elif not as_json:
                typer.echo(f"{outcome.check:17} {outcome.state.value:4}  {outcome.note}")
            write(asdict(outcome), as_json and not is_running)

        write({"check": "start", "parts": names, "quick": quick, **machine()}, as_json)
        for outcome in _outcomes(names, device, quick, add):
            outcomes.append(outcome)
            add(outcome)
        write(summary(outcomes), as_json)
    if not as_json:
        typer.echo(headline(outcomes))
    raise typer.Exit(status(outcomes))


def wanted(only: Sequence[str], quick: bool) -> list[str]:
    """The parts to run, in their order; the device always comes first. Raises ConfigError."""
    for name in only:
        if name not in PARTS:
            raise ConfigError(f"--only {name}: no such part; the parts are {', '.join(PARTS)}")
    chosen = set(only) | {"device"} if only else set(PARTS) - (NOT_QUICK if quick else set())
    return [name for name in PARTS if name in chosen]


def status(outcomes: Sequence[CheckOutcome]) -> int:
    """0 if there was a device to check and nothing failed."""
    failed = any(each.state is State.FAIL for each in outcomes)
    return int(failed or outcomes[0].state is not State.PASS)


def headline(outcomes: Sequence[CheckOutcome]) -> str:
    """The last line for people."""
    told = summary(outcomes)
    if not told["ran"]:
        return f"nothing was checked: {told['why_not']}; run it where PyTorch sees a GPU"
    failed, not_run = (", ".join(map(str, told[name])) for name in ("failed", "not_run"))
    return f"failed: {failed or 'none'}; not run: {not_run or 'none'}"


def summary(outcomes: Sequence[CheckOutcome]) -> dict[str, Any]:
    """The last line. ``ran``: whether there was a device to check."""
    return {
        "check": "gpu",
        "ran": outcomes[0].state is State.PASS,
        "why_not": "" if outcomes[0].state is State.PASS else outcomes[0].note,
        "failed": [each.check for each in outcomes if each.state is State.FAIL],
        "not_run": [each.check for each in outcomes if each.state is State.SKIP],
        "checks": {
            each.check: {"state": each.state, "note": each.note, **each.figures}
            for each in outcomes
        },
        **machine(),
    }


def _outcomes(
    names: Sequence[str], device: str, quick: bool, heard: Callable[[CheckOutcome], None]
) -> Iterator[CheckOutcome]:
    """The outcomes; the first is whether there is a device, and without one the only one."""
    end = time.monotonic() + QUICK_S - _RESERVE_S if quick else float("inf")
    for name in names:
        part, left = PARTS[name], end - time.monotonic()
        why = hindrance(part, left, quick)
        limit_s = min(left, part.quick_s if quick else part.whole_s)
        outcome = (
            CheckOutcome(name, State.SKIP, why)
            if why
            else run_part(name, device, quick, limit_s, heard)
        )
        if outcome.note == overdue(limit_s) and limit_s < part.quick_s:  # by others' fault
            note = f"not done in the {limit_s:.0f} of {QUICK_S:.0f} s that were left for it"
            outcome = replace(outcome, state=State.SKIP, note=note)
        yield outcome
        if name == "device":
            if outcome.state is not State.PASS:
                return
            device = device or str(outcome.figures["device"])


def hindrance(part: Part, left_s: float, quick: bool) -> str:
    """Why a part is not run; "" if it is."""
    version = engine_version()
    is_there = version != NO_ENGINE
    if part.needs_engine and not (is_there and fit_of(version) is Fit.TESTED):
        found = f"{version} is installed" if is_there else "none is installed"
        return f"needs vLLM {SUPPORTED}; {found} here"
    if quick and left_s < part.quick_s / 3:
        return f"{left_s:.0f} of {QUICK_S:.0f} s were left, too few for it; run it with --only"
    return ""
