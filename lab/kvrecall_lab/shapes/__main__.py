"""``python -m kvrecall_lab.shapes``: what ``make models`` runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvrecall.processes.command import Jobs, Keep, command_folder, one_of
from kvrecall.processes.progress import ProgressLines
from kvrecall_lab.shapes.row import TIERS, Row
from kvrecall_lab.shapes.shapes import SHAPES, Shape
from kvrecall_lab.shapes.trial import Laboratory

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
    show: Annotated[bool, typer.Option("--list", help="List the models and exit.")] = False,
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
        rows: dict[str, list[Row]] = {}
        with _progress.alive(), ThreadPoolExecutor(jobs) as workers:
            _progress(f"{len(shapes)} models, {jobs} at a time, in {folder}")

            def attempt(shape: Shape) -> list[Row]:
                found = []
                for row in laboratory.rows(shape, tiers if tier else shape.tiers):
                    _progress(_text(row))
                    found.append(row)
                return found

            tries = {workers.submit(attempt, shape): shape.name for shape in shapes}
            try:
                for each in as_completed(tries):
                    rows[tries[each]] = each.result()
            except BaseException:
                laboratory.stop()
                workers.shutdown(cancel_futures=True)
                raise
        ordered = [row for shape in shapes for row in rows[shape.name]]
        Console(width=140).print(_table(ordered))
        ok = all(row.ok for row in ordered)
        print(json.dumps({"ok": ok, "rows": [_figures(row) for row in ordered]}), flush=True)
        raise typer.Exit(0 if ok else 1)


def _text(row: Row) -> str:
    """A row for people."""
    if not row.run:
        return f"{row.model}: not run: {row.why}"
    found = "; ".join(row.faults()) or "ok"
    moved = f"{row.hit_tokens} tokens, {row.bytes_moved} of {row.bytes_needed} bytes"
    return f"{row.model:15} {row.tier:7} {row.case:10} {moved}: {found}"


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
