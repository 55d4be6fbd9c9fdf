"""``python -m kvrecall_lab.shapes``: what ``make models`` runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab.shapes.row import TIERS, Row
from kvrecall_lab.shapes.shapes import SHAPES
from kvrecall_lab.shapes.trial import Laboratory
from kvrecall_lab.trials import Jobs, Keep, Listed, finish, one_of, run_trials

app = typer.Typer(add_completion=False)

_progress = ProgressLines("models")


@app.command()
def models(
    model: Annotated[
        list[str] | None, typer.Option(help="A model to try; may be given several times.")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="A tier to recall from; may be given several times.")
    ] = None,
    show: Listed = False,
    jobs: Jobs = 2,
    keep: Keep = False,
) -> None:
    """Small models with the KV groups of published ones, recalled from every tier: prompts that end
    on a block and beside it, longer ones computed in chunks, several samples, and requests that are
    preempted; below the host after kill -9 of the engine that saved them; from a pool service by
    its other engine, and from Mooncake by an engine without that service; and by engines of another
    number of ranks. Every reply is compared with that of a hit on the device of an engine without a
    pool, bit for bit, and the bytes moved with those that the hits need.

    The last line is JSON; the exit status is 0 only if no row is wrong.
    """
    if show:
        for shape in SHAPES:
            typer.echo(f"{shape.name:16} {shape.like}")
        return
    shapes = [one for one in SHAPES if one.name in one_of(model, [s.name for s in SHAPES], "model")]
    tiers = [one for one in TIERS if one in one_of(tier, TIERS, "tier")]
    with command_folder("models", keep, large=("models", "pools", "cache")) as folder:
        laboratory = Laboratory(folder, _progress.now)
        with _progress.alive():
            _progress(f"{len(shapes)} models, {jobs} at a time, in {folder}")
            trials = {
                shape.name: partial(laboratory.rows, shape, tiers if tier else shape.tiers)
                for shape in shapes
            }
            found = run_trials(_progress, trials, jobs, _text, laboratory.engines.stop)
        rows = [row for each in found.values() for row in each]
        Console(width=140).print(_table(rows))
        ok = all(row.ok for row in rows)
        finish({"ok": ok, "rows": [_figures(row) for row in rows]}, ok)


def _text(rows: Sequence[Row]) -> str:
    """Rows of a model for people; the faulty ones by their faults."""
    faulty = [f"{row.tier} {row.case}: {'; '.join(row.faults())}" for row in rows if not row.ok]
    unrun = [f"not run: {row.why}" for row in rows if not row.run]
    return "\n    ".join([f"{rows[0].model}: {len(rows)} rows", *unrun, *faulty])


def _table(rows: Sequence[Row]) -> Table:
    heads = ("model", "groups", "tier", "case", "equal", "tokens", "on device", "moved", "needed")
    table = Table(*heads, title="Models of every shape, recalled")
    for row in rows:
        if not row.run:
            table.add_row(row.model, "", "", "not run", "", "", "", "", row.why)
            continue
        figures = (row.hit_tokens, row.device_tokens, row.bytes_moved, row.bytes_needed)
        equal = "yes" if row.equal else "NO"
        place = f"{row.tier}, killed" if row.restarted else row.tier
        table.add_row(
            row.model, str(row.groups), place, row.case, equal, *(f"{one:,}" for one in figures)
        )
    return table


def _figures(row: Row) -> dict[str, object]:
    if not row.run:
        return {"model": row.model, "run": False, "reason": row.why}
    return {**asdict(row), "ok": row.ok, "why": "; ".join(row.faults())}


if __name__ == "__main__":
    app()
