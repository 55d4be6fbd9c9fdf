"""Hints of clients: their record, what the policy makes of them, and sessions of agents."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest

from kvrecall.block import BlockKey, Tenant
from kvrecall.pool.eviction import KeyedPolicy, make_policy
from kvrecall.pool.eviction.queues import QueueLinks
from kvrecall.pool.eviction.warmup import HintPins, WarmUp
from kvrecall.pool.hints import KINDS, NOT_AGAIN, RETURNS, Advice, Hint, HintRecord, hint_of
from kvrecall.simulate.replay import clairvoyant_hits
from kvrecall.simulate.trace import BLOCK_TOKENS, trace_of
from kvrecall.testing.policy_contract import anything, keys_of
from kvrecall_lab.workload import HINTS, MIXED, HintedRow, agents, replay_hinted

ONE, TWO = Tenant("1" * 16), Tenant("2" * 16)
BACK, GONE = Hint(returns=True), Hint(returns=False)


def trusted(tenant: Tenant = ONE) -> HintRecord:
    """A record in which a tenant's last hints came true."""
    record = HintRecord()
    for number in range(8):
        for now in (number, number + 0.5):
            record.used(keys_of(f"{tenant}{number}", 2), now, tenant, BACK)
    assert record._records[tenant].credit > 0.6
    return record


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (3, "it is 3"),
        ([], "must be an object"),
        ({"back": True}, "'back' is unknown; known: returns, in_s, pin_s"),
        ({"returns": 1}, "returns is 1; it must be true or false"),
        ({"in_s": "5"}, "in_s is '5'; it must be a number of seconds"),
        ({"in_s": True}, "in_s is True"),
        ({"pin_s": -1}, "pin_s is -1; it must be 0 to 86400 seconds"),
        ({"pin_s": float("nan")}, "pin_s is nan"),
        ({"in_s": 1e9}, "in_s is 1000000000.0; it must be 0 to 86400"),
        ({"returns": False, "pin_s": 5}, "returns is false; leave out in_s and pin_s"),
    ],
)
def test_what_is_no_hint_is_refused_with_the_reason(given: object, why: str) -> None:
    with pytest.raises(ValueError, match=r"^") as caught:
        hint_of(given)
    assert why in str(caught.value)


@pytest.mark.parametrize("name", [None, "in_s", "returns", "pin_s"])
def test_what_is_nested_deep_is_refused_in_a_line(name: str | None) -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="it must be") as raised:
        hint_of(deep if name is None else {name: deep})
    assert len(str(raised.value)) < 200


def test_a_hint_is_read() -> None:
    assert hint_of({}) == Hint()
    assert hint_of({"returns": True, "in_s": 5, "pin_s": None}) == Hint(True, 5.0, None)


def test_a_new_tenant_is_not_believed_and_an_honest_one_soon() -> None:
    record = HintRecord()
    assert record.used(keys_of("a", 3), 0.0, ONE, BACK) is None
    advices = [record.used(keys_of("a", 3), 10.0 * n, ONE, BACK) for n in range(1, 6)]
    assert advices[-1] is not None
    assert advices[-1].kind == RETURNS
    assert record.used(keys_of("b", 3), 60.0, TWO, BACK) is None, "another tenant's credit"
    counts = record.counts
    assert (counts.given, counts.true, counts.false) == (7, 5, 0)
    assert counts.believed == sum(advice is not None for advice in advices)


@pytest.mark.parametrize(
    ("hint", "after", "is_true"),
    [
        (BACK, 800.0, True),
        (BACK, 1000.0, False),
        (GONE, 800.0, False),
        (GONE, 1000.0, True),
        (Hint(True, 100.0), 10.0, False),
        (Hint(True, 100.0), 30.0, True),
        (Hint(None, 100.0), 390.0, True),
        (Hint(True, 100.0), 450.0, False),
        (Hint(pin_s=60.0), 50.0, True),
        (Hint(pin_s=60.0), 70.0, False),
    ],
)
def test_outcomes(hint: Hint, after: float, is_true: bool) -> None:
    record, keys = HintRecord(), keys_of("a", 3)
    record.used(keys, 0.0, ONE, hint)
    record.used([*keys, BlockKey(b"next")], after, ONE, None)
    assert (record.counts.true, record.counts.false) == (is_true, not is_true)
    assert (record._records[ONE].credit > 0.5) is is_true


