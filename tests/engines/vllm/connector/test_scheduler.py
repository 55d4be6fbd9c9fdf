"""The scheduler side against a real pool and vLLM's own request, without an engine: the timings
that an engine on a CPU does not produce (asynchronous scheduling, several ranks, late copies)."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.disks import FaultyIo
from support.stores import SHARED, MemoryStore
from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request, RequestStatus

from engines.vllm.conftest import pool
from kvrecall.block import BlockKey, Namespace, TierName
from kvrecall.config import DiskConfig, RecallSettings
from kvrecall.engines.base import HANDOVER, HINT
from kvrecall.engines.vllm.compat import scheduler as compat_scheduler
from kvrecall.engines.vllm.connector.metrics import SchedulerEvents
from kvrecall.engines.vllm.connector.scheduler import RecallScheduler
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.engines.vllm.wire import (
    Arrival,
    Comparison,
    Departure,
    Deviation,
    EngineFacts,
    LoadOrder,
    OffloadOrders,
    StepOrders,
    StepReport,
    StoreOrder,
)
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import NO_ARENA, ArenaHandle, Recall, RecallState
from kvrecall.pool.disk import DiskTier
from kvrecall.testing import wait_until

__all__ = ["pool"]  # for tests that import it from here

BLOCK = 16
FACTS = EngineFacts.of_one(BLOCK, 4096, ranks=2, copies_in_step=False)


class ByName:
    """Adapters whose content is their name."""

    def is_known(self, lora: object) -> bool:
        return True

    def loaded(self, adapters: object) -> None: ...

    def identity(self, lora: object) -> str | None:
        return None if lora == "unknown" else str(lora)


class Bench:
    """A scheduler side and the steps of an imaginary engine around it."""

    def __init__(
        self,
        pool: Pool,
        facts: EngineFacts = FACTS,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[SchedulerEvents] = (),
        **settings: Any,
    ) -> None:
        self.pool = pool
        self.parted: list[Request] = []
        self.reloads = 0
        self.base: Namespace | None = Namespace.of({"test": "1"})
        self.blocks = defaultdict[str, list[int]](lambda: list(range(1, 999)))  # of requests
        hashes = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"))
        self.side = RecallScheduler(
            pool,
            RecallSettings.from_mapping({"host_size": "1MiB", "audit": "off", **settings}),
            facts,
            lambda: self.base,
            ByName(),
            lambda name: self.tables(name),
            part_ways=self.parted.extend,
            reloaded=self.reload,
            observers=observers,
            tail_hash=compat_scheduler.tail_hash(hashes, BLOCK),
            clock=clock,
        )
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK, sha256_cbor)

    def tables(self, name: str) -> tuple[list[int]]:
        return (self.blocks[name],)

    def reload(self) -> None:
        self.reloads += 1

    def request(
        self,
        name: str,
        prompt: int | list[int],
        first: int = 0,
        told: Any = None,
        salt: str | None = None,
        media: Sequence[Any] = (),
        **sampling: Any,
    ) -> Request:
        """``prompt``: its tokens, or how many from ``first`` on."""
        params = SamplingParams(max_tokens=100, **sampling)
        params.update_from_generation_config({}, eos_token_id=1)
        tokens = list(range(first, first + prompt)) if isinstance(prompt, int) else prompt
        hashed: Any = {"cache_salt": salt, "mm_features": list(media), "block_hasher": self.hasher}
        request = Request(name, tokens, params, None, **hashed)
        request.kv_transfer_params = told
        self.side.admit(request)
        return request

    def step(self, request: Request, tokens: int, *others: Request) -> StepOrders:
        requests = (request, *others)
        scheduled = {one.request_id: tokens for one in requests}
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values())
        )
        orders = self.side.orders(output, self.pool.arena_handle())
        for one in requests:
            one.num_computed_tokens += tokens
        return orders

    def idle(self, arena: ArenaHandle | None = None) -> StepOrders:
        """The orders of a step that computes nothing."""
        nothing = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
        return self.side.orders(nothing, arena or self.pool.arena_handle())

    def report(self, orders: StepOrders, ranks: int = 2, failed: bool = False) -> None:
        ids = [store.store_id for store in orders.stores]
        report = StepReport(dict.fromkeys(ids, ranks), set(ids) if failed else set())
        self.side.reported(report, set(), set())

    def end(self, request: Request, status: RequestStatus) -> tuple[bool, dict[str, Any]]:
        """Whether its device blocks are held, and its reply."""
        request.status = status
        return self.side.finished(request, (self.blocks[request.request_id],))

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


def test_a_token_is_left_to_compute(pool: Pool) -> None:
    bench = Bench(pool)
    bench.report(bench.step(bench.request("first", 2 * BLOCK), 2 * BLOCK))
    assert bench.matched(bench.request("again", 2 * BLOCK)) == BLOCK
    assert bench.matched(bench.request("more", 2 * BLOCK + 1)) == 2 * BLOCK


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
    hold, told = bench.end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert hold
    assert told["kvrecall"]["computed"] == 31
    orders = bench.idle()
    assert stored(orders) == [2]
    assert orders.releases == ["r"]


def test_blocks_whose_copies_are_late_are_durable_a_step_later(tmp_path: Path) -> None:
    disk = {"disk_path": str(tmp_path / "disk"), "disk_size": "64MiB"}
    settings = RecallSettings.from_mapping({"host_size": "1MiB", **disk})
    with Pool.open(settings.pool) as pool:
        bench = Bench(pool, async_write=False)
        request = bench.request("r", 40)
        orders = bench.step(request, 40)
        request.append_output_token_ids(3)
        bench.end(request, RequestStatus.FINISHED_STOPPED)
        bench.side.reported(StepReport(), set(), set())
        assert bench.side.counters.counts["flushes_missed"] == 0
        bench.report(orders)
        assert bench.side.counters.counts["flushes_missed"] == 0
        (below,) = (tier for tier in pool.stats().tiers if tier.name == "disk")
        assert below.blocks == 2


@pytest.mark.parametrize(
    "since", [RequestStatus.PREEMPTED, RequestStatus.RUNNING, RequestStatus.FINISHED_ABORTED]
)
def test_preemption_waits_for_late_copies(pool: Pool, since: RequestStatus) -> None:
    """Whatever becomes of the request before the next step: vLLM has freed its blocks."""
    bench = Bench(pool)
    request = bench.request("r", 16)
    bench.step(request, 16)
    assert not bench.step(request, 0).stores_first
    request.num_preemptions += 1
    request.status = since
    if request.is_finished():
        bench.side.finished(request, (bench.blocks["r"],))
    assert bench.idle().stores_first


def test_a_failed_load_is_not_tried_again(pool: Pool) -> None:
    bench = Bench(pool)
    bench.report(bench.step(bench.request("first", 40), 40))
    request = bench.request("again", 40)
    assert bench.matched(request) == 32
    bench.side.allocated(request, (bench.blocks["again"],), 32)
    (load,) = bench.idle().loads
    assert load.copies[0].block_ids == (1, 2)
    bench.side.reported(None, {"again"}, {"again"})
    assert bench.side.counters.loads == {}
    assert pool.stats().leases == 0
    assert bench.matched(request) == 0
    assert bench.end(request, RequestStatus.FINISHED_STOPPED)[1]["kvrecall"]["computed"] == 40


def test_no_room_is_no_error(pool: Pool) -> None:
    bench = Bench(pool)
    request = bench.request("r", 16 * 400)
    orders = bench.step(request, 16 * 400)
    assert 0 < len(stored(orders)) <= 256, "1 MiB holds 256 blocks of 4 KiB"
    assert bench.side.counters.counts["blocks_refused"] > 0
    bench.report(orders)
    assert bench.matched(bench.request("again", 16 * 400)) == len(stored(orders)) * BLOCK


def test_a_request_that_was_refused_room_does_not_ask_in_every_step(pool: Pool) -> None:
    bench = Bench(pool)
    taken = [Namespace.of({"other": "1"}).key(bytes([n // 256, n % 256])) for n in range(256)]
    pool.register(Namespace.of({"other": "1"}), 4096)
    pool.reserve(taken)  # being filled: cannot be evicted
    request = bench.request("r", 16 * 100)
    asked = [bench.side.counters.counts["blocks_refused"]]
    for _ in range(40):
        bench.step(request, BLOCK)
        asked.append(bench.side.counters.counts["blocks_refused"])
    steps = [step for step in range(40) if asked[step + 1] > asked[step]]
    assert steps == [0, 2, 6, 14, 30]
    pool.abandon(taken)
    saved = [block for _ in range(16) for block in stored(bench.step(request, BLOCK))]
    assert saved == list(range(1, len(saved) + 1))
    assert len(saved) > 40


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
        assert stored(bench.step(request, 40)) == ([] if adapter == "unknown" else [1, 2])


def test_reset_is_refused_while_loading_and_private_afterwards(pool: Pool) -> None:
    bench = Bench(pool)
    bench.report(bench.step(bench.request("first", 40), 40))
    request = bench.request("again", 40)
    assert bench.matched(request) == 32
    bench.side.allocated(request, (bench.blocks["again"],), 32)
    assert not bench.side.reset()
    bench.side.reported(None, {"again"}, set())
    assert list(bench.side.counters.loads) == ["host"]
    assert bench.side.reset()
    assert bench.matched(bench.request("third", 40)) == 0
    bench.report(bench.step(bench.request("fourth", 40), 40))
    assert bench.matched(bench.request("fifth", 40)) == 32
    state = bench.side.state_of("fifth")
    assert state is not None
    assert state.namespace is not None
    assert state.namespace.digest != Namespace.of({"test": "1"}).digest


def test_what_runs_when_weights_change_is_not_pooled(pool: Pool) -> None:
    """What was ordered before is of the old weights, and saved; a load under way fails."""
    bench = Bench(pool)
    bench.report(bench.step(bench.request("first", 40), 40))
    loading, running = bench.request("loading", 40), bench.request("running", 80, first=500)
    waiting = bench.request("waiting", 40, first=900)
    assert bench.matched(loading) == 32
    bench.side.allocated(loading, (bench.blocks["loading"],), 32)
    orders = bench.step(running, 40)
    bench.side.weights_changed()
    assert {one.request_id for one in bench.parted} == {"first", "loading", "running"}
    assert compat_scheduler.doomed == {"loading"}
    compat_scheduler.doomed.clear()
    bench.report(orders)
    assert stored(bench.step(running, 40)) == []
    assert stored(bench.step(waiting, 40)) == []
    assert bench.matched(bench.request("next", 60, first=500)) == 32
    assert bench.side.counters.counts["weights_changed"] == 1


def test_new_weights_have_another_name(pool: Pool) -> None:
    bench = Bench(pool)
    bench.report(bench.step(bench.request("first", 40), 40))
    assert bench.matched(bench.request("before", 40)) == 2 * BLOCK
    bench.base = Namespace.of({"test": "2"})
    bench.side.weights_changed()
    assert bench.matched(bench.request("after", 40)) == 0
    bench.base = Namespace.of({"test": "1"})
    bench.side.weights_changed()
    assert bench.matched(bench.request("back", 40)) == 2 * BLOCK


def test_what_is_on_its_way_when_a_model_loads_by_itself_is_not_saved(pool: Pool) -> None:
    bench = Bench(pool)
    orders = bench.step(bench.request("first", 40), 40)
    ids = [store.store_id for store in orders.stores]
    report = StepReport(dict.fromkeys(ids, 2), reloaded=True)
    bench.side.reported(report, set(), set())
    assert bench.reloads == 1
    assert bench.matched(bench.request("again", 40)) == 0


def test_only_requests_of_an_adapter_that_is_replaced_end(pool: Pool) -> None:
    bench = Bench(pool)
    plain, tuned = bench.request("plain", 40), bench.request("tuned", 40, first=500)
    tuned.lora_request = SimpleNamespace(lora_int_id=3)
    bench.side.adapters_loaded({}, {3})
    assert stored(bench.step(tuned, 40)) == []
    assert stored(bench.step(plain, 40)) == [1, 2]


@pytest.mark.parametrize("mask", [None, [True, False] * 20])
def test_embeddings_are_pooled_until_some_are_mixed_with_tokens(pool: Pool, mask: Any) -> None:
    bench = Bench(pool)

    def request(name: str, first: int, mask: list[bool] | None) -> Request:
        made = bench.request(name, 40, first)
        bench.side._states.clear()
        made.prompt_embeds, made.prompt_is_token_ids = torch.zeros(40, 2), mask
        bench.side.admit(made)
        return made

    assert stored(bench.step(request("one", 0, mask), 40)) == ([1, 2] if mask is None else [])
    assert stored(bench.step(request("two", 500, None), 40)) == ([1, 2] if mask is None else [])
    assert stored(bench.step(bench.request("tokens", 40, 900), 40)) == [1, 2]


def finished(bench: Bench, request: Request) -> dict[str, Any]:
    request.append_output_token_ids([5])
    return bench.end(request, RequestStatus.FINISHED_LENGTH_CAPPED)[1]


def test_a_decode_instance_waits_for_what_a_prefill_instance_promised(pool: Pool) -> None:
    prefill, decode = Bench(pool), Bench(pool, handover_deadline=60)
    request = prefill.request("first", 40)
    orders = prefill.step(request, 40)
    told = finished(prefill, request)
    assert told[HANDOVER]["tokens"] == 32
    plain = decode.request("plain", 40)
    assert decode.matched(plain) == 0, "nothing was promised to it"
    again = decode.request("again", 40, told=told)
    assert decode.matched(again) is None
    prefill.report(orders)
    wait_until(lambda: decode.matched(again) is not None)
    assert decode.matched(again) == 32
    counts = decode.side.counters.counts
    assert (counts["handovers"], counts["handovers_late"]) == (1, 0)


@pytest.mark.parametrize("returns", [True, False])
def test_a_hint_that_both_roles_bring_is_one_use_of_the_prompt(pool: Pool, returns: bool) -> None:
    """Over one pool service. With pools of their own, each has recorded it."""
    hint = {HINT: {"returns": returns}}
    prefill, decode = Bench(pool), Bench(pool)
    first = prefill.request("first", 40, told=hint)
    prefill.matched(first)
    prefill.report(prefill.step(first, 40))
    told = finished(prefill, first)
    assert told[HANDOVER]["hinted"]
    assert decode.matched(decode.request("again", 40, told=hint | told)) == 32
    stats = pool.stats()
    assert (stats.hints, stats.hints_true, stats.hints_false) == (1, 0, 0), "nobody came back"
    prefill.matched(prefill.request("next turn", 56))
    stats = pool.stats()
    assert (stats.hints, stats.hints_true, stats.hints_false) == (1, returns, not returns)
    with Pool.open(RecallSettings.from_mapping({"host_size": "1MiB"}).pool) as other:
        elsewhere = Bench(other, handover_deadline=0.01)
        again = elsewhere.request("again", 40, told=hint | told)
        wait_until(lambda: elsewhere.matched(again) == 0)
        assert other.stats().hints == 1


def test_a_hint_that_the_decode_instance_alone_brings_counts(pool: Pool) -> None:
    """As of ``vllm serve``: the router leaves kv_transfer_params out for the prefill instance."""
    prefill, decode = Bench(pool), Bench(pool)
    first = prefill.request("first", 40)
    prefill.matched(first)
    prefill.report(prefill.step(first, 40))
    told = finished(prefill, first)
    assert "hinted" not in told[HANDOVER]
    decode.matched(decode.request("again", 40, told={HINT: {"returns": True}} | told))
    assert pool.stats().hints == 1


def test_a_promise_that_is_broken_is_computed(pool: Pool) -> None:
    prefill, decode = Bench(pool), Bench(pool, handover_deadline=0.05)
    request = prefill.request("first", 40)
    orders = prefill.step(request, 40)
    told = finished(prefill, request)
    prefill.report(orders, failed=True)
    again = decode.request("again", 40, told=told)
    assert decode.matched(again) is None
    wait_until(lambda: decode.matched(again) is not None)
    assert decode.matched(again) == 0
    assert decode.side.counters.counts["handovers_late"] == 1


def test_a_promise_of_another_model_is_refused_and_counted(pool: Pool) -> None:
    bench = Bench(pool)
    foreign = {HANDOVER: {"tokens": 32, "namespace": Namespace.of({"test": "2"}).digest.hex()}}
    assert bench.matched(bench.request("r", 40, told=foreign)) == 0
    assert bench.side.counters.counts["handovers_foreign"] == 1


def test_no_more_is_promised_than_was_saved(pool: Pool) -> None:
    bench = Bench(pool)
    request = bench.request("first", 40)
    bench.report(bench.step(request, 40), failed=True)
    assert HANDOVER not in finished(bench, request)
    aborted = bench.request("aborted", 40, first=100)
    bench.report(bench.step(aborted, 40))
    assert HANDOVER not in bench.end(aborted, RequestStatus.FINISHED_ABORTED)[1]


def test_an_engine_that_may_not_load_only_saves(pool: Pool) -> None:
    bench = Bench(pool, replace(FACTS, recalls=False))
    bench.report(bench.step(bench.request("first", 40), 40))
    assert bench.matched(bench.request("again", 40)) == 0
    assert Bench(pool).matched(bench.request("third", 40)) == 32


def test_engines_that_only_read_or_share_nothing(pool: Pool) -> None:
    """Beside one that writes, whose blocks stay when the reader forgets all."""
    writer, reader, private = Bench(pool), Bench(pool, access="read"), Bench(pool, access="private")
    writer.report(writer.step(writer.request("first", 40), 40))
    assert (reader.matched(reader.request("a", 40)), private.matched(private.request("a", 40))) == (
        32, 0,
    )  # fmt: skip
    assert not reader.step(reader.request("b", 40, first=100), 40).stores
    private.report(private.step(private.request("b", 40, first=100), 40))
    assert private.matched(private.request("c", 40, first=100)) == 32
    assert writer.matched(writer.request("c", 40, first=100)) == 0
    reader.end(reader.side.state_of("a").request, RequestStatus.FINISHED_ABORTED)  # type: ignore[union-attr]
    assert reader.side.reset()
    assert writer.matched(writer.request("d", 40)) == 32


def test_what_a_connector_beside_it_loads_is_not_saved_and_has_a_deadline(pool: Pool) -> None:
    now = [0.0]
    bench = Bench(pool, clock=lambda: now[0], load_deadline=10)
    bench.report(bench.step(bench.request("first", 40), 40))
    delivered = {"do_remote_prefill": True}
    for name in ("brought", "late"):
        assert bench.matched(bench.request(name, 40, told=dict(delivered))) == 0
    bench.side.reported(StepReport(), {"brought"}, set())
    now[0] = 9.0
    assert bench.side.late() == []
    now[0] = 10.0
    assert (bench.side.late(), bench.side.late()) == (["late"], [])
    assert bench.side.counters.counts["handovers_late"] == 1
    assert not bench.step(bench.request("second", 40, first=100), 40).stores
    assert bench.matched(bench.request("third", 40)) == 32, "it goes on to recall"


def test_what_another_held_too_long_without_a_step_is_computed(pool: Pool) -> None:
    """NIXL's lease of it may have ended, and other blocks be where it was: a reply was wrong."""
    now = [0.0]
    bench = Bench(pool, clock=lambda: now[0], load_deadline=600)
    doomed = compat_scheduler.doomed
    doomed.clear()
    told = {"do_remote_prefill": True}
    asked, queued, brought, runs = (bench.request(f"{n}", 40, told=dict(told)) for n in range(4))
    for one in (asked, brought, runs):
        assert bench.matched(one) == 0
    bench.side.reported(StepReport(), {brought.request_id}, set())
    bench.step(runs, 40)
    for now[0] in (5.0, 19.0, 33.0):
        assert bench.side.late() == []
    assert not doomed
    now[0] = 49.0
    bench.request("new", 40, told=dict(told))
    assert bench.side.late() == []
    assert doomed == {asked.request_id, queued.request_id}
    now[0] = 65.0  # "new" has no step now
    assert bench.side.late() == []
    now[0] = 600.0
    assert bench.side.late() == [asked.request_id], "and not what runs"
    assert bench.side.counters.counts["handovers_late"] == 3, "each of them once"
    doomed.clear()
    old = bench.request("old", 40, told=dict(told))
    bench.end(old, RequestStatus.FINISHED_ABORTED)
    waited = Request("waited", [1] * 40, old.sampling_params, None, arrival_time=1.0)
    waited.kv_transfer_params = dict(told)
    bench.side.admit(waited)
    prefill = Bench(pool)
    first = prefill.request("first", 40)
    prefill.step(first, 40)
    given = finished(prefill, first)[HANDOVER]
    ages = {"fresh": given["at"], "held": given["at"] - 60, "odd": "1", "none": None}
    for name, at in ages.items():
        bench.request(name, 40, told={**told, HANDOVER: {**given, "at": at}})
    assert bench.side.late() == []
    assert doomed == {"waited", "held"}, "they had waited for the engine to take them"
    doomed.clear()


