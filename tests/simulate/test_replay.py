from __future__ import annotations

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrecall.pool.eviction import POLICY_NAMES
from kvrecall.simulate.cli import app
from kvrecall.simulate.replay import TierSpec, clairvoyant_hits, replay
from kvrecall.simulate.trace import Trace, TraceError, read_trace, trace_of
from kvrecall_lab.workload import WORKLOADS, make_workload

CONVERSATION = Path(__file__).parents[3] / "shared" / "traces" / "conversation_trace.jsonl"
"""Mooncake's conversation trace (FAST'25), which does not lie in the repository."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Chat between batch jobs that scan, an hour's first half: a file as a recorded trace is."""
    path = tmp_path_factory.mktemp("trace") / "mixed.jsonl"
    with path.open("w") as file:
        for now, ids in WORKLOADS["scan"](1):
            if now < 1800:
                file.write(json.dumps({"timestamp": now * 1000, "hash_ids": ids}) + "\n")
    return read_trace(path)


@pytest.fixture(scope="module")
def conversation() -> Trace:
    if not CONVERSATION.exists():
        pytest.skip(f"Mooncake's conversation trace is not at {CONVERSATION}")
    return read_trace(CONVERSATION)


def hits(trace: Trace, policy: str, *capacities: int) -> int:
    tiers = [TierSpec(f"tier{n}", capacity) for n, capacity in enumerate(capacities)]
    return replay(trace, tiers, policy).hits


def nearest_hits(trace: Trace, policy: str, *capacities: int) -> int:
    tiers = [TierSpec(f"tier{n}", capacity) for n, capacity in enumerate(capacities)]
    return replay(trace, tiers, policy).tiers[0].read


# -- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [500, 1_000])
def test_hazard_closes_part_of_the_gap(mixed: Trace, capacity: int) -> None:
    lru, bound = hits(mixed, "lru", capacity), clairvoyant_hits(mixed, capacity)
    assert hits(mixed, "hazard", capacity) >= lru + 0.15 * (bound - lru)


