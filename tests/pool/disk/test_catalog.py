"""What other threads say of a disk tier's blocks waits for the one that owns the orders."""

from __future__ import annotations

import itertools
import random
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from support.clocks import ManualClock

from kvrecall.block import BlockKey, TierName, tenant_of
from kvrecall.config import Amount, PoolTerms, TenantRules, TenantTerms
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk import catalog as catalog_module
from kvrecall.pool.disk.catalog import Catalog
from kvrecall.pool.disk.index import IndexRow
from kvrecall.pool.eviction import POLICY_NAMES
from kvrecall.pool.hints import RETURNS, Advice
from kvrecall.testing import chain, namespace
from pool.counts import count_catalog, count_orders

MIB = 1 << 20
NAMESPACE, WINDOWS = namespace("chain"), namespace("windows")
SIZE = 4096
ANN = tenant_of("ann")
BOUNDED = PoolTerms(tenants=TenantRules(TenantTerms(disk=Amount(share=0.9))))


class Bench:
    """A catalog, and what it should hold."""

    def __init__(self, policy: str = "hazard", terms: PoolTerms = BOUNDED) -> None:
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
                rows.append(IndexRow(at, key, parent, depth, SIZE, bytes(16), 0, ANN))
        self.catalog.publish(rows)

    def order(self) -> list[BlockKey]:
        return [entry.key for entry in self.catalog.coldest(1000)]

    def check(self) -> None:
        self.catalog.settle()
        count_catalog(self.catalog)
        count_orders(self.catalog)
        assert len(self.catalog) == len(self.here)


