"""The scheduler side against a real pool and vLLM's own request, without an engine: the timings
that an engine on a CPU does not produce (asynchronous scheduling, several ranks, late copies)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from kvrecall.block import Namespace
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.scheduler_side import EngineFacts, RecallScheduler
from kvrecall.engines.vllm.wire import StepOrders, StepReport
from kvrecall.pool import Pool

BLOCK = 16
FACTS = EngineFacts(
    block_size=BLOCK,
    hash_block_size=BLOCK,
    block_bytes=4096,
    ranks=2,
    copies_in_step=False,
    frees_while_running=False,
)


@pytest.fixture
def pool() -> Iterator[Pool]:
    settings = RecallSettings.from_mapping({"host_size": "1MiB"})
    with Pool.open(settings.pool) as pool:
        yield pool


class Bench:
    """A scheduler side and the steps of an imaginary engine around it."""

    def __init__(self, pool: Pool, facts: EngineFacts = FACTS, **settings: Any) -> None:
        self.pool = pool
        self.blocks: dict[str, list[int]] = {}
        self.side = RecallScheduler(
            pool,
            RecallSettings.from_mapping({"host_size": "1MiB", **settings}),
            facts,
            lambda: Namespace.of({"test": "1"}),
            lambda lora: None if lora == "unknown" else str(lora),
            self.blocks.__getitem__,
        )
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK, sha256_cbor)

    def request(self, name: str, tokens: int, first: int = 0) -> Request:
        params = SamplingParams(max_tokens=100)
        params.update_from_generation_config({}, eos_token_id=1)
        prompt = list(range(first, first + tokens))
        request = Request(name, prompt, params, None, block_hasher=self.hasher)
        self.blocks[name] = list(range(1, 200))
        self.side.admit(request)
        return request

    def step(self, request: Request, tokens: int) -> StepOrders:
        scheduled = SimpleNamespace(num_scheduled_tokens={request.request_id: tokens})
        orders = self.side.orders(scheduled, self.pool.arena_handle())
        request.num_computed_tokens += tokens
        return orders

    def report(self, orders: StepOrders, ranks: int = 2, failed: bool = False) -> None:
        ids = [store.store_id for store in orders.stores]
        report = StepReport(dict.fromkeys(ids, ranks), set(ids) if failed else set())
        self.side.reported(report, set(), set())

    def matched(self, request: Request, computed: int = 0) -> int | None:
        return self.side.match(request, computed)[0]


def stored(orders: StepOrders) -> list[int]:
    return [block for store in orders.stores for block in store.copy.block_ids]


def test_blocks_are_seen_when_every_rank_has_copied_them(pool: Pool) -> None:
    bench = Bench(pool)
    first = bench.request("first", 40)
    orders = bench.step(first, 40)
    assert stored(orders) == [1, 2]
    again = bench.request("again", 40)
    assert bench.matched(again) == 0
    bench.report(orders, ranks=1)
    assert bench.matched(again) == 0
    bench.report(orders, ranks=1)
    assert bench.side.match(again, 0) == (32, True)
    assert bench.matched(again, 16) == 16


def test_rejected_speculation_is_never_saved(pool: Pool) -> None:
    """Blocks are saved up to the tokens that are known, whatever was scheduled beyond them."""
    bench = Bench(pool)
    request = bench.request("r", 14)
    assert stored(bench.step(request, 14)) == []
    request.append_output_token_ids(7)
    orders = bench.step(request, 1 + 5)  # one token, five drafts: positions 14 to 19
    assert stored(orders) == []
    request.num_computed_tokens -= 5  # all rejected
    request.append_output_token_ids(8)
    assert stored(bench.step(request, 1)) == [1]


def test_asynchronous_scheduling_saves_what_is_known_late(pool: Pool) -> None:
    """The engine runs a step ahead of its tokens; the tail is saved when the request ends, and
    its device blocks are held until then."""
    bench = Bench(pool)
    request = bench.request("r", 31)
    assert stored(bench.step(request, 31)) == [1]
    orders = bench.step(request, 1)  # position 31 before its token is known
    assert stored(orders) == []
    request.append_output_token_ids([5])
    request.append_output_token_ids([6])
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    hold, told = bench.side.finished(request, bench.blocks["r"])
    assert hold
    assert told["kvrecall"]["computed"] == 31
    idle = SimpleNamespace(num_scheduled_tokens={})
    orders = bench.side.orders(idle, pool.arena_handle())
    assert stored(orders) == [2]
    assert orders.releases == ["r"]


def test_device_blocks_are_held_while_copies_are_late(pool: Pool) -> None:
    bench = Bench(pool)
    request = bench.request("r", 16)
    orders = bench.step(request, 16)
    assert stored(orders) == [1]
    request.append_output_token_ids(3)
    request.status = RequestStatus.FINISHED_STOPPED
    assert bench.side.finished(request, bench.blocks["r"])[0]
    bench.report(orders)

    done = bench.request("done", 16)
    bench.step(done, 16)
    done.status = RequestStatus.FINISHED_ABORTED
    assert not bench.side.finished(done, bench.blocks["done"])[0], "its blocks are all there"


def test_preemption_waits_for_late_copies(pool: Pool) -> None:
    bench = Bench(pool)
    request = bench.request("r", 16)
    bench.step(request, 16)
    assert not bench.step(request, 0).drain
    request.status = RequestStatus.PREEMPTED
    idle = SimpleNamespace(num_scheduled_tokens={})
    assert bench.side.orders(idle, pool.arena_handle()).drain


def test_a_failed_copy_is_not_offered(pool: Pool) -> None:
    bench = Bench(pool)
    request = bench.request("r", 40)
    bench.report(bench.step(request, 40), failed=True)
    assert bench.matched(bench.request("again", 40)) == 0
    assert pool.stats().reserved == 0


def test_a_failed_load_is_not_tried_again(pool: Pool) -> None:
    bench = Bench(pool)
    bench.report(bench.step(bench.request("first", 40), 40))
    request = bench.request("again", 40)
    assert bench.matched(request) == 32
    bench.side.allocated(request, bench.blocks["again"], 32)
    (load,) = bench.side.orders(SimpleNamespace(num_scheduled_tokens={}), None).loads
    assert load.copy.block_ids == (1, 2)
    bench.side.reported(None, {"again"}, {"again"})
    assert pool.stats().leases == 0
    assert bench.matched(request) == 0
    request.status = RequestStatus.FINISHED_STOPPED
    assert bench.side.finished(request, bench.blocks["again"])[1]["kvrecall"]["computed"] == 40


def test_no_room_is_no_error(pool: Pool) -> None:
    bench = Bench(pool)
    request = bench.request("r", 16 * 400)
    bench.blocks["r"] = list(range(1, 500))
    orders = bench.step(request, 16 * 400)
    assert 0 < len(stored(orders)) <= 256, "1 MiB holds 256 blocks of 4 KiB"
    assert bench.side.tally.blocks_refused > 0
    bench.report(orders)
    assert bench.matched(bench.request("again", 16 * 400)) == len(stored(orders)) * BLOCK


def test_an_unknown_adapter_is_not_pooled(pool: Pool) -> None:
    bench = Bench(pool)
    plain = bench.request("plain", 40)
    bench.report(bench.step(plain, 40))
    for name, adapter in (("one", "content 1"), ("unknown", "unknown")):
        request = bench.request(f"{name}-first", 1)
        bench.side._states.clear()
        request = Request(name, list(range(40)), SamplingParams(), None, block_hasher=bench.hasher)
        request.lora_request = adapter
        assert bench.matched(request) == 0
        bench.blocks[name] = list(range(1, 99))
        assert stored(bench.step(request, 40)) == ([] if adapter == "unknown" else [1, 2])


def test_reset_is_refused_while_loading_and_private_afterwards(pool: Pool) -> None:
    bench = Bench(pool)
    bench.report(bench.step(bench.request("first", 40), 40))
    request = bench.request("again", 40)
    assert bench.matched(request) == 32
    bench.side.allocated(request, bench.blocks["again"], 32)
    assert not bench.side.reset()
    bench.side.reported(None, {"again"}, set())
    assert bench.side.reset()
    assert bench.matched(bench.request("third", 40)) == 0
    bench.report(bench.step(bench.request("fourth", 40), 40))
    assert bench.matched(bench.request("fifth", 40)) == 32
    assert Namespace.of({"test": "1"}).digest != bench.side._namespace.digest  # type: ignore[union-attr]