@pytest.mark.long
@pytest.mark.parametrize(
    ("capacity", "at_least"), [(1_000, 0.080), (5_859, 0.182), (10_000, 0.230), (30_000, 0.330)]
)
def test_hazard_closes_part_of_the_gap_of_the_conversation_trace(
    conversation: Trace, capacity: int, at_least: float
) -> None:
    assert hits(conversation, "hazard", capacity) / conversation.blocks >= at_least


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_hazard_holds_where_it_was_not_tuned(name: str) -> None:
    whole = make_workload(name, seed=7).requests
    trace = Trace(name, whole[: len(whole) // 2])
    for capacity in (500, 2_000):
        lru, ours = hits(trace, "lru", capacity), hits(trace, "hazard", capacity)
        assert ours >= 0.97 * lru
        assert ours <= clairvoyant_hits(trace, capacity)


def hot_and_scan(chains: int, share: float, requests: int, step: float, seed: int) -> Trace:
    """Chains of ten blocks asked for again and again at random, ``share`` of the requests; the
    others never come back. A request every ``step`` seconds."""
    rng, new = random.Random(seed), itertools.count(chains)
    drawn = (rng.randrange(chains) if rng.random() < share else next(new) for _ in range(requests))
    return trace_of("hot", [(n * step, range(10 * c, 10 * c + 10)) for n, c in enumerate(drawn)])


@pytest.mark.parametrize(
    "step", [0.3, 60.0, *(pytest.param(step, marks=pytest.mark.long) for step in (0.001, 5.0))]
)
def test_hazard_keeps_a_hot_set_from_the_start(step: float) -> None:
    """However fast: before it is taught, while it hardly is, and after."""
    for requests, (chains, share, capacity) in itertools.product(
        (60, 120, 250), [(10, 0.5, 200), (10, 0.2, 300), (15, 0.9, 200)]
    ):
        traces = [hot_and_scan(chains, share, requests, step, seed) for seed in range(2)]
        for tiers in [(capacity,), (capacity, 10**6)]:  # the first of two refuses nothing
            lru, ours = (
                sum(nearest_hits(trace, policy, *tiers) for trace in traces)
                for policy in ("lru", "hazard")
            )
            assert ours >= 0.95 * lru


# -- replay ----------------------------------------------------------------------------------


def test_strict_prefix() -> None:
    """Block 2 stays in the cache, but is of no use without block 1."""
    trace = trace_of("t", [(0, [1, 2]), (1, [3]), (2, [1, 2, 4])])
    assert hits(trace, "lru", 10) == 2
    assert hits(trace, "lru", 2) == 1  # 2 goes first, then 1 is hit
    assert clairvoyant_hits(trace, 2) == 2  # 3 is bypassed


def test_tiers_serve_from_the_nearest() -> None:
    trace = trace_of("t", [(0, [1, 2]), (1, [3, 4]), (2, [1, 2]), (3, [1, 2])])
    outcome = replay(trace, [TierSpec("host", 2), TierSpec("disk", 10)], "lru")
    host, disk = outcome.tiers
    assert (disk.read, host.read) == (2, 2)
    assert (host.written, disk.written) == (6, 4)
    assert (host.evicted, disk.evicted) == (4, 0)
    assert outcome.hit_rate == 0.5


def test_a_chain_longer_than_the_tier() -> None:
    trace = trace_of("t", [(0, range(10)), (1, range(10))])
    for policy in ("lru", "s3fifo", "hazard"):
        assert hits(trace, policy, 4) == 4


# -- the bound -------------------------------------------------------------------------------


def best_by_trying(trace: Trace, capacity: int) -> int:
    """Tries all that a cache could keep after each request."""
    best = {frozenset[bytes](): 0}
    for request in trace.requests:
        following: dict[frozenset[bytes], int] = {}
        for kept, count in best.items():
            length = 0
            while length < len(request.chain) and request.chain[length] in kept:
                length += 1
            have = kept | set(request.chain)
            for some in itertools.combinations(have, min(capacity, len(have))):
                state = frozenset(some)
                following[state] = max(following.get(state, 0), count + length)
        best = following
    return max(best.values())


def test_the_bound_is_exact() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        tree = {"": 0}
        rows = []
        for now in range(8):
            path, ids = "", []
            for _ in range(rng.randrange(1, 4)):
                path += rng.choice("ab")
                ids.append(tree.setdefault(path, len(tree)))
            rows.append((float(now), ids))
        trace = trace_of("t", rows)
        for capacity in (1, 2, 4):
            bound = clairvoyant_hits(trace, capacity)
            assert bound == best_by_trying(trace, capacity)
            for policy in ("lru", "s3fifo", "hazard"):
                assert hits(trace, policy, capacity) <= bound


# -- traces ----------------------------------------------------------------------------------


def test_reads_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 2000, "hash_ids": [1, 2], "input_length": 600}\n\n'
        '{"timestamp": 500, "hash_ids": []}\r\n'
    )
    trace = read_trace(path)
    assert [request.now for request in trace.requests] == [0.5, 2.0]
    assert trace.blocks == 2


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"timestamp": 1, "hash_ids": [1', ":2: not JSON"),
        ("[1]", ":2: not a JSON object"),
        ("[" * 100_000, ":2: not JSON"),
        ('{"timestamp": 1}', ":2: field 'hash_ids' is missing"),
        ('{"hash_ids": [1]}', ":2: field 'timestamp' is missing"),
        ('{"timestamp": "x", "hash_ids": [1]}', ":2: timestamp is 'x'"),
        ('{"timestamp": NaN, "hash_ids": [1]}', ":2: timestamp is nan"),
        ('{"timestamp": -1, "hash_ids": [1]}', ":2: timestamp is -1"),
        ('{"timestamp": 1, "hash_ids": "ab"}', ":2: hash_ids must be"),
        ('{"timestamp": 1, "hash_ids": [1.5]}', ":2: hash_ids must be"),
        ('{"timestamp": 1, "hash_ids": [1, 1]}', ":2: hash_ids names a block twice"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1]}\n' + line + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"{}", mtime=0), "is compressed; unpack it first, with gunzip"),
        (b"PK\x03\x04...", "is compressed; unpack it first, with unzip"),
        (b"\x89PNG\r\n", "is not text"),
        (b"", "no request has hash_ids"),
        (b"\n\n", "no request has hash_ids"),
        (b'{"timestamp": 0, "hash_ids": []}', "no request has hash_ids"),
        (b"timestamp,hash_ids\n1,2\n", ":1: not JSON"),
    ],
)
def test_a_file_that_is_no_trace_is_one_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    done = CliRunner().invoke(app, [str(path), "--capacity-blocks", "5"])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert words in done.stderr


