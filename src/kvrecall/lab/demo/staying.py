"""``make serve``: the demo's server, staying up, with the request to send."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

from kvrecall.lab.demo.prompts import TURN_1
from kvrecall.lab.engines.child import server_environment

POOL = Path("var/pool")


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
    POOL.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command, env=server_environment())
    # Ctrl-C reaches the server directly (same terminal); it ends in order and we with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: process.terminate())
    while process.poll() is None and not _healthy(port):
        time.sleep(0.5)
    if process.poll() is None:
        address = f"http://127.0.0.1:{port}/dashboard"
        typer.echo(
            f"\nReady. Send it, twice:\n\n{request(port)}\n\n"
            f"Its dashboard: {address}\n\nCtrl-C ends it.",
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


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