def test_a_liar_loses_its_credit_and_can_earn_it_again() -> None:
    record = trusted()
    for number in range(20):
        for now in (number, number + 0.5):
            record.used(keys_of(f"lie {number}", 2), 100.0 + now, ONE, GONE)
    assert record.used(keys_of("x", 2), 130.0, ONE, BACK) is None
    for number in range(60):
        record.used(keys_of("x", 2), 131.0 + number, ONE, BACK)
    assert record.used(keys_of("x", 2), 200.0, ONE, BACK) is not None


def test_the_record_is_bounded() -> None:
    record = HintRecord()
    for number in range(20_000):
        tenant = Tenant(f"{number:016x}")
        record.used([BlockKey(b"%d" % number)], 0.001 * number, tenant, BACK)
    assert len(record._open) <= 4096
    assert len(record._ends) <= 2 * 4096
    assert len(record._records) <= 1024


def test_kinds_are_classes() -> None:
    record = trusted()
    kinds = set()
    for number, hint in enumerate([GONE, BACK, *(Hint(True, s) for s in (0, 10, 50, 300, 9e3))]):
        advice = record.used(keys_of(f"k{number}", 2), 20.0, ONE, hint)
        assert advice is not None
        kinds.add(advice.kind)
    assert kinds == set(range(NOT_AGAIN, KINDS))


# -- the policy ------------------------------------------------------------------------------


def hazard(capacity_blocks: int, remember: int | None = None) -> KeyedPolicy:
    return KeyedPolicy(lambda names: WarmUp(capacity_blocks, QueueLinks(names), remember))


def pins_of(policy: KeyedPolicy) -> HintPins:
    assert isinstance(policy.policy, WarmUp)
    return policy.policy._pins


def fill(policy: KeyedPolicy, text: str, blocks: int, now: float, advice: Advice | None) -> Any:
    keys = keys_of(text, blocks)
    policy.access(keys, now, advice=advice)
    for depth, key in enumerate(keys):
        policy.insert(key, keys[depth - 1] if depth else None, now)
    return keys


@pytest.mark.parametrize("taught", [False, True])
def test_a_pin_keeps_blocks_until_it_ends(taught: bool) -> None:
    policy = hazard(40)
    if taught:
        for number in range(1000):
            policy.access(keys_of(f"t{number % 2}", 3), number * 0.1)
    now = 200.0
    kept = fill(policy, "kept", 4, now, Advice(RETURNS, 60.0, 0.1, "a"))
    other = fill(policy, "other", 36, now + 1, None)
    assert set(policy.victims(40, anything, now + 2)) == set(other)
    assert set(policy.victims(40, anything, now + 59)) == set(other)
    policy.access(keys_of("later", 1), now + 61)
    assert set(policy.victims(40, anything, now + 61)) == {*kept, *other}
    assert not pins_of(policy)
    assert not pins_of(policy)._by_tenant


def test_pins_are_bounded_by_their_share_and_all_tenants_by_half() -> None:
    policy = hazard(100)
    for number in range(10):
        fill(policy, f"{number}", 30, 1.0, Advice(RETURNS, 60.0, 0.1, f"tenant {number}"))
    assert pins_of(policy)._by_tenant == {f"tenant {number}": 10 for number in range(5)}
    assert len(pins_of(policy)) == 50
    free = set(policy.victims(300, anything, 2.0))
    assert len(free) == 250
    for key in free:
        policy.remove(key)
    policy.access(keys_of("later", 1), 100.0)
    assert not pins_of(policy)


def test_a_pinned_block_that_is_dropped_leaves_no_trace() -> None:
    policy = hazard(10, remember=0)
    keys = fill(policy, "a", 3, 1.0, Advice(0, 60.0, 1.0, "a"))
    for key in reversed(keys):
        policy.remove(key)
    for number in range(40):
        policy.access(keys_of(f"{number}", 5), 2.0 + number)
    assert not pins_of(policy)
    fill(policy, "a", 3, 100.0, None)
    assert len(policy.victims(3, anything, 101.0)) == 3


def test_a_hint_does_not_reach_what_other_chains_share() -> None:
    policy = hazard(200)
    head = keys_of("head", 5)
    now = 0.0
    for number in range(200):  # sessions say the truth: they do not return
        now += 5.0
        keys = [*head, *keys_of(f"s{number}", 5)]
        policy.access(keys, now, advice=Advice(NOT_AGAIN, 0.0, 0.0, "a"))
        for depth, key in enumerate(keys):
            policy.insert(key, keys[depth - 1] if depth else None, now)
        if number > 30:
            for victim in policy.victims(5, anything, now):
                assert victim not in head
                policy.remove(victim)