def test_reading_reports_all_of_the_file(small: Path) -> None:
    parts: list[int] = []
    read_trace(small, parts.append)
    assert len(parts) == 30
    assert sum(parts) == small.stat().st_size + 1, "a line end for each, the last one's too"


# -- the command -----------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl"
    rows = [{"timestamp": 1000 * n, "hash_ids": [0, 1 + n % 3, 10 + n]} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_command_json(small: Path) -> None:
    args = [str(small), "--capacity-blocks", "5", "--block-bytes", "1MiB", "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["policy"] == "hazard"
    assert row["requests"] == 30
    assert row["blocks"] == 90
    assert 0.3 < row["hit_rate"] <= row["clairvoyant"] < 1.0
    assert row["tiers"][0]["read_bytes"] == row["hits"] << 20


def test_command_compares(small: Path) -> None:
    args = [str(small), "--tiers", "host:2,disk:8", "--policy", "all"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    assert "clairvoyant" in result.stdout
    assert "{" not in result.stdout
    row = json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)
    assert [p["policy"] for p in row["policies"]] == list(POLICY_NAMES)
    assert row["hit_rate"] == max(p["hit_rate"] for p in row["policies"])
    assert [tier["name"] for tier in row["policies"][0]["tiers"]] == ["host", "disk"]


def test_sizes_are_taken_as_well_as_blocks(small: Path) -> None:
    def told(*words: str) -> Any:
        result = CliRunner().invoke(app, [str(small), "--json", *words])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    per_block = ("--block-bytes", "64MiB")
    in_bytes = told("--tiers", "host:128MiB,disk:1GiB", *per_block)
    in_blocks = told("--tiers", "host:2,disk:16", *per_block)
    assert in_bytes == in_blocks
    assert [tier["capacity_bytes"] for tier in in_bytes["tiers"]] == [128 << 20, 1 << 30]
    assert told("--capacity", "320MiB", *per_block) == told("--capacity-blocks", "5", *per_block)


@pytest.mark.parametrize(
    ("tiers", "hint"),
    [
        ("host:100,disk:200", "disk adds nothing: host holds the whole trace"),
        ("host:2,disk:2", "disk adds nothing: it is no larger than host"),
        ("host:2,disk:100", None),
        ("host:8,disk:20,remote:100", "remote adds nothing: with host and disk alone"),
    ],
)
def test_a_tier_that_adds_nothing_is_named(tmp_path: Path, tiers: str, hint: str | None) -> None:
    path = tmp_path / "loop.jsonl"  # four blocks, at once and again later, and others once
    rows = [{"timestamp": 1000 * n, "hash_ids": [n // 2 % 4, 10 + n]} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    words = [str(path), "--tiers", tiers, "--policy", "lru"]
    result = CliRunner().invoke(app, words)
    hints = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["hints"]
    assert [each for each in hints if hint and each.startswith(hint)] if hint else not hints
    assert all(f"hint: {each[:20]}" in result.stdout for each in hints)


@pytest.mark.parametrize(("policy", "columns"), [("all", 80), ("hazard", 80), ("all", 100)])
def test_the_table_is_not_cut(
    small: Path, policy: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = ["--tiers", "host:2,remote:999TiB", "--block-bytes", "1MiB", "--policy", policy]
    result = CliRunner().invoke(app, [str(small), *words])
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "…" not in result.stdout
    assert "bypassed" in result.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["--capacity", "64GiB"],
        ["--capacity", "1KiB", "--block-bytes", "1MiB"],
        ["--tiers", "host:64GiB,disk:5"],
        ["--capacity", "64GiB", "--capacity-blocks", "5", "--block-bytes", "1MiB"],
        ["--capacity-blocks", "0"],
        ["--capacity-blocks", "-3"],
        ["--capacity-blocks", "many"],
        ["--capacity-blocks", "5", "--policy", "lucky"],
        ["--capacity-blocks", "5", "--block-bytes", "big"],
        ["--capacity-blocks", "5", "--block-bytes", "0"],
        ["--capacity-blocks", "5", "--tiers", "host:5"],
        ["--tiers", "host"],
        ["--tiers", "host:5,host:6"],
        [],
    ],
)
def test_command_refuses_in_one_line(small: Path, args: list[str]) -> None:
    result = CliRunner().invoke(app, [str(small), *args])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvrecall: ")
    assert result.stderr.count("\n") == 1


def test_command_names_a_missing_trace() -> None:
    result = CliRunner().invoke(app, ["/nowhere/at/all.jsonl", "--capacity-blocks", "5"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
