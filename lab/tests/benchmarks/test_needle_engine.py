"""``bench needle`` on a real engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.long]

NEEDLE = ["-m", "kvrecall_lab.bench", "needle", "--lengths", "1K"]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The line of JSON the command ends with."""
    command = [sys.executable, *NEEDLE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_one_engine_dense_and_by_retrieval(tmp_path: Path) -> None:
    """With all blocks selected the answers are the dense ones; with very few they are not."""
    figures = run(
        tmp_path, "--samples", "8", "--tasks", "single,chain", "--share", "1,0.01",
        "--digest", "mean", "--digest-tokens", "128", "--least", "1", "--reference",
        "--records", "all.jsonl", "--json",
    )  # fmt: skip
    assert figures["active"] is True
    assert figures["dense"]["1024"]["single"]["right"] >= 7
    whole, few, reference_whole, reference_few = figures["arms"]
    # With these options the default mode is the reference's, so the arms are equal.
    assert reference_few["name"] == "retrievalkv 0.01"
    assert reference_few["blocks_selected"] == few["blocks_selected"]
    assert reference_few["results"] == few["results"]
    assert reference_whole["blocks_selected"] == whole["blocks_selected"]
    assert (figures["share"], whole["share"], few["share"]) == (1.0, 1.0, 0.01)
    assert whole["blocks_selected"] > 2 * few["blocks_selected"] > 0
    records = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(records) == figures["questions"] == 16
    same = [record["replies"][0] == record["replies"][1] for record in records]
    assert sum(same) >= 14, "bfloat16, in batches as requests come: a near tie may fall either way"
    assert few["against_dense"]["1024"]["all"]["lost"] > 0
