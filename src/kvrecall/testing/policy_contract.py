"""The contract of every eviction policy. Subclass ``PolicyContract`` and give it a policy."""

from __future__ import annotations

import random

from kvrecall.block import BlockKey
from kvrecall.pool.eviction import KeyedPolicy


def keys_of(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(f"{name}/{index}".encode()) for index in range(count)]


def store(policy: KeyedPolicy, chain: list[BlockKey], now: float) -> None:
    """A request for ``chain``: access, then insert what follows, prefix first."""
    policy.access(chain, now)
    for depth, key in enumerate(chain):
        policy.insert(key, chain[depth - 1] if depth else None, now)


def anything(_: BlockKey) -> bool:
    return True


class PolicyContract:
    CAPACITY = 50

    def make(self) -> KeyedPolicy:
        raise NotImplementedError

    def test_empty(self) -> None:
        policy = self.make()
        assert policy.victims(3, anything, 0.0) == []
        policy.remove(BlockKey(b"never seen"))
        policy.access([], 1.0)
        policy.access(keys_of("never seen", 3), 1.0)
        assert policy.victims(3, anything, 2.0) == []

    def test_victims_stay_until_removed(self) -> None:
        policy, chain = self.make(), keys_of("a", 8)
        store(policy, chain, 1.0)
        first = policy.victims(3, anything, 2.0)
        assert len(first) == len(set(first)) == 3
        assert policy.victims(3, anything, 2.0) == first
        for key in first:
            policy.remove(key)
            policy.remove(key)
        rest = policy.victims(100, anything, 3.0)
        assert sorted(rest) == sorted(set(chain) - set(first))

    def test_a_chain_goes_from_its_end(self) -> None:
        policy, chain = self.make(), keys_of("a", 8)
        store(policy, chain, 1.0)
        assert policy.victims(8, anything, 2.0) == chain[::-1]
        for left in range(8, 0, -1):
            assert policy.victims(1, anything, 2.0) == [chain[left - 1]]
            policy.remove(chain[left - 1])

    def test_what_hangs_on_a_chain_goes_before_it(self) -> None:
        policy, chain, hanging = self.make(), keys_of("a", 4), keys_of("window", 2)
        store(policy, chain, 1.0)
        for key in hanging:
            policy.insert(key, chain[-1], 1.0, hangs=True)
        assert sorted(policy.victims(2, anything, 2.0)) == hanging
        policy.access(chain, 3.0, hanging[:1])
        policy.access([], 3.0, keys_of("never seen", 2))
        for key in hanging:
            policy.remove(key)
        assert policy.victims(9, anything, 4.0) == chain[::-1]
        policy.access(chain, 5.0, hanging)
        for key in hanging:
            policy.insert(key, chain[-1], 5.0, hangs=True)
        assert len(policy.victims(9, anything, 6.0)) == 6

    def test_held_blocks_come_back_where_they_were(self) -> None:
        policy, old, new = self.make(), keys_of("old", 5), keys_of("new", 5)
        store(policy, old, 1.0)
        store(policy, new, 2.0)
        order = policy.victims(10, anything, 3.0)
        for key in old:
            policy.hold(key)
            policy.hold(key)
        assert policy.victims(10, lambda key: key in new, 3.0) == new[::-1]
        for key in old:
            policy.release(key)
            policy.release(key)
        assert policy.victims(10, anything, 3.0) == order
        for key in (*old[3:], *new):
            policy.hold(key)
            policy.remove(key)
            policy.release(key)
        assert policy.victims(10, anything, 3.0) == old[2::-1]

    def test_inserted_twice_is_there_once(self) -> None:
        policy, chain = self.make(), keys_of("a", 3)
        store(policy, chain, 1.0)
        store(policy, chain, 2.0)
        assert sorted(policy.victims(10, anything, 3.0)) == sorted(chain)

    def test_children_may_come_before_parents(self) -> None:
        """After a restart, blocks are inserted least recently used first, without accesses."""
        policy, chain = self.make(), keys_of("a", 6)
        for depth in range(5, -1, -1):
            policy.insert(chain[depth], chain[depth - 1] if depth else None, 9.0 - depth)
        assert sorted(policy.victims(10, anything, 20.0)) == sorted(chain)

    def test_against_a_set(self) -> None:
        for seed in range(8):
            self._walk(random.Random(seed), hanging=False)

    def test_hanging_blocks_against_a_set(self) -> None:
        for seed in range(5):
            self._walk(random.Random(seed), hanging=True)

    def _walk(self, rng: random.Random, hanging: bool) -> None:
        """Blocks come and go; with ``hanging`` in any order, parents before what hangs on them or
        after."""
        policy, now = self.make(), 0.0
        resident: set[BlockKey] = set()
        held: set[BlockKey] = set()  # of a chain from its root, as leases are
        for _ in range(300):
            for key in held:
                policy.release(key)
            held = set(_random_chain(rng)) if rng.random() < 0.5 else set()
            for key in held:
                policy.hold(key)
            now += rng.choice((0.0, 0.01, 1.0, 30.0, 1000.0))
            chain = _random_chain(rng)
            beside = [BlockKey(b"window of " + key) for key in chain] if hanging else []
            used, ending = rng.sample(beside, rng.randrange(len(beside) + 1)), beside[-2:]
            policy.access(chain, now, used, ending[: rng.randrange(3)])
            places = [(key, chain[at - 1] if at else None) for at, key in enumerate(chain)]
            places += zip(beside, chain, strict=False)
            if hanging:
                places = rng.sample(places, rng.randrange(1, len(places) + 1))
            for key, parent in places:
                hangs = key in beside
                if key in resident:
                    continue
                if len(resident) >= self.CAPACITY:
                    if rng.random() < 0.5 and not policy.admit(key, parent, now, hangs):
                        break
                    kept = held.union(chain)
                    victims = policy.victims(1, lambda k, kept=kept: k not in kept, now)  # type: ignore[misc]
                    assert len(victims) == 1
                    assert victims[0] in resident - set(chain)
                    policy.remove(victims[0])
                    resident.discard(victims[0])
                policy.insert(key, parent, now, hangs)
                resident.add(key)
            most = len(resident) // 4 if hanging else rng.random() < 0.1
            for key in rng.sample(sorted(resident), rng.randrange(1 + most)):
                policy.remove(key)
                resident.discard(key)
            count = rng.randrange(1, 80)
            found = policy.victims(count, lambda k, kept=held: k not in kept, now)  # type: ignore[misc]
            idle = resident - held
            assert len(found) == len(set(found)) == min(count, len(idle))
            assert idle.issuperset(found)
            some = rng.sample(sorted(resident), min(3, len(resident)))  # of anywhere
            for key in some:
                policy.hold(key)
            found = policy.victims(count, lambda k, some=some: k not in some, now)  # type: ignore[misc]
            assert len(found) == len(set(found))
            assert resident.difference(some).issuperset(found)
            for key in some:
                policy.release(key)


def _random_chain(rng: random.Random) -> list[BlockKey]:
    """One of many overlapping chains: a key names the whole path to it."""
    path, chain = "", []
    for _ in range(rng.randrange(1, 12)):
        path += rng.choice("aaab")
        chain.append(BlockKey(path.encode()))
    return chain
