"""``python -m kvrecall_lab.faults``: what ``make faults`` runs."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from kvrecall.processes.command import ProgressLines
from kvrecall_lab.faults.mutants import MUTANTS, Mutant
from kvrecall_lab.faults.run import in_processes, is_ordered, ordered, schedules, summed
from kvrecall_lab.faults.schedule import Outcome
from kvrecall_lab.trials import finish

app = typer.Typer(add_completion=False)


@app.command()
def faults(
    seeds: Annotated[int, typer.Option(min=1, help="Number of schedules.")] = 1000,
    first: Annotated[int, typer.Option(help="Seed of the first one.")] = 0,
    seed: Annotated[
        int | None, typer.Option(help="Run this schedule alone, and tell what happened in it.")
    ] = None,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Plant faults in the pool; each must be found.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=1, help="Processes; by default one for each processor.")
    ] = len(os.sched_getaffinity(0)),
) -> None:
    """Run the pool on a simulated machine that fails: power, disk, store, clock and memory, at
    any call. The last line is JSON; the exit status is 0 only if no schedule broke a promise."""
    if not is_ordered():
        raise typer.Exit(ordered(sys.argv[1:]))
    if seed is not None:
        (one,) = schedules([seed])
        print("\n".join([f"{one.kind}, {one.calls} calls", *one.story, *one.verdicts.lines()]))
        finish(summed([one]), one.verdicts.is_good)
    progress = ProgressLines("faults")
    if mutants:
        survived = [one.why for one in MUTANTS if not _is_caught(one, seeds, first, progress)]
        finish({"mutants": len(MUTANTS), "survived": survived}, not survived)
    began, every = time.monotonic(), list[Outcome]()
    for outcomes in in_processes(range(first, first + seeds), jobs):
        every += outcomes
        for one in outcomes:
            if not one.verdicts.is_good:
                progress(f"seed {one.seed}, {one.kind}: {one.verdicts.lines()[0]}")
        progress(f"{len(every)}/{seeds} schedules")
    seconds = time.monotonic() - began
    rate = round(60 * seeds / seconds)
    is_good = all(one.verdicts.is_good for one in every)
    finish(summed(every) | {"per_minute": rate, "seconds": round(seconds)}, is_good)


def _is_caught(mutant: Mutant, most: int, first: int, progress: ProgressLines) -> bool:
    seed = mutant.caught_by(most, first)
    progress(f"{'SURVIVED' if seed is None else f'found by {seed}'}: without '{mutant.why}'")
    return seed is not None


if __name__ == "__main__":
    app()
