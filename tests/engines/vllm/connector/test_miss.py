"""Each miss has one reason, and none of another tenant's: the scheduler side over real pools."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from pool.inside import is_answered
from support.clocks import HostClocks
from support.disks import FaultyIo
from support.stores import MemoryStore
from vllm.v1.request import Request

from engines.vllm.connector.test_groups import SHAPES
from engines.vllm.connector.test_groups import Bench as GroupBench
from engines.vllm.connector.test_groups import prompt as prompt_of
from engines.vllm.connector.test_scheduler import BLOCK, Bench, SlowPool, finished
from kvrecall.block import BlockKey, Namespace, TierName, tenant_of
from kvrecall.config import (
    Amount,
    DiskConfig,
    PoolTerms,
    RecallSettings,
    RemoteConfig,
    TenantRules,
    TenantTerms,
)
from kvrecall.engines.base import MISSED, Reason
from kvrecall.engines.vllm.connector.chains import Chains, Parting
from kvrecall.engines.vllm.wire import StepOrders
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.pool.tier import Tier
from kvrecall.testing import wait_until

NAMES = itertools.count()
PROMPT = list(range(1000, 1000 + 8 * BLOCK + 4))


def make_pool(**settings: Any) -> Pool:
    return Pool.open(RecallSettings.from_mapping({"host_size": "1MiB", **settings}).pool)


def ask(
    bench: Bench,
    prompt: list[int],
    salt: str | None = None,
    saves: bool = True,
    loads: bool = True,
    **sampling: Any,
) -> dict[str, Any]:
    """The miss of a request that is computed and ends, as its reply has it; {} without one."""
    name = f"request {next(NAMES)}"
    request = bench.request(name, prompt, salt=salt, **sampling)
    wait_until(lambda: bench.matched(request) is not None)
    if got := bench.matched(request):
        bench.side.allocated(request, (bench.blocks[name],), got)
        request.num_computed_tokens = got if loads else 0
        bench.side.reported(None, {name}, set() if loads else {name})
    orders = bench.step(request, len(prompt) - request.num_computed_tokens)
    bench.report(orders, failed=not saves)
    wait_until(lambda: bench.pool.stats().queued_writes == 0)
    if isinstance(bench.pool, ServiceClient):
        wait_until(lambda: is_answered(bench.pool))
    told: dict[str, Any] = finished(bench, request).get(MISSED, {})
    return told


def other(first: int, blocks: int = 3) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def test_a_whole_hit_has_no_reason(pool: Pool) -> None:
    bench = Bench(pool)
    assert ask(bench, PROMPT) == {"reason": "new", "from": 0, "tokens": len(PROMPT)}
    assert ask(bench, PROMPT) == {}
    assert bench.side.counters.counts["new:missed_tokens"] == len(PROMPT)


def test_what_is_shorter_than_a_block(pool: Pool) -> None:
    bench = Bench(pool)
    assert ask(bench, PROMPT[:BLOCK]) == {"reason": "short", "from": 0, "tokens": BLOCK}
    assert ask(bench, PROMPT[4 : BLOCK + 5])["reason"] == "new"


@pytest.mark.parametrize(
    ("known", "prompt", "token"),
    [
        *(
            ([PROMPT], [*PROMPT[:at], *other(50_000)], at)
            for at in (9, 3 * BLOCK, 3 * BLOCK + 5, 8 * BLOCK - 1)
        ),
        # The next turn, whose client has changed a token of the answer, or has not.
        ([PROMPT], [*PROMPT, 6, *other(50_000)], len(PROMPT)),
        ([PROMPT], [*PROMPT, 5, *other(60_000)], None),
        # The nearest of several counts, and many other beginnings hide none.
        (
            [[*PROMPT[:at], *other(1000 * at)] for at in (20, 28, 24)],
            [*PROMPT[:28], *other(90)],
            28,
        ),
        ([PROMPT, *(other(1000 * n) for n in range(9, 69))], [*PROMPT[:12], *other(90)], 12),
        # Few common tokens at the beginning are a template.
        ([PROMPT], [*PROMPT[:7], *other(50_000)], None),
    ],
)
def test_a_prompt_that_leaves_a_known_one_says_where(
    pool: Pool, known: list[list[int]], prompt: list[int], token: int | None
) -> None:
    bench = Bench(pool)
    for one in known:  # is answered by token 5
        ask(bench, one)
    told = ask(bench, prompt)
    assert (told["reason"], told.get("token")) == ("new" if token is None else "diverged", token)
    assert token is None or told["from"] == min(token, len(PROMPT)) // BLOCK * BLOCK


def test_positions_are_left_out_on_request(pool: Pool) -> None:
    bench = Bench(pool, explain_misses="blocks")
    ask(bench, PROMPT)
    told = ask(bench, [*PROMPT[:40], *range(50_000, 50_000 + 2 * BLOCK)])
    assert told == {"reason": "diverged", "from": 32, "tokens": 2 * BLOCK + 8}


def test_off_is_off(pool: Pool) -> None:
    bench = Bench(pool, explain_misses="off")
    assert ask(bench, PROMPT) == {}
    assert ask(bench, PROMPT[:BLOCK]) == {}
    assert bench.side.misses is None


@pytest.mark.parametrize("cause", ["dropped", "cleared", "capacity", "expired", "quota"])
def test_what_was_evicted_says_from_where_and_why(cause: str) -> None:
    settings: dict[str, Any] = {"host_size": "1MiB", "policy": "lru"}
    if cause == "expired":
        settings["ttl"] = "1000s"
    if cause == "quota":
        settings["tenant_quota"] = {"host": f"{12 * 4096}B"}
    clocks = HostClocks()
    with Pool.open(RecallSettings.from_mapping(settings).pool, clocks.clock()) as pool:
        bench = Bench(pool)
        ask(bench, PROMPT)
        clocks.advance(1001.0)
        if cause == "dropped":
            pool.admin.drop([block.key for block in pool.admin.blocks()])
        elif cause == "cleared":
            pool.clear()
        elif cause == "expired":
            wait_until(lambda: not list(pool.admin.blocks()))
        else:
            for first in range(5_000, 90_000, 1000):
                ask(bench, list(range(first, first + 8 * BLOCK + 4)))
        told = ask(bench, PROMPT)
        assert (told["reason"], told["tier"], told["cause"]) == ("evicted", "host", cause)
        assert told["time"] == pytest.approx(clocks.wall, abs=1e-3, rel=0)


def test_of_several_causes_the_first_counts(pool: Pool) -> None:
    """In the order of docs/misses.md."""
    bench = Bench(pool)
    ask(bench, PROMPT)
    assert ask(bench, PROMPT[:BLOCK], prompt_logprobs=0)["reason"] == "short"
    pool.clear()
    assert ask(bench, PROMPT, prompt_logprobs=0)["reason"] == "not_asked"
    pool.clear()
    assert ask(bench, PROMPT)["reason"] == "evicted", "though it was computed, and not saved"
    pool.clear()
    left = [*PROMPT[: BLOCK + 3], *range(50, 50 + 3 * BLOCK)]
    assert ask(bench, left)["reason"] == "evicted", (
        "of its first block, though it leaves the second"
    )
    assert ask(bench, [*left[: BLOCK + 5], *range(90, 90 + 3 * BLOCK)])["reason"] == "diverged"


def test_a_refused_block_says_so() -> None:
    with make_pool(tenant_quota={"host": f"{8 * 4096}B"}) as pool:
        bench = Bench(pool)
        ask(bench, PROMPT)
        ticket = pool.acquire([block.key for block in pool.admin.blocks()], 60.0)
        other = list(range(9000, 9000 + 4 * BLOCK + 4))
        assert ask(bench, other)["reason"] == "new"
        told = ask(bench, other)
        assert (told["reason"], told["tier"], told["cause"]) == ("refused", "host", "quota")
        pool.release(ticket)


def test_a_block_that_is_being_saved_is_a_race(pool: Pool) -> None:
    bench = Bench(pool)
    first = bench.request("first", 40)
    bench.step(first, 20)
    second = bench.request("second", 40)
    bench.matched(second)
    bench.step(second, 40)
    told = finished(bench, second)[MISSED]
    assert told["reason"] == "race"


def begun(bench: Bench, name: str, prompt: list[int]) -> tuple[Request, StepOrders]:
    """A request whose step is with the workers."""
    request = bench.request(name, prompt)
    assert bench.matched(request) == 0
    return request, bench.step(request, len(prompt))


def test_reasons_are_found_while_the_workers_compute() -> None:
    """And are those of the moment at which the prompt was looked up: the step itself fills its
    blocks, and their pool evicts others for them."""
    with make_pool(policy="lru") as pool:
        bench = Bench(pool)
        misses = bench.side.misses
        misses.aside()
        ask(bench, PROMPT)
        for first in range(5_000, 90_000, 1000):
            ask(bench, list(range(first, first + 8 * BLOCK + 4)))
        misses.aside()
        bench.side.counters.take()
        request, _ = begun(bench, "again", PROMPT)
        assert not bench.side.counters.misses
        assert "explain_aside_seconds" not in bench.side.counters.take().data["counts"]
        misses.aside()
        assert bench.side.counters.misses["again"]["reason"] == "evicted"
        assert finished(bench, request)[MISSED]["reason"] == "evicted"
        counts = bench.side.counters.take().data["counts"]
        assert counts["explain_aside_seconds"] > 0
        assert "evicted:missed_tokens" not in counts
        bench.idle()
        assert bench.side.counters.counts["evicted:missed_tokens"] == len(PROMPT)


@pytest.mark.parametrize("has_aside", [False, True])
def test_what_one_step_brings_is_settled_in_order(pool: Pool, has_aside: bool) -> None:
    """The second of two equal prompts is a race, one that follows an answer goes on behind it, and
    one that ends before the engine had time has its reason."""
    bench = Bench(pool)
    if has_aside:
        bench.side.misses.aside()
    first, orders = begun(bench, "first", PROMPT)
    second, _ = begun(bench, "second", PROMPT)
    told = finished(bench, second)[MISSED]
    assert (told["reason"], told["cause"]) == ("race", "being saved")
    assert finished(bench, first)[MISSED]["reason"] == "new"
    bench.report(orders)
    third = [*PROMPT, 6, *range(50_000, 50_050)]
    request = bench.request("third", third)
    assert bench.matched(request) == 8 * BLOCK
    bench.side.allocated(request, (bench.blocks["third"],), 8 * BLOCK)
    request.num_computed_tokens = 8 * BLOCK
    bench.step(request, len(third) - 8 * BLOCK)
    told = finished(bench, request)[MISSED]
    assert (told["reason"], told["token"]) == ("diverged", len(PROMPT))


def test_what_is_not_settled_is_bounded(pool: Pool) -> None:
    bench = Bench(pool)
    bench.side.misses.aside()
    for number in range(3000):
        request = bench.request(f"short {number}", 4, 9000 + 4 * number)
        bench.step(request, 4)
        finished(bench, request)
        assert len(bench.side.misses._due) <= 1025
    assert bench.side.misses.chains.nbytes > 0


def test_a_request_that_excludes_recall(pool: Pool) -> None:
    bench = Bench(pool)
    ask(bench, PROMPT)
    told = ask(bench, PROMPT, prompt_logprobs=1)
    assert (told["reason"], told["cause"]) == ("not_asked", "prompt_logprobs")
    told = ask(bench, PROMPT, skip_reading_prefix_cache=True)
    assert (told["reason"], told["cause"]) == ("not_asked", "skip_reading_prefix_cache")


def test_a_slow_tier_is_declined_with_both_estimates(slow: SlowPool) -> None:
    slow.fill(16 * 50)
    bench = slow.bench()
    bench.side.costs.saw_load(TierName.DISK, 0.1, 50.0)
    bench.side.costs._passed_over = 0
    bench.side.costs._seen_at[TierName.DISK] = slow.now
    request = bench.request("again", 16 * 50)
    assert bench.matched(request) == 0
    bench.step(request, 16 * 50)
    told = finished(bench, request)[MISSED]
    assert told["reason"] == "declined"
    assert told["load_s"] > told["compute_s"] > 1.0


def test_a_service_tells_it_too_and_is_never_waited_for(tmp_path: Path) -> None:
    settings = RecallSettings.from_mapping({"host_size": "1MiB"})
    service = ServiceThread(settings.pool, tmp_path / "pool.sock")
    client = ServiceClient(tmp_path / "pool.sock", 60.0)
    try:
        bench = Bench(client)  # type: ignore[arg-type]
        assert ask(bench, PROMPT)["reason"] == "new"
        assert ask(bench, PROMPT) == {}
        told = ask(bench, [*PROMPT[:40], *range(50_000, 50_000 + 2 * BLOCK)])
        assert (told["reason"], told["token"]) == ("diverged", 40)
        client.clear()
        told = ask(bench, PROMPT)
        assert (told["reason"], told["cause"]) == ("evicted", "dropped")
        service.close()
        wait_until(lambda: not client.is_connected)
        told = ask(bench, [*PROMPT[:5], 9, *PROMPT[5:]])
        assert (told["reason"], told["tier"]) == ("away", "service")
    finally:
        client.close()


def test_a_service_that_cannot_hold_a_block_pools_nothing(tmp_path: Path) -> None:
    """It follows one that could: the engine's namespace is known and refused."""
    room = RecallSettings.from_mapping({"host_size": "1MiB"}).pool
    service = ServiceThread(room, tmp_path / "pool.sock")
    client = ServiceClient(tmp_path / "pool.sock", 60.0)
    try:
        bench = Bench(client)  # type: ignore[arg-type]
        assert ask(bench, PROMPT)["reason"] == "new"
        service.close()
        wait_until(lambda: not client.is_connected)
        service = ServiceThread(replace(room, host_bytes=2048), tmp_path / "pool.sock")
        wait_until(lambda: client.is_connected)
        ask(bench, PROMPT[:BLOCK])  # from its last step on the engine uses the new service
        told = ask(bench, PROMPT)
        cause = "namespace abandoned or refused"
        assert (told["reason"], told["cause"]) == ("not_pooled", cause)
    finally:
        client.close()
        service.close()


