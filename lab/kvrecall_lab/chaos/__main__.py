"""``python -m kvrecall_lab.chaos``: what ``make chaos`` runs."""

from __future__ import annotations

import logging
import secrets
import time
from typing import Annotated

import typer

from kvrecall.config import parse_size
from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall_lab.chaos.run import MODELS, ChaosRun, Settings
from kvrecall_lab.trials import Keep, finish, one_of

app = typer.Typer(add_completion=False)


@app.command()
def chaos(
    seconds: Annotated[
        float, typer.Option(min=1, help="Duration of the faults in seconds.")
    ] = 120.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of questions and faults; random by default.")
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="Number of engine processes.")] = 2,
    model: Annotated[
        str, typer.Option(help=f"Model of the engines: {', '.join(MODELS)}.")
    ] = "dense",
    disk_size: Annotated[
        str, typer.Option(help="Limit of the disk tier; 64MiB makes it evict constantly.")
    ] = "1GiB",
    keep: Keep = False,
) -> None:
    """Run real engines on a real pool service while the service and engines are killed and files
    are damaged. Every reply is compared with that of an engine without a pool. The last line is
    JSON; the exit status is 0 only if wrong, hung, failed, lost_committed and leaked_bytes are
    0."""
    one_of([model], tuple(MODELS), "model")
    logging.getLogger("kvrecall").setLevel(logging.CRITICAL)  # losses are intended
    progress = ProgressLines("chaos")
    seed = secrets.randbelow(1 << 20) if seed is None else seed
    with command_folder("chaos", keep) as folder:
        disk_bytes = parse_size(disk_size, "disk-size")
        settings = Settings(seconds, seed, engines, disk_bytes=disk_bytes, model=model)
        with progress.alive():
            progress(f"seed {seed}, in {folder}, {time.strftime('%H:%M:%S')}")
            report = ChaosRun(settings, folder, progress).run()
        finish(
            report.figures() | {"seed": seed, "seconds": seconds, "model": model}, report.is_clean
        )


if __name__ == "__main__":
    app()
