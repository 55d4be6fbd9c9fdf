from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvrecall.block import BlockKey
from kvrecall.errors import ConfigError
from kvrecall.pool.eviction import KeyedPolicy, make_policy
from kvrecall.pool.eviction.queues import QueueLinks
from kvrecall.pool.eviction.warmup import WarmUp
from kvrecall.testing.policy_contract import PolicyContract, anything, keys_of, store


class TestLru(PolicyContract):
    def make(self) -> KeyedPolicy:
        return make_policy("lru", self.CAPACITY)


class TestS3Fifo(PolicyContract):
    def make(self) -> KeyedPolicy:
        return make_policy("s3fifo", self.CAPACITY)


class TestHazard(PolicyContract):
    def make(self) -> KeyedPolicy:
        return make_policy("hazard", self.CAPACITY)


def hazard(capacity_blocks: int, remember: int | None = None) -> KeyedPolicy:
    return KeyedPolicy(lambda names: WarmUp(capacity_blocks, QueueLinks(names), remember))


def inner(policy: KeyedPolicy) -> WarmUp:
    assert isinstance(policy.policy, WarmUp)
    return policy.policy


class TaughtPolicy(KeyedPolicy):
    """Has seen a thousand seconds of requests before its time begins."""

    def __init__(self, capacity_blocks: int, remember: int | None = None) -> None:
        super().__init__(lambda names: WarmUp(capacity_blocks, QueueLinks(names), remember))
        for number in range(200):
            chain = keys_of(f"teacher {number % 2}", 3)
            self.access(chain, 5.0 * number)
            for key in chain:  # known even without memory
                self.insert(key, None, 5.0 * number)
        for key in keys_of("teacher 0", 3) + keys_of("teacher 1", 3):
            self.remove(key)
        assert self.chance(BlockKey(b"new"), 1000.0) is not None
        places = {"insert": 2, "access": 1, "admit": 2, "chance": 1, "victims": 2}
        for name, place in places.items():
            setattr(self, name, later(getattr(self, name), place))


def later(method: Callable[..., Any], place: int) -> Callable[..., Any]:
    """The method with a thousand seconds more in the argument at ``place``."""

    def called(*args: Any, **more: Any) -> Any:
        return method(*args[:place], 1000.0 + args[place], *args[place + 1 :], **more)

    return called


class TestTaughtHazard(PolicyContract):
    def make(self) -> KeyedPolicy:
        return TaughtPolicy(self.CAPACITY)


class TestHazardWithoutMemory(PolicyContract):
    def make(self) -> KeyedPolicy:
        return TaughtPolicy(self.CAPACITY, remember=0)


