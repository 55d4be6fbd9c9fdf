"""The benchmarks that start servers: each by its command, as short as possible."""

from __future__ import annotations

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
