"""An engine that could read another model's KV computes instead, detects it, and stays correct."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.disks import FaultyIo

from engines.vllm.connector.test_scheduler import BLOCK, FACTS, Bench, pool
from engines.vllm.engine import Engine, prompt_of
from kvrecall.block import TierName
from kvrecall.config import DiskConfig, RecallSettings
from kvrecall.engines.vllm.connector.audit import GENERATION_S, Belief, _vouching
from kvrecall.engines.vllm.connector.compare import deviation
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages
from kvrecall.engines.vllm.wire import (
    ORIGIN_BYTES,
    Deviation,
    EngineFacts,
    StepOrders,
    StepReport,
)
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Recall, RecallState
from kvrecall.pool.disk import DiskTier
from kvrecall.testing.blocks import wait_until
from kvrecall_lab.models import write_lora

__all__ = ["pool"]

TOKENS = 3 * 128 + 5
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


def test_own_blocks_are_believed(pool: Pool) -> None:
    one = Audited(pool, audit=0)
    assert one.run("a", 40) == 0
    assert one.run("b", 40) == 32
    assert counts(one) == (0, 0)


def test_the_first_hit_on_anothers_blocks_is_computed(pool: Pool) -> None:
    Audited(pool).run("a", 40)
    Audited(pool).run("x", 60, first=500)
    two = Audited(pool)
    assert two.run("b", 40) == 0
    assert counts(two) == (1, 0)
    assert two.run("c", 40) == 32
    assert two.run("d", 60, first=500) == 0, "a third writer is proved by itself"
    assert two.run("e", 60, first=500) == 48
    assert pool.stats().leases == 0


def test_one_audit_at_a_time_and_the_others_compute(pool: Pool) -> None:
    Audited(pool).run("a", 40)
    two = Audited(pool)
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


def loads_at(bench: Bench, seconds_per_block: float) -> None:
    """The engine's measured bandwidths of prefill and both tiers."""
    bench.side.costs.saw_step(1000, 500, 0.1)
    for tier in (TierName.HOST, TierName.DISK):
        bench.side.costs.saw_load(tier, 1, seconds_per_block)


def test_a_prefix_that_is_faster_computed_proves_its_writer(pool: Pool) -> None:
    """So that the first long prefix after a restart is loaded, not computed."""
    Audited(pool).run("a", 40)
    Audited(pool).run("x", 60, first=500)
    two = Audited(pool)
    loads_at(two, 100.0)
    assert two.run("b", 40) == 0
    assert counts(two) == (1, 0)
    assert two.run("y", 60, first=500) == 0
    assert counts(two) == (1, 0), "one proof is enough while nothing is loaded"
    loads_at(two, 1e-6)
    assert two.run("c", 40) == 32
    assert two.run("z", 60, first=500) == 0, "this writer is not proved"
    assert pool.stats().leases == 0


def test_a_mismatch_is_found_in_a_prefix_that_is_faster_computed(pool: Pool) -> None:
    Audited(pool).run("a", 40)
    two = Audited(pool)
    loads_at(two, 100.0)
    assert two.run("b", 40, found=DIFFERS) == 0
    assert counts(two) == (1, 1)
    assert pool.stats().leases == 0


def test_blocks_to_compare_come_from_disk_while_the_request_computes(tmp_path: Path) -> None:
    io = FaultyIo()
    disk = DiskConfig(tmp_path, 64 << 20)
    with Pool(Arena.create(64 * 4096), DiskTier(disk)) as pool:
        Audited(pool).run("a", 60)
        wait_until(lambda: pool.stats().unwritten_bytes == 0)
    with Pool(Arena.create(64 * 4096), DiskTier(disk, io=io)) as pool:
        io.read_gate.clear()
        two = Audited(pool)
        loads_at(two, 100.0)
        assert two.run("gone", 60) == 0
        assert counts(two) == (0, 0), "a request that ends waits for nothing"
        request = two.request("b", 60)
        assert two.matched(request) == 0
        two.report(two.step(request, 60))
        request.append_output_token_ids(7)
        io.read_gate.set()

        def compared() -> bool:
            orders = two.step(request, 0)
            two.report(orders)
            return bool(orders.comparisons)

        wait_until(compared)
        assert counts(two) == (1, 0)
        two.side.finished(request, (two.blocks["b"],))
        assert pool.stats().leases == 0
        loads_at(two, 1e-6)
        loaded = two.request("c", 60)
        wait_until(lambda: two.matched(loaded) == 48)


