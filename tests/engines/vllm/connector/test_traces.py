"""Spans of a real engine's requests, at a real collector."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.collector import Span, Spans, by_grpc

from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import BLOCK, hits, push_out_of_host
from kvrecall.engines.vllm.connector.handover import Wait
from kvrecall.engines.vllm.connector.request import BlockHashes, LoadRecord, RequestState
from kvrecall.engines.vllm.connector.traces import Traces
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.processes.ports import free_port

pytestmark = pytest.mark.engine

BLOCK_BYTES = 4 * 2 * 2 * 64 * BLOCK * 4  # layers, K and V, KV heads, head size, float32
BLOCKS = 7
TOKENS = BLOCKS * BLOCK + 30
SALT = "a salt that no span may have"


@pytest.fixture(scope="module")
def collected() -> Iterator[tuple[str, Spans]]:
    with by_grpc() as collector:
        yield collector


@pytest.fixture(scope="module")
def engine(
    start: Callable[..., Engine],
    model_folder: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    collected: tuple[str, Spans],
) -> Engine:
    return start(
        model=str(model_folder("qwen3")),
        dtype="float32",
        pool={
            "host_size": 24 * BLOCK_BYTES,
            "policy": "lru",
            "disk_path": str(tmp_path_factory.mktemp("disk")),
            "disk_size": "256MiB",
            "load_or_compute": "load",
        },
        num_gpu_blocks_override=38,
        otlp_traces_endpoint=collected[0],
        env={"OTEL_BSP_SCHEDULE_DELAY": "50"},
    )


def traced(engine: Engine, spans: Spans, prompt: list[int], **ask: Any) -> tuple[Any, list[Span]]:
    """A reply, and the spans of its trace once all are there."""
    reply = engine.ask(prompt, **ask)
    engine.settle()

    def ours(name: str) -> list[Span]:
        found = spans.named(name)
        return [span for span in found if span.attributes["gen_ai.request.id"] == reply["id"]]

    spans.wait(lambda: bool(ours("kvrecall.request") and ours("llm_request")))
    return reply, spans.of_trace(ours("kvrecall.request")[0].trace)


def one(found: list[Span], name: str) -> Span:
    (span,) = (span for span in found if span.name == f"kvrecall.{name}")
    return span


def check_tree(found: list[Span]) -> None:
    """One trace, whose root is the request; what came before the first token follows each other
    within it."""
    root = one(found, "request")
    assert root.parent == ""
    assert {span.parent for span in found if span is not root} == {root.id}
    assert all(span.began <= span.ended for span in found)
    first = root.events["first token"]
    before = [s for s in found if s.name.startswith("kvrecall.") and s.name != "kvrecall.save"]
    for span in before:
        assert root.began <= span.began <= span.ended <= root.ended
        if span is not root:
            assert span.ended <= first
    (llm,) = (span for span in found if span.name == "llm_request")
    assert llm.attributes["gen_ai.request.id"] == root.attributes["gen_ai.request.id"]
    assert one(found, "compute").ended == first
    assert one(found, "queue").began == root.began


def test_a_computed_prompt(engine: Engine, collected: tuple[str, Spans]) -> None:
    _, spans = collected
    reply, found = traced(engine, spans, prompt_of(TOKENS, 1), max_tokens=3, salts=[SALT])
    assert hits(reply) == (0, 0, 0)
    check_tree(found)
    names = [span.name.removeprefix("kvrecall.") for span in found if "llm" not in span.name]
    assert names == ["request", "queue", "lookup", "compute", "save"]
    assert one(found, "lookup").attributes["kvrecall.lookup.blocks"] == BLOCKS
    assert one(found, "lookup").attributes["kvrecall.lookup.found"] == 0
    compute = one(found, "compute").attributes
    assert compute == {"kvrecall.compute.tokens": TOKENS, "kvrecall.compute.steps": 2}
    save = one(found, "save").attributes
    assert (save["kvrecall.save.blocks"], save["kvrecall.save.failed"]) == (BLOCKS, 0)
    assert save["kvrecall.save.bytes"] == BLOCKS * BLOCK_BYTES
    root = one(found, "request").attributes
    assert root["kvrecall.tokens.computed"] == TOKENS == root["kvrecall.prompt_tokens"]
    assert (root["kvrecall.output_tokens"], root["kvrecall.outcome"]) == (3, "length_capped")
    assert root["kvrecall.salted"] is True
    assert (root["kvrecall.missed"], root["kvrecall.missed.tokens"]) == ("new", TOKENS)
    assert SALT not in repr(found)


def test_hits_on_host_and_disk(engine: Engine, collected: tuple[str, Spans]) -> None:
    _, spans = collected
    prompt = prompt_of(TOKENS, 2)
    engine.ask(prompt)
    assert engine.forget_device()
    reply, found = traced(engine, spans, prompt)
    assert hits(reply) == (0, BLOCKS * BLOCK, 0)
    check_tree(found)
    names = [span.name.removeprefix("kvrecall.") for span in found if "llm" not in span.name]
    assert [n for n in names if n != "save"] == [
        *("request", "queue", "lookup", "load", "copy", "compute")
    ]
    assert one(found, "lookup").attributes["kvrecall.lookup.found.host"] == BLOCKS
    load = one(found, "load").attributes
    assert (load["kvrecall.load.tier"], load["kvrecall.load.outcome"]) == ("host", "whole")
    copy = one(found, "copy").attributes
    assert copy["kvrecall.copy.blocks"] == BLOCKS
    assert copy["kvrecall.copy.bytes"] == BLOCKS * BLOCK_BYTES
    assert (copy["kvrecall.copy.device"], copy["kvrecall.copy.failed"]) == ("cpu", False)
    assert copy["kvrecall.copy.device_seconds"] > 0
    assert one(found, "compute").attributes["kvrecall.compute.tokens"] == 30
    root = one(found, "request").attributes
    assert root["kvrecall.tokens.host"] == BLOCKS * BLOCK
    assert "kvrecall.missed" not in root, "a whole hit has no reason"

    push_out_of_host(engine, 2)
    reply, found = traced(engine, spans, prompt)
    assert hits(reply)[2] >= 5 * BLOCK
    check_tree(found)
    loads = {
        span.attributes["kvrecall.load.tier"]: span.attributes
        for span in found
        if span.name == "kvrecall.load"
    }
    assert loads["disk"]["kvrecall.load.outcome"] == "whole"
    assert loads["disk"]["kvrecall.load.blocks"] * BLOCK == hits(reply)[2]
    assert loads["disk"]["kvrecall.load.missing"] == 0
    assert sum(one["kvrecall.load.blocks"] for one in loads.values()) == BLOCKS


def test_a_request_without_a_client_s_span_begins_a_trace(engine: Engine) -> None:
    found = engine.traced_midway(prompt=prompt_of(TOKENS, 4))
    assert found["request"]
    assert found["headers"]["traceparent"].startswith("00-")
    assert "kvrecall-traces" in found["threads"]


def state_of(request: Any) -> RequestState:
    return RequestState(request, BlockHashes((1,), 16), LoadRecord(Wait(1.0)))


def test_spans_without_a_collector_are_dropped_and_counted() -> None:
    """Nothing waits for them. After ``close`` no thread takes any."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    dropped: list[int] = []
    facts = EngineFacts.of_one(16, 4096)
    endpoint = f"http://127.0.0.1:{free_port()}"
    traces = Traces(endpoint, facts, "cpu", False, 10.0, lambda: dropped.append(1))
    traces.close()
    for number in range(3000):
        request = Request(f"one-{number:08x}", [1] * 20, SamplingParams(max_tokens=2), None)
        state = state_of(request)
        traces.admitted(state)
        traces.considered(state)
        traces.store_ordered(state, 0, 1)
        traces.finished(state, 20)
    assert len(dropped) == 2 * 3000 - 4096, "two batches each: the request, and what it saved"


