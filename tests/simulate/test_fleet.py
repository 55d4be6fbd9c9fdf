"""``kvrecall simulate --hosts``: sessions, hosts with tiers of their own, a store they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrecall.simulate.cli import app
from kvrecall.simulate.fleet import replay_fleet, sessions_of
from kvrecall.simulate.replay import TierSpec, replay
from kvrecall.simulate.trace import Trace, trace_of
from kvrecall_lab.workload import make_workload

ROOMY = [TierSpec("host", 10_000)]


def turns(*chains: list[int], gap: float = 30.0) -> Trace:
    return trace_of("turns", [(gap * place, chain) for place, chain in enumerate(chains)])


def test_a_request_that_goes_on_is_of_the_session() -> None:
    trace = turns([1, 2], [1, 3], [1, 2, 4], [1, 3, 5, 6], [1, 2, 4, 7], [1], [9])
    assert list(sessions_of(trace.requests)) == [0, 1, 0, 1, 0, 2, 3]


def test_a_partial_block_at_the_end_is_no_part_of_what_goes_on() -> None:
    trace = trace_of("partial", [(0.0, [1, 2], True), (1.0, [1, 3, 4], True), (2.0, [1, 3, 5])])
    assert list(sessions_of(trace.requests)) == [0, 0, 0]


@pytest.mark.parametrize("routing", ["sticky", "spread"])
@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_one_host_is_the_plain_replay(routing: Any, policy: str) -> None:
    trace = make_workload("chat-pareto", hours=0.1)
    tiers = [TierSpec("host", 300), TierSpec("disk", 900)]
    alone = replay(trace, tiers, policy)
    found = replay_fleet(trace, 1, tiers, None, routing, policy)
    assert (found.hits, found.accesses) == (alone.hits, alone.accesses)
    assert [tier.read for tier in found.tiers] == [tier.read for tier in alone.tiers]
    assert found.traffic.read == found.traffic.written == 0


def test_a_session_that_stays_hits_what_its_host_computed() -> None:
    chains = [[100 * s + turn for turn in range(t + 1)] for t in range(6) for s in range(40)]
    trace = turns(*chains)
    sticky = replay_fleet(trace, 8, ROOMY, None, "sticky", "lru")
    spread = replay_fleet(trace, 8, ROOMY, None, "spread", "lru")
    assert sticky.sessions == 40
    again = sum(len(chain) - 1 for chain in chains)  # all but each turn's new block
    assert sticky.hits == again
    assert spread.hits < again


def test_a_store_makes_hosts_equal() -> None:
    """With room for all, every block that any host computed is hit, and each is sent once."""
    trace = make_workload("chat-lognormal")
    different = {key for request in trace.requests for key in request.chain}
    store = TierSpec("store", 1_000_000)
    for routing in ("sticky", "spread"):
        found = replay_fleet(trace, 5, [TierSpec("host", 200)], store, routing, "lru")
        assert found.hits == found.accesses - len(different)
        assert found.traffic.written == len(different)
        assert found.traffic.read == found.tiers[-1].read


def test_the_busiest_minute() -> None:
    """A host of one block: what it evicted comes from the store."""
    chains = [[1], [2], [1], [2], [1], [2]]
    found = replay_fleet(
        turns(*chains, gap=50.0), 1, [TierSpec("host", 1)], TierSpec("store", 9), "sticky", "lru"
    )
    assert found.traffic.read == 4
    assert found.traffic.most_read == 1  # a minute has one or two of the requests
    assert found.traffic.written == 2
    assert found.traffic.most_written == 2


def simulate(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    line: dict[str, Any] = json.loads(done.stdout)
    return line


def test_the_command_compares_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * (10 * turn + s), "hash_ids": [100 * s + b for b in range(turn + 2)]}
        for turn in range(5)
        for s in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (str(path), "--tiers", "host:64MiB,disk:1GiB", "--block-bytes", "1MiB")
    line = simulate(*words, "--hosts", "4", "--store", "1GiB")
    assert (line["hosts"], line["sessions"]) == (4, 10)
    for routing in ("sticky", "spread"):
        assert [tier["name"] for tier in line[routing]["tiers"]] == ["host", "disk", "store"]
        assert line[routing]["store_written_bytes_a_s"] > 0
    assert line["sticky"]["store_read_bytes"] < line["spread"]["store_read_bytes"]
    assert line["sticky"]["hit_rate"] == line["spread"]["hit_rate"]
    without = simulate(*words, "--hosts", "4")
    assert without["spread"]["hit_rate"] < without["sticky"]["hit_rate"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hosts", "2", "--policy", "all"), "--policy all cannot be combined with --hosts"),
        (("--store", "10", "--groups", "full:1MiB"), "--groups cannot be combined with"),
        (("--store", "0"), "--store: '0' is not a whole number of blocks"),
        (("--store", "1GiB"), "--store: '1GiB' is a size"),
        (("--hosts", "0"), "greater than or equal to 1"),
    ],
)
def test_wrong_options_are_refused_by_name(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, ["trace.jsonl", "--capacity-blocks", "100", *words])
    assert done.exit_code != 0
    assert said in " ".join(done.output.split()).replace("│ ", "")