def test_leases_and_pins_do_not_end_each_other() -> None:
    policy = hazard(10)
    (key,) = fill(policy, "a", 1, 1.0, Advice(RETURNS, 60.0, 1.0, "a"))
    policy.hold(key)
    policy.release(key)
    assert not policy.victims(1, anything, 2.0), "still pinned"
    policy.hold(key)
    policy.access(keys_of("later", 1), 100.0)
    assert not policy.victims(1, anything, 100.0), "still leased"
    policy.release(key)
    assert policy.victims(1, anything, 101.0) == [key]


@pytest.mark.parametrize("name", ["lru", "s3fifo", "hazard"])
def test_any_advice_is_safe(name: str) -> None:
    """Every call in any order, under wild advice: residents and victims stay consistent."""
    rng, policy = random.Random(5), make_policy(name, 60)
    resident: set[BlockKey] = set()
    for step in range(800):
        now = step * rng.random()
        now = step * 0.9
        chain = keys_of(f"s{rng.randrange(40)}", rng.randint(1, 12))
        advice = Advice(rng.randrange(KINDS), rng.choice([0.0, 1.0, 90.0]), rng.random(), "t")
        policy.access(chain, now, advice=rng.choice([None, advice]))
        for depth, key in enumerate(chain):
            if key in resident:
                continue
            if len(resident) >= 60:
                victims = policy.victims(1, lambda k, c=chain: k not in c, now)
                if not victims:
                    break
                assert victims[0] in resident
                policy.remove(victims[0])
                resident.remove(victims[0])
            policy.insert(key, chain[depth - 1] if depth else None, now)
            resident.add(key)
    policy.access(keys_of("end", 1), 1e6)
    assert set(policy.victims(100, anything, 1e6)) == resident


# -- sessions of agents ----------------------------------------------------------------------


def sessions(hints: str, count: int = 16, seed: int = 3) -> list[HintedRow]:
    return list(agents(seed, hints, count))


def test_agents_have_the_published_shape() -> None:
    turns, prompts, seen = [], [], [0, 0]
    for seed in range(2):
        trace = trace_of("agents", [row[:2] for row in sessions("none", 24, seed)])
        known: set[BlockKey] = set()
        ends: dict[BlockKey, int] = {}
        for request in trace.requests:
            prompts.append(len(request.chain) * BLOCK_TOKENS)
            new = sum(key not in known for key in request.chain)
            seen[0] += len(request.chain) - new
            seen[1] += len(request.chain)
            known.update(request.chain)
            before = next((k for k in reversed(request.chain) if k in ends), None)
            turn = 1 if before is None else ends.pop(before) + 1
            ends[request.chain[-1]] = turn
        turns += [turn for turn in ends.values() if turn > 15]
    assert seen[0] / seen[1] > 0.95
    long = [prompt for prompt in prompts if prompt > 60_000]  # sub-agents' are shorter
    assert 120_000 < statistics.median(long) < 165_000
    assert 25 < statistics.median(turns) < 60


def test_hints_help_if_true_and_do_no_harm_if_not() -> None:
    capacity = 400
    plain = sessions("none", 8)
    lru = replay_hinted(plain, capacity, "lru").hit_rate
    rates = {name: replay_hinted(sessions(name, 8), capacity, "hazard") for name in HINTS}
    found = {name: outcome.hit_rate for name, outcome in rates.items()}
    trace = trace_of("plain", [row[:2] for row in plain])
    best = clairvoyant_hits(trace, capacity) / trace.blocks
    assert found["honest"] > found["none"] + 0.2 * (best - found["none"]), found
    assert found["honest"] > lru + 0.2 * (best - lru), found
    assert found["noisy"] > found["none"], found
    assert found["lying"] >= 0.99 * found["none"], found
    assert found["none"] >= 0.99 * lru, found
    assert rates["lying"].client_hints.believed < 0.02 * rates["lying"].client_hints.given
    assert rates["none"].client_hints.given == 0


def test_a_liar_and_a_silent_tenant_lose_nothing_to_an_honest_one() -> None:
    rows = sessions(MIXED, 15)
    silent = [(now, chain, None, tenant) for now, chain, _, tenant in rows]
    before = replay_hinted(silent, 800, "hazard").tenants
    after = replay_hinted(rows, 800, "hazard").tenants
    rates = {name: (before[name].hit_rate, after[name].hit_rate) for name in before}
    assert set(rates) == {"honest", "none", "lying"}
    assert rates["honest"][1] > rates["honest"][0] + 0.02, rates
    for name in ("none", "lying"):
        assert rates[name][1] >= 0.99 * rates[name][0], rates
    owners = {block: tenant for _, chain, _, tenant in rows for block in chain}
    assert all(owners[block] == tenant for _, chain, _, tenant in rows for block in chain)
