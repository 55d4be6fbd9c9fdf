"""A request's use is recorded in parts, and anything may happen between two of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from support.between import meanwhile
from support.clocks import ManualClock
from support.counts import count_catalog, count_names

from kvrecall.block import BlockKey, TierName, tenant_of
from kvrecall.config import Amount, PoolTerms, TenantRules, TenantTerms
from kvrecall.pool import residents
from kvrecall.pool.changes import Cause
from kvrecall.pool.departures import Departures
from kvrecall.pool.disk import catalog as catalog_module
from kvrecall.pool.disk.catalog import Catalog
from kvrecall.pool.disk.index import Row, Rows
from kvrecall.pool.eviction import POLICY_NAMES
from kvrecall.pool.hints import RETURNS, Advice
from kvrecall.testing.blocks import chain, namespace

MIB = 1 << 20
NAMESPACE, WINDOWS = namespace("chain"), namespace("windows")
SIZE = 4096
ANN = tenant_of("ann")
BOUNDED = PoolTerms(tenants=TenantRules(TenantTerms(disk=Amount(share=0.9))))


class Bench:
    """A catalog, and what it should hold."""

    def __init__(self, policy: str, terms: PoolTerms = BOUNDED) -> None:
        self.clock = ManualClock()
        self.catalog = Catalog(policy, 100, lambda: 64 * MIB, self.clock, terms)
        self.here: set[BlockKey] = set()
        self.catalog.watch(self)
        self.places = itertools.count()  # slots that are free

    def stored(self, tier: TierName, key: BlockKey, parent: BlockKey | None) -> None:
        assert key not in self.here
        self.here.add(key)

    def removed(self, tier: TierName, key: BlockKey, cause: Cause) -> None:
        self.here.remove(key)

    def publish(self, keys: Sequence[BlockKey], of: Sequence[BlockKey] = ()) -> None:
        """Those that are not here: a chain, or what hangs on the blocks ``of`` a chain."""
        rows = []
        for depth, key in enumerate(keys):
            parent = of[depth] if of else keys[depth - 1] if depth else None
            if key not in self.here:
                at = next(self.places) * SIZE
                rows.append(Row(at, key, parent, depth, SIZE, bytes(16), 0, ANN))
        self.catalog.publish(rows)

    def check(self, names: bool) -> None:
        count_catalog(self.catalog)
        assert len(self.catalog) == len(self.here)
        if names:
            count_names(self.catalog)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_anything_may_happen_between_two_parts_of_a_use(policy: str, seed: int) -> None:
    rng, bench = random.Random(seed), Bench(policy)
    catalog = bench.catalog
    head = chain(NAMESPACE, 5, "head")
    chains = [head + chain(NAMESPACE, 7, name) for name in "abcd"]
    windows = [chain(WINDOWS, 12, name) for name in "abcd"]
    everything = [*itertools.chain(*chains, *windows)]

    def some() -> list[BlockKey]:
        return rng.sample(everything, rng.randrange(1, 9))

    def touch() -> None:
        which, length = rng.randrange(4), rng.randrange(1, 13)
        advice = rng.choice((None, None, Advice(RETURNS, 9.0, 0.2, "ann")))
        beside = rng.sample(windows[which], rng.randrange(4))
        catalog.touch(chains[which][:length], beside, windows[which][length - 1 : length], advice)

    def store() -> None:
        which, length = rng.randrange(4), rng.randrange(1, 13)
        bench.publish(chains[which][:length])
        if rng.random() < 0.5:
            bench.publish(windows[which][:length], chains[which])

    def load() -> None:
        entries = [entry for key in some() if (entry := catalog.acquire(key))]
        catalog.evict(3, SIZE)
        for entry in entries:
            catalog.release(entry)

    changes: list[Callable[[], object]] = [
        touch,
        store,
        store,
        load,
        lambda: catalog.evict(rng.randrange(1, 9), SIZE),
        lambda: catalog.evict_bytes(5 * SIZE),
        lambda: catalog.forget(some(), Cause.DROPPED),
        lambda: catalog.make_way(ANN, 64 * MIB, None),
        lambda: catalog.pin(some()),
        lambda: catalog.unpin(some()),
        lambda: catalog.resize_policy(rng.randrange(50, 150)),
        lambda: rng.random() < 0.3 and catalog.forget_all(),
    ]
    happened = 0
    for _ in range(80):
        bench.clock.advance(rng.choice((0.0, 0.1, 3.0, 60.0)))
        with meanwhile(rng.choices(changes, k=rng.randrange(12))) as actions:
            touch()
        happened += len(actions)
        store()
        bench.check(policy in ("lru", "fifo", "hazard"))
    assert happened > 200


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("gap", range(8))
def test_a_block_that_leaves_meanwhile_is_used_no_more(
    policy: str, gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one that could get its number."""
    monkeypatch.setattr(residents, "Departures", partial(Departures, most=1))
    bench, keys, others = Bench(policy), chain(NAMESPACE, 12), chain(NAMESPACE, 30, "others")
    bench.publish(keys)
    bench.clock.advance(100.0)

    def replace() -> None:
        bench.catalog.forget(keys[4:], Cause.DROPPED)
        bench.publish(others)

    nothing: list[Callable[[], object]] = [lambda: None] * gap
    with meanwhile([*nothing, replace]) as actions:
        bench.catalog.touch(keys)
    assert len(actions) == gap + 1
    used = {block.key: block.used for block in bench.catalog.infos()}
    assert used.keys() == bench.here == {*keys[:4], *others}
    assert set(used.values()) == {bench.clock.now}
    noted = bench.catalog.take_unnoted_uses(100)
    order = [entry.key for entry in bench.catalog.coldest(100)]
    assert [key for key in order if key in others] == others[::-1]
    assert sorted(noted) == [(int(bench.clock.now), place * SIZE) for place in range(4)]
    bench.check(policy in ("lru", "fifo", "hazard"))


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_an_empty_tier_may_be_ranked_anew_meanwhile(policy: str) -> None:
    bench, keys = Bench(policy), chain(NAMESPACE, 40)

    def rank() -> None:
        bench.catalog.resize_policy(77)
        bench.publish(keys[:5])

    with meanwhile([lambda: None, rank]) as actions:
        bench.catalog.touch(keys)
    assert len(actions) == 2
    bench.check(policy in ("lru", "fifo", "hazard"))
    with meanwhile([]):
        bench.catalog.touch(keys)
    bench.check(policy in ("lru", "fifo", "hazard"))


