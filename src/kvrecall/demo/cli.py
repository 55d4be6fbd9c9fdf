"""``kvrecall demo`` shows the tiers; ``mooncake`` shows the remote store; ``serve`` starts a server
that stays up."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from kvrecall.commands import Json
from kvrecall.demo.mooncake import MooncakeDemo, MooncakeVerdict
from kvrecall.demo.tiers import DemoVerdict, Subject, TierDemo, TierVerdict
from kvrecall.errors import ConfigError, EngineError
from kvrecall.processes.child import server_environment
from kvrecall.processes.command import ProgressLines, command_folder
from kvrecall.processes.server import is_healthy

REPOSITORY = Path(__file__).resolve().parents[3]
TRAINED = REPOSITORY / "models" / "recall-tiny"
"""The example model, which the wheel does not contain."""

app = typer.Typer(add_completion=False)
_progress = ProgressLines("demo")

_Model = Annotated[
    Path | None,
    typer.Option(help="Model folder to use; default: a small one that needs no download."),
]
_Characters = Annotated[
    int | None,
    typer.Option(
        min=2_000, max=72_000, help="Length of the long text; a shorter one takes less time."
    ),
]


def _subject(model: Path | None, folder: Path, characters: int | None) -> Subject:
    """The given model, else the trained example model, else one with random weights."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "the demo needs vLLM, which is not installed here: pip install 'kvrecall[cuda]', on a "
            "machine without a GPU 'kvrecall[cpu]'"
        )
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError(f"--model: {model} is not a model folder: it has no config.json")
    chosen = model or (TRAINED if (TRAINED / "model.safetensors").exists() else None)
    if chosen is not None:
        return Subject(chosen, characters or 72_000, max_model_len=32_768)
    return Subject(_random_model(folder), min(characters or 8_000, 8_000), 10_240, trained=False)


def _random_model(folder: Path) -> Path:
    """A byte-level model, wider than the trained one, so that a shorter text takes as long."""
    from kvrecall.bench.model import write_model

    _progress("writing a model of random weights: only the repository has the trained one")
    return write_model(
        folder / "random-qwen3", hidden=512, layers=6, heads=8, dtype="float32", vocab=512
    )


def _end(verdict: DemoVerdict, as_json: bool) -> NoReturn:
    """Prints the verdict and exits with its status."""
    verdict.print(Console(width=None if sys.stdout.isatty() else 120, emoji=False), as_json)
    raise typer.Exit(0 if verdict.summary()["ok"] else 1)


@app.callback(invoke_without_command=True)
def tiers(
    context: typer.Context,
    model: _Model = None,
    characters: _Characters = None,
    as_json: Json = False,
) -> None:
    """Show what recall gains on this machine, and that it changes no token.

    Starts the real server three times: without a pool, with one, and with the same pool after a
    restart, when only the blocks on disk are left. Each answers the two turns of a conversation and
    a question about a long text.

    The table shows the sources of each prompt's tokens (device, host, disk, or computed) and the
    time to first token. Below it: the speed-up of the long text's first token, and how many answers
    are identical. The exit status is 0 only if every tier was hit and no token differs.

    Needs vLLM, 2 GiB of memory and 2 GiB of disk space for KV blocks; downloads nothing. Takes some
    minutes without a GPU. All files are in a temporary folder, which is removed at the end.

    \b
    kvrecall demo                      as above
    kvrecall demo --characters 9000    a shorter text: takes less time, gains less
    kvrecall demo --model FOLDER       a model of your own
    kvrecall demo mooncake             two servers that share blocks over Mooncake
    kvrecall demo serve                a server that stays up, and what to send it
    """
    if context.invoked_subcommand is not None:
        return
    with command_folder("demo", keep_failed=False) as folder, _progress.alive():
        subject = _subject(model, folder, characters)
        demo = TierDemo(subject, folder, _progress)
        demo.run()
    _end(TierVerdict(demo.rows, subject.model.name, subject.trained), as_json)


@app.command("mooncake", short_help="Show two servers that share blocks over Mooncake Store.")
def mooncake(model: _Model = None, characters: _Characters = None, as_json: Json = False) -> None:
    """Show a server that recalls from Mooncake Store what another one stored, and that the loss of
    the store's master fails no request and changes no token."""
    with command_folder("demo", keep_failed=False) as folder, _progress.alive():
        subject = _subject(model, folder, characters)
        demo = MooncakeDemo(subject, folder, _progress)
        demo.run()
    _end(MooncakeVerdict(demo), as_json)


@app.command("serve")
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Model folder; default: the example model.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port on the loopback interface.")] = 8000,
) -> None:
    """Start kvrecall serve with a pool, and print what to send it.

    The pool is kept in var/pool of the repository, else in kvrecall/demo of the user's cache
    folder.
    """
    folder = _kept_folder()
    launch = [sys.executable, "-m", "kvrecall", "serve"]
    options = ["--port", str(port), "--host-size", "1GiB", "--disk-size", "4GiB"]
    chosen = model or (TRAINED if (TRAINED / "config.json").exists() else _random_model(folder))
    command = [*launch, str(chosen), *options, "--disk-path", str(folder / "pool")]
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, env=server_environment())
    # Ctrl-C reaches the server directly (same terminal); it shuts down, and this process after it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.terminate())
    while process.poll() is None and not is_healthy(url):
        time.sleep(0.5)
    if process.poll() is None:
        typer.echo(
            f"\nReady. Send this, restart the server, and send it again:\n\n{request(port)}\n\n"
            f"Its dashboard: {url}/dashboard\n\nCtrl-C ends it.",
            err=True,
        )
    raise typer.Exit(process.wait())


def _kept_folder() -> Path:
    """The folder of the pool of ``serve``, which outlives the server."""
    if (REPOSITORY / "Makefile").is_file():
        folder = REPOSITORY / "var"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "kvrecall" / "demo"
    (folder / "pool").mkdir(parents=True, exist_ok=True)
    return folder


def request(port: int) -> str:
    """README's curl command: sent after a restart, its prompt comes from disk but for a block."""
    body = r"{\"inputs\": \"$(seq -s ' ' 1 900)\", \"parameters\": {\"details\": true}}"
    return (
        f"curl -s http://127.0.0.1:{port}/generate -H 'Content-Type: application/json' \\\n"
        f"""  -d "{body}" | grep -o '"recall":{{[^}}]*}}'"""
    )