def test_a_mismatch_makes_the_engine_private(pool: Pool) -> None:
    one = Audited(pool)
    one.run("a", 40)
    two = Audited(pool)
    assert two.run("x", 60, first=500) == 0
    assert two.run("b", 40, found=DIFFERS) == 0
    assert counts(two) == (1, 1)
    assert two.run("c", 40) == 0, "computed, and saved under a name of its own"
    assert two.run("d", 40) == 32
    assert counts(two) == (1, 1)
    assert one.run("e", 40) == 32, "the other engine's blocks are still its own"
    assert one.run("f", 60, found=DIFFERS, first=500) == 0, "what the stray engine had written"
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
    assert reader.run("b", 40) == 0
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


def test_of_many_requests_on_later_blocks_each_computes_one(pool: Pool) -> None:
    """A burst of hand-overs does not wait for one of them."""
    clock = Seconds()
    writer, reader = (Audited(pool, clock=clock) for _ in range(2))
    writer.run("a", 40)
    reader.run("b", 40)
    clock.now = 1.0
    for name, first in ("c", 500), ("d", 700):
        writer.run(name, 60, first=first)
    requests = [reader.request(f"r{first}", 60, first) for first in (500, 700)]
    assert [reader.matched(one) for one in requests] == [32, 32]
    assert reader.run("unproved", 60, first=500) == 32


def test_who_has_loaded_later_blocks_starts_over_if_the_newest_differs(pool: Pool) -> None:
    """The workers are told which request has loaded something."""
    clock = Seconds()
    writer, reader = (Audited(pool, clock=clock) for _ in range(2))
    writer.run("a", 40)
    request = reader.request("b", 40)
    assert reader.matched(request) == 0
    orders = reader.step(request, 40)
    assert [one.repeated for one in orders.comparisons] == [False]
    reader.report(orders)
    reader.side.finished(request, ([],))
    clock.now = 1.0
    writer.run("d", 60)
    request = reader.request("e", 60)
    assert reader.matched(request) == 32
    beside = reader.request("f", 60)
    reader.side.admit(beside)
    states = [reader.side.state_of(name) for name in ("e", "f")]
    for state, vouched in zip(states, (3, 2), strict=True):
        assert state is not None
        ticket = pool.acquire(state.keys(3), 1.0)
        assert reader.side._auditor.trusted(state, pool.poll(ticket).offsets) == vouched
        pool.release(ticket)
    reader.side.finished(beside, ([],))
    orders = reader.step(request, 60)
    assert [one.repeated for one in orders.comparisons] == [True]
    reader.report(orders)
    reader.side.finished(request, ([],))
    assert pool.stats().leases == 0


@pytest.mark.parametrize(
    ("written", "vouching"),
    [
        ([(1, 3), (1, 4)], 1),
        ([(1, 5), (1, 4)], 0),
        ([(1, 5), (1, 4), (1, 5)], 2),
        ([(1, 3), (2, 9)], 0),
        ([(1, 3), (9, 0), (1, 4)], 0),
        ([(9, 0), (1, 4)], None),
        ([(1, 3), (1, 0), (2, 2), (1, 3)], 3),
    ],
)
def test_a_block_vouches_for_no_later_ones(
    written: list[tuple[int, int]], vouching: int | None
) -> None:
    """By writer and generation; of writers 1 and 2 what is written up to 2 is proved."""
    origins = [
        bytes([writer] * 6) + generation.to_bytes(2, "big") for writer, generation in written
    ]
    belief = Belief({bytes([writer] * 6): 2 for writer in (1, 2)})
    assert _vouching(origins, 0, belief) == vouching


