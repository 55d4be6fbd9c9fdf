"""The benchmark of the service runs, and measures what it claims."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvrecall.bench import cli


@pytest.mark.long
def test_every_part_is_measured() -> None:
    small = "--blocks 1000 --repetitions 1".split()
    done = CliRunner().invoke(cli.app, ["service", *small, "--json"])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    figures = json.loads(line)
    assert figures["lookup_s"]["n"] == 100
    assert figures["restore_to_plain"]["n"] == 2
    assert figures["restore_to_plain"]["p50"] > 0
    assert figures["start_s"]["first_find"]["p50"] >= figures["start_s"]["ready"]["p50"] > 0
    assert done.stderr.count("bench: ") >= 3
    assert len(figures["rows"]) >= 7
