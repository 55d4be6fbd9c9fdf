"""The benchmarks that start servers: each by its command, as short as possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import commands
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
def test_each_cause_of_a_miss_is_reported() -> None:
    figures = figures_of("misses", "--requests", "60")
    assert figures["right"] == 1.0
    assert figures["requests"] >= 60
    reasons = {"new", "short", "diverged", "namespace", "evicted", "damaged"}
    assert reasons <= set(figures["reasons"])


@pytest.mark.longest
def test_a_replay_hits_what_its_simulation_hits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [[0, 1, 2], [3, 4], [0, 1, 5], [3, 4, 6], [0, 1, 2, 7], [3, 4, 6, 8]]
    lines = ({"timestamp": 1000 * at, "hash_ids": ids} for at, ids in enumerate(rows))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    variants = commands.figures_of("replay", "--trace", str(trace), "--requests", "3")["variants"]
    assert [one["requests_that_differ"] for one in variants.values()] == [0] * 4
    assert variants["device"]["hits"]["device"] == 3
    assert sum(variants["device, host"]["hits"].values()) == 2 + 3 + 3


def test_large_requests_through_the_router() -> None:
    figures = figures_of(
        "proxies", "--rate", "50", "--seconds", "0.5", "--rounds", "1", "--size", "20000"
    )
    straight, ours = figures["ways"]["straight"], figures["ways"]["kvrecall router"]
    assert straight["requests"] == ours["requests"] > 0
    assert straight["failed"] == ours["failed"] == {}
    assert ours["own_p50_ms"] > straight["own_p50_ms"] > 0


@pytest.mark.long
def test_the_same_sessions_with_every_choice_of_a_router() -> None:
    figures = figures_of("router", "--sessions", "4", "--turns", "3", "--rounds", "1")
    ways = figures["ways"]
    assert list(ways) == ["turns", "least_busy", "guess", "events"]
    assert {one["requests"] for one in ways.values()} == {12}
    for one in ways.values():
        assert 0 < one["computed_tokens"] < one["prompt_tokens"]
        shares = one["computed_share"] + sum(one["by_tier"].values())
        assert shares == pytest.approx(1, abs=1e-3)
    assert ways["events"]["computed_tokens"] < ways["turns"]["computed_tokens"]