class Changes:
    """Whatever may happen to chains with a common head, a tail, and what hangs on them."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self.bench, self.rng = bench, rng
        head = chain(NAMESPACE, 5, "head")
        self.chains = [head + chain(NAMESPACE, 7, name) for name in "abcd"]
        self.windows = [chain(WINDOWS, 12, name) for name in "abcd"]
        self.tails = [BlockKey(keys[-1] + b"/tail") for keys in self.chains]
        self.everything = [*itertools.chain(*self.chains, *self.windows), *self.tails]
        catalog = bench.catalog
        self.of_others: list[Callable[[], object]] = [
            self.touch,
            self.load,
            lambda: catalog.forget(self.some(), Cause.DROPPED),
            lambda: catalog.pin(self.some()),
            lambda: catalog.unpin(self.some()),
            self.clear,
        ]
        self.of_the_owner: list[Callable[[], object]] = [
            self.store,
            self.store,
            lambda: catalog.evict(rng.randrange(1, 9) * SIZE, SIZE),
            lambda: catalog.evict(5 * SIZE),
            lambda: catalog.make_way(ANN, 64 * MIB, None),
            lambda: catalog.fit(rng.choice((SIZE, 2 * SIZE))),
        ]

    def some(self) -> list[BlockKey]:
        return self.rng.sample(self.everything, self.rng.randrange(1, 9))

    def touch(self) -> None:
        rng, which, length = self.rng, self.rng.randrange(4), self.rng.randrange(1, 13)
        advice = rng.choice((None, None, Advice(RETURNS, 9.0, 0.2, "ann")))
        beside = [*rng.sample(self.windows[which], rng.randrange(4)), self.tails[which]]
        ending = self.windows[which][length - 1 : length]
        self.bench.catalog.touch(self.chains[which][:length], beside, ending, advice)

    def clear(self) -> None:
        if self.rng.random() < 0.2:
            self.bench.catalog.forget_all()

    def store(self) -> None:
        which, length = self.rng.randrange(4), self.rng.randrange(1, 13)
        self.bench.publish(self.chains[which][:length])
        if self.rng.random() < 0.5:
            self.bench.publish(self.windows[which][:length], self.chains[which])
        if self.rng.random() < 0.2:
            self.bench.publish(self.tails[which : which + 1], self.chains[which][-1:])

    def load(self) -> None:
        catalog = self.bench.catalog
        entries = [entry for key in self.some() if (entry := catalog.acquire(key))]
        if self.rng.random() < 0.5:
            catalog.forget(self.some(), Cause.CORRUPT)
        for entry in entries:
            catalog.release(entry)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_anything_may_happen_before_the_owner_knows(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "_AT_ONCE", 3)
    monkeypatch.setattr("kvrecall.pool.entries._HELD_FROM", 1)
    rng, bench = random.Random(seed), Bench(policy)
    changes = Changes(bench, rng)
    for _ in range(150):
        bench.clock.advance(rng.choice((0.0, 0.1, 3.0, 60.0)))
        for change in rng.choices(changes.of_others, k=rng.randrange(6)):
            change()
        rng.choice(changes.of_the_owner)()
        if rng.random() < 0.3:
            bench.check()
    bench.check()


def test_threads_may_change_blocks_while_the_owner_evicts() -> None:
    bench, before = Bench(), sys.getswitchinterval()
    owner, ended = Changes(bench, random.Random(1)), threading.Event()
    failures: list[BaseException] = []
    sys.setswitchinterval(0.001)  # five times as many turns find what a lock less would cost

    def change(seed: int) -> None:
        changes = Changes(bench, random.Random(seed))
        try:
            while not ended.is_set():
                changes.rng.choice(changes.of_others)()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=change, args=(seed,)) for seed in (2, 3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(150):
            bench.clock.advance(0.1)
            owner.rng.choice(owner.of_the_owner)()
    finally:
        sys.setswitchinterval(before)
        ended.set()
        for thread in threads:
            thread.join()
    assert not failures
    bench.check()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_block_that_left_is_used_no_more(policy: str) -> None:
    """Nor is one that gets its number."""
    bench, keys, others = Bench(policy), chain(NAMESPACE, 12), chain(NAMESPACE, 30, "others")
    bench.publish(keys)
    bench.check()
    bench.clock.advance(100.0)
    bench.catalog.touch(keys)
    bench.catalog.forget(keys[4:], Cause.DROPPED)
    bench.publish(others)
    used = {block.key: block.used for block in bench.catalog.infos()}
    assert used.keys() == bench.here == {*keys[:4], *others}
    assert set(used.values()) == {bench.clock.now}
    assert [key for key in bench.order() if key in others] == others[::-1]
    noted = bench.catalog.take_unnoted_uses(100)
    assert sorted(noted) == [(int(bench.clock.now), place * SIZE) for place in range(4)]
    bench.check()


def test_uses_beyond_the_buffer_are_lost_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "_MOST_USES", 4)
    bench, keys = Bench("lru"), chain(NAMESPACE, 9)
    alone = [[key] for key in keys]
    for key in alone:
        bench.publish(key)
    assert bench.order() == keys
    full = [not bench.catalog.touch(key) for key in alone[:6]]
    assert full == [False, True, True, True, True, True], "from the half on the owner is woken"
    bench.catalog.forget(keys[8:], Cause.DROPPED)
    bench.catalog.pin(keys[7:8])
    assert bench.order() == [*keys[4:7], *keys[:4]]
    assert bench.catalog.touch(alone[4])
    monkeypatch.setattr(catalog_module, "_MOST_USED", 100)
    assert not bench.catalog.touch(chain(NAMESPACE, 120)), "a long chain fills it, too"
    assert not bench.catalog.touch(alone[4])
    bench.check()


def test_uses_that_wait_are_for_the_policy_that_fits() -> None:
    bench, keys = Bench(), chain(NAMESPACE, 4)
    bench.catalog.touch(keys, advice=Advice(RETURNS, 60.0, 0.5, "ann"))
    bench.catalog.fit(2 * SIZE)
    bench.publish(keys)
    assert bench.order() == [], "a hint pins them"
    bench.clock.advance(100.0)
    bench.catalog.touch(keys)
    assert bench.order() == keys[::-1]


def test_a_use_that_waits_counts() -> None:
    bench, keys = Bench("lru"), chain(NAMESPACE, 6)
    bench.publish(keys)
    bench.clock.advance(100.0)
    used = keys[:2]
    bench.catalog.touch(used)
    used.append(keys[3])
    old = [block.key for block in bench.catalog.infos(bench.clock.now - 50.0)]
    assert sorted(old) == sorted(keys[2:])
    bench.catalog.settle()
    again = [block.key for block in bench.catalog.infos(bench.clock.now - 50.0)]
    assert sorted(again) == sorted(keys[2:])


def rows_of(keys: Sequence[BlockKey]) -> list[IndexRow]:
    above = [None, *keys[:-1]]
    return [
        IndexRow(place * SIZE, key, parent, place, SIZE, bytes(16), 1000, ANN)
        for place, (key, parent) in enumerate(zip(keys, above, strict=True))
    ]


@pytest.mark.parametrize("kind", ["drop", "pin", "clear", "twice"])
def test_what_is_said_of_rows_while_they_are_read_is_heeded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first four of twelve."""
    bench, keys = Bench(), chain(NAMESPACE, 12)
    catalog = bench.catalog
    catalog.begin_recovery(())
    bench.places = itertools.count(len(keys))
    of_kind: dict[str, Callable[[], object]] = {
        "drop": partial(catalog.forget, [keys[0], keys[8]], Cause.DROPPED),
        "pin": partial(catalog.pin, keys[7:9]),
        "clear": catalog.forget_all,
        "twice": partial(bench.publish, keys[6:7]),
    }
    actions = [of_kind[kind]]
    monkeypatch.setattr(catalog_module, "_RECOVERED", 4)

    def turn(seconds: float) -> None:
        if actions:
            actions.pop()()

    monkeypatch.setattr("kvrecall.pool.disk.catalog.time.sleep", turn)
    refused = [address // SIZE for address in catalog.recover(rows_of(keys))]
    monkeypatch.undo()
    assert refused == {"drop": [8], "pin": [], "clear": [*range(4, 12)], "twice": [6]}[kind]
    assert catalog.rank_rest(lambda: False)
    bench.check()
    assert len(bench.here) == {"drop": 10, "pin": 12, "clear": 0, "twice": 12}[kind]
    pinned = {block.key for block in catalog.infos() if block.pinned}
    assert pinned == (set(keys[7:9]) if kind == "pin" else set())


@pytest.mark.parametrize("meanwhile", ["pinned", "read"])
def test_a_block_that_is_taken_after_victims_were_found_stays(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, keys = Bench("lru"), chain(NAMESPACE, 4)
    bench.publish(keys)
    catalog, search = bench.catalog, bench.catalog._search

    def taken(*args: int | None) -> list[int]:
        found = search(*args)  # type: ignore[arg-type]
        catalog.pin(keys[3:]) if meanwhile == "pinned" else catalog.acquire(keys[3])
        return found

    monkeypatch.setattr(catalog, "_search", taken)
    assert catalog.evict(SIZE) == SIZE
    assert bench.here == {keys[0], keys[1], keys[3]}


def test_rows_that_cannot_be_taken_over_together() -> None:
    """Of one key, or of a size that its namespace has no more."""
    bench, keys = Bench(), chain(NAMESPACE, 6)
    bench.catalog.begin_recovery(())
    rows = rows_of(keys)
    rows[4] = rows[4]._replace(key=keys[1])
    assert bench.catalog.recover(rows) == [4 * SIZE]
    assert bench.catalog.rank_rest(lambda: False)
    bench.check()
    bench = Bench()
    bench.catalog.begin_recovery(())
    bench.catalog.forget_namespace(NAMESPACE.digest, but_of=2 * SIZE)
    assert bench.catalog.recover(rows_of(keys)) == [place * SIZE for place in range(6)]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_use_after_the_present_counts_as_one_now(pinned: bool) -> None:
    bench, keys = Bench(), chain(NAMESPACE, 4)
    bench.catalog.begin_recovery(keys if pinned else ())
    rows = [row._replace(used=2_000_000, pinned=pinned) for row in rows_of(keys)]
    assert bench.catalog.recover(rows) == []
    assert {block.used for block in bench.catalog.infos()} == {bench.clock.now}


def test_only_the_block_that_was_copied_moves_and_its_pin_with_it() -> None:
    bench, (key, other) = Bench(), chain(NAMESPACE, 2)
    bench.publish([key, other])
    catalog = bench.catalog
    old, kept = (catalog.coldest(2)[::-1])[:2]
    assert (old.key, kept.key) == (key, other)
    catalog.pin([other])
    assert catalog.relocate(kept, 90 * SIZE)
    assert catalog.take_unnoted_pins(9) == [(1, 90 * SIZE)]
    catalog.forget([key], Cause.DROPPED)
    catalog.settle()
    bench.publish([key])  # anew, into another slot
    assert not catalog.relocate(old, 91 * SIZE)
    bench.check()


def test_a_tenant_at_its_limit_keeps_what_new_blocks_hang_on() -> None:
    terms = PoolTerms(tenants=TenantRules(TenantTerms(disk=Amount(4 * SIZE))))
    bench, keys = Bench("lru", terms), chain(NAMESPACE, 3)
    old = chain(NAMESPACE, 1, "old")
    bench.publish(old)
    bench.publish(keys)
    assert bench.catalog.make_way(ANN, 2 * SIZE, keys[2]) == SIZE
    assert bench.here == set(keys)


def test_pins_take_no_more_than_their_share() -> None:
    bench, keys = Bench("lru", PoolTerms(pin_limit=2.5 * SIZE / (64 * MIB))), chain(NAMESPACE, 4)
    bench.publish(keys[:3])
    bench.catalog.pin(keys)
    bench.publish(keys[3:])
    assert bench.catalog.pinned_bytes == 2 * SIZE
    assert [block.pinned for block in bench.catalog.infos()].count(True) == 2
    bench.check()
