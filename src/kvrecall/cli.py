"""The ``kvrecall`` command. Importing this module must stay cheap: no engine, no torch.

``serve`` and ``config`` belong to the server. Other rooms bring commands of their own as typer
apps; ``_ROOMS`` names them, and they are imported only when they are called.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
from typing import Any

import typer

from kvrecall import __version__
from kvrecall.server.cli import config_app, serve

app = typer.Typer(name="kvrecall", no_args_is_help=True, add_completion=False)
app.command(context_settings={"allow_interspersed_args": True})(serve)
app.add_typer(config_app, name="config")

_ROOMS = {
    "pool": (
        "kvrecall.pool.service.cli",
        "Run and administer a pool: serve, stat, ls, verify, drop, pin, resize, key.",
    ),
    "bench": ("kvrecall.lab.bench.cli", "Measure recall on this machine."),
    "demo": ("kvrecall.lab.demo.cli", "Show what recall gains on this machine."),
    "simulate": ("kvrecall.simulate.cli", "Play a trace against pool sizes and policies."),
    "router": ("kvrecall.router.cli", "Send prompts to prefill and decode instances."),
    "plan": ("kvrecall.plan.cli", "Size a pool."),
    "gpu-check": (
        "kvrecall.lab.gpu_check.cli",
        "Check kvrecall on this machine's GPU, and measure it.",
    ),
}
"""Sub-commands by the module whose ``app`` they are, with their help."""


def _add_room(name: str, module: str, text: str) -> None:
    """Adds a command that imports its room's app when it is called."""

    @app.command(
        name,
        help=text,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def room(context: typer.Context) -> None:
        sub_app: Any = importlib.import_module(module).app
        sub_app(args=context.args, prog_name=f"kvrecall {name}")


for _name, (_module, _text) in _ROOMS.items():
    _add_room(_name, _module, _text)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(f"kvrecall {__version__}")


def main() -> None:
    """Runs the command line and exits with its status."""
    status = 1
    try:
        app()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if "vllm" not in sys.modules:
        sys.exit(status)
    # Libraries of the engine print pages of leak reports when the interpreter is taken down.
    # Everything of ours has ended by now, so the process ends after the exit handlers.
    logging.shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
