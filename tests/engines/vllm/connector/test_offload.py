"""What the offload planner offloads, when, and at what cost: with a real pool and vLLM's own block
manager, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from engines.vllm.connector.test_scheduler import ByName
from kvrecall.attention.selection import Gate
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.block import Namespace
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.compat.attention import override_kv_cache_spec
from kvrecall.engines.vllm.compat.offloadable import OffloadableSpec
from kvrecall.engines.vllm.compat.scheduler import block_manager
from kvrecall.engines.vllm.connector import connector as connector_module
from kvrecall.engines.vllm.connector.connector import RecallConnector
from kvrecall.engines.vllm.connector.offload import PATIENCE, OffloadPlanner
from kvrecall.engines.vllm.connector.scheduler import MakePlanner, RecallScheduler
from kvrecall.engines.vllm.wire import (
    ORIGIN_BYTES,
    EngineFacts,
    LoadOrder,
    OffloadOrders,
    Shard,
    StepOrders,
    StepReport,
    StoreOrder,
)
from kvrecall.pool import Pool
from kvrecall.pool.base import PoolClient
from kvrecall.testing import wait_until

BLOCK = 16
FACTS = EngineFacts.of_one(BLOCK, 4096)
SETTINGS = RetrievalSettings(
    init_tokens=16,
    local_tokens=64,
    topk_share=0.2,
    dense_boundary=64,
    offload_boundary=256,
    gate=False,
    cache_share=0.1,
    least_blocks=1,
)


class Bench:
    """A scheduler around vLLM's block manager, whose workers complete stores at once."""

    def __init__(
        self,
        pool: PoolClient,
        blocks: int,
        in_place: bool = False,
        settings: RetrievalSettings = SETTINGS,
        audit: object = "off",
        make_planner: MakePlanner | None = None,
    ) -> None:
        override_kv_cache_spec(lambda layer: None)
        init_none_hash(sha256_cbor)
        self.pool = pool
        spec = OffloadableSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
        config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, 4096, BLOCK, BLOCK)
        self.side = RecallScheduler(
            pool,
            RecallSettings.from_mapping({"host_size": "1MiB", "audit": audit}),
            FACTS,
            lambda: Namespace.of({"test": "1"}),
            ByName(),
            self.manager.get_block_ids,
            make_planner=make_planner
            or partial(
                OffloadPlanner, pool, settings, BLOCK, Gate(settings, 512), 600.0, in_place=in_place
            ),
        )
        self.planner = block_manager(self.manager).planner = self.side.offload
        self.orders: OffloadOrders | None = None
        self.loads: list[LoadOrder] = []
        self.makes_stores = True
        self._stores: list[int] = []
        self._running: dict[str, Request] = {}

    @property
    def ordered(self) -> OffloadOrders:
        """What the last step was ordered."""
        assert self.orders is not None
        return self.orders

    @property
    def free(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def request(self, name: str, tokens: int, first: int = 0) -> Request:
        params = SamplingParams(max_tokens=1000)
        params.update_from_generation_config({}, eos_token_id=1)
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        request = Request(
            name, list(range(first, first + tokens)), params, None, block_hasher=hasher
        )
        self.side.admit(request)
        self._running[name] = request
        return request

    def prefill(self, request: Request) -> None:
        hit, tokens, *_ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - tokens
        assert self.manager.allocate_slots(request, new, tokens, hit) is not None
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = tokens
        self._step(request, new)

    def restore(self, request: Request) -> bool:
        """Begins a request with its prefix from device and pool. False if there is no room."""
        request.num_computed_tokens = 0
        hit, local, *_ = self.manager.get_computed_blocks(request)
        external, _ = self.side.match(request, local)
        assert external, "nothing in the pool"
        got = self.manager.allocate_slots(
            request, 0, local, hit, num_external_computed_tokens=external, delay_cache_blocks=True
        )
        if got is None:
            return False
        ids = self.manager.get_block_ids(request.request_id)[0]
        self.side.allocated(request, (ids,), external)
        request.num_computed_tokens = local + external
        self.loads = self.orders_of({}).loads
        self.side.reported(None, {request.request_id}, set())
        self.manager.cache_blocks(request, request.num_computed_tokens)
        return True

    def restored(self, name: str, tokens: int) -> Request:
        """A request that has begun with its prefix from device and pool."""
        request = self.request(name, tokens)
        assert self.restore(request)
        return request

    def compute(self, request: Request, tokens: int) -> bool:
        """Computes the next tokens of the prompt."""
        request.status = RequestStatus.RUNNING
        if self.manager.allocate_slots(request, tokens) is None:
            return False
        self._step(request, tokens)
        return True

    def decode(self, request: Request, tokens: int = 1) -> bool:
        """False if vLLM would have to preempt."""
        for _ in range(tokens):
            if self.manager.allocate_slots(request, 1) is None:
                return False
            self._step(request, 1)
        return True

    def _step(self, request: Request, tokens: int) -> None:
        orders = self.orders_of({request.request_id: tokens})
        request.num_computed_tokens += tokens
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(7)
        self._stores += [store.store_id for store in orders.stores]
        for store in orders.stores:
            sign(self.pool, store)
        if self.makes_stores:
            self.make_stores()

    def make_stores(self) -> None:
        """The workers have made all stores ordered so far."""
        made, self._stores = self._stores, []
        self.side.reported(StepReport(dict.fromkeys(made, 1)), set(), set())

    def orders_of(self, scheduled: dict[str, int]) -> StepOrders:
        step = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values())
        )
        orders = self.side.orders(step, self.pool.arena_handle())
        self.orders = orders.offload
        return orders

    def begun(self, name: str, tokens: int, first: int = 0) -> Request:
        """A request whose prompt is computed."""
        request = self.request(name, tokens, first)
        self.prefill(request)
        return request

    def end_all(self) -> None:
        for request in list(self._running.values()):
            self.end(request)
        assert self.free == self.manager.block_pool.num_gpu_blocks - 1

    def end(self, request: Request) -> None:
        del self._running[request.request_id]
        request.status = RequestStatus.FINISHED_STOPPED
        self.side.finished(request, self.manager.get_block_ids(request.request_id))
        self.manager.free(request)


