"""``kvrecall config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.errors import ExitStatus, errors_shown

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
    from kvrecall.server.mindie.check import explain, report

    with errors_shown():
        if not as_json:
            raise typer.Exit(explain(file, every, allow_plaintext))
        found = report(file, every, allow_plaintext)
        typer.echo(json.dumps(found, default=str))
        raise typer.Exit(0 if found["ok"] else ExitStatus.WRONG_SETTINGS)


@app.command("example")
def config_example() -> None:
    """Print a minimal config.json."""
    from kvrecall.server.mindie.check import EXAMPLE

    typer.echo(EXAMPLE, nl=False)
