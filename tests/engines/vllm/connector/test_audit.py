"""An engine that could read another model's KV computes instead, detects it, and stays correct."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from vllm.v1.request import Request, RequestStatus

from engines.vllm.connector.test_scheduler import BLOCK, FACTS, Bench, pool
from engines.vllm.engine import Engine, prompt_of
from kvrecall.block import BlockKey
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.connector.audit import GENERATION_S, Belief, _parts, _vouching
from kvrecall.engines.vllm.connector.compare import deviation
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages
from kvrecall.engines.vllm.wire import ORIGIN_BYTES, Deviation, EngineFacts, StepOrders, StepReport
from kvrecall.pool import Pool
from kvrecall.pool.base import Recall, RecallState
from kvrecall_lab.models.variants import write_lora

__all__ = ["pool"]

TOKENS = 3 * 128 + 5
EXPERTS = replace(FACTS, has_experts=True)
SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32}


# ---- the scheduler side --------------------------------------------------------------------


class Audited(Bench):
    """Workers that write origins, and find what they are told to find."""

    def __init__(
        self,
        pool: Pool,
        facts: EngineFacts = FACTS,
        audit: object = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pool, facts, clock, audit=audit)

    def report(
        self,
        orders: StepOrders,
        ranks: int = 2,
        failed: bool = False,
        found: Deviation | None = None,
    ) -> None:
        memory = self.pool.arena.array()
        for store in orders.stores:
            for offset in store.copy.offsets:
                at = offset + orders.record_bytes[0]
                memory[at : at + ORIGIN_BYTES] = list(store.origin)
        report = StepReport(
            {store.store_id: ranks for store in orders.stores},
            compared={
                one.number: (ranks, found or Deviation(len(one.copy.block_ids)))
                for one in orders.comparisons
            },
        )
        self.side.reported(report, set(), set())

    def run(self, name: str, tokens: int, found: Deviation | None = None, first: int = 0) -> int:
        """A request from its beginning to its end; the tokens it loads."""
        request = self.request(name, tokens, first)
        loaded, _ = self.side.match(request, 0)
        assert loaded is not None
        if loaded:
            self.side.allocated(request, (self.blocks[name],), loaded)
            self.side.reported(None, {name}, set())
        request.num_computed_tokens = loaded
        self.report(self.step(request, tokens - loaded), found=found)
        self.side.finished(request, (self.blocks[name],))
        return loaded


DIFFERS = Deviation(2, 2, times=3.0, relative=0.1, layer="layers.1")


def counts(bench: Bench) -> tuple[float, float]:
    return bench.side.counters.counts["audits"], bench.side.counters.counts["audits_failed"]


@pytest.mark.parametrize(("facts", "first"), [(FACTS, (16, 32)), (EXPERTS, (0, 0))])
def test_of_the_first_hit_on_anothers_blocks_the_last_ones_are_computed(
    pool: Pool, facts: EngineFacts, first: tuple[int, int]
) -> None:
    """One; with experts so many that a short hit is computed whole."""
    Audited(pool).run("a", 40)
    Audited(pool).run("x", 60, first=500)
    two = Audited(pool, facts)
    assert two.run("b", 40) == first[0]
    assert counts(two) == (1, 0)
    assert two.run("c", 40) == 32
    assert two.run("d", 60, first=500) == first[1], "a third writer is proved by itself"
    assert two.run("e", 60, first=500) == 48
    assert pool.stats().leases == 0


def test_a_restart_recalls_a_long_prompt_but_for_a_block(pool: Pool) -> None:
    """With experts but for sixteen."""
    Audited(pool).run("a", 100 * BLOCK + 1)
    assert Audited(pool).run("b", 100 * BLOCK + 1) == 99 * BLOCK
    assert Audited(pool, EXPERTS).run("c", 100 * BLOCK + 1) == 84 * BLOCK


def test_one_audit_at_a_time_and_the_others_compute(pool: Pool) -> None:
    Audited(pool).run("a", 40)
    two = Audited(pool, EXPERTS)
    first, second = two.request("b", 40), two.request("c", 40)
    assert two.matched(first) == 0
    assert two.matched(second) == 0
    orders = two.step(second, 40)
    assert not orders.comparisons
    orders = two.step(first, 20)
    assert [one.copy.block_ids for one in orders.comparisons] == [(1,)]
    two.report(orders, ranks=1)
    assert counts(two) == (0, 0), "a rank has not told yet, and a block is not there yet"
    two.report(orders, ranks=1)
    orders = two.step(first, 20)
    two.report(orders)
    assert counts(two) == (1, 0)
    assert pool.stats().leases == 0


def test_a_mismatch_makes_the_engine_private(pool: Pool) -> None:
    one = Audited(pool)
    one.run("a", 40)
    two = Audited(pool)
    assert two.run("x", 60, first=500) == 0
    assert two.run("b", 40, found=DIFFERS) == 16
    assert counts(two) == (1, 1)
    assert two.run("c", 40) == 0, "computed, and saved under a name of its own"
    assert two.run("d", 40) == 32
    assert counts(two) == (1, 1)
    assert one.run("e", 40) == 32, "the other engine's blocks are still its own"
    assert one.run("f", 60, found=DIFFERS, first=500) == 32, "what the stray engine had written"
    assert counts(one) == (1, 1)
    assert pool.stats().leases == pool.stats().reserved == 0


def test_stores_under_way_are_not_committed_to_a_refuted_namespace(pool: Pool) -> None:
    Audited(pool).run("a", 40)
    two = Audited(pool)
    late = two.request("late", 40, first=900)
    orders = two.step(late, 40)
    two.run("b", 40, found=DIFFERS)
    two.report(orders)
    other = Audited(pool, audit="off")
    assert other.matched(other.request("probe", 40, first=900)) == 0


class Seconds:
    """A clock."""

    now = 0.0

    def __call__(self) -> float:
        return self.now * GENERATION_S


def test_a_proof_is_of_what_was_written_before(pool: Pool) -> None:
    """Later blocks of the writer are audited by the newest of them, which is computed."""
    clock = Seconds()
    writer, reader = (Audited(pool, clock=clock) for _ in range(2))
    writer.run("a", 40)
    assert reader.run("b", 40) == 16
    clock.now = 0.9
    writer.run("c", 60)
    assert reader.run("d", 60) == 48, "of the same second"
    for clock.now, tokens, own in (1.0, 80, 48), (2.5, 120, 80):
        assert writer.run(f"w{tokens}", tokens) == own
    assert reader.run("e", 120) == 96
    assert counts(reader) == (2, 0)
    assert reader.run("f", 80) == 64, "what was written between is proved as well"
    assert reader.run("g", 120) == 112
    assert counts(reader) == (2, 0)
    clock.now = 3.0
    writer.run("h", 160)
    assert reader.run("i", 160, found=DIFFERS) == 128
    assert counts(reader) == (3, 1)
    assert reader.run("j", 40) == 0, "the namespace is not used any more"
    assert pool.stats().leases == 0


def test_who_has_loaded_later_blocks_starts_over_if_the_newest_differs(pool: Pool) -> None:
    """The workers are told which request has loaded something."""
    clock = Seconds()
    writer, reader = (Audited(pool, clock=clock) for _ in range(2))
    writer.run("a", 40)
    reader.run("b", 40)
    clock.now = 1.0
    writer.run("d", 80)
    request = reader.request("e", 80)
    assert reader.matched(request) == 48
    beside = reader.request("f", 80)
    states = [reader.side.state_of(name) for name in ("e", "f")]
    for state, vouched in zip(states, (4, 2), strict=True):
        assert state is not None
        ticket = pool.acquire(state.keys(4), 1.0)
        assert reader.side._auditor.trusted(state, pool.poll(ticket).offsets) == vouched
        pool.release(ticket)
    reader.side.finished(beside, ([],))
    orders = reader.step(request, 80)
    assert [one.starts_over for one in orders.comparisons] == [True]
    reader.report(orders)
    reader.side.finished(request, ([],))
    assert pool.stats().leases == 0


@pytest.mark.parametrize(
    ("written", "least", "loaded", "by"),
    [
        ([(1, 3), (1, 4)], 0, 1, [1]),
        ([(1, 5), (1, 4)], 0, 0, []),
        ([(1, 5), (1, 4), (1, 5)], 0, 2, [2]),
        ([(1, 3), (2, 9)], 0, 0, []),
        ([(1, 3), (9, 0), (1, 4)], 0, 1, [2]),
        ([(1, 3), (9, 0), (1, 4)], 1, 1, [2]),
        ([(9, 0), (9, 4), (9, 3)], 1, 1, [1]),
        ([(1, 3), (1, 0), (2, 2), (1, 3)], 0, 3, [3]),
        ([(9, 0)] * 4, 3, 1, [1, 2, 3]),
        ([(1, 3)] * 4, 3, 3, [3]),
        ([(8, 0), (9, 0), (8, 0), (8, 0), (9, 0)], 1, 3, [3, 4]),
        ([(8, 0), (8, 0), (9, 0), (9, 0)], 1, 1, [1]),
        ([(8, 0), (8, 0), (2, 1), (9, 0), (9, 0)], 1, 1, [1]),
    ],
)
def test_a_block_vouches_for_no_later_ones(
    written: list[tuple[int, int]], least: int, loaded: int, by: list[int]
) -> None:
    """By writer and generation; of writers 1 and 2 what is written up to 2 is proved."""
    origins = [
        bytes([writer] * 6) + generation.to_bytes(2, "big") for writer, generation in written
    ]
    belief = Belief({bytes([writer] * 6): 2 for writer in (1, 2)})
    first, vouches, places = _vouching(origins, 0, belief, least)
    assert (first, places) == (loaded, by)
    doubted = [_parts(origin) for origin in origins[:loaded] if not belief.trusts(origin)]
    assert all(generation <= vouches[writer] for writer, generation in doubted)


def test_of_a_hit_of_several_writers_a_block_of_each_is_compared(pool: Pool) -> None:
    """Blocks of the second writer do not vouch for those of the first before them."""
    one, two, reader = (Audited(pool) for _ in range(3))
    one.run("a", 60)
    assert two.run("b", 100) == 32, "of three blocks by one, two are loaded"
    assert reader.run("c", 100) == 32
    assert reader.run("d", 100) == 96
    assert counts(reader) == (1, 0)


def test_blocks_that_vouch_are_compared_wherever_they_lie(pool: Pool) -> None:
    """One in the middle of those that are computed."""
    reader, tokens = Audited(pool), 70 * BLOCK + 1
    Audited(pool).run("a", tokens)
    request = reader.request("b", tokens)
    state = reader.side.state_of("b")
    assert state is not None
    ticket = pool.acquire(state.keys(70), 1.0)
    for place, offset in enumerate(pool.poll(ticket).offsets):
        writer = 1 if place in (0, 1, 2, 3, 35) else 2 if place < 20 else 3
        at = offset + FACTS.groups[0].record_bytes
        pool.arena.array()[at : at + ORIGIN_BYTES] = [writer] * 6 + [0, 0]
    pool.release(ticket)
    assert reader.matched(request) == 19 * BLOCK
    reader.side.allocated(request, (reader.blocks["b"],), 19 * BLOCK)
    request.num_computed_tokens = 19 * BLOCK
    orders = reader.step(request, tokens - 19 * BLOCK)
    compared = {block - 1 for one in orders.comparisons for block in one.copy.block_ids}
    assert compared == {*range(19, 36), *range(54, 70)}
    reader.report(orders)
    assert counts(reader) == (1, 0)


def test_a_writer_ends_before_its_generations_do(pool: Pool) -> None:
    """What it has written as another writer stays its own; to others the new one is unproved."""
    clock = Seconds()
    writer, reader = (Audited(pool, clock=clock) for _ in range(2))
    writer.run("a", 40)
    assert writer.run("own", 40) == 32
    reader.run("b", 40)
    clock.now = 65536.0
    writer.run("x", 40, first=500)
    assert writer.run("c", 40) == writer.run("y", 40, first=500) == 32
    assert reader.run("z", 40, first=500) == 16
    assert reader.run("d", 40) == 32


@dataclass
class Written:
    """A block: by whom, in which generation of its writer, and what was computed: ``content``, by
    the weights of each block of the chain."""

    writer: Changing
    generation: int
    content: tuple[int, ...]


class Changing(Audited):
    """An engine whose weights change; comparisons find it. ``changed``: in which generation they
    did so unseen. ``believed``: the blocks of its replies that it has loaded."""

    def __init__(
        self, pool: Pool, clock: Seconds, blocks: dict[int, Written], weights: int = 0
    ) -> None:
        super().__init__(pool, clock=clock)
        self.clock, self.written = clock, blocks
        self.weights, self.changed, self.began = weights, -1, clock.now
        self.believed: list[Written] = []
        self.loaded: list[Written] = []

    @property
    def generation(self) -> int:
        return int(self.clock.now - self.began)

    def step(self, request: Any, tokens: int, *others: Any) -> StepOrders:
        self.loaded = []
        orders = super().step(request, tokens, *others)
        for load in orders.loads:
            self.loaded = [self.written[at] for copy in load.copies for at in copy.offsets]
        return orders

    def content(self, place: int) -> tuple[int, ...]:
        """Of the block of the request at that place, which it computes behind those it loaded."""
        before = self.loaded[-1].content if self.loaded else ()
        return before + (self.weights,) * (place + 1 - len(before))

    def report(self, orders: StepOrders, *args: Any, **kwargs: Any) -> None:
        compared = [
            (block - 1, self.written[at])
            for one in orders.comparisons
            for block, at in zip(one.copy.block_ids, one.copy.offsets, strict=True)
        ]
        equal = all(one.content == self.content(place) for place, one in compared)
        for store in orders.stores:
            for block, at in zip(store.copy.block_ids, store.copy.offsets, strict=True):
                self.written[at] = Written(self, self.generation, self.content(block - 1))
        if equal or not any(one.starts_over for one in orders.comparisons):  # else it starts over
            self.believed += self.loaded
        super().report(orders, found=None if equal else DIFFERS)


ENGINE = st.integers(0, 2)
RUN = st.tuples(st.just("run"), ENGINE, st.integers(1, 6))
EVENTS = st.one_of(
    RUN,
    RUN,
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 1.0])),
    st.tuples(st.sampled_from(["unseen", "unseen", "seen", "restart"]), ENGINE),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, min_size=6, max_size=20), st.tuples(*[st.sampled_from([0, 0, 1])] * 3))
def test_an_unseen_change_reaches_others_for_a_generation_at_most(
    events: list[Any], weights: tuple[int, int, int]
) -> None:
    """Engines that have what they started with load other KV, whatever blocks of all of them a
    chain has, only of the generation in which its writer changed; and without changes nothing is
    proved twice."""
    clock, blocks = Seconds(), dict[int, Written]()
    with Pool.open(RecallSettings.from_mapping({"host_size": "1MiB"}).pool) as pool:
        engines = [Changing(pool, clock, blocks, own) for own in weights]
        for number, (event, *where) in enumerate(events):
            if event == "wait":
                clock.now += where[0]
                continue
            engine = engines[where[0]]
            if event == "run":
                engine.run(f"r{number}", where[1] * BLOCK + 1)
            elif event == "restart":
                engines[where[0]] = Changing(pool, clock, blocks, weights[where[0]])
            else:
                engine.weights += 2  # which no other one started with
                if event == "unseen":
                    engine.changed = engine.generation if engine.changed < 0 else engine.changed
                else:
                    engine.side.weights_changed()
                    engine.began = clock.now
        for engine, own in zip(engines, weights, strict=True):
            wrong = [one for one in engine.believed if {*one.content} != {own}]
            if engine.weights == own:
                assert all(one.generation == one.writer.changed for one in wrong)
        if {*weights} == {0} and all(event in ("run", "wait") for event, *_ in events):
            written = {(id(one.writer), one.generation) for one in blocks.values()}
            for engine in engines:
                assert counts(engine)[0] <= sum(one[0] != id(engine) for one in written)


def test_a_fleet_audits_each_writer_by_a_block() -> None:
    """Eight engines' scheduler sides on one pool, of which each has read the prompts of all: 200
    blocks each, of which the whole comparison computed all, and now one."""
    prompts, settings = 8, RecallSettings.from_mapping({"host_size": "16MiB"})
    with Pool.open(settings.pool) as pool:
        fleet = [Audited(pool) for _ in range(prompts)]
        for number, engine in enumerate(fleet):
            engine.run(f"own {number}", 200 * BLOCK + 1, first=number * 10_000)
        computed = 0
        for engine in fleet:
            for number in range(prompts):
                for turn in range(2):
                    loaded = engine.run(f"{number}-{turn}", 200 * BLOCK + 1, first=number * 10_000)
                    computed += 200 - loaded // BLOCK
        assert computed == prompts * (prompts - 1)
        assert all(counts(engine) == (prompts - 1, 0) for engine in fleet)


def test_one_hit_in_so_many_is_checked_by_its_last_block(pool: Pool) -> None:
    bench = Audited(pool, audit=3)
    bench.run("a", 60)
    assert [bench.run(f"r{i}", 60) for i in range(7)] == [48, 48, 32, 48, 48, 32, 48]
    assert counts(bench) == (2, 0)


def test_a_chain_of_each_writer_is_once_compared_from_its_start(pool: Pool) -> None:
    """By a repeated audit, if it was proved by its last block; and all start over if it differs."""
    Audited(pool).run("a", 60)
    bench = Audited(pool, audit=2)
    assert [bench.run(f"r{i}", 60) for i in range(6)] == [32, 48, 0, 48, 32, 48]
    assert counts(bench) == (3, 0)


def test_a_repeated_audit_waits_until_the_engine_is_idle(pool: Pool) -> None:
    bench = Audited(pool, audit=2)
    bench.run("a", 60)
    bench.request("someone else", 40, first=700)
    assert [bench.run(f"r{i}", 60) for i in range(70)].count(32) == 1
    bench.side.finished(bench.side.state_of("someone else").request, ([],))  # type: ignore[union-attr]


def test_only_blocks_that_decoding_does_not_change_are_checked_again(pool: Pool) -> None:
    """Each hit is due; that of the longer prompt ends in blocks that may differ, and rightly so."""
    bench = Audited(pool, replace(FACTS, exact_blocks=2), audit=1)
    bench.run("a", 60)
    assert [bench.run(f"r{i}", 60) for i in range(3)] == [48, 48, 48]
    assert counts(bench) == (0, 0)
    assert bench.run("b", 40) == 16
    assert counts(bench) == (1, 0)


def test_nothing_is_compared_with_what_a_lost_service_had(pool: Pool) -> None:
    """Its arena is another one now, and others' blocks lie there."""

    class Lost:
        """A pool service that goes while blocks are leased."""

        is_lost = False

        def __getattr__(self, name: str) -> Any:
            return getattr(pool, name)

        def poll(self, ticket: int) -> Recall:
            return Recall(RecallState.READY) if self.is_lost else pool.poll(ticket)

    Audited(pool).run("a", 60)
    service = Lost()
    two = Audited(service)  # type: ignore[arg-type]
    request = audited(two, "b", 60)
    service.is_lost = True
    orders = two.step(request, 28)
    assert [(one.copy.block_ids, one.starts_over) for one in orders.comparisons] == [((), True)]
    two.report(orders, found=DIFFERS)
    assert counts(two) == (0, 0)
    assert pool.stats().leases == 0