def rows_of(keys: Sequence[BlockKey]) -> Rows:
    count = len(keys)
    addresses = [place * SIZE for place in range(count)]
    parents = [None, *keys[:-1]]
    tags, used = [bytes(16)] * count, [1000] * count
    depths = list(range(count))
    sizes = [SIZE] * count
    return Rows(addresses, keys, parents, depths, sizes, tags, used, [ANN] * count, [0] * count)


@pytest.mark.parametrize("kind", ["drop", "pin", "clear", "twice"])
@pytest.mark.parametrize("gap_at", [3, 4])
def test_what_is_said_of_rows_between_two_holds_is_heeded(
    kind: str, gap_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between those of the second of three parts (3), or after it (4)."""
    first = {3: 4, 4: 8}[gap_at]  # of the rows that are still to come
    bench, keys = Bench("hazard"), chain(NAMESPACE, 12)
    catalog = bench.catalog
    catalog.begin_recovery()
    bench.places = itertools.count(len(keys))
    actions = {
        "drop": [partial(catalog.forget, [keys[0], keys[8]], Cause.DROPPED)],
        "pin": [partial(catalog.pin, keys[7:9])],
        "clear": [catalog.forget_all],
        "twice": [partial(bench.publish, keys[first + 2 : first + 3])],
    }[kind]
    monkeypatch.setattr(catalog_module, "_RECOVERED", 4)
    calls: list[float] = []

    def gap(seconds: float) -> None:
        calls.append(seconds)
        if actions and len(calls) == gap_at:
            actions.pop()()

    monkeypatch.setattr(catalog_module.time, "sleep", gap)
    refused = catalog.recover(rows_of(keys))
    monkeypatch.undo()
    rest = list(range(first, 12))
    assert refused == {"drop": [8], "pin": [], "clear": rest, "twice": [first + 2]}[kind]
    assert catalog.rank_rest(lambda: False)
    bench.check(names=True)
    assert len(bench.here) == {"drop": 10, "pin": 12, "clear": 0, "twice": 12}[kind]
    pinned = {block.key for block in catalog.infos() if block.pinned}
    assert pinned == (set(keys[7:9]) if kind == "pin" else set())
