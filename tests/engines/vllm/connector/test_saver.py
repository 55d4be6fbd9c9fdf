"""Which blocks are saved: only those whose every token has its KV in a device block of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from engines.vllm.connector.test_scheduler import BLOCK, FACTS, Bench, stored
from kvrecall.block import BlockKey
from kvrecall.engines.vllm.wire import EngineFacts
from kvrecall.pool import Pool
from kvrecall.pool.base import Reservation, Verdict

ONE = replace(FACTS, ranks=1, copies_in_step=True)


def ended(bench: Bench, request: Request, status: RequestStatus) -> list[int]:
    """The device blocks that are saved when a request has ended."""
    bench.end(request, status)
    return stored(bench.idle())


@pytest.mark.parametrize("null", [0, 1, 2])
def test_a_block_that_is_not_on_the_device_ends_what_is_saved(pool: Pool, null: int) -> None:
    """Of a chain as of retrieval, whose middle blocks have left; a slot reserved for one behind it
    is given back."""
    bench = Bench(pool, ONE)
    request = bench.request("r", 4 * BLOCK)
    bench.blocks["r"][null] = 0
    orders = bench.step(request, 3 * BLOCK)
    assert stored(orders) == [1, 2][:null]
    bench.report(orders, ranks=1)
    assert stored(bench.step(request, BLOCK)) == [], "nothing behind the gap"
    assert pool.stats().reserved == 0
    assert bench.matched(bench.request("again", 4 * BLOCK)) == null * BLOCK


WHOLE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@pytest.mark.parametrize("status", WHOLE)
@pytest.mark.parametrize(
    ("prompt", "computed", "sampled"),
    [
        (30, 31, 2),  # its last token ends a block, and was sampled only
        (30, 31, 3),  # accepted drafts behind the last token that was computed
        (31, 32, 1),  # a step ahead: the token that ends the block is being computed
        (30, 34, 2),  # a step ahead, with drafts
        (30, 31, 20),  # resumed in chunks, and ended by what a step before gave
    ],
)
def test_a_block_is_saved_when_its_last_token_is_computed(
    pool: Pool, prompt: int, computed: int, sampled: int, status: RequestStatus
) -> None:
    bench = Bench(pool, ONE)
    request = bench.request("r", prompt)
    bench.report(bench.step(request, prompt), ranks=1)
    request.append_output_token_ids([7] * sampled)
    request.num_computed_tokens = computed
    assert ended(bench, request, status) == []
    assert bench.matched(bench.request("again", prompt)) == BLOCK


def test_the_last_block_of_an_answer_is_saved_with_the_token_behind_it(pool: Pool) -> None:
    bench = Bench(pool, ONE)
    request = bench.request("r", 30)
    bench.report(bench.step(request, 30), ranks=1)
    request.append_output_token_ids([7, 7, 7])
    request.num_computed_tokens = 32
    assert ended(bench, request, RequestStatus.FINISHED_STOPPED) == [2]


def test_what_failed_or_was_aborted_is_not_saved_at_its_end(pool: Pool) -> None:
    bench = Bench(pool, ONE)
    for status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
        request = bench.request(status.name, 30, first=1000 * int(status))
        bench.report(bench.step(request, 30), ranks=1)
        request.append_output_token_ids([7, 7, 7])
        request.num_computed_tokens = 32
        assert ended(bench, request, status) == []


def test_what_a_step_that_failed_was_to_save_is_never_seen(pool: Pool) -> None:
    """Where the engine goes on after it: vLLM aborts all requests."""
    bench, uncached = Bench(pool, replace(FACTS, recovers=True)), set[int]()
    bench.side._uncache = uncached.update
    request = bench.request("r", 40)
    orders = bench.step(request, 40)
    bench.end(request, RequestStatus.FINISHED_ABORTED)
    assert uncached >= {1, 2}, "nor on the device"
    bench.report(orders)
    assert bench.matched(bench.request("again", 40)) == 0
    assert pool.stats().reserved == 0


def test_a_preempted_request_saves_what_it_computes_again(pool: Pool) -> None:
    """And no block that it had before, whose device block is another's now."""
    bench = Bench(pool, ONE)
    request = bench.request("r", 30)
    bench.report(bench.step(request, 15), ranks=1)
    request.num_computed_tokens, request.num_preemptions = 0, 1
    request.status = RequestStatus.PREEMPTED
    request.append_output_token_ids([7, 7, 7])  # of a step that was under way
    assert ended(bench, request, RequestStatus.FINISHED_STOPPED) == []


