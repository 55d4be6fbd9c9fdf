"""``python -m kvrecall_lab.gpu``: the command line of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvrecall.bench.report import names_in
from kvrecall.errors import errors_shown
from kvrecall.processes.command import ProgressLines
from kvrecall_lab.gpu.parts import PARTS
from kvrecall_lab.trials import Listed, one_of

app = typer.Typer(add_completion=False)


@app.command()
def pack(
    out: Annotated[Path, typer.Argument(help="Folder for the archives.")] = Path("build/gpu-kit"),
    caches: Annotated[
        Path | None, typer.Option(help="Folder with archives of caches from the last run.")
    ] = None,
) -> None:
    """Pack vLLM for CUDA and what it imports: some minutes, 2 GB of disk while it runs."""
    from kvrecall_lab.gpu import pack

    progress = ProgressLines("pack")
    with errors_shown(), progress.alive():
        total = pack.pack(out, caches, progress)
    typer.echo(f"{out}: {total / 2**20:.1f} MiB")


@app.command()
def run(
    out: Annotated[
        Path, typer.Option(help="Folder for results, and for caches to bring back.")
    ] = Path("build/gpu-out"),
    parts: Annotated[str, typer.Option(help=f"Comma-separated; of {', '.join(PARTS)}.")] = "",
    limit: Annotated[float, typer.Option(min=1, help="Seconds for all of it.")] = 570,
    home: Annotated[Path, typer.Option(help="Where the kit was unpacked.")] = Path("/tmp/kit"),
    tiny: Annotated[bool, typer.Option("--tiny", help="On a CPU, at toy size.")] = False,
    show: Listed = False,
) -> None:
    """Run parts, each with its own limit. Exits with 1 if one failed."""
    from kvrecall_lab.gpu import run

    names = one_of(names_in(parts), tuple(PARTS), "parts")
    if show:
        typer.echo("\n".join(f"{name:24} {PARTS[name].whole_s:4.0f} s" for name in names))
        return
    raise typer.Exit(not run.run(names, out, home, limit, tiny))


if __name__ == "__main__":
    app()
