"""``python -m kvrecall_lab.faults``: what ``make faults`` runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from typing import Annotated

import typer

from kvrecall.processes.command import ProgressLines
from kvrecall_lab.faults.mutants import MUTANTS, caught_by
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
        survived = list(_uncaught(seeds, first, jobs, progress))
        finish({"mutants": len(MUTANTS), "survived": survived}, not survived)
    began, every = time.monotonic(), list[Outcome]()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):  # what was found by then is told
        for outcomes in in_processes(range(first, first + seeds), jobs):
            every += outcomes
            for one in outcomes:
                if not one.verdicts.is_good:
                    progress(f"seed {one.seed}, {one.kind}: {one.verdicts.lines()[0]}")
            progress(f"{len(every)}/{seeds} schedules")
    seconds = time.monotonic() - began
    rate = round(60 * len(every) / seconds)
    is_good = len(every) == seeds and all(one.verdicts.is_good for one in every)
    finish(summed(every) | {"per_minute": rate, "seconds": round(seconds)}, is_good)


def _uncaught(most: int, first: int, jobs: int, progress: ProgressLines) -> Iterator[str]:
    with ProcessPoolExecutor(jobs, get_context("spawn")) as workers:
        found = workers.map(caught_by, range(len(MUTANTS)), repeat(most), repeat(first))
        for mutant, seed in zip(MUTANTS, found, strict=True):
            told = "SURVIVED" if seed is None else f"found by {seed}"
            progress(f"{told}: without '{mutant.why}'")
            if seed is None:
                yield mutant.why


if __name__ == "__main__":
    app()
