"""``python -m kvrecall_lab.stress``: an hour's mix of requests in minutes."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Annotated

import typer

from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab.engines.host import STATES
from kvrecall_lab.stress.run import DEVICES, Stress
from kvrecall_lab.trials import Keep, finish, one_of

app = typer.Typer(add_completion=False)

_HAPPENED = ("requests", "aborted", "preempted", "recalled_blocks")
_FIGURES = (*_HAPPENED, "restarted", "wrong", "stuck", "leaks", "parted")


@app.command()
def stress(
    requests: Annotated[int, typer.Option(min=20, help="Number of requests.")] = 800,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the requests; random by default.")
    ] = None,
    device: Annotated[
        list[str] | None, typer.Option(help=f"Copies: {', '.join(DEVICES)}; repeatable.")
    ] = None,
    keep: Keep = False,
) -> None:
    """Ask a real engine, whose device cache holds forty blocks, for prompts that share prefixes,
    with priorities, adapters, grammars, several samples and log-probabilities, and abort a quarter
    of them, while its service is killed, or restarted between two steps, and its pool emptied. All
    replies are compared with those of an engine without a pool. The last line is JSON; the status
    is 0 only if no reply is wrong, nothing is stuck or leaks, and requests were preempted, aborted,
    and recalled.
    """
    chosen = one_of(device, tuple(DEVICES), "device")
    logging.getLogger("kvrecall").setLevel(logging.CRITICAL)  # losses are intended
    seed = secrets.randbelow(1 << 20) if seed is None else seed
    progress = ProgressLines("stress")
    began = time.monotonic()
    with command_folder("stress", keep) as folder, progress.alive():
        progress(f"seed {seed}, in {folder}")
        report = Stress(folder, seed, requests, progress).run(chosen)
        for fault in report.faults:
            progress(f"FAULT {fault}")
    counts = {name: report[name] for name in _FIGURES}
    counts |= {f"aborted {state}": report[f"aborted {state}"] for state in STATES}
    good = not report.faults and all(report[name] for name in _HAPPENED)
    finish(counts | {"seconds": round(time.monotonic() - began), "seed": seed}, good)


if __name__ == "__main__":
    app()
