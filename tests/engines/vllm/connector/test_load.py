"""A hit's blocks between the match and the step that loads them."""

from __future__ import annotations

import pytest
from vllm.v1.request import Request

from engines.vllm.connector.test_groups import ONE as TAILED
from engines.vllm.connector.test_groups import SHAPES, prompt
from engines.vllm.connector.test_groups import Bench as GroupBench
from engines.vllm.connector.test_saver import ONE, idle
from engines.vllm.connector.test_scheduler import BLOCK, Bench, pool
from kvrecall.engines.vllm.wire import StepOrders
from kvrecall.pool import Pool
from kvrecall.pool.base import Recall, RecallState

__all__ = ["pool"]


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
    (load,) = idle(bench).loads
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
    orders: StepOrders = idle(bench)  # type: ignore[arg-type]
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
    GroupBench(pool, SHAPES["gemma"]).run(prompt(200))
    bench = GroupBench(pool, SHAPES["gemma"], audit=4096)
    assert bench.side.match(bench.request(prompt(200)), 0) == (0, False)