def audited(bench: Audited, name: str, tokens: int, first: int = 0) -> Request:
    request = bench.request(name, tokens, first)
    loaded = bench.matched(request)
    assert loaded == (tokens - 1) // BLOCK * BLOCK - BLOCK
    bench.side.allocated(request, (bench.blocks[name],), loaded)
    bench.side.reported(None, {name}, set())
    request.num_computed_tokens = loaded
    return request


@pytest.mark.parametrize("change", ["weights", "refuted", "not on the device"])
def test_who_has_loaded_what_nothing_vouches_for_starts_over(pool: Pool, change: str) -> None:
    """Its audit ended before its block was compared, or the block is not there to be compared."""
    Audited(pool).run("a", 60)
    Audited(pool).run("x", 60, first=500)
    two = Audited(pool)
    request, other = audited(two, "b", 60), two.request("c", 60, first=500)
    if change == "weights":
        two.side.weights_changed()
    elif change == "not on the device":
        two.blocks["b"][2] = 0
    else:
        assert two.matched(other) == 32
        two.report(two.step(other, 60), found=DIFFERS)
    orders = two.step(request, 28)
    assert [(one.copy.block_ids, one.starts_over) for one in orders.comparisons] == [((), True)]
    assert not two.step(request, 1).comparisons, "once"
    for one in request, other:
        two.side.finished(one, ([],))
    assert pool.stats().leases == 0


