"""The laboratory's commands, and their output."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from bench import commands
from support.commands import ran

from kvrecall.processes.command import as_child
from kvrecall_lab.bench.cli import app

figures_of = partial(commands.figures_of, app=app)
"""The output of a benchmark, run by its command line."""


def lab(room: str, *words: str, timeout: float = 580) -> subprocess.CompletedProcess[str]:
    """``python -m kvrecall_lab.ROOM``, which has ended, with all that it started."""
    command = as_child(sys.executable, "-m", f"kvrecall_lab.{room}", *words)
    return ran(*command, timeout=timeout)