def test_a_hit_of_several_writers_is_loaded_as_far_as_one_block_vouches(pool: Pool) -> None:
    """Later blocks of two writers: the first one's last block, of those before the other's."""
    clock = Seconds()
    one, two, reader = (Audited(pool, clock=clock) for _ in range(3))
    for writer, first in (one, 500), (two, 700):
        writer.run("x", 40, first=first)
        assert reader.run(f"p{first}", 40, first=first) == 0
    assert two.run("q", 40, first=500) == 0, "it proves the other writer, too"
    clock.now = 1.0
    one.run("a", 60)
    assert two.run("b", 100) == 32, "of three blocks by one, two are loaded"
    clock.now = 2.0
    assert reader.run("c", 100) == 32
    assert reader.run("d", 100) == 96


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
    assert reader.run("z", 40, first=500) == 0
    assert reader.run("d", 40) == 32


def test_who_has_proved_a_writer_is_another_writer(pool: Pool) -> None:
    """Its weights may have changed since."""
    writer, reader, third = (Audited(pool) for _ in range(3))
    writer.run("a", 40)
    reader.run("b", 40)
    reader.run("x", 60, first=500)
    assert third.run("c", 40) == 0
    assert third.run("y", 60, first=500) == 0
    assert third.run("z", 60, first=500) == 48
    assert counts(third) == (2, 0)


@dataclass
class Written:
    """A block: by whom, with which weights, in which generation of its writer."""

    writer: Changing
    weights: int
    generation: int


class Changing(Audited):
    """An engine whose weights change; comparisons find it. ``changed``: in which generation they
    did so unseen. ``believed``: the blocks of its replies that it has loaded."""

    def __init__(self, pool: Pool, clock: Seconds, blocks: dict[int, Written]) -> None:
        super().__init__(pool, clock=clock)
        self.clock, self.written = clock, blocks
        self.weights, self.changed, self.began = 0, -1, clock.now
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

    def report(self, orders: StepOrders, *args: Any, **kwargs: Any) -> None:
        for store in orders.stores:
            made = Written(self, self.weights, self.generation)
            self.written.update(dict.fromkeys(store.copy.offsets, made))
        compared = (self.written[at] for one in orders.comparisons for at in one.copy.offsets)
        equal = all(one.weights == self.weights for one in compared)
        if equal or not any(one.repeated for one in orders.comparisons):  # else it starts over
            self.believed += self.loaded
        super().report(orders, found=None if equal else DIFFERS)


ENGINE = st.integers(0, 1)
RUN = st.tuples(st.just("run"), ENGINE, st.integers(1, 6))
EVENTS = st.one_of(
    RUN,
    RUN,
    st.tuples(st.just("wait"), st.sampled_from([0.25, 1.0, 1.0])),
    st.tuples(st.sampled_from(["unseen", "unseen", "seen", "restart"]), ENGINE),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(EVENTS, min_size=6, max_size=20))
def test_an_unseen_change_reaches_others_for_a_generation_at_most(events: list[Any]) -> None:
    """Engines that have what they started with load other KV only of the generation in which its
    writer changed; and without changes nothing is proved twice."""
    clock, blocks = Seconds(), dict[int, Written]()
    settings = RecallSettings.from_mapping({"host_size": "1MiB"})
    with Pool.open(settings.pool) as pool:
        engines = [Changing(pool, clock, blocks) for _ in range(2)]
        for number, (event, *where) in enumerate(events):
            if event == "wait":
                clock.now += where[0]
                continue
            engine = engines[where[0]]
            if event == "run":
                engine.run(f"r{number}", where[1] * BLOCK + 1)
            elif event == "restart":
                engines[where[0]] = Changing(pool, clock, blocks)
            else:
                engine.weights += 1
                if event == "unseen":
                    engine.changed = engine.generation if engine.changed < 0 else engine.changed
                else:
                    engine.side.weights_changed()
                    engine.began = clock.now
        for engine in engines:
            wrong = [one for one in engine.believed if one.weights != engine.weights]
            if not engine.weights:
                assert all(one.generation == one.writer.changed for one in wrong)
        if all(event in ("run", "wait") for event, *_ in events):
            written = {(id(one.writer), one.generation) for one in blocks.values()}
            for engine in engines:
                assert counts(engine)[0] <= sum(one[0] != id(engine) for one in written)


