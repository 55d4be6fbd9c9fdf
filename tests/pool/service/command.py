"""``kvrecall pool`` in the test's own process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from kvrecall.pool_cli import app


def pool(*words: object) -> Result:
    """``kvrecall pool WORDS``."""
    return CliRunner().invoke(app, list(map(str, words)))


def as_json(*words: object) -> Any:
    """What ``kvrecall pool WORDS --json`` prints; it must end with 0."""
    done = pool(*words, "--json")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)
