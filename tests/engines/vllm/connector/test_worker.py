"""The worker side with the scheduler side and a real pool, without an engine: bytes of device
blocks, with copies made in place and with copies as late as a stream may make them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin

from engines.vllm.connector.test_scheduler import BLOCK, Bench
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.attention.activity import Activity, HeatTotals
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.compat.config import LayerPlacement, Sharing
from kvrecall.engines.vllm.connector import copier as copier_module
from kvrecall.engines.vllm.connector import worker
from kvrecall.engines.vllm.connector.connector import RecallConnector
from kvrecall.engines.vllm.connector.copier import LONGEST_S, Copier, CopyQueue
from kvrecall.engines.vllm.connector.worker import RecallWorker
from kvrecall.engines.vllm.device.base import Batch, Copy, Event
from kvrecall.engines.vllm.device.inline import Moment
from kvrecall.engines.vllm.wire import (
    ORIGIN_BYTES,
    Comparison,
    EngineFacts,
    LoadOrder,
    StepOrders,
    StoreOrder,
)
from kvrecall.errors import EngineError
from kvrecall.pool import Pool
from kvrecall.pool.base import NO_ARENA
from kvrecall_lab.streams.device import Mark
from kvrecall_lab.streams.late import PATIENCE, late_device

LAYERS, DEVICE_BLOCKS, PAGE = 2, 200, 512


class Machine(Bench):
    """A scheduler side and one worker, whose device blocks are rows of tensors."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in {
            "layer_placements": ({f"l{i}": LayerPlacement(PAGE, PAGE) for i in range(LAYERS)},),
            "fp8_type": None,
            "kernel_of": "",
            "prompt_token_work": (0.0, 0),
            "record_places": [i * PAGE for i in range(LAYERS)],
            "sharing_of": Sharing(),
            "stage_rank": 0,
            "traces_endpoint": None,
        }.items():
            monkeypatch.setattr(worker.config, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(worker.config, "most_of_ranks", lambda number: number)
        forward = SimpleNamespace(static_forward_context={})
        model = SimpleNamespace(dtype=torch.float32)
        self.device = {
            f"l{i}": torch.zeros(DEVICE_BLOCKS, PAGE, dtype=torch.uint8) for i in range(LAYERS)
        }
        self.worker = RecallWorker(
            SimpleNamespace(compilation_config=forward, model_config=model),
            SimpleNamespace(num_blocks=DEVICE_BLOCKS),
        )
        self.worker.register(self.device)
        shard = self.worker.shard()
        assert shard.nbytes() == LAYERS * PAGE
        nbytes = shard.nbytes() + ORIGIN_BYTES
        facts = EngineFacts.of_one(BLOCK, nbytes, copies_in_step=shard.copies_in_step)
        super().__init__(pool, facts)
        self.late = not shard.copies_in_step
        self.released: set[str] = set()

    @property
    def copier(self) -> Copier:
        mapped = self.worker._arena._mapped
        assert mapped is not None
        return mapped.copier

    def run(self, orders: StepOrders, computes: dict[int, int]) -> set[str]:
        """A step of the engine: what the worker is asked to do, and in between the forward pass,
        which fills each of these blocks with a value. Returns the requests whose load has ended."""
        self.worker.before_overwrite(orders)
        self.worker.start_loads(orders)
        if self.late and computes:
            self.worker._device.machine.now += 0.01
            self.worker._device.current().record().wait()  # it begins after what it must follow
        for block, value in computes.items():
            for rows in self.device.values():
                rows[block] = value
        self.worker.start_stores(orders)
        released, loaded, failed = self.worker.finished()
        self.side.reported(self.worker.report(), loaded, failed)
        self.released |= released
        return loaded

    def rest(self) -> set[str]:
        return self.run(self.idle(), {})

    def settle(self, times: int = 1) -> None:
        """Until the copies ordered so far have ended."""
        for _ in range(times * PATIENCE):
            self.rest()

    def compute(self, name: str, values: list[int], first: int = 0) -> tuple[Request, bool]:
        """A request of so many blocks and half a one, from its prefill to its end; whether its
        device blocks must be held."""
        request = self.request(name, len(values) * BLOCK + BLOCK // 2, first)
        ids = self.blocks[name]
        self.run(self.step(request, request.num_tokens), dict(zip(ids, values, strict=False)))
        request.append_output_token_ids([5])
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        hold, _ = self.side.finished(request, (ids,))
        return request, hold

    def load(self, name: str, tokens: int, ids: list[int], first: int = 0) -> Request:
        """Orders the load of what the pool has of a prompt, into these device blocks."""
        request = self.request(name, tokens, first)
        external, asynchronous = self.side.match(request, 0)
        assert asynchronous
        assert external == len(ids) * BLOCK
        self.side.allocated(request, (ids,), external)
        return request

    def values(self, blocks: list[int]) -> list[set[int]]:
        return [
            {int(value) for rows in self.device.values() for value in rows[block].unique()}
            for block in blocks
        ]


@pytest.fixture(params=["in place", "late"])
def machine(
    request: pytest.FixtureRequest, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Machine]:
    if request.param == "late":
        monkeypatch.setitem(devices.FORMS, "cpu", late_device)
    devices.device_of.cache_clear()
    machine = Machine(pool, monkeypatch)
    assert machine.late == (request.param == "late")
    yield machine
    machine.worker.close()
    devices.device_of.cache_clear()


def test_blocks_come_back_to_other_places_as_they_were(machine: Machine) -> None:
    _, hold = machine.compute("first", [11, 12, 13])
    assert hold == machine.late
    machine.settle()
    assert machine.released == ({"first"} if machine.late else set())
    for rows in machine.device.values():
        rows.zero_()
    machine.load("again", 3 * BLOCK + 1, [50, 60, 55])
    steps, loaded = 1, machine.rest()
    while not loaded:
        steps, loaded = steps + 1, machine.rest()
    assert loaded == {"again"}
    assert steps == (PATIENCE if machine.late else 1)
    assert machine.values([50, 60, 55]) == [{11}, {12}, {13}]
    assert machine.values([1, 2, 3, 51]) == [{0}] * 4
    assert machine.pool.stats().leases == 0
    assert machine.side.counters.counts["loaded_bytes"] == 3 * LAYERS * PAGE
    assert machine.side.counters.counts["load_seconds"] > 0


def test_nothing_is_found_before_its_copy_is_made(machine: Machine) -> None:
    machine.compute("first", [11, 12, 13])
    again = machine.request("again", 3 * BLOCK + 1)
    assert machine.matched(again) == (0 if machine.late else 3 * BLOCK)


def test_a_preempted_requests_blocks_are_read_before_they_are_overwritten(machine: Machine) -> None:
    first = machine.request("first", 2 * BLOCK + 4)
    machine.run(machine.step(first, first.num_tokens), {1: 21, 2: 22})
    first.status = RequestStatus.PREEMPTED
    first.num_preemptions += 1
    other = machine.request("other", 2 * BLOCK + 4, first=500)  # gets the same device blocks
    machine.run(machine.step(other, other.num_tokens), {1: 31, 2: 32})
    machine.settle()
    machine.load("again", 2 * BLOCK + 1, [50, 51])
    while not machine.rest():
        continue
    assert machine.values([50, 51]) == [{21}, {22}]


def test_a_request_that_ends_while_it_loads_is_reported_once(machine: Machine) -> None:
    """With stores of before its preemption under way: vLLM frees its blocks at the first report,
    and does not know it at a second one."""
    machine.compute("first", [11, 12])
    machine.settle()
    again = machine.load("again", 2 * BLOCK + 1, [50, 51])
    state: Any = machine.side.state_of("again")
    state.saving.open.add(1 << 40)
    again.status = RequestStatus.FINISHED_ABORTED
    hold, _ = machine.side.finished(again, ([50, 51],))
    assert not hold
    loaded: list[str] = []
    for _ in range(2 * PATIENCE):
        loaded += machine.rest()
    assert loaded == ["again"]
    assert "again" not in machine.released


def test_loads_end_in_their_order_and_one_that_cannot_be_made_fails(machine: Machine) -> None:
    for name, values, first in (("first", [11, 12], 0), ("second", [21, 22], 500)):
        machine.compute(name, values, first)
        machine.settle()  # its device blocks are held until then
    machine.load("a", 2 * BLOCK + 1, [50, 51])
    loaded = [machine.rest()]
    machine.load("b", 2 * BLOCK + 1, [60, 61], first=500)
    loaded.append(machine.rest())
    machine.load("c", 2 * BLOCK + 1, [70, 71])
    loaded.append(machine.run(machine.idle(NO_ARENA), {}))
    while {"a", "b", "c"} - set().union(*loaded):
        loaded.append(machine.rest())
    assert machine.values([50, 51, 60, 61]) == [{11}, {12}, {21}, {22}]
    assert machine.side.counters.counts["loads_failed"] == 1
    state: Any = machine.side.state_of("c")
    assert state.loading.computes
    assert sum(name in each for each in loaded for name in "abc") == 3, "each is reported once"
    assert machine.pool.stats().leases == 0


class Failing(RuntimeError):
    """Of a forward pass."""


def connector_of(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> RecallConnector:
    """The connector of the machine's worker, as Model Runner V1 finds it."""
    connector = RecallConnector.__new__(RecallConnector)
    connector._worker = machine.worker
    connector._connector_metadata = None
    monkeypatch.setattr(mixin, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(mixin, "get_forward_context", lambda: None)
    return connector


def told_of(orders: StepOrders) -> Any:
    """What Model Runner V1 tells after a step, within which it computes."""
    step: Any = SimpleNamespace(
        kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set()
    )
    return mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step)


def test_a_step_within_a_handler_has_not_failed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a script generates after it has caught something."""
    connector = connector_of(machine, monkeypatch)
    request = machine.request("r", 2 * BLOCK + 4)
    orders = machine.step(request, request.num_tokens)
    try:
        raise Failing
    except Failing:
        connector.handle_preemptions(orders)
        with told_of(orders) as output:
            pass
    machine.side.reported(output.kv_connector_worker_meta, set(), set())
    machine.settle()
    assert machine.matched(machine.request("again", 2 * BLOCK + 4)) == 2 * BLOCK


@pytest.mark.parametrize("runner", ["V1", "V2"])
def test_nothing_of_a_step_that_failed_is_saved(
    machine: Machine, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on. Model Runner V1 ends the step with what it is told about copies, and
    drops it; V2 begins the next one. Blocks of before, and the load, are told then."""
    machine.compute("first", [11, 12])
    machine.settle()
    connector = connector_of(machine, monkeypatch)
    machine.load("again", 2 * BLOCK + 1, [50, 51])
    doomed = machine.request("doomed", 2 * BLOCK + 4, first=500)
    orders = machine.step(doomed, doomed.num_tokens)
    assert [store.copy.block_ids for store in orders.stores] == [(1, 2)]
    connector.handle_preemptions(orders)
    if runner == "V1":
        with pytest.raises(Failing), told_of(orders) as output:
            raise Failing
        assert output.kv_connector_worker_meta is None
        assert not output.finished_recving
    machine.end(doomed, RequestStatus.FINISHED_ABORTED)
    loaded: set[str] = set()
    for _ in range(2 * PATIENCE):
        loaded |= machine.rest()
    assert loaded == {"again"}
    assert machine.side.counters.counts["loads_failed"] == (runner == "V2")
    assert machine.values([50, 51]) == ([{0}, {0}] if runner == "V2" else [{11}, {12}])
    assert machine.side.counters.counts["stores_failed"] == 1
    assert machine.matched(machine.request("after", 2 * BLOCK + 4, first=500)) == 0
    stats = machine.pool.stats()
    assert (stats.reserved, stats.leases) == (0, 0)


def refuse(monkeypatch: pytest.MonkeyPatch, queue: CopyQueue, after: int) -> None:
    """The driver takes so many batches, and refuses the next."""
    copy, taken = queue._stream.copy, itertools.count()

    def refusing(batch: Batch) -> None:
        if next(taken) >= after:
            raise EngineError("cuMemcpyBatchAsync: CUDA error 1 at item 0")
        copy(batch)

    monkeypatch.setattr(queue._stream, "copy", refusing, raising=False)


@pytest.mark.parametrize("after", [0, 1])
def test_a_store_that_the_driver_refuses_is_not_saved(
    machine: Machine, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are given to others when what was queued of it has ended."""
    monkeypatch.setattr(copier_module, "_ITEMS", 1)
    machine.worker.map_arena(machine.pool.arena_handle())
    refuse(monkeypatch, machine.copier.stores, after)
    machine.compute("first", [11, 12])
    assert (machine.pool.stats().reserved > 0) == machine.late
    machine.settle(2)
    assert machine.pool.stats().reserved == 0
    assert machine.side.counters.counts["stores_failed"] == 1
    assert machine.released == ({"first"} if machine.late else set())
    assert machine.matched(machine.request("again", 2 * BLOCK + 1)) == 0


@pytest.mark.parametrize("after", [0, 1])
def test_a_load_that_the_driver_refuses_is_computed(
    machine: Machine, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device blocks are the request's again when what was queued of it has ended."""
    monkeypatch.setattr(copier_module, "_ITEMS", 1)
    machine.compute("first", [11, 12])
    machine.settle(2)
    refuse(monkeypatch, machine.copier.loads, after)
    machine.load("again", 2 * BLOCK + 1, [50, 51])
    steps, loaded = 1, machine.rest()
    while not loaded:
        steps, loaded = steps + 1, machine.rest()
    assert steps == (PATIENCE if machine.late else 1)
    assert machine.side.counters.counts["loads_failed"] == 1
    assert machine.pool.stats().leases == 0
    state: Any = machine.side.state_of("again")
    assert state.loading.computes


def test_an_order_that_names_what_is_not_there_fails_alone(machine: Machine) -> None:
    """Block numbers and offsets are compared with the device's and the arena's."""
    machine.compute("first", [11, 12])
    machine.settle()
    arena = machine.pool.arena_handle()
    far = arena.nbytes - 8
    loads = [
        LoadOrder("no block", (Copy((DEVICE_BLOCKS,), (0,)),)),
        LoadOrder("below", (Copy((-1,), (0,)),)),
        LoadOrder("behind", (Copy((50,), (far,)),)),
        LoadOrder("before", (Copy((50,), (-512,)),)),
        LoadOrder("twice", (Copy((50, 50), (0, LAYERS * PAGE)),)),
        LoadOrder("uneven", (Copy((50, 51), (0,)),)),
        LoadOrder("group", (Copy((50,), (0,), 7),)),
        LoadOrder("no group", (Copy((50,), (0,), -1),)),
    ]
    stores = [
        StoreOrder(1000, Copy((DEVICE_BLOCKS,), (0,)), b"12345678"),
        StoreOrder(1001, Copy((1,), (far,)), b"12345678"),
        StoreOrder(1002, Copy((0,), (0,)), b"12345678"),
        StoreOrder(1003, Copy((1, 2), (0,)), b"12345678"),
        StoreOrder(1004, Copy((1, 2), (0, LAYERS * PAGE - 1)), b"12345678"),
        StoreOrder(1005, Copy((1,), (arena.nbytes - LAYERS * PAGE,)), b"12345678"),  # no origin
        StoreOrder(1006, Copy((1,), (0,)), b"short"),
        StoreOrder(1007, Copy((1,), (0,), 1), b"12345678"),
    ]
    before = bytes(machine.pool.arena.array())
    orders = StepOrders(arena, loads, stores, record_bytes=(LAYERS * PAGE,))
    machine.worker.before_overwrite(orders)
    machine.worker.start_loads(orders)
    machine.worker.start_stores(orders)
    _, loaded, failed = machine.worker.finished()
    assert loaded == failed == {load.request_id for load in loads}
    report = machine.worker.report()
    assert report is not None
    assert report.failed == report.stored.keys() == {store.store_id for store in stores}
    assert bytes(machine.pool.arena.array()) == before
    assert machine.values([50]) == [{0}]
    small = StepOrders(arena, [], stores[:1], record_bytes=(LAYERS * PAGE - 1,))
    small.stores[0] = StoreOrder(2000, Copy((1,), (0,)), b"12345678")
    machine.worker.start_stores(small)
    report = machine.worker.report()
    assert report is not None
    assert report.failed == {2000}, "the next record would begin in this one"
    machine.side.reported(report, set(), set())  # numbers that were never ordered


@pytest.mark.parametrize("machine", ["late"], indirect=True)
def test_device_blocks_and_slots_of_a_stuck_store(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are free after the longest wait, as what is read from them is never committed; the
    slots when it has ended. Meanwhile nothing is saved, and nothing waits for it."""
    machine.worker.map_arena(machine.pool.arena_handle())
    queue, now = machine.copier.stores, 0.0
    queue._clock = lambda: now
    queue._stream.is_stuck = True  # type: ignore[attr-defined]
    machine.compute("first", [11, 12])
    machine.settle()
    assert machine.released == set()
    now = LONGEST_S + 1
    machine.rest()
    assert machine.released == {"first"}
    reserved = machine.pool.stats().reserved
    assert reserved > 0
    other = machine.request("other", 2 * BLOCK + 4, first=500)
    machine.run(machine.step(other, other.num_tokens), {1: 21, 2: 22})
    assert machine.side.counters.counts["stores_failed"] == 1
    assert machine.pool.stats().reserved == reserved, "slots that nobody writes are free"
    machine.worker._arena.stores_first()  # does not wait for what never ends
    with pytest.raises(EngineError, match="cannot be given back"):
        machine.worker.unregister()
    queue._stream.is_stuck = False  # type: ignore[attr-defined]
    machine.settle(2)
    assert machine.pool.stats().reserved == 0
    assert machine.side.counters.counts["stores_failed"] == 2
    assert machine.matched(machine.request("again", 2 * BLOCK + 1)) == 0
    machine.compute("third", [31, 32], first=900)
    machine.settle(2)
    assert machine.matched(machine.request("found", 2 * BLOCK + 1, first=900)) == 2 * BLOCK


@pytest.mark.parametrize("machine", ["late"], indirect=True)
def test_an_arena_is_unmapped_only_when_no_copy_can_write_it(machine: Machine) -> None:
    """Its owner has died while a copy was stuck."""
    machine.compute("first", [11, 12])
    machine.rest()
    machine.compute("second", [21, 22], first=500)
    mapping, copier, ticks = machine.worker._arena, machine.copier, itertools.count()
    copier.stores._clock = lambda: LONGEST_S * next(ticks)
    copier.stores._stream.is_stuck = True  # type: ignore[attr-defined]
    with mapping._lock:
        mapping._detach()
    locked = copier._device.locked  # type: ignore[attr-defined]
    assert len(locked) == 1
    assert not mapping.store(machine.pool.arena_handle(), Copy((1,), (0,)))
    assert mapping.is_stuck == (False, True)
    copier.stores._stream.is_stuck = False  # type: ignore[attr-defined]
    seen = []
    for _ in range(3 * PATIENCE):
        machine.rest()
        seen.append((len(copier.stores._under_way), len(locked)))
    assert list(dict.fromkeys(seen)) == [(1, 1), (0, 0)]
    assert mapping.store(machine.pool.arena_handle(), Copy((1,), (0,)))


def test_a_device_that_does_not_answer_ends_the_engine_with_its_cause(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.compute("first", [11, 12])
    machine.settle()
    machine.load("again", 2 * BLOCK + 1, [50, 51])

    def broken(event: Event) -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    for event in (Moment, Mark):
        monkeypatch.setattr(event, "is_reached", broken)
    with pytest.raises(EngineError, match=r"\(loads\).*unspecified launch failure.*restart"):
        machine.rest()
    monkeypatch.undo()


def test_all_ranks_and_groups_decide_by_the_greatest_measurement(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether attention is sparse. Here layers of two kinds measured two numbers, and another rank
    a third."""
    settled: list[int] = []
    measured = (32 << 20, 512 << 20)
    machine.worker._retrieval = {0: []}
    for number in measured:
        kernel: Any = SimpleNamespace(overhead_bytes=number)
        group = RetrievalGroup(Activity(), HeatTotals(), kernel, settled.append)
        machine.worker._retrieval[0].append(group)
    for others, most in ((64 << 20, 512 << 20), (1 << 30, 1 << 30)):
        monkeypatch.setattr(
            worker.config, "most_of_ranks", lambda number, others=others: max(number, others)
        )
        settled.clear()
        machine.worker._shard = None
        assert machine.worker.shard().overhead_bytes == most
        assert settled == [most, most]


def test_the_probe_measures_the_device_and_not_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that multiplies in less time than a launch takes, unless products are large."""
    device = late_device()
    clock = device.machine
    a_second, launch_s, rows = 4e14, 1e-5, []

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        clock.now += launch_s
        seconds = 2.0 * len(a) * b.numel() / a_second
        clock.computing.launch(lambda: None, set(), set(), "product", seconds)
        rows.append(len(a))

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setitem(devices.FORMS, "cpu", lambda _: device)
    devices.device_of.cache_clear()
    found = worker.least_token_seconds(1e10, 4096, torch.float16, torch.device("cpu"))
    devices.device_of.cache_clear()
    assert found == pytest.approx(1e10 / a_second, rel=0.02)
    assert len(rows) < 30


def test_who_has_loaded_what_cannot_be_compared_starts_over(machine: Machine) -> None:
    nothing, equal = Copy((), ()), Copy((1,), (0,))
    told = {"nothing": (nothing, True), "equal": (equal, True), "not loaded": (nothing, False)}
    comparisons = [Comparison(7, name, *order) for name, order in told.items()]
    orders = StepOrders(machine.pool.arena_handle(), comparisons=comparisons)
    machine.worker.before_overwrite(orders)
    machine.worker.start_stores(orders)
    report = machine.worker.report()
    assert report is not None
    assert report.refuted == {"nothing"}


def test_a_prefill_is_timed_by_the_device(machine: Machine) -> None:
    machine.compute("first", [1, 2, 3])
    machine.rest()
    seconds = machine.side.costs.compute_seconds(0)
    assert seconds == pytest.approx(0.01 / 3.5) if machine.late else seconds > 0


def test_without_the_devices_memory_copies_fail_and_touch_nothing(machine: Machine) -> None:
    """vLLM 0.33 calls both as often as it likes."""
    machine.compute("first", [11, 12])
    machine.settle()
    shard = machine.worker.shard()
    machine.worker.unregister()
    machine.worker.unregister()
    for rows in machine.device.values():
        rows.zero_()
    machine.load("asleep", 2 * BLOCK + 1, [50, 51])
    assert machine.rest() == {"asleep"}
    machine.compute("other", [31, 32], first=500)
    assert machine.side.counters.counts["loads_failed"] == 1
    assert machine.side.counters.counts["stores_failed"] == 1
    assert machine.values([50, 51]) == [{0}, {0}]
    machine.worker.restore()
    machine.worker.restore()
    assert machine.worker.shard() is shard
    machine.load("awake", 2 * BLOCK + 1, [60, 61])
    while not machine.rest():
        continue
    assert machine.values([60, 61]) == [{11}, {12}]
    assert machine.pool.stats().leases == 0


def test_a_load_that_sleep_overtakes_counts_as_failed(machine: Machine) -> None:
    """It is complete when the memory goes, and with it what was loaded."""
    machine.compute("first", [11, 12])
    machine.settle()
    machine.load("again", 2 * BLOCK + 1, [50, 51])
    loaded = machine.rest()
    assert loaded == (set() if machine.late else {"again"})
    machine.worker.unregister()
    machine.worker.restore()
    assert loaded | machine.rest() == {"again"}
    assert machine.side.counters.counts["loads_failed"] == machine.late
