"""The output of a benchmark, run by its command line."""

from __future__ import annotations

import json
from typing import Any

import typer
from typer.testing import CliRunner

from kvrecall.bench.cli import app


def figures_of(*words: str, app: typer.Typer = app) -> dict[str, Any]:
    """Its line of JSON; asserts success."""
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
