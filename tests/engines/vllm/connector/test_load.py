"""A hit's blocks between the match and the step that loads them; load or recompute: the cheaper one
is chosen, from measured costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.request import Request

from engines.vllm.connector.test_groups import ONE as TAILED
from engines.vllm.connector.test_groups import SHAPES, prompt
from engines.vllm.connector.test_groups import Bench as GroupBench
from engines.vllm.connector.test_saver import ONE
from engines.vllm.connector.test_scheduler import BLOCK, Bench
from kvrecall.block import TierName
from kvrecall.engines.vllm.connector.load import LoadCostModel
from kvrecall.pool import Pool
from kvrecall.pool.base import Recall, RecallState

HOST, DISK = TierName.HOST, TierName.DISK
MB = 1 << 20


def hit(pool: Pool) -> tuple[Bench, Request]:
    """A request whose two blocks are in the arena."""
    bench = Bench(pool, ONE)
    bench.report(bench.step(bench.request("first", 40), 40), ranks=1)
    request = bench.request("again", 40)
    assert bench.matched(request) == 2 * BLOCK
    return bench, request


def test_a_hit_in_a_service_that_was_replaced_is_not_loaded(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks again for a request that got no device blocks: by then other blocks may lie where
    its own were."""
    bench, request = hit(pool)
    assert bench.matched(request) == 2 * BLOCK
    monkeypatch.setattr(pool, "poll", lambda ticket: Recall(RecallState.READY))
    assert bench.matched(request) == 0
    assert pool.stats().leases == 0


def test_what_vllm_takes_of_a_chain_is_loaded(pool: Pool) -> None:
    """Blocks that have no place on the device stay in the arena."""
    bench, request = hit(pool)
    bench.side.allocated(request, ([0, 7],), BLOCK + 16)
    (load,) = bench.idle().loads
    assert [copy.block_ids for copy in load.copies] == [(7,)]


@pytest.mark.parametrize("shape", ["gemma", "states"])
@pytest.mark.parametrize("short", ["tokens", "blocks", "table"])
def test_a_hit_of_several_groups_is_loaded_whole_or_fails(
    pool: Pool, shape: str, short: str
) -> None:
    """If vLLM takes less than it was offered, or has no device block for one."""
    saver = GroupBench(pool, SHAPES[shape])
    saver.run(prompt(200))
    bench = GroupBench(pool, SHAPES[shape])
    request = bench.request(prompt(200))
    tokens, _ = bench.side.match(request, 0)
    assert tokens
    tables = [list(range(1, 99)) for _ in bench.kinds]
    if short == "blocks":
        tables[-1][:] = [0] * 98
    if short == "table":
        tables[-1].clear()
    bench.side.allocated(request, tables, tokens - (32 if short == "tokens" else 0))
    step = SimpleNamespace(num_scheduled_tokens={}, total_num_scheduled_tokens=0)
    orders = bench.side.orders(step, pool.arena_handle())
    assert [load.copies for load in orders.loads] == [()]


def test_a_tail_of_replaced_tokens_has_the_new_tokens_key(pool: Pool) -> None:
    """vLLM drops what a session has not computed when more of its prompt arrives."""
    bench = GroupBench(pool, TAILED)
    request = bench.request(prompt(100))
    state = bench.side.state_of(request.request_id)
    assert state is not None
    before = state.key_at(80)
    assert before == state.key_at(80)
    del request._all_token_ids[70:]  # as vLLM's Scheduler._update_request_as_session
    request._all_token_ids.extend(range(900, 940))
    twin = bench.side.state_of(bench.request([*request.all_token_ids, 1]).request_id)
    assert twin is not None
    assert before != state.key_at(80) == twin.key_at(80)


def test_a_hit_of_several_groups_that_is_audited_is_not_tried_again(pool: Pool) -> None:
    GroupBench(pool, SHAPES["states"]).run(prompt(200))
    bench = GroupBench(pool, SHAPES["states"], audit=4096)
    assert bench.side.match(bench.request(prompt(200)), 0) == (0, False)


# ---- costs ------------------------------------------------------------------------------


def costs(disk_mb_s: float | None, ms_per_token: float) -> LoadCostModel:
    """Blocks of 128 tokens and 1 MiB; the host gives 10 GiB/s."""
    it = LoadCostModel(block_tokens=128, block_bytes=MB, deadline_s=10.0)
    for depth in (256, 2000, 4000):
        it.saw_step(512, depth, 512 * ms_per_token / 1000)
    it.saw_load(HOST, 64, 64 / 10240)
    if disk_mb_s is not None:
        it.saw_load(DISK, 64, 64 / disk_mb_s)
    return it


def test_nothing_known_loads_everything() -> None:
    fresh = LoadCostModel(128, MB, 10.0)
    plan = fresh.plan((HOST, DISK, DISK), 0)
    assert (plan.blocks, plan.patience_s) == (3, 10.0)


def test_a_fast_disk_is_used_and_a_slow_one_is_not() -> None:
    found = (HOST,) * 10 + (DISK,) * 50
    assert costs(1000, ms_per_token=1).plan(found, 0).blocks == 60
    slow = costs(2, ms_per_token=1).plan(found, 0)
    assert 10 <= slow.blocks <= 12, "what the host has is taken, and a probe of the disk at most"


def test_a_tier_never_seen_is_tried() -> None:
    assert costs(None, ms_per_token=0.001).plan((DISK,) * 40, 0).blocks == 40


