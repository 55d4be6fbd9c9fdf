"""Spans of requests that go another way than a whole hit: the scheduler side over real pools, at a
real collector."""

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
from engines.vllm.connector.test_scheduler import BLOCK, FACTS, Bench, SlowPool
from kvrecall.block import TierName
from kvrecall.engines.vllm.connector.traces import Traces
from kvrecall.testing.blocks import wait_until

TOKENS = 16 * 50


@pytest.fixture(scope="module")
def collected() -> Iterator[tuple[str, Spans]]:
    with by_grpc() as collector:
        yield collector


class Traced:
    """A scheduler side whose spans go to the collector."""

    def __init__(
        self,
        make: Callable[..., Bench],
        collected: tuple[str, Spans],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        endpoint, self.spans = collected
        self.traces = Traces(endpoint, FACTS, "cpu", False, 10.0, clock=clock)
        self.bench = make(observers=[self.traces])

    def answers(self, request: Request) -> None:
        """The step had a result: the first token."""
        request.append_output_token_ids(5)
        self.traces.step_ended()

    def ends(
        self, request: Request, status: RequestStatus = RequestStatus.FINISHED_STOPPED
    ) -> None:
        request.status = status
        self.bench.side.finished(request, (self.bench.blocks[request.request_id],))
        self.traces.close()

    def told(self, name: str) -> dict[str, Any]:
        """Of the request's spans by their names, the attributes, without their prefix."""
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
    ("choice", "after_s", "outcome"), [("auto", 0.9, "given_up"), ("load", 20.0, "late")]
)
def test_a_load_that_is_not_waited_for(
    slow: SlowPool, collected: tuple[str, Spans], choice: str, after_s: float, outcome: str
) -> None:
    """Computing takes 8 seconds, and the load's deadline is 10."""
    slow.fill(TOKENS)
    traced = Traced(partial(slow.bench, load_or_compute=choice), collected, lambda: slow.now)
    slow.io.read_gate.clear()
    name = f"a load that is {outcome}"
    request = traced.bench.request(name, TOKENS)
    assert traced.bench.matched(request) is None
    slow.now = after_s
    assert traced.bench.matched(request) == 0
    traced.bench.step(request, TOKENS)
    slow.now += 8.0
    traced.answers(request)
    traced.ends(request)
    told = traced.told(name)
    assert (told["load"]["load.tier"], told["load"]["load.outcome"]) == ("disk", outcome)
    assert (told["load"]["load.blocks"], told["load"]["load.bytes"]) == (0, 0)
    assert told["load"]["load.missing"] == told["lookup"]["lookup.found.disk"] == 49
    assert told["compute"]["compute.tokens"] == TOKENS
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
    slow.fill(TOKENS)
    for slab in (tmp_path / "disk").glob("slab-*.kv"):
        with slab.open("r+b") as file:
            for at in range(8192, slab.stat().st_size, 4096):
                file.seek(at + 17)
                file.write(b"\xff\x00\xff")
    traced = Traced(partial(Bench, slow.pool), collected)
    request = traced.bench.request("damaged", TOKENS)
    wait_until(lambda: traced.bench.matched(request) is not None)
    traced.bench.step(request, TOKENS)
    traced.answers(request)
    traced.ends(request)
    told = traced.told("damaged")
    load = told["load"]
    assert load["load.outcome"] == "lost"
    assert load["load.missing"] >= 40
    assert load["load.blocks"] + load["load.missing"] == told["lookup"]["lookup.found"] == 49
    assert load["load.bytes"] == load["load.blocks"] * FACTS.block_bytes
    assert (told["request"]["missed"], told["request"]["missed.tier"]) == ("damaged", "disk")


def test_a_load_that_is_declined(slow: SlowPool, collected: tuple[str, Spans]) -> None:
    slow.fill(TOKENS)
    traced = Traced(slow.bench, collected, lambda: slow.now)
    costs = traced.bench.side.costs
    costs.saw_load(TierName.DISK, 0.1, 50.0)
    costs._passed_over = 0
    costs._seen_at[TierName.DISK] = slow.now
    request = traced.bench.request("declined", TOKENS)
    assert traced.bench.matched(request) == 0
    traced.bench.step(request, TOKENS)
    traced.answers(request)
    traced.ends(request)
    told = traced.told("declined")
    assert told["lookup"]["lookup.declined"] == told["lookup"]["lookup.found"] == 49
    assert "load" not in told
    assert told["request"]["missed"] == "declined"


def test_a_request_that_ends_while_it_loads(slow: SlowPool, collected: tuple[str, Spans]) -> None:
    slow.fill(TOKENS)
    traced = Traced(slow.bench, collected, lambda: slow.now)
    slow.io.read_gate.clear()
    request = traced.bench.request("ends early", TOKENS)
    assert traced.bench.matched(request) is None
    slow.now = 0.3
    traced.ends(request, RequestStatus.FINISHED_ABORTED)
    told = traced.told("ends early")
    assert told["load"]["load.outcome"] == "dropped"
    assert told["request"]["outcome"] == "aborted"
    assert told["request"]["output_tokens"] == 0
    assert "first token" not in traced.root.events
    assert "compute" not in told


def test_a_copy_that_fails(collected: tuple[str, Spans]) -> None:
    with make_pool() as pool:
        traced = Traced(partial(Bench, pool), collected)
        first = traced.bench.request("saved", 4 * BLOCK)
        traced.bench.report(traced.bench.step(first, 4 * BLOCK))
        wait_until(lambda: pool.stats().queued_writes == 0)
        request = traced.bench.request("failing copy", 4 * BLOCK + 4)
        assert traced.bench.matched(request) == 4 * BLOCK
        traced.bench.side.allocated(request, (traced.bench.blocks["failing copy"],), 4 * BLOCK)
        traced.bench.side.reported(None, {"failing copy"}, {"failing copy"})
        traced.bench.step(request, 4 * BLOCK + 4)
        traced.answers(request)
        traced.ends(request)
    told = traced.told("failing copy")
    assert told["load"]["load.outcome"] == "whole"
    assert told["copy"]["copy.failed"] is True
    assert told["compute"]["compute.tokens"] == 4 * BLOCK + 4
    assert told["request"]["tokens.computed"] == 4 * BLOCK + 4
    assert told["request"]["missed"] == "failed"


def test_a_save_that_fails(collected: tuple[str, Spans]) -> None:
    with make_pool() as pool:
        traced = Traced(partial(Bench, pool), collected)
        request = traced.bench.request("failing save", 40)
        traced.bench.matched(request)
        traced.bench.report(traced.bench.step(request, 40), failed=True)
        traced.answers(request)
        traced.ends(request)
    save = traced.told("failing save")["save"]
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
        traced.answers(asking)
        traced.ends(asking)
    told = traced.told("unanswered")
    assert told["lookup"]["lookup.unanswered"] is True
    assert told["lookup"]["lookup.rounds"] > 1
    assert (told["request"]["missed"], told["request"]["missed.tier"]) == ("late", "remote")
    (lookup,) = (s for s in traced.spans.of_trace(traced.root.trace) if s.name == "kvrecall.lookup")
    assert lookup.ended - lookup.began >= 45e6
