"""The benchmarks that start servers: each by its command, as short as possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_commands import figures_of

pytestmark = pytest.mark.engine


@pytest.mark.longest
def test_restore() -> None:
    """It fails if a prefix comes from another tier than intended: parts of shorter ones would still
    be in memory."""
    figures = figures_of("restore", "--tokens", "4096", "--repetitions", "1")
    assert figures["moved_bytes"] == figures["prefix_bytes"]
    assert set(figures["ttft_s"]) == {"computed", "device", "host", "disk"}
    assert all(times["p50"] > 0 for times in figures["ttft_s"].values())


@pytest.mark.longest
def test_overhead() -> None:
    figures = figures_of("overhead", "--tokens", "512", "--rounds", "1")
    assert all(times["p50"] > 0 for times in figures["tokens_per_s"].values())


@pytest.mark.longest
def test_throttle() -> None:
    figures = figures_of("throttle", "--tokens", "512", "--repetitions", "1")
    assert len(figures["ratios"]) > 1
    assert all(ratio["p50"] > 0 for ratio in figures["ratios"].values())


@pytest.mark.long
def test_replay(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    prompts = [[1, 2, 3], [1, 2, 3, 4], [5, 6], [1, 2, 3, 4, 7]]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 250 * at, "input_length": 512 * len(ids),
                        "output_length": 4, "hash_ids": ids}) + "\n"
            for at, ids in enumerate(prompts)
        )
    )  # fmt: skip
    figures = figures_of(
        *("replay", str(trace), "--requests", "4", "--seconds", "2", "--every", "1"),
        *("--block-tokens", "128", "--variants", "host"),
    )
    assert figures["variants"]["host"]["requests"] == 4