def test_a_promise_holds_across_hosts(tmp_path: Path) -> None:
    """Two pools of their own, a store that both reach: the blocks come a moment after the promise,
    and the decode instance finds them though it was told first that they are not there."""
    remote = {"kind": "objects", "url": f"file://{tmp_path}/store"}
    raw = {"host_size": "1MiB", "remote": remote}
    settings = RecallSettings.from_mapping(raw)
    with Pool.open(settings.pool) as here, Pool.open(settings.pool) as there:
        prefill, decode = Bench(here), Bench(there, handover_deadline=60)
        request = prefill.request("first", 40)
        orders = prefill.step(request, 40)
        told = finished(prefill, request)
        again = decode.request("again", 40, told=told)
        assert decode.matched(again) is None
        state = decode.side.state_of("again")
        assert state is not None
        wait_until(lambda: not there.find(state.keys(2)).pending)
        assert there.find(state.keys(2)).blocks == 0
        assert decode.matched(again) is None
        prefill.report(orders)
        wait_until(lambda: decode.matched(again) is not None)
        assert decode.matched(again) == 32
        assert decode.side.sources(again) == {}
        decode.side.allocated(again, (decode.blocks["again"],), 32)
        assert decode.side.sources(again) == {"remote": 32}
        decode.side.reported(None, {"again"}, set())