def test_one_hit_in_so_many_is_checked_by_its_last_block(pool: Pool) -> None:
    bench = Audited(pool, audit=3)
    bench.run("a", 60)
    assert [bench.run(f"r{i}", 60) for i in range(7)] == [48, 48, 32, 48, 48, 32, 48]
    assert counts(bench) == (2, 0)


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
    request = two.request("b", 60)
    assert two.matched(request) == 0
    service.is_lost = True
    orders = two.step(request, 60)
    assert orders.comparisons == []
    two.report(orders, found=DIFFERS)
    assert counts(two) == (0, 0)
    assert pool.stats().leases == 0


def test_a_proof_ends_with_the_weights(pool: Pool) -> None:
    """One that was given before says nothing of what lies under the new name, nor, in others, of
    what this engine writes from then on."""
    writer, reader = Audited(pool), Audited(pool)
    writer.run("a", 40)
    assert reader.run("b", 40) == 0
    assert reader.run("c", 40) == 32, "it has proved the writer"
    writer.side.weights_changed()
    writer.run("x", 60, first=500)
    assert reader.run("y", 60, first=500) == 0, "it is not the writer that was proved"
    assert counts(reader) == (2, 0)
    assert writer.run("d", 40) == 0, "not its own any more"
    assert writer.run("e", 40) == 32
    assert counts(writer) == (1, 0)
    reader.side.weights_changed()
    assert reader.run("f", 40) == 0
    assert counts(reader) == (3, 0)


def test_off_believes_everything(pool: Pool) -> None:
    Audited(pool, audit="off").run("a", 40)
    assert Audited(pool, audit="off").run("b", 40) == 32


def test_prompts_with_images_are_proved_by_themselves(pool: Pool) -> None:
    Audited(pool).run("a", 40)
    two = Audited(pool)
    two.run("b", 40)
    request = two.request("c", 40)
    request.mm_features = [SimpleNamespace()]
    assert two.matched(request) == 0


def test_an_ended_request_proves_only_what_it_computed(pool: Pool) -> None:
    Audited(pool).run("a", 60)
    two = Audited(pool)
    request = two.request("b", 60)
    assert two.matched(request) == 0
    two.side.finished(request, ([],))
    assert counts(two) == (0, 0)
    assert pool.stats().leases == 0
    assert two.run("c", 60) == 0, "nothing was proved"


def test_only_blocks_that_decoding_does_not_change_are_compared(pool: Pool) -> None:
    """Retrieval attention decodes approximately: later blocks may differ, and rightly so."""
    Audited(pool).run("a", 100)
    two = Audited(pool, replace(FACTS, exact_blocks=2))
    request = two.request("b", 100)
    assert two.matched(request) == 0
    (comparison,) = two.step(request, 100).comparisons
    assert comparison.copy.block_ids == (1, 2)


def test_of_a_long_hit_its_ends_are_compared(pool: Pool) -> None:
    Audited(pool).run("a", 50 * BLOCK)
    two = Audited(pool)
    request = two.request("b", 50 * BLOCK)
    assert two.matched(request) == 0
    (comparison,) = two.step(request, 50 * BLOCK).comparisons
    assert comparison.copy.block_ids == (*range(1, 17), *range(34, 50))


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
    for place in (0, 1):
        got = again.ask(prompts[place])
        assert got["tokens"] == want[place]["tokens"]
        assert got["from"]["computed"] == (TOKENS, TOKENS - 3 * 128)[place]
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