def sign(pool: PoolClient, store: StoreOrder) -> None:
    """As the workers do."""
    if isinstance(pool, Pool):
        for offset in store.copy.offsets:
            at = offset + FACTS.groups[0].record_bytes
            pool.arena.array()[at : at + ORIGIN_BYTES] = list(store.origin)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool.open(RecallSettings.from_mapping({"host_size": "1MiB"}).pool) as pool:
        yield pool
        assert pool.stats().leases == 0


@pytest.fixture
def bench(pool: Pool) -> Iterator[Bench]:
    """Whose requests end after the test, with all they had."""
    bench = Bench(pool, 100)
    yield bench
    bench.end_all()


@pytest.fixture
def small_pool() -> Iterator[Pool]:
    """Room for sixteen blocks."""
    with Pool.open(RecallSettings.from_mapping({"host_size": f"{16 * 4096}B"}).pool) as pool:
        yield pool


def test_middle_blocks_leave_with_the_first_decoded_token(bench: Bench, pool: Pool) -> None:
    request = bench.begun("r", 400)
    assert bench.free == 99 - 25
    assert bench.orders is None
    before = bench.manager.get_block_ids("r")[0]
    assert bench.decode(request)
    # 401 tokens: 26 blocks, init 1, local from block 21 on, 20 between: 4 chosen, 2 to spare.
    (left,) = bench.ordered.departures
    assert list(left.block_ids) == before[1:21]
    assert len(left.offsets) == 20
    assert len(left.slots) == 6
    after = bench.manager.get_block_ids("r")[0]
    assert after[1:21] == [0] * 20
    assert not set(left.slots) & set(after)
    assert bench.ordered.rows == {after[25]: "r"}
    assert bench.free == 99 - 26 + 20 - 6
    assert pool.stats().leases == 20
    bench.end(request)
    assert (bench.free, pool.stats().leases) == (99, 0)
    bench.begun("other", 10, 0)
    assert bench.ordered.ended == ["r"]