def test_drafts_are_saved_once_they_are_tokens(pool: Pool) -> None:
    """A block that rejected drafts fill is not the block of the tokens that follow."""
    bench = Bench(pool, ONE)
    request = bench.request("r", 14)
    bench.step(request, 14)
    request.append_output_token_ids(7)
    request.spec_token_ids = [1, 2, 3]
    assert stored(bench.step(request, 4)) == [], "position 15 is a draft"
    request.num_computed_tokens -= 2  # one was accepted
    request.append_output_token_ids([1, 8])
    assert stored(bench.step(request, 1)) == [1]


def test_what_a_step_saves_is_of_one_generation(pool: Pool) -> None:
    """Else a hit in another engine ends before the part that the audited one does not vouch for:
    a tail, behind a block, is never compared itself."""
    bench = Bench(pool, ONE, clock=map(float, itertools.count()).__next__)
    orders = bench.step(bench.request("one", 40), 40, bench.request("other", 40, first=1000))
    assert len(stored(orders)) == 4
    assert len({store.origin for store in orders.stores}) == 1


def test_a_tail_is_loaded_and_not_the_block_that_filled_up_later(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be of a later generation, which the audit of what is before it does not vouch for:
    seen as a prompt of 240 tokens that found 128 after a restart."""
    bench = Bench(pool, replace(ONE, match_unit=4))
    first = bench.request("first", 30)
    bench.report(bench.step(first, 30), ranks=1)
    first.append_output_token_ids([7] * 3)
    bench.report(bench.step(first, 3), ranks=1)
    again = bench.request("again", 30)
    state = bench.side.state_of("again")
    assert state is not None
    assert (tail := state.key_at(28)) is not None
    assert pool.is_in_host(tail)
    asked: list[Sequence[BlockKey]] = []
    acquire = pool.acquire
    monkeypatch.setattr(pool, "acquire", lambda *a: (asked.append(a[0]), acquire(*a))[1])
    assert bench.matched(again) == 28
    assert asked == [(*state.keys(1), tail)]


@pytest.mark.parametrize("frees", [False, True])
def test_what_a_window_leaves_is_copied_before_it_is_overwritten(pool: Pool, frees: bool) -> None:
    """Where copies are late: vLLM may give a running request's blocks to another."""
    facts = EngineFacts.of_one(BLOCK, 4096, frees=frees, copies_in_step=False)
    bench = Bench(pool, facts)
    bench.step(bench.request("r", 40), 40)
    assert bench.idle().stores_first is frees


def test_nothing_is_saved_of_a_request_that_ends_while_it_loads(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device blocks hold other KV until then, whatever the pool has lost meanwhile."""
    bench = Bench(pool, ONE)
    bench.report(bench.step(bench.request("first", 40), 40), ranks=1)
    request = bench.request("again", 40)
    assert bench.matched(request) == 2 * BLOCK
    bench.side.allocated(request, ([1, 2],), 2 * BLOCK)
    bench.idle()
    request.num_computed_tokens = 2 * BLOCK
    room = lambda keys, *_: (Reservation(Verdict.RESERVED, 0),) * len(keys)  # noqa: E731
    monkeypatch.setattr(pool, "reserve", room)
    assert ended(bench, request, RequestStatus.FINISHED_STOPPED) == []


def test_blocks_of_a_session_whose_tokens_are_replaced_have_the_new_tokens_keys(pool: Pool) -> None:
    """vLLM drops what a session has not computed when more of its prompt arrives."""
    bench = Bench(pool, ONE)
    request = bench.request("r", 40)
    assert bench.matched(request) == 0, "it knows the keys of the whole prompt"
    bench.report(bench.step(request, 20), ranks=1)
    del request._all_token_ids[20:]  # as vLLM's Scheduler._update_request_as_session
    del request.block_hashes[20 // BLOCK :]
    request._all_token_ids.extend(range(900, 940))
    request.update_block_hashes()
    assert request.num_tokens == 60
    bench.report(bench.step(request, 40), ranks=1)
    assert bench.matched(bench.request("as before", 40)) == BLOCK
    tokens = [*request.all_token_ids, 1]
    twin = bench.request("twin", tokens)
    assert bench.matched(twin) == 3 * BLOCK


def test_what_is_behind_a_block_that_was_refused_is_not_saved(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is given back."""
    bench = Bench(pool, ONE)
    reserve = pool.reserve
    request = bench.request("r", 3 * BLOCK)
    full = Reservation(Verdict.REFUSED)

    def refusing(keys: Sequence[BlockKey], *more: Any) -> Sequence[Reservation]:
        return [full if i == 1 else one for i, one in enumerate(reserve(keys, *more))]

    monkeypatch.setattr(pool, "reserve", refusing)
    orders = bench.step(request, 3 * BLOCK)
    assert stored(orders) == [1]
    bench.report(orders, ranks=1)
    assert pool.stats().reserved == 1, "the one that was refused here"
    assert bench.matched(bench.request("again", 4 * BLOCK)) == BLOCK