@pytest.mark.parametrize("compared", [False, True])
def test_blocks_on_the_device_wait_for_the_audit_of_who_loaded_them(
    pool: Pool, compared: bool
) -> None:
    """Another request finds them in vLLM's prefix cache; they leave it if the audit is given up."""
    Audited(pool).run("a", 60)
    two = Audited(pool)
    taken: list[set[int]] = []
    two.side._uncache = taken.append
    request, beside = audited(two, "b", 60), two.request("c", 60)
    assert two.side.match(beside, 32) == (None, False)
    assert two.side.match(two.request("d", 60, first=32), 32) == (0, False)
    orders = two.step(request, 28)
    assert two.side.match(beside, 32) == (None, False), "its report is not there"
    if compared:
        two.report(orders)
    two.side.finished(request, ([4, 5],))
    assert two.side.match(beside, 32) == ((16, True) if compared else (None, False))
    assert taken == []
    if not compared:
        two.report(orders)
    Audited(pool).run("x", 60, first=500)
    two.side.finished(audited(two, "e", 60, first=500), ([7, 8],))
    assert taken == [{7, 8}]
    assert two.run("f", 60, first=500) == 32, "nothing was proved"


def test_a_proof_ends_with_the_weights(pool: Pool) -> None:
    """One that was given before says nothing of what lies under the new name, nor, in others, of
    what this engine writes from then on."""
    writer, reader = Audited(pool), Audited(pool)
    writer.run("a", 40)
    assert reader.run("b", 40) == 16
    assert reader.run("c", 40) == 32, "it has proved the writer"
    writer.side.weights_changed()
    writer.run("x", 60, first=500)
    assert reader.run("y", 60, first=500) == 32, "it is not the writer that was proved"
    assert counts(reader) == (2, 0)
    assert writer.run("d", 40) == 16, "not its own any more"
    assert writer.run("e", 40) == 32
    assert counts(writer) == (1, 0)
    reader.side.weights_changed()
    assert reader.run("f", 40) == 16
    assert counts(reader) == (3, 0)


