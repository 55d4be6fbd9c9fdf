"""The output of one of the laboratory's benchmarks, run by its command line."""

from __future__ import annotations

from functools import partial

from bench import commands

from kvrecall_lab.bench.cli import app

figures_of = partial(commands.figures_of, app=app)