def test_a_span_of_the_process_is_no_requests_parent() -> None:
    """vLLM forks its engine core within the span of its start, which is current there for good."""
    from opentelemetry.sdk.trace import TracerProvider
    from vllm import SamplingParams
    from vllm.v1.request import Request

    endpoint = f"http://127.0.0.1:{free_port()}"
    traces = Traces(endpoint, EngineFacts.of_one(16, 4096), "cpu", False, 10.0)
    request = Request("one-00000000", [1] * 20, SamplingParams(max_tokens=2), None)
    with TracerProvider().get_tracer("vllm").start_as_current_span("start") as current:
        state = state_of(request)
        traces.admitted(state)
        assert state.id in traces.open
    traces.close()
    _, trace, _, sampled = request.trace_headers["traceparent"].split("-")
    assert trace != f"{current.get_span_context().trace_id:032x}"
    assert int(sampled, 16) & 1


def test_an_aborted_request_ends_its_trace(engine: Engine, collected: tuple[str, Spans]) -> None:
    _, spans = collected
    engine.abort_midway(prompt=prompt_of(TOKENS, 3), after_steps=1, max_tokens=8)

    def aborted() -> list[Span]:
        found = spans.named("kvrecall.request")
        return [span for span in found if span.attributes["kvrecall.outcome"] == "aborted"]

    spans.wait(lambda: bool(aborted()))
    (root,) = aborted()
    assert "first token" not in root.events
    assert "kvrecall.compute" in {span.name for span in spans.of_trace(root.trace)}