@pytest.mark.parametrize("what", ["mm_features", "lora_request"])
def test_prompts_with_images_or_an_adapter_are_computed_whole(pool: Pool, what: str) -> None:
    """And proved by themselves."""
    two = Audited(pool)
    for bench, name in (Audited(pool), "a"), (two, "b"):
        request = bench.request(name, 40)
        setattr(request, what, [SimpleNamespace()] if what == "mm_features" else "adapter")
        assert bench.side.match(request, 0) == (0, False)
        bench.report(bench.step(request, 40))
        bench.side.finished(request, ([],))
    assert counts(two) == (1, 0)


def test_what_text_proved_says_nothing_of_images(pool: Pool) -> None:
    one, two = (Audited(pool, clock=lambda: 0.0) for _ in range(2))
    assert [one.run("a", 40), two.run("b", 40), two.run("c", 40)] == [0, 16, 32]
    for bench in (one, two):
        request = bench.request("image", 40, 500)
        request.mm_features = [SimpleNamespace()]
        assert bench.side.match(request, 0) == (0, False)
        bench.report(bench.step(request, 40))
        bench.side.finished(request, ([],))


def test_all_blocks_that_are_to_vouch_must_be_there(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Audited(pool, EXPERTS).run("a", 20 * BLOCK + 5)
    bench, acquire, asked = Audited(pool, EXPERTS), pool.acquire, list[int]()

    def fewer(keys: Sequence[BlockKey], *more: Any) -> int:
        asked.append(len(keys))
        return acquire(keys if len(asked) == 1 else keys[:-1], *more)

    monkeypatch.setattr(pool, "acquire", fewer)
    request = bench.request("b", 20 * BLOCK + 5)
    assert bench.side.match(request, 0) == (0, False), "nothing is loaded unproved"
    assert len(asked) > 1
    bench.end(request, RequestStatus.FINISHED_ABORTED)
    assert pool.stats().leases == 0


def test_only_blocks_that_decoding_does_not_change_are_compared(pool: Pool) -> None:
    """Retrieval attention decodes approximately: later blocks may differ, and rightly so."""
    Audited(pool).run("a", 100)
    two = Audited(pool, replace(FACTS, exact_blocks=2))
    request = two.request("b", 100)
    assert two.matched(request) == 16
    (comparison,) = two.step(request, 100).comparisons
    assert comparison.copy.block_ids == (2,)


# ---- the comparison ------------------------------------------------------------------------


def pages_with(values: torch.Tensor) -> tuple[list[LayerPages], torch.Tensor]:
    """A layer of blocks ``[blocks, elements]``, and an arena that has the same."""
    rows = values.view(torch.uint8)
    return [LayerPages("layer", rows, "", values.dtype)], rows.clone().flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_rounding_is_within_and_another_model_is_not(dtype: torch.dtype, dim: int) -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(4, 16 * dim, generator=draw).to(dtype)
    pages, arena = pages_with(values)
    size = values[0].nbytes
    ids, offsets = [0, 1, 3], [0, size, 3 * size]

    def compare(exact: bool = False) -> Deviation:
        return deviation(GroupPages(tuple(pages)), arena, ids, offsets, dtype, exact)

    assert compare() == Deviation(3)
    clean = values.clone()
    noise = torch.finfo(dtype).eps * 0.25
    values.copy_((clean.float() * (1 + noise * torch.randn(clean.shape, generator=draw))).to(dtype))
    rounded = compare()
    assert rounded.within
    assert rounded.unequal == 3 or dtype is not torch.float32
    if rounded.unequal:
        assert not compare(exact=True).within
    values.copy_((clean.float() + 0.05 * torch.randn(clean.shape, generator=draw)).to(dtype))
    other = compare()
    assert not other.within
    assert other.layer == "layer"
    values.copy_(clean)
    values[3, 5] = float("nan")
    assert not compare().within


@pytest.mark.parametrize(
    ("kept", "computes", "first", "further"),
    [
        (torch.float16, torch.float16, 2**-10, 2**-9),
        (torch.float32, torch.float16, 2**-10, 2**-9),
        (torch.float8_e4m3fn, torch.bfloat16, 2**-4, 2**-4),
    ],
)
def test_deeper_layers_may_deviate_further_up_to_a_bound(
    kept: torch.dtype, computes: torch.dtype, first: float, further: float
) -> None:
    """What is kept more precisely than it is computed is no more exact."""
    ours = torch.randn(1, 2048, generator=torch.Generator().manual_seed(1)).to(kept)
    theirs = (2 * ours.float()).to(kept).view(torch.uint8).flatten()
    rows = ours.view(torch.uint8)
    for layers, bound in ((1, first), (2, first + further), (4, first + 3 * further), (401, 0.5)):
        pages = tuple(LayerPages(f"layer {at}", rows, "", kept) for at in range(layers))
        arena = torch.cat([*[rows.flatten()] * (layers - 1), theirs])
        found = deviation(GroupPages(pages), arena, [0], [0], computes, False)
        assert found.layer == f"layer {layers - 1}"
        assert found.relative / found.times == pytest.approx(bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("share", [0.15, 0.5, 1.0])
@pytest.mark.parametrize("value", ["zero", "largest", "infinite"])
def test_vectors_of_nothing_and_of_too_much_are_not_within(
    dtype: torch.dtype, share: float, value: str
) -> None:
    """Of a block that was never written, or partly; of one so large that squares overflow: a ratio
    that is no number passed for none."""
    draw = torch.Generator().manual_seed(1)
    values = 8 * torch.randn(2, 64 * 128, generator=draw).to(dtype)
    pages, arena = pages_with(values)
    size = values[0].nbytes
    pooled = arena.view(dtype).reshape(values.shape)
    largest = torch.finfo(dtype).max
    sizes = {"zero": 0.0, "largest": largest, "infinite": float("inf")}
    pooled[:, : int(share * pooled.shape[1])] = sizes[value]
    found = deviation(GroupPages(tuple(pages)), arena, [0, 1], [0, size], dtype, False)
    assert not found.within
    assert (found.unequal, found.layer) == (2, "layer")
    if value == "largest":  # both are, and differ
        values[:, : int(share * values.shape[1])] = -largest
        found = deviation(GroupPages(tuple(pages)), arena, [0, 1], [0, size], dtype, False)
        assert not found.within


def test_eight_bit_caches_are_compared_by_value() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(2, 4096, generator=draw).to(torch.float8_e4m3fn)
    rows = values.view(torch.uint8)
    pages = [LayerPages("layer", rows.clone(), "", torch.float8_e4m3fn)]
    group = GroupPages(tuple(pages))
    arena = rows.flatten()
    pages[0].rows[0, :3] ^= 1
    found = deviation(group, arena, [0, 1], [0, 4096], torch.bfloat16, False)
    assert (found.blocks, found.unequal, found.within) == (2, 1, True)
    scaled = (values.float() * 1.5).to(torch.float8_e4m3fn).view(torch.uint8)
    pages[0].rows.copy_(scaled)
    assert not deviation(group, arena, [0, 1], [0, 4096], torch.bfloat16, False).within


def test_what_ranks_found_is_added_up() -> None:
    one, two = Deviation(3, 1, 0.2, 0.01, "a"), Deviation(3, 2, 1.5, 0.3, "b")
    report = StepReport(compared={7: (1, one)}).aggregate(StepReport(compared={7: (1, two)}))
    assert report.compared == {7: (2, Deviation(3, 2, 1.5, 0.3, "b"))}


# ---- real engines --------------------------------------------------------------------------


def retuned(base: Path, folder: Path) -> Path:
    """The same model with another input norm and key norm."""
    folder.mkdir()
    for path in base.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(base / "model.safetensors")
    for name in ("model.layers.0.input_layernorm", "model.layers.1.self_attn.k_norm"):
        key = f"{name}.weight"
        draw = torch.randn(weights[key].shape, generator=torch.Generator().manual_seed(3))
        weights[key] = weights[key] * (1 + 0.5 * draw).to(weights[key].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.engine
def test_two_models_that_nothing_tells_apart(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """With one namespace for all: each engine's replies are its own, whoever wrote first; and that
    of a writer whose weights change unseen after what proves it was written."""
    base = model_folder("qwen3", **SHAPE)
    disk = {"host_size": "64MiB", "disk_path": str(tmp_path / "disk"), "disk_size": "256MiB"}
    pool = {**disk, "load_or_compute": "load", "async_write": False}
    options = {"dtype": "float32", "pool": pool, "prelude": "engines.vllm.one_namespace"}
    *prompts, late = (prompt_of(TOKENS, seed) for seed in range(4))

    first = start(model=str(base), **options)
    want = [first.ask(prompt) for prompt in prompts[:2]]
    first.trouble(name="retune")
    first.trouble(name="age")
    first.ask(late)
    first.close()

    other = start(model=str(retuned(base, tmp_path / "retuned")), **options)
    alone = [salted(other, prompt) for prompt in prompts]
    assert [one["tokens"] for one in alone[:2]] != [one["tokens"] for one in want]
    for place in (2, 0, 1, 0, 2):  # what it has written itself comes first, and last
        got = other.ask(prompts[place])
        assert (got["tokens"], got["logprobs"]) == (
            alone[place]["tokens"],
            alone[place]["logprobs"],
        )
        assert other.forget_device()
    metrics = other.metrics()
    assert metrics["kvrecall_audits_total"] == metrics["kvrecall_audits_failed_total"] == 1
    assert "AUDIT FAILED" in other.log.read_text()
    assert other.ask(prompts[0])["from"]["host"] == 3 * 128, "it goes on with blocks of its own"
    other.close()

    again = start(model=str(base), **options)
    for blocks, place in ((2, 1), (3, 0)):  # what was audited vouches for what was written before
        got = again.ask(prompts[place])
        assert got["tokens"] == want[place]["tokens"]
        assert got["from"]["computed"] == TOKENS - blocks * 128
        assert again.forget_device()
    got = again.ask(late)  # of the weights that nothing saw change
    metrics = again.metrics()
    assert metrics["kvrecall_audits_total"] == 2
    assert metrics["kvrecall_audits_failed_total"] == 1
    assert again.forget_device()
    assert got["tokens"] == salted(again, late)["tokens"]
    again.close()


def salted(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    """The reply as of an engine without a pool: nothing has that salt."""
    (reply,) = engine.generate(prompts=[prompt], salts=["alone"])
    assert engine.forget_device()
    return reply


@pytest.mark.long
@pytest.mark.engine
def test_wrong_kv_under_a_proved_origin_is_computed_anew(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """A repeated audit fails: the request that has loaded the blocks begins anew, and so do the
    others; the device's prefix cache, which has them now, is emptied. An adapter of another content
    under one identity is told by its own audit."""
    base = model_folder("qwen3", **SHAPE)
    engine = start(
        model=str(base),
        dtype="float32",
        pool={"host_size": "64MiB", "load_or_compute": "load", "audit": 1},
        prelude="engines.vllm.one_namespace",
        enable_lora=True,
        max_lora_rank=8,
    )
    prompt, others = prompt_of(TOKENS, 1), prompt_of(TOKENS, 2)
    want, beside = engine.ask(prompt), engine.ask(others)
    assert engine.forget_device()
    engine.trouble(name="scribble")
    got = engine.ask(prompt)
    assert got["tokens"] == want["tokens"]
    assert got["logprobs"] == want["logprobs"]
    assert (got["cached"], got["from"]["host"]) == (0, 0), "all of it was computed"
    metrics = engine.metrics()
    assert metrics["kvrecall_audits_failed_total"] == 1
    assert engine.ask(prompt)["tokens"] == want["tokens"]
    assert engine.ask(others)["tokens"] == beside["tokens"]
    assert engine.pool_stats()["leases"] == 0

    lora = ["style", 1, str(write_lora(tmp_path / "adapter", base, rank=8, seed=1))]
    tuned = engine.ask(prompt, lora=lora)
    assert tuned["tokens"] != want["tokens"]
    assert engine.forget_device()
    assert engine.ask(prompt, lora=lora)["tokens"] == tuned["tokens"]
    engine.close()
