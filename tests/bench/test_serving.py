"""The serving benchmark: its workloads, and one run against a real server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.commands import figures_of
from kvrecall.bench import serving
from kvrecall.bench.serving import DEPLOYMENTS, HOST, conversations, measure_chat, servers
from kvrecall.errors import EngineError


def test_conversations_are_always_the_same_and_share_the_system_prompt() -> None:
    workload = conversations(8, 2)
    assert conversations(8, 2) == workload
    first, second, *_ = (session.opening for session in workload.sessions)
    assert first[:256] == second[:256]
    assert first[256:320] != second[256:320]
    assert workload.prompt_tokens > 0
    assert workload.longest_prompt >= max(len(s.opening) for s in workload.sessions)


def test_an_unknown_variant_is_an_error_that_names_the_known() -> None:
    with pytest.raises(EngineError, match=r"there is no variant 'ram'.*host, disk"):
        measure_chat(1, 1, "ram")


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
