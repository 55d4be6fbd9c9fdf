"""Replays for models with several KV groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind
from kvrecall.simulate.cli import app
from kvrecall.simulate.replay import GroupSpec, TierSpec, parse_groups, replay
from kvrecall.simulate.trace import read_trace, trace_of
from kvrecall_lab.workload import make_workload

WINDOWS = "full:10,window:1024:4"
STATES = "full:10,state:2048:25"
ROOM = [TierSpec("host", 1 << 40)]


def test_what_a_hit_needs() -> None:
    full, window = parse_groups(WINDOWS)
    assert list(full.needed(3)) == [0, 1, 2]
    assert [list(window.needed(n)) for n in (0, 1, 2, 3)] == [[], [0], [0, 1], [1, 2]]
    short = GroupSpec(CacheKind.WINDOW, 128, 4)
    assert list(short.needed(7)) == [6]
    assert list(GroupSpec(CacheKind.WINDOW, 513, 4).needed(7)) == [6]
    assert list(GroupSpec(CacheKind.WINDOW, 514, 4).needed(7)) == [5, 6]
    chunk = GroupSpec(CacheKind.CHUNK, 2048, 4)
    assert [list(chunk.needed(n)) for n in (0, 3, 4, 6)] == [[], [0, 1, 2], [], [4, 5]]
    assert list(GroupSpec(CacheKind.CHUNK, 1000, 4).needed(2)) == [1]
    state = parse_groups(STATES)[1]
    assert [list(state.needed(n)) for n in (0, 1, 9)] == [[], [0], [8]]
    assert list(state.kept(0, 10)) == [3, 7, 9]
    assert list(state.kept(8, 12)) == [11]
    assert list(state.kept(5, 5)) == []


@pytest.mark.parametrize(
    "text",
    ["", "full", "full:0", "half:3", "full:1,full:2", "state:9:9", "full:1,window:9",
     "chunk:9", "chunk:0:9",
     "full:1,window:0:9", "full:1,window:x:9", "full:1,state:1:2:3", "full:1,state:x"],
)  # fmt: skip
def test_groups_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="--groups"):
        parse_groups(text)


def test_one_group_hits_as_without_groups() -> None:
    trace = make_workload("chat-lognormal", 3, 0.3)
    alone = replay(trace, [TierSpec("host", 4000)], "lru", groups=parse_groups("full:10"))
    assert alone.hits == replay(trace, [TierSpec("host", 400)], "lru").hits
    assert alone.moved == {"full": 10 * alone.hits}


def test_a_hit_ends_where_a_window_or_a_state_is() -> None:
    """The second request leaves the first inside: windows are there, a state is at every fourth
    block only."""
    trace = trace_of("two", [(0.0, list(range(10))), (1.0, [*range(7), 100, 101])])
    windows = replay(trace, ROOM, "lru", groups=parse_groups(WINDOWS))
    assert (windows.hits, windows.moved) == (7, {"full": 70, "window": 8})
    states = replay(trace, ROOM, "lru", groups=parse_groups(STATES))
    assert (states.hits, states.moved) == (4, {"full": 40, "state": 25})
    assert states.tiers[0].written == 12 * 10 + (3 + 2) * 25


def test_a_model_of_windows_alone_needs_no_more_than_the_last_ones() -> None:
    """The chain is the windows. What a hit does not need it neither moves nor saves again."""
    trace = trace_of("two", [(0.0, list(range(10))), (1.0, list(range(200, 206))),
                             (2.0, [*range(10), 100])])  # fmt: skip
    whole = replay(trace, ROOM, "lru", groups=parse_groups("window:1024:4"))
    assert (whole.hits, whole.moved, whole.tiers[0].written) == (10, {"window": 8}, 17 * 4)
    # Room for twelve: the second request evicts the last four of the first.
    small = replay(trace, [TierSpec("host", 12 * 4)], "lru", groups=parse_groups("window:1024:4"))
    assert (small.hits, small.moved) == (6, {"window": 8})


def test_a_block_that_is_not_full_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 1300, "hash_ids": [1, 2, 3]}] * 2
    path.write_text("\n".join(map(json.dumps, rows)))
    outcome = replay(read_trace(path), ROOM, "lru", groups=parse_groups("full:10,state:9"))
    assert (outcome.accesses, outcome.hits) == (4, 2)


def test_lower_tiers_serve_what_the_host_lost() -> None:
    trace = trace_of("back", [(0.0, [1, 2, 3]), (1.0, [4, 5, 6]), (2.0, [1, 2, 3])])
    tiers = [TierSpec("host", 50), TierSpec("disk", 1000)]
    outcome = replay(trace, tiers, "lru", groups=parse_groups(WINDOWS))
    assert outcome.hits == 3
    assert outcome.tiers[1].read == outcome.moved["full"] + outcome.moved["window"] == 38
    assert outcome.tiers[0].evicted > 0


@pytest.mark.parametrize(("groups", "capacity"), [("full:12,window:128:12", 24_000),
                                                  ("full:12,state:8192:38", 12_000)])  # fmt: skip
def test_hazard_beats_recency(groups: str, capacity: int) -> None:
    trace = make_workload("document-qa", 1, hours=0.5)
    hits = {
        policy: replay(
            trace, [TierSpec("host", capacity)], policy, groups=parse_groups(groups)
        ).hits
        for policy in ("lru", "hazard")
    }
    assert hits["hazard"] > 1.15 * hits["lru"]


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        (30 * n + turn, range(100 * n, 100 * n + 20 + turn)) for n in range(40) for turn in range(9)
    ]
    path.write_text(
        "\n".join(json.dumps({"timestamp": 1000 * t, "hash_ids": [*ids]}) for t, ids in rows)
    )
    arguments = [str(path), "--groups", "full:12MiB,window:128:12MiB"]
    words = [*arguments, "--tiers", "host:2GiB,disk:9GiB", "--policy", "lru"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    row = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert 0.2 < row["hit_rate"] <= row["unlimited"] < 1
    assert [tier["name"] for tier in row["tiers"]] == ["host", "disk"]
    assert sum(row["read_bytes"].values()) == sum(tier["read_bytes"] for tier in row["tiers"])
    assert "a pool without limit" in " ".join(result.output.split())
    for wrong, says in (
        (["--capacity-blocks", "7"], "sizes of its own"),
        (["--capacity", "10MiB"], "less than a record of each group"),
        ([], "give one of --capacity"),
    ):
        result = CliRunner().invoke(app, [*arguments, *wrong])
        assert result.exit_code == 2
        assert says in " ".join(result.output.split())
