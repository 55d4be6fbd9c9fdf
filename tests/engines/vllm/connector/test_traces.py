"""Spans of requests at a real collector: a real engine's, and the scheduler side's over real pools
for those that go another way than a whole hit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.collector import Span, Spans, by_grpc
from support.stores import SHARED, MemoryStore
from vllm.v1.request import Request, RequestStatus

from engines.vllm.connector.test_miss import make_pool
from engines.vllm.connector.test_scheduler import FACTS, Bench, SlowPool
from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import BLOCK, hits, push_out_of_host
from kvrecall.block import TierName
from kvrecall.engines.vllm.connector.handover import Wait
from kvrecall.engines.vllm.connector.request import BlockHashes, LoadRecord, RequestState
from kvrecall.engines.vllm.connector.traces import Traces
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.processes.ports import free_port
from kvrecall.testing import wait_until

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


@pytest.mark.engine
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


@pytest.mark.engine
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


@pytest.mark.engine
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
    traces = Traces(endpoint, facts, "cpu", False, lambda: dropped.append(1))
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
    traces = Traces(endpoint, EngineFacts.of_one(16, 4096), "cpu", False)
    request = Request("one-00000000", [1] * 20, SamplingParams(max_tokens=2), None)
    with TracerProvider().get_tracer("vllm").start_as_current_span("start") as current:
        state = state_of(request)
        traces.admitted(state)
        assert state.id in traces.open
    traces.close()
    _, trace, _, sampled = request.trace_headers["traceparent"].split("-")
    assert trace != f"{current.get_span_context().trace_id:032x}"
    assert int(sampled, 16) & 1


@pytest.mark.engine
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


# ---- without an engine ----------------------------------------------------------------

PROMPT = 16 * 50


class Traced:
    """A scheduler side whose spans go to the collector."""

    def __init__(
        self,
        make: Callable[..., Bench],
        collected: tuple[str, Spans],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        endpoint, self.spans = collected
        self.traces = Traces(endpoint, FACTS, "cpu", False, clock=clock)
        self.bench = make(observers=[self.traces])

    def ends(self, request: Request, answers: bool = True) -> dict[str, Any]:
        """A step had a result, the first token, unless the request is aborted before. Of its spans
        by their names, the attributes, without their prefix."""
        if answers:
            request.append_output_token_ids(5)
            self.traces.step_ended()
        aborted, stopped = RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED
        self.bench.end(request, stopped if answers else aborted)
        self.traces.close()
        name = request.request_id
        roots = [s for s in self.spans.named("kvrecall.request") if self.is_of(s, name)]
        self.spans.wait(lambda: bool(roots), 1.0)
        (root,) = roots
        found = self.spans.of_trace(root.trace)
        assert all(span.began <= span.ended for span in found)
        assert all(span.parent == root.id for span in found if span.name.count(".") == 1
                   and span is not root)  # fmt: skip
        self.root = root
        return {
            span.name.removeprefix("kvrecall."): {
                key.removeprefix("kvrecall."): value for key, value in span.attributes.items()
            }
            for span in found
        }

    @staticmethod
    def is_of(span: Span, name: str) -> bool:
        return span.attributes["gen_ai.request.id"] == name


@pytest.mark.parametrize(
    ("choice", "after_s", "outcome"), [("auto", 2.9, "given_up"), ("load", 20.0, "late")]
)
def test_a_load_that_is_not_waited_for(
    slow: SlowPool, collected: tuple[str, Spans], choice: str, after_s: float, outcome: str
) -> None:
    """Computing takes 8 seconds, and the load's deadline is 10."""
    slow.fill(PROMPT)
    traced = Traced(partial(slow.bench, load_or_compute=choice), collected, lambda: slow.now)
    slow.io.read_gate.clear()
    name = f"a load that is {outcome}"
    request = traced.bench.request(name, PROMPT)
    assert traced.bench.matched(request) is None
    slow.now = after_s
    assert traced.bench.matched(request) == 0
    traced.bench.step(request, PROMPT)
    slow.now += 8.0
    told = traced.ends(request)
    assert (told["load"]["load.tier"], told["load"]["load.outcome"]) == ("disk", outcome)
    assert (told["load"]["load.blocks"], told["load"]["load.bytes"]) == (0, 0)
    assert told["load"]["load.missing"] == told["lookup"]["lookup.found.disk"] == 49
    assert told["compute"]["compute.tokens"] == PROMPT
    assert (told["request"]["missed"], told["request"]["missed.tier"]) == ("late", "disk")
    assert "copy" not in told
    # The wait for the disk, and that for computing, are what the first token waited for.
    lengths = {
        span.name.removeprefix("kvrecall."): (span.ended - span.began) / 1e9
        for span in traced.spans.of_trace(traced.root.trace)
    }
    assert lengths["load"] == pytest.approx(after_s, abs=0.01)
    assert lengths["compute"] == pytest.approx(8.0, abs=0.01)


