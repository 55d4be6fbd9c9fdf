"""The ``kvrecall`` command. Importing this module must stay cheap: no engine, no torch, no pool.

Each room brings its commands as a typer app; ``_ROOMS`` names them, and one is imported only when
it is called, prints its help, or is completed by a shell.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer
import typer.core

from kvrecall import __version__
from kvrecall.commands import add_lazily
from kvrecall.errors import ExitStatus, errors_shown, show_error

typer.core.HAS_RICH = False  # whose help cuts long names, metavars and paths at 80 columns

app = typer.Typer(
    name="kvrecall",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},  # of all sub-commands, too
    pretty_exceptions_enable=False,  # an exception here is a bug: Python's traceback, to report
)

_UsageError: Any = typer.BadParameter.__base__
"""typer's error for a wrong command line. Its module depends on typer's version."""

_ROOMS = {
    "serve": ("kvrecall.server.cli", "Serve a model over OpenAI and MindIE/TGI routes."),
    "doctor": ("kvrecall.doctor.cli", "Check what is installed, what fits and what would hit."),
    "pool": ("kvrecall.pool_cli", "Run a pool service, and administer pools."),
    "why": ("kvrecall.server.why_cli", "Say why a prompt was computed and not recalled."),
    "router": ("kvrecall.router.cli", "Send each prompt to the engine that answers first."),
    "config": ("kvrecall.server.mindie.check", "Check MindIE's config.json, or print an example."),
    "plan": ("kvrecall.plan.cli", "Size a pool."),
    "simulate": ("kvrecall.simulate.cli", "Replay a trace against pool sizes and policies."),
    "bench": ("kvrecall.bench.cli", "Measure recall on this machine."),
    "demo": ("kvrecall.demo.cli", "Show what recall gains on this machine."),
    "gpu-check": ("kvrecall.gpu_check.cli", "Check kvrecall on a GPU, and measure it."),
}
"""Commands by the module whose ``app`` they are, with the help that `kvrecall --help` shows."""


def _app_of(module: str) -> typer.Typer:
    found: typer.Typer = importlib.import_module(module).app
    return found


for _name, (_module, _text) in _ROOMS.items():
    add_lazily(app, _name, _text, partial(_app_of, _module))


def version_line() -> str:
    """``kvrecall 0.1.0 (vLLM 0.32.0+cpu, torch 2.13.0+cpu, Python 3.11.7)``, from the metadata of
    installed packages."""
    from kvrecall.engines.vllm.compat.versions import DISTRIBUTIONS, installed_version

    engines = {"vLLM": installed_version(*DISTRIBUTIONS), "torch": installed_version("torch")}
    found = [f"{name} {version}" if version else f"no {name}" for name, version in engines.items()]
    python = ".".join(map(str, sys.version_info[:3]))
    return f"kvrecall {__version__} ({', '.join(found)}, Python {python})"


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line())
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print kvrecall's, vLLM's, torch's and Python's version.",
            is_eager=True, callback=_tell_version,
        ),
    ] = False,
) -> None:  # fmt: skip
    """Keep KV-cache blocks in a pool of tiers, and recall them instead of recomputing."""


def usage_line(error: Any) -> str:
    """The error of a command line in one line."""
    from pydantic import ValidationError

    message = " ".join(error.format_message().split()).rstrip(".").replace(": Value error, ", ": ")
    command = error.ctx.command_path if error.ctx else _called(sys.argv[1:])
    if isinstance(error.__cause__, ValidationError):
        from kvrecall.config import allowed_by

        name, detail = message.partition("'")[2].partition("'")[0], error.__cause__.errors()[0]
        message = f"{name} is {detail['input']!r}; {allowed_by(detail, None)}"
    elif command == "kvrecall serve" and message.lower().startswith("no such option: "):
        message += (
            f"; an option of vLLM's goes after --: kvrecall serve MODEL -- {error.option_name} ..."
        )
    message += "" if message.endswith(("?", "...")) else "."
    return f"{command}: {message[:1].lower()}{message[1:]} Try '{command} --help'"


def _called(words: Sequence[str]) -> str:
    """``kvrecall pool serve``, if that is what ``words`` begin with."""
    if not words or words[0] not in _ROOMS:
        return "kvrecall"
    room = typer.main.get_command(_app_of(_ROOMS[words[0]][0]))
    inner = [word for word in words[1:2] if word in getattr(room, "commands", ())]
    return " ".join(["kvrecall", words[0], *inner])


def main() -> None:
    """Runs the command line and exits with its status."""
    status = 1
    try:
        with errors_shown():
            done = typer.main.get_command(app).main(prog_name="kvrecall", standalone_mode=False)
        status = done if isinstance(done, int) else ExitStatus.OK
    except _UsageError as error:
        status = ExitStatus.WRONG_SETTINGS
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message())
        else:
            show_error(usage_line(error), status)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    if status == ExitStatus.INTERRUPTED:
        show_error("kvrecall: interrupted", status)
    if "vllm" not in sys.modules:
        sys.exit(status)
    # Libraries of the engine print pages of leak reports when the interpreter is taken down.
    # Everything of ours has ended by now, so the process ends after the exit handlers.
    logging.shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