def test_trivial_loads_are_not_argued_about() -> None:
    quick_engine = costs(100, ms_per_token=0.0001)
    assert quick_engine.plan((DISK,), 0).blocks == 1
    assert quick_engine.plan((DISK,) * 100, 0).blocks <= 2


def test_deeper_tokens_cost_more_so_deeper_hits_are_worth_more() -> None:
    it = LoadCostModel(128, MB, 10.0)
    for depth in (500, 10_000, 20_000, 40_000):
        it.saw_step(512, depth, 512 * (0.1 + depth / 10_000) / 1000)
    assert it.compute_seconds(300) > 5 * it.compute_seconds(1)
    it.saw_load(DISK, 64, 64 * 0.1)  # 100 ms a block
    assert it.plan((DISK,) * 20, 0).blocks < 20
    assert it.plan((DISK,) * 20, 300).blocks == 20


def test_the_wait_is_bounded_by_what_is_expected() -> None:
    plan = costs(1000, ms_per_token=1).plan((DISK,) * 50, 0)
    assert 0.1 <= plan.patience_s <= 0.7, "at most a tenth of the 6.4 s it saves"
    stalled = costs(1000, ms_per_token=1)
    stalled.saw_load(DISK, 1, 0.2)
    assert stalled.plan((DISK,) * 50, 0).blocks < 50, "a stall is believed at once"


def test_a_load_of_another_speed_counts_for_a_tenth() -> None:
    it = costs(1000, 1.0)
    it.saw_load(DISK, 64, 64 / 1500)
    assert it.load_seconds(DISK) == pytest.approx(1 / 1050)


def test_few_blocks_tell_a_latency_and_no_bandwidth() -> None:
    it = costs(None, ms_per_token=1)
    it.saw_load(DISK, 1, 0.5, asked=1)
    assert it.plan((DISK,) * 179, 0).blocks == 179
    it.saw_load(DISK, 8, 4.0, asked=8)
    assert it.plan((DISK,) * 179, 0).blocks < 179


def test_blocks_that_come_pay_for_the_wait() -> None:
    it = costs(1000, ms_per_token=1)
    assert it.gained_seconds((), 0) == 0
    assert it.gained_seconds((HOST,) * 4, 0) == 0, "these would have been there anyway"
    assert it.gained_seconds((HOST,) * 4 + (DISK,) * 10, 0) == pytest.approx(1.28, rel=0.1)


def test_the_first_wait_is_bounded_by_the_least_that_computing_can_take() -> None:
    it = LoadCostModel(128, MB, 10.0, least_token_seconds=0.001)
    plan = it.plan((DISK,) * 50, 0)
    assert plan.blocks == 50
    assert 1.0 <= plan.patience_s <= 2.0, "a third of the 6.4 s that it saves"


def test_a_tier_that_is_passed_over_is_tried_again() -> None:
    """However slow it was: a tier that once delivered nothing must not be avoided for ever."""
    it = costs(1000, ms_per_token=1)
    it.saw_load(DISK, 0, 5.0)
    plans = [it.plan((DISK,) * 20, 0) for _ in range(20)]
    tried = [plan for plan in plans if plan.blocks]
    assert len(tried) == 5, "each fourth"
    assert all(plan.patience_s <= 0.05 * 20 * 0.128 * 1.1 for plan in tried)
    for _ in tried:
        it.saw_load(DISK, 1, 0.001)
        for _ in range(10):
            it.saw_load(DISK, 20, 0.02)
    assert it.plan((DISK,) * 20, 0).blocks == 20


def test_a_tier_unheard_of_for_long_is_tried_at_once() -> None:
    """After an outage the next request detects the recovery, not the fourth."""
    now = [100.0]
    it = LoadCostModel(128, MB, 10.0, clock=lambda: now[0])
    for _ in range(20):
        it.saw_step(512, 1000, 0.512)
    it.saw_load(DISK, 0, 5.0)
    now[0] += 1.0
    assert it.plan((DISK,) * 20, 0).blocks == 0
    now[0] += 10.0
    assert it.plan((DISK,) * 20, 0).blocks == 1
    it.saw_load(DISK, 1, 0.001)
    assert it.plan((DISK,) * 20, 0).blocks == 20


def test_small_steps_teach_nothing_of_prefill() -> None:
    it = LoadCostModel(128, MB, 10.0)
    it.saw_step(1, 5000, 0.05)
    assert it.plan((DISK,) * 5, 0).patience_s == 10.0


def test_steps_may_overlap_and_each_teaches_once() -> None:
    """The workers report the device's time of a step when it is known, each rank its own."""
    it = LoadCostModel(128, MB, 10.0)
    assert it.step_begins(True, 8, 50) is None, "too few tokens to tell"
    first, second = it.step_begins(True, 64, 50), it.step_begins(True, 128, 50)
    assert first is not None
    assert second is not None
    it.step_took(second, 1.28)
    it.step_took(second, 99.0)  # another rank's
    assert it.compute_seconds(0) == pytest.approx(1.28)
    it.step_took(first, 0.64)
    assert it.compute_seconds(0) == pytest.approx(1.28)


def test_a_wait_knows_whether_the_engine_worked_meanwhile() -> None:
    it = LoadCostModel(128, MB, 10.0)
    mark = it.mark()
    it.step_begins(False)
    assert it.idle_since(mark)
    it.step_begins(True)
    assert not it.idle_since(mark)
