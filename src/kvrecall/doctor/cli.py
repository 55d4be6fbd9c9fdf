"""``kvrecall doctor``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvrecall import __version__
from kvrecall.commands import Json
from kvrecall.config import help_of
from kvrecall.doctor.machine import check_engine, check_machine, check_packages
from kvrecall.doctor.model import check_layout
from kvrecall.doctor.pool import check_pool, read_settings
from kvrecall.errors import ExitStatus, hidden
from kvrecall.server.checks import Finding, Health

app = typer.Typer(add_completion=False)

JSON_VERSION = 1
"""Version of the ``--json`` schema: raised when a key is removed or changes its meaning."""
_STYLES = {
    Health.OK: "green", Health.NOTE: "dim", Health.WARNING: "yellow", Health.BROKEN: "bold red",
}  # fmt: skip


@app.command()
def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Model folder or hub id to serve.", show_default=False)
    ] = None,
    pool_config: Annotated[
        Path | None, typer.Option(help="pool.json of the pool; the options below override it.")
    ] = None,
    host_size: Annotated[str | None, typer.Option(help=help_of("host_size"))] = None,
    disk_path: Annotated[str | None, typer.Option(help=help_of("disk_path"))] = None,
    disk_size: Annotated[str | None, typer.Option(help=help_of("disk_size"))] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip importing vLLM, which takes about ten seconds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine: what is installed, what fits, what is missing, what would hit.

    Changes nothing. Exits with 1 if something is broken.
    """
    options = {"host_size": host_size, "disk_path": disk_path, "disk_size": disk_size}
    given = {name: value for name, value in options.items() if value is not None}
    console = Console(stderr=True, emoji=False)
    with console.status("looking ...") as status:
        findings = list(examine(model, pool_config, given, not quick, status.update))
    if as_json:
        typer.echo(json.dumps(report(findings)))
    else:
        _show(findings)
    raise typer.Exit(ExitStatus.OK if fits(findings) else ExitStatus.FAILED)


def examine(
    model: str | None = None,
    pool_config: Path | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
    imports: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """All checks, the quick ones first; ``progress`` receives what takes longer. ``imports``:
    whether to import vLLM, in a child process."""
    yield from _checked(check_packages(serves=model is not None))
    yield from _checked(check_machine())
    settings, found = read_settings(pool_config, options)
    yield found
    if settings is not None:
        yield from _checked(check_pool(settings))
    local = None
    if model is not None:
        layout = list(_checked(check_layout(model, settings)))
        yield from layout
        is_folder = Path(model).expanduser().is_dir()  # vLLM looks for others online
        is_read = any(each.check == "layout" for each in layout)
        local = model if is_folder and is_read else None
    if imports:
        progress("importing torch, vLLM and the connector in a child process ...")
        remote = settings and settings.pool.remote
        uses_mooncake = bool(remote and remote.kind == "mooncake")
        yield from _checked(check_engine(local, uses_mooncake=uses_mooncake))


def _checked(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The findings, up to a check that fails itself, which is one, too."""
    try:
        yield from findings
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks go on
        found = hidden(f"the check itself failed: {type(error).__name__}: {error}")
        cure = "report it: this is a bug in kvrecall"
        yield Finding("doctor", "check", Health.WARNING, " ".join(found.split()), cure)


def fits(findings: list[Finding]) -> bool:
    return not any(each.state is Health.BROKEN for each in findings)


def report(findings: list[Finding]) -> dict[str, object]:
    return {
        "doctor": JSON_VERSION,
        "version": __version__,
        "fits": fits(findings),
        "findings": [each.as_dict() for each in findings],
    }


def _show(findings: list[Finding]) -> None:
    table = Table(title="kvrecall doctor", show_lines=False)
    for name in ("", "check", "found"):
        table.add_column(name, no_wrap=name == "check")
    area = ""
    for each in findings:
        if each.area != area:
            area = each.area
            table.add_section()
            table.add_row("", f"[bold]{area}[/]", "")
        style = _STYLES[each.state]
        cure = f"\n[{style}]-> {escape(each.cure)}[/]" if each.cure else ""
        table.add_row(f"[{style}]{each.state.value}[/]", each.check, escape(each.found) + cure)
    console = Console(emoji=False)
    console.print(table)
    counts = {state: sum(each.state is state for each in findings) for state in Health}
    verdict = "fits" if fits(findings) else f"{counts[Health.BROKEN]} broken"
    console.print(f"{verdict}; warnings: {counts[Health.WARNING]}, notes: {counts[Health.NOTE]}")
