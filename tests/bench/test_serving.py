"""The serving benchmark: its workloads, and one run against a real server."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvrecall.errors import EngineError
from kvrecall.lab.bench import serving
from kvrecall.lab.bench.serving import DEPLOYMENTS, HOST, measure_serving, servers
from kvrecall.lab.bench.workload import conversations, slice_of

from .commands import figures_of


def test_conversations_come_from_the_seed() -> None:
    assert conversations(8, 2, seed=1) == conversations(8, 2, seed=1)
    assert conversations(8, 2, seed=1) != conversations(8, 2, seed=2)


def test_conversations_share_the_system_prompt_and_nothing_else() -> None:
    first, second, *_ = (session.opening for session in conversations(8, 2).sessions)
    assert first[:256] == second[:256]
    assert first[256:320] != second[256:320]


def test_no_prompt_is_longer_than_said() -> None:
    workload = conversations(8, 3)
    assert workload.prompt_tokens > 0
    assert workload.longest_prompt >= max(len(s.opening) for s in workload.sessions)


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


def test_of_a_thinned_trace_sessions_are_kept_whole(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        (1000 * (100 * turn + session), [0, *range(session * 10 + 1, session * 10 + 3 + turn)])
        for turn in range(2)
        for session in range(60)
    ]
    path.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": 1, "output_length": 1, "hash_ids": ids})
            + "\n"
            for t, ids in rows
        )
    )
    kept = slice_of(path, 120, 16, seconds=10.0, every=3).sessions
    assert 4 < len(kept) < 80
    openings = [session.opening for session in kept]
    first, second = openings[: len(kept) // 2], openings[len(kept) // 2 :]
    assert [len(text) for text in first] == [48] * len(first)
    assert [text[:48] for text in second] == first


def test_an_unknown_variant_is_an_error_that_names_the_known() -> None:
    with pytest.raises(EngineError, match=r"there is no variant 'ram'.*host, disk"):
        measure_serving(conversations(1, 1), ["ram"], 60.0)


@pytest.mark.long
@pytest.mark.engine
def test_a_pool_recalls_what_the_device_forgot(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvrecall bench chat`, small."""
    # Whatever is found is loaded: on a busy machine computing may look faster.
    always = servers(pool={**HOST, "load_or_compute": "load"})
    monkeypatch.setitem(DEPLOYMENTS, "host", replace(DEPLOYMENTS["host"], servers=always))
    # The device gets what the longest prompt needs, twice.
    monkeypatch.setattr(serving, "SHARES", {**serving.SHARES, "device": 0.0, "host": 4.0})
    # There will be no time for the second.
    words = "--sessions 3 --turns 3 --seed 3 --variants host,disk --budget 1"
    figures = figures_of("chat", *words.split())
    assert figures["absent"] == {"disk": "no time: 1 seconds for all"}
    found = figures["variants"]["host"]
    assert found["requests"] == 9
    assert found["hit_rate"] > 0.3
    assert found["ttft_s"]["p50"] <= found["ttft_s"]["p95"] <= found["ttft_s"]["p99"]