# ---- several KV groups ----------------------------------------------------------------------


def of_groups(bench: GroupBench, tokens: list[int]) -> dict[str, Any]:
    """The miss of a request that is computed and ends; it has one if it is no whole hit."""
    request, on_device, recalled = bench.begin(tokens)
    bench.prefill(request)
    told: dict[str, Any] = bench.end(request).get(MISSED, {})
    unit = bench.facts.unit
    assert (not told) == (on_device + recalled >= (len(tokens) - 1) // unit * unit)
    return told


@pytest.mark.parametrize("shape", SHAPES)
def test_engines_of_several_groups_have_one_reason(shape: str) -> None:
    """The block that is missing is any group's: the chain's, or a window or state beside it."""
    with make_pool(host_size="4MiB", policy="lru") as pool:
        bench = GroupBench(pool, SHAPES[shape])
        asked = prompt_of(321)
        assert of_groups(bench, asked)["reason"] == "new"
        bench.forget_device()
        of_groups(bench, asked)
        told = of_groups(bench, [*asked[:200], *prompt_of(200, 2)])
        if told["reason"] == "unsaved":  # the states behind these tokens were not kept
            assert told["group"] in ("state", "window")
        else:
            assert (told["reason"], told["token"]) == ("diverged", 200)
        dropped = 0
        for digest in {block.key[:16] for block in pool.admin.blocks()}:
            bench.forget_device()
            of_groups(bench, asked)
            bench.forget_device()
            pool.admin.drop([b.key for b in pool.admin.blocks() if b.key.startswith(digest)])
            told = of_groups(bench, asked)
            if told:  # a chunk that begins there needs no block before it
                assert (told["reason"], told["cause"]) == ("evicted", "dropped")
                dropped += 1
        assert dropped


# ---- tenants ------------------------------------------------------------------------------


THEIRS, PUSHED = "theirs", 9
"""The other tenant; how many prompts push everything else out of the small host."""


@dataclass
class World:
    """An engine and its pool, in which one tenant may have done something before another asks."""

    pool: Pool
    bench: Bench
    io: FaultyIo
    store: MemoryStore

    def push_out(self) -> None:
        """Leaves what is on disk on disk only."""
        for first in range(50_000, 50_000 + PUSHED * 1000, 1000):
            ask(self.bench, list(range(first, first + 8 * BLOCK + 4)), "pushes")

    def drop(self, cause: Cause) -> None:
        self.pool.drop([*{block.key for block in self.pool.admin.blocks()}], cause)

    def lease(self) -> None:
        """Of all that is in the host, for the rest of the test."""
        self.pool.acquire([block.key for block in self.pool.host_blocks()], 60.0)


@contextmanager
def world(folder: Path, reason: str, explain: str) -> Iterator[World]:
    """One in which a tenant can get this reason."""
    choice = "auto" if reason == "declined" else "load"
    settings: dict[str, Any] = {"explain_misses": explain, "load_or_compute": choice}
    settings["load_deadline"] = 0.05 if reason in ("late", "no_room") else 60
    settings["audit"] = 1 if reason == "audit" else "off"
    limit = TenantTerms(host=Amount(4 * 4096 if reason == "refused" else 64 * 4096))
    terms = PoolTerms(tenants=TenantRules(named={tenant_of(THEIRS): limit}))
    io, store, arena = FaultyIo(), MemoryStore(), Arena.create(64 * 4096)
    below: Tier = DiskTier(DiskConfig(folder, 64 << 20), "lru", io=io, terms=terms)
    if reason == "away":
        below = RemoteTier(store, RemoteConfig("memory"))
        settings["lookup_deadline"] = 0.05
    with Pool(arena, below, "lru", terms=terms) as pool:
        bench = Bench(pool, **settings)
        if reason == "not_pooled":
            bench.base = None
        else:
            ask(bench, PROMPT[:17], "registers the namespace")
        yield World(pool, bench, io, store)
        io.read_gate.set()


def does(world: World, reason: str) -> None:
    """What the other tenant does, so that its own next request gets this reason."""
    bench, pool = world.bench, world.pool
    match reason:
        case "new" | "unknown":
            ask(bench, list(range(9_000, 9_000 + 4 * BLOCK)), THEIRS)
        case "diverged":
            ask(bench, [*PROMPT[:40], *range(9_000, 9_040)], THEIRS)
        case "unsaved":
            ask(bench, PROMPT, THEIRS, saves=False)
        case "namespace":
            other = Bench(pool)
            other.base = Namespace.of({"test": "2"})
            ask(other, PROMPT, THEIRS)
        case "race":
            request = bench.request("live", PROMPT, salt=THEIRS)
            bench.matched(request)
            bench.step(request, 8)
        case "refused":
            ask(bench, list(range(9000, 9000 + 4 * BLOCK + 4)), THEIRS)
            ticket = pool.acquire([block.key for block in pool.admin.blocks()], 60.0)
            ask(bench, PROMPT, THEIRS)
            pool.release(ticket)
        case "evicted" | "damaged":
            ask(bench, PROMPT, THEIRS)
            world.drop(Cause.DROPPED if reason == "evicted" else Cause.CORRUPT)
        case _:
            ask(bench, PROMPT, THEIRS)


def happens(world: World, reason: str) -> None:
    """What happens to engine and pool then, with that tenant or without it."""
    match reason:
        case "late":
            world.push_out()
            world.io.read_gate.clear()
        case "no_room":
            world.push_out()
            world.lease()
        case "declined":
            world.push_out()
            costs = world.bench.side.costs
            costs.saw_step(1000, 500, 10.0)
            costs.saw_load(TierName.DISK, 0.1, 50.0)
            costs._passed_over = 0
            costs._seen_at[TierName.DISK] = time.monotonic()
        case "away":
            world.push_out()
            world.store.failing = OSError("no route")
        case "unknown":
            world.pool.why = lambda key: None  # type: ignore[method-assign, assignment, return-value]


def asks(world: World, reason: str, salt: str | None) -> dict[str, Any]:
    """The request that gets this reason, if its tenant's history is that."""
    prompt = PROMPT[:BLOCK] if reason == "short" else PROMPT
    if reason == "not_asked":
        return ask(world.bench, prompt, salt, skip_reading_prefix_cache=True)
    return ask(world.bench, prompt, salt, loads=reason != "failed")


ALIKE = {Reason.SHORT, Reason.NOT_ASKED, Reason.NOT_POOLED, Reason.UNKNOWN, Reason.AWAY}
"""Reasons that a request has whatever anybody did before; of the others it is new."""


@pytest.mark.parametrize(
    ("reason", "explain"),
    [*((reason, "tokens") for reason in (*Reason, None)), (Reason.DIVERGED, "blocks")],
)
def test_no_reason_depends_on_what_another_tenant_did(
    tmp_path: Path, reason: Reason | None, explain: str
) -> None:
    """The same request, in the same pool without that tenant and with it, under another salt and
    under none: every field is the same, and so is every key that is looked up. ``None``: the other
    tenant has a whole hit."""
    told: dict[bool, list[Any]] = {}
    for others in (False, True):
        with world(tmp_path / str(others), str(reason), explain) as made:
            if others:
                does(made, str(reason))
            happens(made, str(reason))
            if others:
                own = asks(made, str(reason), THEIRS)
                assert own.get("reason") == reason
                if reason is Reason.AWAY:
                    assert own["tier"] == "remote"
            looked_up: list[Any] = []
            why, parting = made.pool.why, made.bench.side.misses.chains.parting

            def seen(key: Any, *, why: Any = why, into: list[Any] = looked_up) -> Any:
                into.append(key)
                return why(key)

            def compared(
                parent: Any, tokens: Any, *, parting: Any = parting, into: list[Any] = looked_up
            ) -> Any:
                into.append(parent)
                found = parting(parent, tokens)
                assert found is None, "tokens of another tenant were compared"
                return found

            made.pool.why = seen  # type: ignore[method-assign, assignment]
            made.bench.side.misses.chains.parting = compared  # type: ignore[method-assign, assignment]
            told[others] = [asks(made, str(reason), salt) for salt in ("ours", None)]
            told[others] += looked_up
    assert told[True] == told[False]
    expected = str(reason) if reason in ALIKE else "new"
    assert [one["reason"] for one in told[True][:2]] == [expected] * 2


# ---- memory --------------------------------------------------------------------------------


def test_the_memory_of_chains_is_bounded() -> None:
    chains = Chains(BLOCK, most_bytes=50_000)
    keys = [f"{number}".encode() for number in range(400)]
    for number in range(0, 400, 4):
        part = keys[number : number + 4]
        chains.add(b"root", part, list(range(number, number + 4 * BLOCK)), str(number))  # type: ignore[arg-type]
    assert chains.nbytes <= 50_000
    assert len(chains._places) < 200
    assert chains.owner(keys[399]) == "396"  # type: ignore[arg-type]
    assert chains.owner(keys[0]) is None  # type: ignore[arg-type]
    for number in range(4000):
        chains.add(f"{number}".encode(), [], [1, 2, 3], "")  # type: ignore[arg-type]
    assert chains.nbytes <= 50_000
    assert len(chains._branches) <= len(chains._segments) < 100
    assert not chains._places


@pytest.mark.parametrize(
    ("blocks", "letters"), [(0, 5), (1, 5), (8, 5), (200, 5), (8, 1000), (1, 100_000)]
)
def test_the_memory_in_use_is_within_the_bound(blocks: int, letters: int) -> None:
    """Of what Python really allocates; the tokens of short and long prompts, of requests with ids
    of so many letters, which clients choose."""
    chains = Chains(BLOCK, most_bytes=1 << 20)
    tracemalloc.start()
    try:
        for number in range(40_000 // max(4, blocks, letters // 100)):
            tokens = range(number, number + blocks * BLOCK + 3)
            keys = [BlockKey(number.to_bytes(32) + place.to_bytes(16)) for place in range(blocks)]
            half = blocks // 2
            parent, first = BlockKey(number.to_bytes(48)), tokens[: half * BLOCK + 1]
            owner = str(number).rjust(letters)
            segment = chains.add(parent, keys[:half], [*first], owner)
            chains.extend(segment, keys[half:], [*tokens[len(first) :]])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert chains.nbytes <= 1 << 20
    assert used <= 1.1 * (1 << 20)
    assert used >= (1 << 20) / 4, "the memory is not used"


def test_an_answer_goes_on_where_its_prompt_ended() -> None:
    chains = Chains(BLOCK, most_bytes=50_000)
    keys = [BlockKey(f"key {number}".encode()) for number in range(4)]
    tokens = list(range(4 * BLOCK + 5))
    segment = chains.add(BlockKey(b"root"), keys[:1], tokens[: BLOCK + 3], "one")
    assert chains.extend(segment, keys[1:], tokens[BLOCK + 3 :])
    assert [chains.owner(key) for key in keys] == ["one"] * 4
    for place, key in enumerate(keys, 1):
        begin = place * BLOCK
        found = chains.parting(key, [*tokens[begin : begin + 4], 99, 99])
        assert found is not None
        assert (found.common, found.ends) == (4, False)
    assert chains.parting(BlockKey(b"root"), tokens[:BLOCK]) == Parting(BLOCK, True)
    for number in range(200):
        chains.add(BlockKey(b"%d" % number), [], tokens, "others")
    assert not any(map(chains.owner, keys))
    assert not chains._places
    used = chains.nbytes
    assert not chains.extend(segment, keys, tokens)  # it is forgotten
    assert chains.nbytes == used
    assert not chains._places