@pytest.mark.parametrize(
    ("name", "capacity", "text"),
    [
        ("lur", 5, "did you mean 'lru'"),
        ("x", 5, "known: lru"),
        ("lfu", 5, "known: lru, s3fifo, hazard"),
        ("lru", 0, "more than 0"),
    ],
)
def test_wrong_settings(name: str, capacity: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_policy(name, capacity)


def test_lru_keeps_the_shared_prefix_longest() -> None:
    policy, head = make_policy("lru", 100), keys_of("head", 2)
    one, two = head + keys_of("one", 2), head + keys_of("two", 2)
    store(policy, one, 1.0)
    store(policy, two, 2.0)
    expected = [one[3], one[2], two[3], two[2], head[1], head[0]]
    assert policy.victims(6, anything, 3.0) == expected


def test_lru_new_block_is_as_young_as_its_parent() -> None:
    policy, chain, other = make_policy("lru", 100), keys_of("a", 3), keys_of("b", 1)
    store(policy, chain[:2], 1.0)
    policy.access(chain, 2.0)
    store(policy, other, 3.0)
    policy.insert(chain[2], chain[1], 4.0)
    assert policy.victims(4, anything, 5.0) == [chain[2], chain[1], chain[0], other[0]]


def test_s3fifo_lets_a_scan_pass() -> None:
    policy, hot = make_policy("s3fifo", 20), keys_of("hot", 5)
    for now in range(3):
        store(policy, hot, float(now))
    for number in range(200):
        key = BlockKey(f"scan/{number}".encode())
        policy.access([key], 3.0)
        if number >= 15:
            for victim in policy.victims(1, anything, 3.0):
                assert victim not in hot
                policy.remove(victim)
        policy.insert(key, None, 3.0)


def test_hazard_never_gives_up_a_parent_first() -> None:
    policy, chain = hazard(100), keys_of("a", 6)
    store(policy, chain, 1.0)
    for now in range(2, 400):
        policy.access(chain[:3], float(now))
        side = keys_of(f"side{now}", 3)
        store(policy, side, float(now))
    order = policy.victims(10_000, anything, 1000.0)
    assert [key for key in order if key in chain] == chain[::-1]


def test_hazard_learns_to_refuse_what_never_comes_back() -> None:
    policy = hazard(10)
    regulars = [keys_of(f"regular{i}", 2) for i in range(5)]
    for number in range(2000):
        now = number * 3.0
        regular = regulars[number % 5]
        store(policy, regular, now)
        passer = keys_of(f"passer{number}", 2)
        policy.access(passer, now + 1.0)
    assert not policy.admit(passer[0], None, now + 1.0)


def test_hazard_memory_is_bounded() -> None:
    policy = hazard(10, remember=100)
    for number in range(5000):
        policy.access(keys_of(f"x{number}", 3), float(number))
    ranked = inner(policy)._ranked
    ranking = ranked._ranking
    assert ranked._ghosts <= 100
    assert sum(len(queue) for queue in ranking._by_bin) <= 110
    assert len(ranking.memory) <= 500
    for number in range(5000):  # no requests: blocks only come and go
        key = BlockKey(f"y{number}".encode())
        policy.insert(key, None, 5000.0)
        policy.remove(key)
    assert ranked._ghosts <= 101
    hot = keys_of("hot", 50)
    for number in range(5000, 10_000):
        store(policy, hot, float(number))
    assert len(ranking.memory) <= 500
    assert sum(len(ranking.by_number[number].names) for number in ranking.memory) <= 20_000


def test_hazard_frees_names_that_were_used_again() -> None:
    """Each request leaves one block that is never used again, and uses 50 others: their names do
    not stay with it."""
    policy = hazard(2_000)
    hot = keys_of("hot", 50)
    store(policy, hot, 0.0)
    for number in range(1, 1_000):
        policy.access(hot, float(number))
        new = keys_of(f"new{number}", 51)
        store(policy, [*hot, new[-1]], float(number))
    known = 50 + 999
    buckets = inner(policy)._ranked._ranking.by_number
    assert sum(bucket.alive for bucket in buckets) == known
    assert sum(bucket.size for bucket in buckets) < 5 * known
    victims = policy.victims(known, anything, 1_000.0)
    assert sorted(victims) == sorted([*hot, *(keys_of(f"new{n}", 51)[-1] for n in range(1, 1_000))])


def test_hazard_counts_each_use_at_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where very many buckets are due at once: against a list of all uses."""
    monkeypatch.setattr("kvrecall.pool.eviction.hazard._FADE", 1.0)
    policy, rng, now = hazard(100_000), random.Random(6), 0.0
    table = inner(policy)._ranked._table
    used_at: dict[BlockKey, float] = {}
    ages = []  # of the uses of blocks that were known
    for round_ in range(4):
        for number in rng.sample(range(500), 500):
            chain = keys_of(f"c{number}", 3)
            policy.access(chain, now)
            ages += [now - used_at[key] for key in chain if key in used_at]
            used_at.update(dict.fromkeys(chain, now))
            now += 0.25
        now += 100.0 * 2**round_
    now -= 0.25 + 100.0 * 2**round_
    reached = ages + [now - then for then in used_at.values()]
    bounds = list(zip(table.bins.starts, table.bins.ends, strict=True))
    counted = zip(map(sum, zip(*table.used, strict=True)),
                  map(sum, zip(*table.entered, strict=True)), strict=True)  # fmt: skip
    assert list(counted) == [
        (sum(start <= age < end for age in ages), sum(start <= age for age in reached))
        for start, end in bounds
    ]


@pytest.mark.parametrize("step", [0.0, 0.001, 5.0])
def test_hazard_untaught_is_lru_to_the_block(step: float) -> None:
    """Whatever comes back in 15 ticks at most, and however often."""
    rng = random.Random(3)
    policies = [hazard(100), make_policy("lru", 100)]
    chains = [keys_of("head", 2) + keys_of(f"c{number}", rng.randrange(9)) for number in range(30)]
    now = 0.0
    for number in range(400):
        now += step if number % 30 == 0 else 0.0
        chain = rng.choice(chains)
        leased = frozenset(chain) if rng.random() < 0.5 else frozenset[BlockKey]()
        count, goes = rng.choice((7, 200)), rng.random() < 0.3
        going = []
        for policy in policies:
            assert policy.admit(BlockKey(b"new"), None, now)
            store(policy, chain, now)
            going.append(policy.victims(count, lambda key, kept=leased: key not in kept, now))  # type: ignore[misc]
            for key in going[-1][: 7 * goes]:
                policy.remove(key)
        assert going[0] == going[1]


def test_hazard_once_taught_forgets_the_order_of_use() -> None:
    policy, chain = hazard(100), keys_of("a", 3)
    for number in range(16):
        assert policy.chance(chain[0], 0.0) is None, (
            "not before 16 ticks with blocks that came back"
        )
        store(policy, chain, float(number))
    for number in range(16, 200):
        store(policy, chain, float(number))
    assert policy.chance(chain[0], 200.0) is not None
    assert inner(policy)._lru is None


def test_names_of_blocks_that_came_before_it_was_taught_are_freed() -> None:
    policy = hazard(100, 0)
    chain, windows = keys_of("a", 5), keys_of("window", 2)
    store(policy, chain, 0.0)
    for key in windows:
        policy.insert(key, chain[-1], 0.0, hangs=True)
    for number in range(100):
        policy.access(chain, float(number), windows)
    assert inner(policy)._lru is None
    for key in (*windows, *chain[::-1]):
        policy.remove(key)
    policy.access(keys_of("b", 2000), 200.0)  # for which names are forgotten
    policy.access(keys_of("c", 2000), 201.0)
    assert [policy.names.number(key) for key in (*chain, *windows)] == [-1] * 7


@pytest.mark.parametrize("make", [hazard, TaughtPolicy])
def test_hazard_learns_parents_it_was_not_told(make: Callable[[int], KeyedPolicy]) -> None:
    policy, chain = make(100), keys_of("a", 4)
    policy.insert(chain[2], None, 1.0)
    policy.insert(chain[3], chain[2], 1.0)
    policy.insert(chain[0], None, 1.0)
    policy.insert(chain[1], chain[0], 1.0)
    policy.access(chain, 2.0)
    assert policy.victims(4, anything, 3.0) == chain[::-1]


def test_hazard_tells_how_likely_a_block_comes_back() -> None:
    policy = hazard(1000)
    assert policy.chance(BlockKey(b"unseen"), 0.0) is None, "it has seen nothing yet"
    now = 0.0
    for turn in range(300):
        now += 10.0
        store(policy, keys_of("hot", 4), now)  # again and again
        store(policy, keys_of(f"cold {turn}", 4), now)  # once each
    hot = policy.chance(keys_of("hot", 4)[0], now)
    cold = policy.chance(keys_of("cold 299", 4)[0], now)
    assert hot is not None
    assert cold is not None
    assert hot > 0.9
    assert cold < 0.2
    assert make_policy("lru", 100).chance(keys_of("hot", 4)[0], now) is None


def test_a_chain_without_what_hangs_on_its_end_goes_next() -> None:
    """Until its windows or its state come back it can serve no hit beyond the next ones."""
    policy, now = TaughtPolicy(50), 0.0
    old, new = keys_of("old", 6), keys_of("new", 6)
    states = keys_of("state", 3)
    store(policy, old, now)
    policy.insert(states[0], old[2], now, hangs=True)
    policy.insert(states[1], old[5], now, hangs=True)
    store(policy, new, 2.0)
    policy.insert(states[2], new[5], 2.0, hangs=True)
    for _ in range(20):  # the old ones are the better by all that is known
        now += 3.0
        policy.access(old, now, states[:2])
    assert policy.victims(1, anything, now) == [states[2]]
    policy.remove(states[1])
    for key in old[:2:-1]:
        assert policy.victims(1, anything, now) == [key]
        policy.remove(key)
    assert policy.victims(1, anything, now) == [states[2]], "a state still serves the rest"


def test_what_hangs_on_a_block_that_is_gone_goes_first_until_it_is_back() -> None:
    policy = TaughtPolicy(50)
    chain, other, windows = keys_of("a", 4), keys_of("b", 4), keys_of("window", 2)
    policy.access(chain, 0.0, windows)
    policy.access(chain, 5.0, windows)
    store(policy, other, 5.0)
    for depth, key in enumerate(chain):
        policy.insert(key, chain[depth - 1] if depth else None, 5.0)
    for key, parent in zip(windows, chain[2:], strict=True):
        policy.insert(key, parent, 5.0, hangs=True)
    policy.remove(chain[3])
    assert policy.victims(1, anything, 6.0) == [windows[1]]
    policy.insert(chain[3], chain[2], 6.0)
    policy.access(chain, 7.0, windows)
    assert policy.victims(1, anything, 8.0) != [windows[1]]
    policy.insert(BlockKey(b"early"), BlockKey(b"not here"), 8.0, hangs=True)
    assert policy.victims(1, anything, 8.0) == [b"early"]


def test_windows_inside_a_request_go_before_those_at_its_end() -> None:
    """A conversation goes on from its end; inside a request few ever hit."""
    policy, now = hazard(4000), 0.0
    for number in range(61):
        chain = keys_of(f"session {number}", 8)
        windows = [BlockKey(b"window" + key) for key in chain]
        for turn in (4, 8) if number < 60 else (4,):
            now += 20.0
            used = windows[3:4] if turn == 8 else []
            policy.access(chain[:turn], now, used, windows[turn - 1 : turn])
            for depth, key in enumerate(chain[:turn]):
                policy.insert(key, chain[depth - 1] if depth else None, now)
                policy.insert(windows[depth], key, now, hangs=True)
    order = policy.victims(4000, anything, now + 1.0)
    inner, end = windows[:3], windows[3]
    assert max(map(order.index, inner)) < order.index(end)
    assert order.index(end) > len(order) / 2