def test_a_sequence_that_stays_for_want_of_room_says_so_once(
    small_pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(small_pool, 100)
    request = bench.begun("r", 400)
    for tokens, said in ((9, 0), (PATIENCE, 1), (2 * PATIENCE, 1)):
        assert bench.decode(request, tokens)
        told = [one.getMessage() for one in caplog.records if "stay on the device" in one.msg]
        assert len(told) == said
    assert "raise host_size (kvrecall plan MODEL --context" in told[0]
    bench.end_all()


@pytest.mark.parametrize("is_own", [True, False])
def test_blocks_of_a_writer_that_is_not_proved_do_not_stand_in_for_the_devices(
    pool: Pool, is_own: bool
) -> None:
    first = Bench(pool, 100, audit=0)
    first.end(first.begun("before", 400, 0))
    second = first if is_own else Bench(pool, 100, audit=0)
    request = second.begun("r", 400, 0)
    assert second.decode(request)
    assert (second.orders is not None) is is_own
    second.end(request)
    assert pool.stats().leases == 0


def test_it_goes_on_while_the_sequence_grows(bench: Bench) -> None:
    request = bench.begun("r", 230)
    gone = slots = 0
    for _ in range(200):
        assert bench.decode(request)
        tokens = request.num_computed_tokens
        if bench.orders is None:
            assert tokens < 256
            continue
        for departure in bench.orders.departures:
            gone += len(departure.block_ids)
            slots += len(departure.slots)
        middle = (tokens - 64) // BLOCK - 1
        assert gone == middle
        assert slots >= -(-middle // 5), "as many as are chosen"
    assert gone == 21


@pytest.mark.parametrize("shared", [16, 48, 64])
def test_a_prefix_within_the_first_blocks_is_loaded(pool: Pool, shared: int) -> None:
    """A long prompt of which the pool has no more than the blocks that never leave, or one more."""
    bench = Bench(pool, 100, settings=replace(SETTINGS, init_tokens=48))
    bench.end(bench.begun("before", shared + 1, 0))
    assert bench.manager.reset_prefix_cache()
    request = bench.restored("r", 400)
    assert len(bench.manager.get_block_ids("r")[0]) == shared // BLOCK
    assert 0 not in bench.manager.get_block_ids("r")[0]
    assert bench.compute(request, 400 - shared)
    bench.end(request)
    assert (bench.free, pool.stats().leases) == (99, 0)


def test_what_the_pool_does_not_hold_stays(small_pool: Pool) -> None:
    bench = Bench(small_pool, 100)
    request = bench.begun("r", 400)
    assert bench.decode(request, PATIENCE + 2)
    ids = bench.manager.get_block_ids("r")[0]
    assert ids.count(0) == 15
    assert 0 not in ids[16:]
    bench.end(request)
    assert (bench.free, small_pool.stats().leases) == (99, 0)


@pytest.mark.parametrize(
    ("measured", "offloads"), [((1 << 10, 2 << 10), True), ((1 << 10, 4 << 20), False)]
)
def test_what_workers_attend_to_densely_stays_on_the_device(
    pool: Pool, measured: tuple[int, int], offloads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler side's gate decides by the workers' greatest measurement."""
    monkeypatch.setattr(connector_module, "is_requested", lambda environ: True)
    monkeypatch.setattr(connector_module, "offload_hindrance", lambda config: None)
    monkeypatch.setattr(connector_module, "active_settings", lambda: replace(SETTINGS, gate=True))
    monkeypatch.setattr(connector_module.config, "layer_token_bytes", lambda config: 512)
    connector = RecallConnector.__new__(RecallConnector)
    connector._pool = pool
    connector._settings = RecallSettings.from_mapping({"host_size": "1MiB"})
    connector._vllm_config = connector._kv_cache_config = None
    make_planner = connector._offload(FACTS, [shard_of(number) for number in measured])
    bench = Bench(pool, 100, make_planner=make_planner)
    request = bench.begun("r", 400)
    assert bench.decode(request)
    assert (0 in bench.manager.get_block_ids("r")[0]) == offloads
    bench.end(request)


def shard_of(overhead_bytes: int) -> Shard:
    return Shard((), "", True, overhead_bytes=overhead_bytes)


def test_what_an_unproved_writer_has_saved_stays_on_the_device(pool: Pool) -> None:
    """The first 19 blocks are another engine's, and the ones behind them this engine's own."""
    Bench(pool, 100).begun("theirs", 19 * BLOCK, 0)
    bench = Bench(pool, 100, audit=4096)
    request = bench.begun("r", 400)
    assert bench.decode(request, PATIENCE + 2)
    assert 0 not in bench.manager.get_block_ids("r")[0]
    ids = bench.manager.get_block_ids("r")[0]
    bench.end(request)

    bench.manager.evict_blocks(set(ids[19:]))  # what is left on the device was computed here
    again = bench.request("again", 400)
    assert bench.restore(again)
    assert sum(len(copy.block_ids) for load in bench.loads for copy in load.copies) == 5
    assert 0 not in bench.manager.get_block_ids("again")[0]
    bench.end(again)
    assert pool.stats().leases == 0


def test_what_went_to_the_disk_is_brought_back_first(tmp_path: Path) -> None:
    settings = {"host_size": 32 * 4096, "disk_path": str(tmp_path), "disk_size": "64MiB"}
    with Pool.open(RecallSettings.from_mapping(settings).pool) as pool:
        bench = Bench(pool, 100)
        request = bench.begun("r", 400)
        assert pool.flush(bench.side.saved("r"), 60.0)
        bench.end(bench.begun("other", 400, 1000))
        assert pool.stats().tiers[0].evictions > 0
        wait_until(lambda: pool.stats().queued_writes == 0)  # the host has room again
        assert bench.decode(request)
        wait_until(lambda: pool.stats().queued_reads == 0)
        wait_until(lambda: bench.orders is not None or not bench.decode(request))
        (left,) = bench.ordered.departures
        assert len(set(left.offsets)) == len(left.block_ids) >= 15
        bench.end_all()
        assert pool.stats().leases == 0


def test_what_another_engine_stored_leaves_once_nothing_reads_it(tmp_path: Path) -> None:
    """The pool has the blocks from a shared store while this engine's stores of them, which read
    the device, are under way."""
    store = {"kind": "objects", "url": f"file://{tmp_path}"}
    settings = RecallSettings.from_mapping({"host_size": "1MiB", "remote": store}).pool
    with Pool.open(settings) as pool:
        bench = Bench(pool, 100)
        request = bench.begun("r", 400)
        assert pool.flush(bench.side.saved("r"), 60.0)
        bench.end(request)
    with Pool.open(settings) as pool:
        bench = Bench(pool, 100)
        bench.makes_stores = False
        request = bench.begun("r", 400)
        state = bench.side.state_of("r")
        assert state is not None
        keys = state.keys(25)
        wait_until(lambda: pool.find(keys).blocks == 25)  # as when it was looked up
        for _ in range(3):
            assert bench.decode(request)
            wait_until(lambda: pool.stats().queued_reads == 0)
            assert bench.orders is None
        bench.make_stores()
        wait_until(lambda: bench.orders is not None or not bench.decode(request))
        (left,) = bench.ordered.departures
        assert len(left.offsets) == 20
        bench.end(request)
        bench.make_stores()
        assert pool.stats().leases == 0
        pool.clear()
        wait_until(lambda: pool.stats().tiers[0].used_bytes == 0)


def test_a_shared_prefix_is_freed_by_the_last(bench: Bench) -> None:
    one, two = bench.begun("one", 400), bench.begun("two", 400)
    assert bench.free == 99 - 26
    assert bench.decode(one)
    assert bench.free == 99 - 26 - 1 - 6, "its blocks are the other's, too"
    assert bench.decode(two)
    assert bench.free == 99 - 26 - 2 - 12 + 20


def test_a_full_device_lets_nothing_leave_rather_than_fail(pool: Pool) -> None:
    """Slots are needed first; offloading shared blocks frees none."""
    bench = Bench(pool, 30)
    one, two = bench.begun("one", 400), bench.begun("two", 400)
    assert bench.free == 29 - 26
    assert bench.decode(one)
    assert bench.orders is None
    bench.end(two)
    assert bench.decode(one)
    assert bench.orders is not None
    bench.end(one)


def test_slots_that_a_step_needs_are_asked_for(pool: Pool) -> None:
    """As the middle grows, more blocks are selected. If none is free, vLLM preempts a request."""
    bench = Bench(pool, 60)
    request = bench.begun("r", 400)
    assert bench.decode(request)
    hog = bench.manager.block_pool.get_new_blocks(bench.free)
    assert not bench.decode(request, 200)
    bench.manager.block_pool.free_blocks(hog)
    assert bench.decode(request, 200)
    bench.end(request)
    assert bench.free == 59


def test_preempted_and_back(bench: Bench, pool: Pool) -> None:
    request = bench.begun("r", 400)
    assert bench.decode(request, 3)
    bench.manager.free(request)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    assert pool.stats().leases == 0
    bench.prefill(request)
    assert bench.ordered.ended == ["r"]
    assert bench.ordered.departures == []
    assert bench.decode(request)
    assert len(bench.ordered.departures) == 1


@pytest.mark.parametrize("counts", [True, False], ids=["delivered", "dropped"])
def test_leases_last_while_a_step_under_way_reads_what_they_keep(
    bench: Bench, pool: Pool, counts: bool
) -> None:
    """With asynchronous scheduling a request may be preempted before the result of its last step is
    in, which still counts."""
    request = bench.begun("r", 400)
    assert bench.decode(request, 3)
    request.num_in_flight_tokens = 1
    bench.manager.free(request)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.num_stale_output_tokens, request.drop_stale_output = 1, not counts
    other = bench.begun("other", 10, 1000)
    assert bench.ordered.ended == ["r"]
    assert pool.stats().leases == 20 * counts
    request.num_in_flight_tokens = request.num_stale_output_tokens = 0
    assert bench.decode(other)
    assert pool.stats().leases == 0


def forgotten(bench: Bench, tokens: int = 400) -> None:
    """A prompt in the pool of which the device has nothing."""
    bench.end(bench.begun("first", tokens, 0))
    assert bench.manager.reset_prefix_cache()


def test_of_a_prefix_in_the_pool_only_init_and_local_come(bench: Bench, pool: Pool) -> None:
    forgotten(bench)
    request = bench.restored("r", 400)
    # 24 of 25 blocks are hit: init 1, local from block 21 on, 20 between stay: 6 slots for them.
    ids = bench.manager.get_block_ids("r")[0]
    assert ids[1:21] == [0] * 20
    (load,) = bench.loads
    assert list(load.copies[0].block_ids) == [ids[0], *ids[21:24]]
    (arrival,) = bench.ordered.arrivals
    assert (arrival.request_id, arrival.init) == ("r", 1)
    assert len(set(arrival.offsets)) == 20
    assert not set(arrival.offsets) & set(load.copies[0].offsets)
    assert len(arrival.slots) == 6
    assert not set(arrival.slots) & set(ids)
    assert bench.free == 99 - 4 - 6
    assert pool.stats().leases == 20
    assert bench.compute(request, 10)
    assert bench.ordered.rows == {bench.manager.get_block_ids("r")[0][24]: "r"}
    assert bench.compute(request, 6)
    assert bench.decode(request, 30)
    assert bench.ordered.departures == []
    assert bench.manager.get_block_ids("r")[0][1:22] == [0] * 21


def test_blocks_that_are_read_in_place_need_no_slots(pool: Pool) -> None:
    """Neither as they leave, nor while the sequence grows, nor where they are found in the pool."""
    bench = Bench(pool, 100, in_place=True)
    first = bench.begun("first", 400, 0)
    assert bench.decode(first)
    (left,) = bench.ordered.departures
    assert (len(left.block_ids), left.slots) == (20, ())
    assert bench.decode(first, 100)
    blocks = bench.manager.get_block_ids("first")[0]
    assert bench.free == 99 - sum(block > 0 for block in blocks)
    bench.end(first)
    assert bench.manager.reset_prefix_cache()
    again = bench.request("r", 400)
    assert bench.restore(again)
    (arrival,) = bench.ordered.arrivals
    assert (len(arrival.offsets), arrival.slots) == (20, ())
    assert bench.free == 99 - 4
    assert bench.compute(again, 16)
    assert bench.decode(again, 30)
    bench.end(again)
    assert (bench.free, pool.stats().leases) == (99, 0)


def test_it_fits_where_the_whole_prefix_would_not(pool: Pool) -> None:
    bench = Bench(pool, 60)
    forgotten(bench)
    hog = bench.manager.block_pool.get_new_blocks(bench.free - 12)
    request = bench.restored("r", 400)
    assert bench.compute(request, 16)
    assert bench.decode(request)
    bench.end(request)
    bench.manager.block_pool.free_blocks(hog)
    assert (bench.free, pool.stats().leases) == (59, 0)


@pytest.mark.parametrize("blocks", [1, 5, 12])
def test_blocks_found_on_the_device_stay_there_unless_they_are_in_the_middle(
    bench: Bench, blocks: int
) -> None:
    forgotten(bench)
    bench.begun("other", blocks * BLOCK + 1, 0)  # the same tokens: a shared prefix
    held = bench.manager.get_block_ids("other")[0]
    bench.restored("r", 400)
    ids = bench.manager.get_block_ids("r")[0]
    assert ids[0] == held[0]
    assert ids[1:21] == [0] * 20
    assert [len(load.copies[0].block_ids) for load in bench.loads] == [3]
    assert bench.free == 99 - len(held) - 3 - 6


def test_a_prefix_that_does_not_fit_leaves_no_lease_when_its_request_ends(pool: Pool) -> None:
    bench = Bench(pool, 60)
    forgotten(bench)
    hog = bench.manager.block_pool.get_new_blocks(bench.free - 5)
    request = bench.request("r", 400)
    assert not bench.restore(request)
    assert pool.stats().leases > 0
    request.status = RequestStatus.FINISHED_ABORTED
    bench.side.finished(request, ([],))
    assert pool.stats().leases == 0
    bench.manager.block_pool.free_blocks(hog)


def test_preempted_while_its_prompt_is_computed(bench: Bench, pool: Pool) -> None:
    forgotten(bench)
    request = bench.restored("r", 400)
    assert bench.compute(request, 5)
    bench.manager.free(request)
    request.status = RequestStatus.PREEMPTED
    assert (bench.free, pool.stats().leases) == (99, 0)
    assert bench.manager.reset_prefix_cache()
    assert bench.restore(request)
    assert bench.ordered.ended == ["r"]
    assert len(bench.ordered.arrivals) == 1
    assert bench.compute(request, 16)
    assert bench.decode(request)


def test_a_short_prefix_of_a_long_prompt_comes_whole(bench: Bench) -> None:
    """All of its few middle blocks would be selected."""
    forgotten(bench, 100)
    bench.restored("r", 400)
    assert 0 not in bench.manager.get_block_ids("r")[0]
    assert bench.orders is None
