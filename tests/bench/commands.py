"""The output of a benchmark, run by its command line."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from kvrecall.lab.bench import cli


def figures_of(*words: str) -> dict[str, Any]:
    """Its line of JSON; asserts success."""
    done = CliRunner().invoke(cli.app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
