"""A slice of a recorded trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrecall_lab.bench.serving import slice_of


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [(0, [1, 2]), (1000, [1, 2, 3]), (5000, [4]), (9000, [1, 2])]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": 512, "output_length": 1, "hash_ids": ids})
            + "\n"
            for t, ids in rows
        )
    )
    return path


def test_a_slice_of_a_trace_keeps_prefixes_and_scales_time(trace: Path) -> None:
    sessions = slice_of(trace, 3, 16, seconds=10.0).sessions
    assert len(sessions) == 3
    assert [session.start_s for session in sessions] == [0.0, 2.0, 10.0]
    assert sessions[1].opening[:32] == sessions[0].opening
    assert len(sessions[1].opening) == 48
    assert sessions[2].opening[:16] != sessions[0].opening[:16]
