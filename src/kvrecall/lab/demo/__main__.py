"""``python -m kvrecall.lab.demo`` shows the tiers; ``mooncake`` shows the remote store; ``serve``
starts a server that stays up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from kvrecall.lab.demo.mooncake import MooncakeDemo, MooncakeVerdict
from kvrecall.lab.demo.tiers import TURN_1, Subject, TierDemo, Verdict, require_browser
from kvrecall.lab.engines.child import server_environment
from kvrecall.lab.engines.server import is_healthy
from kvrecall.lab.processes import command_folder, progress_of

SHOT = Path("docs/images/dashboard.png")
POOL = Path("var/pool")
TRAINED = Path(__file__).resolve().parents[4] / "models" / "recall-tiny"

app = typer.Typer(add_completion=False)
_progress = progress_of("demo")

_Model = Annotated[Path | None, typer.Option(help="Model folder to use.")]
_Characters = Annotated[
    int | None,
    typer.Option(min=2_000, max=72_000, help="Length of the long text; shorter: sooner done."),
]


def _subject(model: Path | None, folder: Path, characters: int | None) -> Subject:
    """The model asked for, else the trained example model, else one with random weights."""
    chosen = model or (TRAINED if (TRAINED / "model.safetensors").exists() else None)
    if chosen is not None:
        return Subject(chosen, characters or 72_000, max_model_len=32_768)
    from kvrecall.lab.models import write_model

    # Bytes for tokens, and wider than the trained model: a shorter text takes as long.
    path = write_model(folder / "random-qwen3", hidden=512, layers=6, heads=8, dtype="float32")
    return Subject(path, min(characters or 8_000, 8_000), max_model_len=10_240)


def _end(verdict: Verdict | MooncakeVerdict) -> NoReturn:
    """Prints the verdict, and ends with the status that goes with it."""
    verdict.print(Console(width=None if sys.stdout.isatty() else 120))
    raise typer.Exit(0 if verdict.summary()["ok"] else 1)


@app.callback(invoke_without_command=True)
def tiers(
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
    with command_folder("demo", keep_failed=False) as folder:
        if shot:
            require_browser()
        subject = _subject(model, folder, characters)
        demo = TierDemo(subject, folder, _progress, SHOT if shot else None)
        demo.run()
    _end(Verdict(demo.rows, subject.model.name))


@app.command("mooncake")
def mooncake(model: _Model = None, characters: _Characters = None) -> None:
    """Shows recall by one server of what another stored in Mooncake Store, and that the loss of
    its master fails no request and changes no token."""
    with command_folder("demo", keep_failed=False) as folder:
        subject = _subject(model, folder, characters)
        demo = MooncakeDemo(subject.model, subject.characters, folder, _progress)
        demo.run()
    _end(MooncakeVerdict(demo))


@app.command("serve")
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Model folder; default: the example model.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on the loopback interface.")] = 8000,
) -> None:
    """Starts kvrecall serve with a pool in var/pool and prints what to send it."""
    launch = [sys.executable, "-c", "from kvrecall.cli import main; main()", "serve"]
    options = ["--port", str(port), "--host-size", "1GiB", "--disk-size", "4GiB"]
    command = [*launch, *([str(model)] if model else []), *options, "--disk-path", str(POOL)]
    url = f"http://127.0.0.1:{port}"
    POOL.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command, env=server_environment())
    # Ctrl-C reaches the server directly (same terminal); it ends in order and we with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.terminate())
    while process.poll() is None and not is_healthy(url):
        time.sleep(0.5)
    if process.poll() is None:
        typer.echo(
            f"\nReady. Send it, twice:\n\n{request(port)}\n\n"
            f"Its dashboard: {url}/dashboard\n\nCtrl-C ends it.",
            err=True,
        )
    raise typer.Exit(process.wait())


def request(port: int) -> str:
    """The curl command to send; sent again, all whole blocks of its prompt are recalled."""
    body = {"inputs": TURN_1, "parameters": {"max_new_tokens": 20, "details": True}}
    return (
        f"curl -s http://127.0.0.1:{port}/generate -H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )


if __name__ == "__main__":
    app()
