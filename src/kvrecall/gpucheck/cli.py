"""``kvrecall gpu-check``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvrecall.bench.report import engine_version, machine
from kvrecall.errors import KvrecallError
from kvrecall.gpucheck import engine
from kvrecall.gpucheck.outcome import Outcome, State
from kvrecall.gpucheck.part import run_part

app = typer.Typer(add_completion=False)

SUPPORTED = ((0, 26), (0, 32))
"""vLLM's first and last minor version that kvrecall is written for."""

_DEVICE = "cuda"
_NOTHING = "; nothing was checked"
_CPU_ONLY = (
    "how many sequences decode at once with retrieval: its attention backend for vLLM runs on "
    "vLLM's CPU platform only in this version (kvrecall bench crowd measures it there)"
)
_PARTS = ("copies", "bandwidth", "retrieval", "decode")
_CONTEXTS = (8192, 16384, 32768, 65536, 131072)
_QUICK_CONTEXTS = (8192,)

Json = Annotated[bool, typer.Option("--json", help="Only the line of JSON.")]


@app.command()
def gpu_check(
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: some minutes.")] = False,
    as_json: Json = False,
    out: Annotated[Path | None, typer.Option(help="Also write the line of JSON here.")] = None,
    require: Annotated[
        bool, typer.Option("--require", help="End with 1 where there is nothing to check on.")
    ] = False,
) -> None:
    """Check kvrecall on this machine's GPU, and measure it.

    Ends with 1 if a check failed; without a GPU or vLLM it says so and ends with 0.
    """

    def progress(text: str) -> None:
        typer.echo(text, err=True)

    outcomes = list(_outcomes(quick, progress))
    told = summary(outcomes)
    if not as_json and told["ran"]:
        _show(outcomes)
    line = json.dumps(told, separators=(",", ":"))
    if out is not None:
        out.write_text(line + "\n")
    typer.echo(line)
    raise typer.Exit(status(outcomes, require))


def status(outcomes: list[Outcome], require: bool) -> int:
    """0: nothing failed. ``require``: and something was checked."""
    if any(each.state is State.FAIL for each in outcomes):
        return 1
    return int(require and outcomes[0].state is not State.PASS)


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """The line of JSON: ``ran`` says whether there was anything to check on."""
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
    """The first is whether there is a device; without one there is no other."""
    found = without_engine() or run_part("device", _DEVICE)
    progress(f"gpu-check: {found.note}" + ("" if found.state is State.PASS else _NOTHING))
    yield found
    if found.state is not State.PASS:
        return
    for name in _PARTS:
        progress(f"{name} ...")
        yield run_part(name, _DEVICE, quick)
    forms = ["piecewise"] if quick else list(engine.FORMS)
    yield from (tokens(name, progress) for name in forms)
    contexts = _QUICK_CONTEXTS if quick else _CONTEXTS
    yield _first_token(contexts, 2 if quick else 5, progress)
    yield Outcome("sequences", State.SKIP, _CPU_ONLY)


def without_engine() -> Outcome | None:
    """Why nothing can be checked here before torch is asked; None if it can."""
    version = engine_version()
    if version == "not installed":
        return Outcome("device", State.SKIP, "vLLM is not installed here")
    first, last = SUPPORTED
    major, minor = (int(part) for part in version.split("+")[0].split(".")[:2])
    if not first <= (major, minor) <= last:
        allowed = " to ".join(".".join(map(str, each)) for each in SUPPORTED)
        note = f"vLLM {version} is installed; kvrecall is for {allowed}"
        return Outcome("device", State.SKIP, note)
    return None


def tokens(form: str, progress: Callable[[str], None], device_bytes: int = 256 << 20) -> Outcome:
    """Whether a server of this form recalls what it computed."""
    name = f"tokens, {form}"
    progress(f"{name} ...")
    try:
        recalled = engine.check_form(form, progress, device_bytes)
    except KvrecallError as error:
        return Outcome(name, State.FAIL, str(error).strip().splitlines()[0])
    split = ", ".join(f"{count} from {tier}" for tier, count in recalled.items())
    return Outcome(name, State.PASS, f"equal: {split}", {"recalled": recalled})


def _first_token(
    contexts: tuple[int, ...], repetitions: int, progress: Callable[[str], None]
) -> Outcome:
    try:
        told = engine.first_token(contexts, engine.LARGE, repetitions, progress)
    except KvrecallError as error:
        return Outcome("first token", State.FAIL, str(error).strip().splitlines()[0])
    note = "; ".join(
        f"{name}: " + ", ".join(f"{int(c) // 1024}K {one['host']:.3f} s" for c, one in each.items())
        for name, each in told.items()
    )
    return Outcome("first token", State.PASS, f"from host memory, {note}", {"seconds": told})


def _show(outcomes: list[Outcome]) -> None:
    table = Table(title="kvrecall gpu-check")
    for column in ("check", "", "what was found"):
        table.add_column(column)
    for each in outcomes:
        table.add_row(each.check, each.state.value, each.note)
    Console().print(table)
