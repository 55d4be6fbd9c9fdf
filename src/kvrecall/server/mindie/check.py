"""``kvrecall config``: ``check`` and ``example``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrecall.errors import ExitStatus, KvrecallError, errors_shown
from kvrecall.server.launch import checked
from kvrecall.server.mindie.planner import plan_config
from kvrecall.server.mindie.reader import Problems, dotted, read_config
from kvrecall.server.mindie.schema import Effect, fields_of

EXAMPLE = Path(__file__).with_name("example.json").read_text("utf-8")
"""A minimal config.json, right but for the model's folder."""

_STYLES = {Effect.ACTS: "green", Effect.PARTLY: "yellow", Effect.NONE: "dim", Effect.UNKNOWN: "red"}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Check MindIE's config.json, or print an example.",
)


@app.command("check")
def config_check(
    file: Annotated[Path, typer.Argument(help="The config.json.")],
    every: Annotated[
        bool, typer.Option("--all", help="Also show fields that are not given.")
    ] = False,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="As in kvrecall serve.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the effect of each field of a config.json, and all errors.

    Exits with 2 if there is an error.
    """
    with errors_shown():
        found = report(file, every, allow_plaintext)
        if as_json:
            typer.echo(json.dumps(found, default=str))
        else:
            _show(found)
        raise typer.Exit(ExitStatus.OK if found["ok"] else ExitStatus.WRONG_SETTINGS)


@app.command("example")
def config_example(
    model: Annotated[Path, typer.Argument(help="The model's folder.")] = Path("/path/to/the/model"),
) -> None:
    """Print a minimal config.json, with a pool of 4 GiB in host memory."""
    typer.echo(EXAMPLE.replace('"/path/to/the/model"', json.dumps(str(model))), nl=False)


def _show(found: dict[str, Any]) -> None:
    """Prints a report as tables, the problems on stderr."""
    # as wide as the terminal, or wide enough for the tables without one
    console = Console(width=None if sys.stdout.isatty() else 140, emoji=False)
    if found["fields"]:
        console.print(_fields_table(found["fields"]))
    if found["ok"]:
        console.print(_effective_table(found["effective"]))
    for kind, style in (("warning", "yellow"), ("note", "dim")):
        for text in found[f"{kind}s"]:
            console.print(f"[{style}]{kind}:[/] {escape(text)}")
    errors = Console(stderr=True, soft_wrap=True, emoji=False)
    for line in found["problems"]:
        errors.print(escape(f"kvrecall config check: {line}"), highlight=False)


def report(file: Path, every: bool, allow_plaintext: bool = False) -> dict[str, Any]:
    """``ok``, ``problems`` (a line each), ``fields`` and the ``effective`` settings, as far as the
    file can be read. ``every``: fields that are not given, too."""
    found: dict[str, Any] = {"file": str(file), "ok": False}
    found |= {key: [] for key in ("problems", "fields", "warnings", "notes")}
    try:
        found["fields"] = [
            each._asdict() | {"field": dotted(each.path)}
            for each in fields_of(read_config(file)[0])
            if each.given or every
        ]
        plan = plan_config(file, plaintext=allow_plaintext)
    except KvrecallError as error:
        lines = error.lines if isinstance(error, Problems) else (str(error),)
        return found | {"problems": lines, "warnings": getattr(error, "warnings", ())}
    doubts, errors = checked(plan, here=False)
    found |= {"warnings": [*plan.warnings, *doubts], "notes": list(plan.notes)}
    if errors:
        return found | {"problems": [f"{file}: {error}" for error in errors]}
    spec = plan.spec
    scheme = "https" if spec.tls else "http"
    planes = {"business": f"{scheme}://{spec.host}:{spec.port}"}
    planes |= {each.name: f"{scheme}://{each.host}:{each.port}" for each in spec.listeners}
    found["effective"] = {
        "model": spec.model,
        "planes": planes,
        "options": {k: v for k, v in spec.options.items() if v is not None},
        "pool": None if spec.recall is None else dict(spec.recall),
        "bounds": plan.bounds(),
    }
    return found | {"ok": True}


def _fields_table(fields: list[dict[str, Any]]) -> Table:
    table = Table("field", "value", "here", "what it does")
    section: str | None = None
    for each in fields:
        above, _, name = each["field"].rpartition(".")
        if above != section:
            section = above
            table.add_section()
            table.add_row(f"[bold]{escape(section) or 'config.json'}[/]")
        value, effect = each["value"], Effect(each["effect"])
        text = f"{value:g}" if isinstance(value, float) else str(value)
        shown = text if each["given"] else f"({text})" if value is not None else ""
        marked = f"[{_STYLES[effect]}]{effect.value}[/]"
        table.add_row(f"  {name}", escape(shown), marked, escape(each["text"]))
    return table


def _effective_table(effective: dict[str, Any]) -> Table:
    """The settings of vLLM and the pool that the file amounts to."""
    rows = {"model": effective["model"]}
    rows |= {f"{name} plane": url for name, url in effective["planes"].items()}
    rows |= effective["bounds"]
    rows |= {f"vllm --{name}": value for name, value in effective["options"].items()}
    pool = effective["pool"] or {"": "off"}
    rows |= {f"pool {name}".rstrip(): value for name, value in pool.items()}
    table = Table("effective setting", "value")
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    return table