def test_a_request_waits_for_the_stores_answer_but_not_for_long(
    request: pytest.FixtureRequest,
) -> None:
    store = SHARED.setdefault(request.node.name, MemoryStore())
    remote = {"kind": "support.stores:make_store", "name": request.node.name}
    settings = RecallSettings.from_mapping({"host_size": "1MiB", "remote": remote})
    with Pool.open(settings.pool) as here, Pool.open(settings.pool) as there:
        first = Bench(here)
        first.report(first.step(first.request("first", 40), 40))
        wait_until(lambda: len(store.values) == 2)
        store.gate.clear()
        hasty, patient = Bench(there, lookup_deadline=0.05), Bench(there, lookup_deadline=30.0)
        early, late = hasty.request("early", 40), patient.request("late", 40)
        assert hasty.matched(early) is None
        wait_until(lambda: hasty.matched(early) == 0)
        assert patient.matched(late) is None
        store.gate.set()
        wait_until(lambda: patient.matched(late) is not None)
        assert patient.matched(late) == 32
    del SHARED[request.node.name]


def test_the_pool_is_not_asked_every_step_while_the_store_is_silent(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SHARED.setdefault(request.node.name, MemoryStore())
    remote = {"kind": "support.stores:make_store", "name": request.node.name}
    settings = RecallSettings.from_mapping({"host_size": "1MiB", "remote": remote})
    now, asked = 0.0, list[str]()
    with Pool.open(settings.pool) as pool:
        monkeypatch.setattr(pool, "find", counted(asked, "find", pool.find))
        store.gate.clear()
        bench = Bench(pool, clock=lambda: now, lookup_deadline=1.0)
        waiting = bench.request("waiting", 40)
        for _ in range(50):
            assert bench.matched(waiting) is None
        assert len(asked) == 1
        now = 0.5
        assert bench.matched(waiting) is None
        assert len(asked) == 2
        now = 1.0
        assert bench.matched(waiting) == 0, "the deadline"
        bench.side.costs.saw_step(1000, 500, 1000.0)  # 32 tokens take 32 s: worth 2.6 s of waiting
        worthy = bench.request("worthy", 40, 1000)
        assert bench.matched(worthy) is None
        now = 3.5
        assert bench.matched(worthy) is None
        store.gate.set()
    del SHARED[request.node.name]


class SlowPool:
    """A real pool whose disk delivers nothing until released, with a manual clock."""

    def __init__(self, folder: Path) -> None:
        self.io = FaultyIo()
        disk = DiskTier(DiskConfig(folder, 64 << 20), io=self.io)
        self.pool = Pool(Arena.create(64 * 4096), disk)
        self.now = 0.0

    def bench(self, **settings: Any) -> Bench:
        bench = Bench(self.pool, clock=lambda: self.now, **settings)
        bench.side.costs.saw_step(1000, 500, 10.0)  # 10 ms a token, 160 a block
        return bench

    def fill(self, tokens: int) -> None:
        """Leaves a prompt of so many tokens on disk only."""
        bench = Bench(self.pool)

        def save(name: str, start: int, length: int) -> None:
            request = bench.request(name, length, start)
            orders = bench.step(request, length)
            bench.report(orders)
            wait_until(lambda: self.pool.stats().queued_writes == 0)

        save("first", 0, tokens)
        keys = {block.key for block in self.pool.host_blocks()}
        for number in range(1, 9):  # what is still being written refuses others a place
            save(f"other {number}", 100_000 * number, 16 * 64)
            if keys.isdisjoint(block.key for block in self.pool.host_blocks()):
                return
        raise AssertionError("the prompt stays in the host")


def test_a_load_that_stalls_is_given_up_for_a_third_of_computing(slow: SlowPool) -> None:
    slow.fill(16 * 50)
    bench = slow.bench()
    slow.io.read_gate.clear()
    request, small = bench.request("again", 16 * 50), bench.request("small", 16 * 3)
    assert bench.matched(small) is None
    slow.now = 0.3
    assert bench.matched(small) == 0
    assert bench.matched(request) is None, "a few late blocks tell no bandwidth"
    slow.now = 3.0  # 2.7 of 8 seconds that computing takes
    assert bench.matched(request) == 0
    assert bench.side.counters.counts["loads_given_up"] == 2
    assert slow.pool.stats().leases == 0
    assert bench.matched(bench.request("next", 16 * 50)) == 0, "it is believed"
    slow.io.read_gate.set()
    wait_until(lambda: slow.pool.stats().queued_reads == 0)
    assert slow.pool.stats().leases == 0, "nor when they have come after all"
    for number in range(8):  # and its recovery is noticed
        late = bench.request(f"late {number}", 16 * 50)
        wait_until(lambda late=late: bench.matched(late) is not None)
        slow.now += 0.001
        if bench.matched(late):
            break
    else:
        pytest.fail("the tier was never tried again")


def test_a_load_ends_before_a_block_that_was_lost(
    slow: SlowPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was found: of the third portion the second block is gone."""
    slow.fill(16 * 50)
    bench, acquire, portions = slow.bench(), slow.pool.acquire, list[int]()

    def losing(keys: Sequence[BlockKey], *more: Any) -> int:
        portions.append(len(keys))
        if len(portions) == 3:
            slow.pool.drop(keys[1:2])
        return acquire(keys, *more)

    monkeypatch.setattr(slow.pool, "acquire", losing)
    request = bench.request("again", 16 * 50)
    wait_until(lambda: bench.matched(request) is not None)
    assert bench.matched(request) == (sum(portions[:2]) + 1) * BLOCK
    assert len(portions) > 10


def test_a_service_that_dies_is_not_a_slow_disk(slow: SlowPool) -> None:
    """A recall that ended early without its blocks says nothing of bandwidth."""
    slow.fill(16 * 50)
    bench = slow.bench()
    slow.io.read_gate.clear()
    request = bench.request("again", 16 * 50)
    assert bench.matched(request) is None
    load = bench.side._matched["again"]
    lost = Recall(RecallState.READY)
    slow.now = 0.05
    load.pool = SimpleNamespace(poll=lambda _: lost, release=slow.pool.release)  # type: ignore[assignment]
    assert bench.matched(request) == 0
    assert bench.side.costs.load_seconds(TierName.DISK) == 0, "a loss was taken for slowness"
    slow.io.read_gate.set()
    again = bench.request("third", 16 * 50)
    wait_until(lambda: bench.matched(again) is not None)
    assert bench.matched(again)


class SeenRequest(Request):
    """Records in ``seen`` that it is looked at."""

    seen: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        find = super().__getattribute__
        SeenRequest.seen.add(find("request_id"))
        return find(name)


class SeenSteps(dict[str, int]):
    """The tokens of a step by request. Records in ``asked`` those asked for by name; gives no list
    of them."""

    def __init__(self, tokens: dict[str, int]) -> None:
        super().__init__(tokens)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> int:
        self.asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all requests of the step are looked at")

    keys = values = items = __iter__  # type: ignore[assignment]


def test_only_sequences_that_complete_a_block_are_looked_at(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(pool, replace(FACTS, copies_in_step=True, ranks=1))
    lengths = {str(i): 40 + 4 * (i % 3) for i in range(60)}  # to a block's end: 8, 4 and 0 tokens
    requests = {name: bench.request(name, n, 100 * int(name)) for name, n in lengths.items()}
    for name, request in requests.items():
        bench.report(bench.step(request, lengths[name]), ranks=1)
        request.append_output_token_ids(2)
    first, *others = requests.values()
    bench.step(first, 1, *others)  # behind the prompt, to learn how far the block's end is
    looked_up: list[str] = []
    tables = bench.tables
    seen_tables = lambda name: looked_up.append(name) or tables(name)  # noqa: E731
    monkeypatch.setattr(bench, "tables", seen_tables)
    calls: list[str] = []
    for name in ("reserve", "commit", "abandon", "find", "acquire", "poll", "touch", "stats"):
        monkeypatch.setattr(pool, name, counted(calls, name, getattr(pool, name)))
    ends = []
    for step in range(2, 2 * BLOCK):
        for request in requests.values():
            request.append_output_token_ids(2)
            request.__class__ = SeenRequest
        scheduled = SeenSteps(dict.fromkeys(requests, 1))
        output = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=len(scheduled)
        )
        SeenRequest.seen.clear()
        looked_up.clear()
        calls.clear()
        orders = bench.side.orders(output, pool.arena_handle())
        bench.report(orders, ranks=1)
        seen = set(SeenRequest.seen)
        for request in requests.values():
            request.__class__ = Request
            request.num_computed_tokens += 1
        whole = {name for name, tokens in lengths.items() if (tokens + step) % BLOCK == 0}
        assert seen == scheduled.asked == set(looked_up) == whole
        assert calls == (["reserve", "commit"] if whole else [])
        assert len(stored(orders)) == len(whole)
        ends += [step] if whole else []
    assert ends == [4, 8, 16, 20, 24]


def counted(calls: list[str], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        calls.append(name)
        return method(*args, **more)

    return call


def test_orders_and_reports_are_the_same_to_the_workers() -> None:
    """vLLM pickles them; numbers may be numpy's."""
    copies = Copy((3, 4), (1 << 40, 4096), 1), Copy((), ())
    orders = StepOrders(
        ArenaHandle(1, 2, 1 << 40, 5, "boot"),
        [LoadOrder("a", copies), LoadOrder("b", ())],
        [StoreOrder(7, copies[0], b"\x00\xff345678")],
        ["c"],
        True,
        [Comparison(9, "d", copies[0], True)],
        (4088, 1 << 33),
        OffloadOrders(
            [Departure("e", 1, (2,), (3,), (4,))], {5: "e"}, ["f"], [Arrival("g", 1, (2,), (3,))]
        ),
        11,
        False,
    )
    assert pickle.loads(pickle.dumps(orders)) == orders
    assert pickle.loads(pickle.dumps(StepOrders(NO_ARENA))) == StepOrders(NO_ARENA)
    found = Deviation(3, 2, float("inf"), 0.5, "layer", True)
    report = StepReport({1: 2}, {3}, {"a"}, {4: (5, found)}, {"b"}, {6: 0.25}, 0.5, 7, 1.5, 8, 2.5)
    assert pickle.loads(pickle.dumps(report)) == report
    measured = replace(report, load_seconds=np.float32(1.5), loaded_bytes=np.int64(7))
    assert pickle.loads(pickle.dumps(measured)) == report


def test_the_blocks_of_a_step_are_reserved_and_ordered_together(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call for each tenant, one store; a store that failed ends the chains of all."""
    bench = Bench(pool, replace(FACTS, copies_in_step=True, ranks=1))
    requests = [bench.request(str(i), 40, first=1000 * i) for i in range(5)]
    salted = bench.request("salted", 40, salt="ann")
    bench.report(bench.step(*requests[:1], 40, *requests[1:], salted), ranks=1)
    asked: list[int] = []
    reserve = pool.reserve

    def watched(keys: Sequence[BlockKey], *more: Any) -> Any:
        asked.append(len(keys))
        return reserve(keys, *more)

    monkeypatch.setattr(pool, "reserve", watched)
    for turn in (1, 2):
        for place in range(BLOCK):
            for one in (*requests, salted):
                one.append_output_token_ids(2)
            orders = bench.step(*requests[:1], 1, *requests[1:], salted)
            assert (len(orders.stores), len(stored(orders))) == ((1, 6) if place == 7 else (0, 0))
            bench.report(orders, ranks=1, failed=turn == 2)
        assert asked == [5, 1] * turn
    assert {bench.side.state_of(one.request_id).saving.closed for one in requests} == {True}
    assert all(pool.find(bench.side.saved(one.request_id)).blocks == 3 for one in requests)


def test_requests_that_end_before_they_complete_a_block_leave_nothing(pool: Pool) -> None:
    bench = Bench(pool, replace(FACTS, copies_in_step=True, ranks=1))
    for number in range(3 * BLOCK):
        request = bench.request(str(number), 8, first=100 * number)
        bench.step(request, 8)
        request.append_output_token_ids(2)
        bench.step(request, 1)
        bench.end(request, RequestStatus.FINISHED_ABORTED)
    awake = bench.side._awake
    assert sum(map(len, awake._resting.values())) <= BLOCK
    assert not awake._awake
    assert not awake._until


def test_a_refused_block_is_tried_again_before_the_next_one_is_complete() -> None:
    settings = RecallSettings.from_mapping({"host_size": "16KiB"})
    with Pool.open(settings.pool) as small:
        bench = Bench(small, replace(FACTS, copies_in_step=True, ranks=1))
        other = bench.request("other", 64)
        bench.report(bench.step(other, 64), ranks=1)
        held = small.acquire(bench.side.saved("other"), 1.0)
        request = bench.request("one", 16, first=500)
        assert not stored(bench.step(request, 16))
        tries = []
        for _ in range(8):
            request.append_output_token_ids(2)
            tries += stored(bench.step(request, 1))
            small.release(held)
        assert tries == [1], "within the next block"


def test_rejected_speculation_does_not_hide_a_blocks_end(pool: Pool) -> None:
    bench = Bench(pool, replace(FACTS, copies_in_step=True, ranks=1))
    request = bench.request("one", 40)
    bench.report(bench.step(request, 40), ranks=1)
    saved = []
    for kept in (1, 3, 1, 2, 1, 3, 2, 1, 1):
        request.append_output_token_ids([2] * kept)
        orders = bench.step(request, 4)  # three drafted tokens
        request.num_computed_tokens += kept - 4
        saved += stored(orders)
        bench.report(orders, ranks=1)
        assert len(saved) == request.num_computed_tokens // BLOCK - 2, request.num_computed_tokens
    assert saved == [3]


def test_hints_of_requests_reach_the_pool_and_wrong_ones_are_counted(pool: Pool) -> None:
    bench = Bench(pool)
    told: list[Any] = [
        {HINT: {"returns": True, "in_s": 30}},
        {HINT: {"returns": "yes"}},
        {HINT: [1]},
        None,
    ]
    for number, params in enumerate(told):
        request = bench.request(f"r{number}", 40, first=1000 * number, told=params)
        assert bench.matched(request) == 0
        assert bench.matched(request) == 0, "asked again: the hint counts once"
    assert (pool.stats().hints, bench.side.counters.counts["hints_invalid"]) == (1, 2)
    session = bench.request("s", 40, first=9000)
    session.session_id = "agent 7"
    bench.matched(session)
    action = SimpleNamespace(action_type=HINT, payload={"returns": False})
    other = bench.request("t", 40, first=9500)
    other.kv_hints = SimpleNamespace(actions=[SimpleNamespace(action_type="x", payload={}), action])
    bench.matched(other)
    assert (pool.stats().hints, bench.side.counters.counts["hints_invalid"]) == (3, 2)


def test_the_sequences_of_a_request_give_one_hint(pool: Pool) -> None:
    """And do not make it false. Requests of other names with numbers are requests of their own."""
    bench = Bench(pool)
    gone = {HINT: {"returns": False}}
    for number in range(4):
        bench.matched(bench.request(f"{number}_cmpl-1-0-abcd", 40, told=gone))
    stats = pool.stats()
    assert (stats.hints, stats.hints_true, stats.hints_false) == (1, 0, 0)
    bench.matched(bench.request("4_mine-abcd", 40, told=gone))
    stats = pool.stats()
    assert (stats.hints, stats.hints_true, stats.hints_false) == (2, 0, 1)
