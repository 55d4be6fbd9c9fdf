"""The benchmark of the service runs, and measures what it claims."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvrecall.bench import cli


@pytest.mark.long
def test_every_part_is_measured() -> None:
    small = "--blocks 1000 --repetitions 1 --clients 3 --seconds 1".split()
    done = CliRunner().invoke(cli.app, ["service", *small])
    assert done.exit_code == 0, done.output
    *table, last = done.stdout.splitlines()
    figures = json.loads(last)
    assert figures["lookup_s"]["n"] == 100
    assert figures["restore_to_plain"]["n"] == 2
    assert figures["restore_to_plain"]["p50"] > 0
    assert figures["start_s"]["first_find"]["p50"] >= figures["start_s"]["ready"]["p50"] > 0
    assert figures["clients"] == len(figures["crowd_medians_s"]) == 3
    assert 3 * 2 <= figures["crowd_lookup_s"]["n"] <= 3 * 10
    assert figures["crowd_slowest_to_fastest"] >= 1
    assert done.stderr.count("bench: ") >= 4
    assert sum(line.startswith("│") for line in table) >= 10