def test_blocks_that_are_lost_on_the_way(
    slow: SlowPool, collected: tuple[str, Spans], tmp_path: Path
) -> None:
    slow.fill(PROMPT)
    for slab in (tmp_path / "disk").glob("slab-*.kv"):
        with slab.open("r+b") as file:
            for at in range(8192, slab.stat().st_size, 4096):
                file.seek(at + 17)
                file.write(b"\xff\x00\xff")
    traced = Traced(partial(Bench, slow.pool), collected)
    request = traced.bench.request("damaged", PROMPT)
    wait_until(lambda: traced.bench.matched(request) is not None)
    traced.bench.step(request, PROMPT)
    told = traced.ends(request)
    load = told["load"]
    assert load["load.outcome"] == "lost"
    assert load["load.missing"] >= 40
    assert load["load.blocks"] + load["load.missing"] == told["lookup"]["lookup.found"] == 49
    assert load["load.bytes"] == load["load.blocks"] * FACTS.block_bytes
    assert (told["request"]["missed"], told["request"]["missed.tier"]) == ("damaged", "disk")


def test_a_load_that_is_declined(slow: SlowPool, collected: tuple[str, Spans]) -> None:
    slow.fill(PROMPT)
    traced = Traced(slow.bench, collected, lambda: slow.now)
    costs = traced.bench.side.costs
    costs.saw_load(TierName.DISK, 0.1, 50.0)
    costs._passed_over = 0
    costs._seen_at[TierName.DISK] = slow.now
    request = traced.bench.request("declined", PROMPT)
    assert traced.bench.matched(request) == 0
    traced.bench.step(request, PROMPT)
    told = traced.ends(request)
    assert told["lookup"]["lookup.declined"] == told["lookup"]["lookup.found"] == 49
    assert "load" not in told
    assert told["request"]["missed"] == "declined"


def test_a_request_that_ends_while_it_loads(slow: SlowPool, collected: tuple[str, Spans]) -> None:
    slow.fill(PROMPT)
    traced = Traced(slow.bench, collected, lambda: slow.now)
    slow.io.read_gate.clear()
    request = traced.bench.request("ends early", PROMPT)
    assert traced.bench.matched(request) is None
    slow.now = 0.3
    told = traced.ends(request, answers=False)
    assert told["load"]["load.outcome"] == "dropped"
    assert told["request"]["outcome"] == "aborted"
    assert told["request"]["output_tokens"] == 0
    assert "first token" not in traced.root.events
    assert "compute" not in told


def test_a_copy_that_fails(collected: tuple[str, Spans]) -> None:
    with make_pool() as pool:
        traced = Traced(partial(Bench, pool), collected)
        first = traced.bench.request("saved", 64)
        traced.bench.report(traced.bench.step(first, 64))
        wait_until(lambda: pool.stats().queued_writes == 0)
        request = traced.bench.request("failing copy", 68)
        assert traced.bench.matched(request) == 64
        traced.bench.side.allocated(request, (traced.bench.blocks["failing copy"],), 64)
        traced.bench.side.reported(None, {"failing copy"}, {"failing copy"})
        traced.bench.step(request, 68)
        told = traced.ends(request)
    assert told["load"]["load.outcome"] == "whole"
    assert told["copy"]["copy.failed"] is True
    assert told["compute"]["compute.tokens"] == 68
    assert told["request"]["tokens.computed"] == 68
    assert told["request"]["missed"] == "failed"


def test_a_save_that_fails(collected: tuple[str, Spans]) -> None:
    with make_pool() as pool:
        traced = Traced(partial(Bench, pool), collected)
        request = traced.bench.request("failing save", 40)
        traced.bench.matched(request)
        traced.bench.report(traced.bench.step(request, 40), failed=True)
        save = traced.ends(request)["save"]
    assert (save["save.blocks"], save["save.failed"]) == (2, 1)


def test_a_store_that_does_not_answer(
    request: pytest.FixtureRequest, collected: tuple[str, Spans]
) -> None:
    store = SHARED.setdefault(request.node.name, MemoryStore())
    remote = {"kind": "support.stores:make_store", "name": request.node.name}
    with make_pool(remote=remote) as pool:
        traced = Traced(partial(Bench, pool, lookup_deadline=0.05), collected)
        first = traced.bench.request("registers", 17, 9_000)
        wait_until(lambda: traced.bench.matched(first) is not None)
        traced.bench.report(traced.bench.step(first, 17))
        store.gate.clear()
        threading.Timer(0.5, store.gate.set).start()
        asking = traced.bench.request("unanswered", 40)
        wait_until(lambda: traced.bench.matched(asking) is not None)
        traced.bench.report(traced.bench.step(asking, 40))
        told = traced.ends(asking)
    assert told["lookup"]["lookup.unanswered"] is True
    assert told["lookup"]["lookup.rounds"] > 1
    assert (told["request"]["missed"], told["request"]["missed.tier"]) == ("late", "remote")
    (lookup,) = (s for s in traced.spans.of_trace(traced.root.trace) if s.name == "kvrecall.lookup")
    assert lookup.ended - lookup.began >= 45e6
