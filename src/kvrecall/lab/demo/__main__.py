"""``python -m kvrecall.lab.demo`` plays the demo; ``serve`` stays up; ``mooncake`` plays the remote
tier's."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from kvrecall.errors import KvrecallError
from kvrecall.lab.demo import staying
from kvrecall.lab.demo.mooncake import MooncakePlay, MooncakeVerdict
from kvrecall.lab.demo.play import Play, Stage, Verdict
from kvrecall.lab.demo.shot import require_browser

SHOT = Path("docs/images/dashboard.png")
TRAINED = Path(__file__).resolve().parents[4] / "models" / "recall-tiny"

app = typer.Typer(add_completion=False)


_Model = Annotated[Path | None, typer.Option(help="Model folder to use.")]
_Characters = Annotated[
    int | None,
    typer.Option(min=2_000, max=72_000, help="Length of the long text; shorter: sooner done."),
]


def _stage(model: Path | None, folder: Path, characters: int | None) -> Stage:
    """The model asked for, else the trained example model, else one with random weights."""
    chosen = model or (TRAINED if (TRAINED / "model.safetensors").exists() else None)
    if chosen is not None:
        return Stage(chosen, characters or 72_000, max_model_len=32_768)
    from kvrecall.lab.models import write_model

    # Bytes for tokens, and wider than the trained model: a shorter text takes as long.
    path = write_model(folder / "random-qwen3", hidden=512, layers=6, heads=8, dtype="float32")
    return Stage(path, min(characters or 8_000, 8_000), max_model_len=10_240)


def _progress(line: str) -> None:
    print(f"demo: {line}", file=sys.stderr, flush=True)


def _terminated(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds: servers are stopped, the folder is removed


@contextmanager
def _theatre() -> Iterator[Path]:
    """A folder that is gone afterwards. What stops the play within is said in a line, and the
    process's status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _terminated)
    with tempfile.TemporaryDirectory(prefix="kvrecall-demo-") as name:
        try:
            yield Path(name)
        except KvrecallError as error:
            _progress(f"failed: {error}")
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            _progress("stopped")
            raise typer.Exit(130) from None


def _end(verdict: Verdict | MooncakeVerdict) -> NoReturn:
    """Prints the verdict, and ends with the status that goes with it."""
    verdict.print(Console(width=None if sys.stdout.isatty() else 120))
    raise typer.Exit(0 if verdict.summary()["ok"] else 1)


@app.callback(invoke_without_command=True)
def demo(
    context: typer.Context,
    model: _Model = None,
    characters: _Characters = None,
    shot: Annotated[
        bool, typer.Option("--shot", envvar="SHOT", help=f"Write {SHOT}: the dashboard.")
    ] = False,
) -> None:
    """Shows recall from device, host and disk, and that no token changes by it."""
    if context.invoked_subcommand is not None:
        return
    with _theatre() as folder:
        if shot:
            require_browser()
        stage = _stage(model, folder, characters)
        play = Play(stage, folder, _progress, SHOT if shot else None)
        play.run()
    _end(Verdict(play.rows, stage.model.name))


@app.command("mooncake")
def mooncake(
    model: _Model = None,
    characters: _Characters = None,
) -> None:
    """Shows recall by one server of what another stored in Mooncake Store, and that the loss of
    its master fails no request and changes no token."""
    with _theatre() as folder:
        stage = _stage(model, folder, characters)
        play = MooncakePlay(stage.model, stage.characters, folder, _progress)
        play.run()
    _end(MooncakeVerdict(play))


app.command("serve")(staying.serve)

if __name__ == "__main__":
    app()
