"""What every eviction policy must do. Subclass ``PolicyContract`` in a test module."""

from __future__ import annotations

import random

from kvrecall.block import BlockKey
from kvrecall.pool.eviction import EvictionPolicy
from kvrecall.testing.blocks import chain, namespace

_NAMESPACE = namespace()


def _any(key: BlockKey) -> bool:
    return True


class PolicyContract:
    """Contract of ``kvrecall.pool.eviction.base.EvictionPolicy``. A subclass overrides ``make``."""

    def make(self, capacity_blocks: int) -> EvictionPolicy:
        raise NotImplementedError

    def filled(self, *names: str, length: int = 8) -> tuple[EvictionPolicy, list[list[BlockKey]]]:
        """A full policy in which chains were used one after the other."""
        policy = self.make(len(names) * length)
        chains = [chain(_NAMESPACE, length, name) for name in names]
        for now, keys in enumerate(chains):
            policy.access(keys, float(now))
            for depth, key in enumerate(keys):
                policy.insert(key, keys[depth - 1] if depth else None, depth, float(now))
        return policy, chains

    def test_empty_has_no_victims(self) -> None:
        assert self.make(4).victims(3, _any, 0.0) == []

    def test_unknown_keys_are_allowed(self) -> None:
        policy = self.make(4)
        keys = chain(_NAMESPACE, 3)
        policy.access(keys, 0.0)
        policy.remove(keys[0])
        assert policy.victims(3, _any, 1.0) == []

    def test_everything_can_be_had(self) -> None:
        policy, chains = self.filled("a", "b", "c")
        everything = sorted(key for keys in chains for key in keys)
        assert sorted(policy.victims(100, _any, 9.0)) == everything
        assert sorted(policy.victims(100, _any, 9.0)) == everything, "victims are not removed"

    def test_as_many_as_asked(self) -> None:
        policy, _ = self.filled("a", "b")
        for count in (0, 1, 5, 16):
            victims = policy.victims(count, _any, 9.0)
            assert len(set(victims)) == len(victims) == count

    def test_what_is_not_evictable_is_passed_over(self) -> None:
        policy, (a, b) = self.filled("a", "b")
        assert set(policy.victims(16, lambda key: key in b, 9.0)) == set(b)
        assert set(policy.victims(16, _any, 9.0)) == {*a, *b}

    def test_removed_blocks_are_no_victims(self) -> None:
        policy, (a, b) = self.filled("a", "b")
        for key in a:
            policy.remove(key)
        assert set(policy.victims(16, _any, 9.0)) == set(b)

    def test_a_chain_leaves_from_its_end(self) -> None:
        policy, (a,) = self.filled("a")
        assert set(policy.victims(3, _any, 9.0)) == set(a[-3:])
        for key in a[-3:]:
            policy.remove(key)
        assert set(policy.victims(2, _any, 9.0)) == set(a[3:5])

    def test_inserting_twice_changes_nothing(self) -> None:
        policy, (a,) = self.filled("a")
        policy.insert(a[7], a[6], 7, 9.0)
        assert sorted(policy.victims(100, _any, 9.0)) == sorted(a)

    def test_against_a_plain_set(self) -> None:
        dice = random.Random(5)
        policy = self.make(40)
        resident: set[BlockKey] = set()
        for step in range(600):
            now = step / 10
            keys = chain(_NAMESPACE, dice.randrange(1, 12), str(dice.randrange(12)))
            policy.access(keys, now)
            held = set(dice.sample(sorted(resident), len(resident) // 8))
            for depth, key in enumerate(keys):
                parent = keys[depth - 1] if depth else None
                if key in resident:
                    continue
                if len(resident) >= 40:
                    if not policy.admit(key, parent, depth, now):
                        break
                    victims = policy.victims(1, lambda k, h=held: k not in h, now)  # type: ignore
                    assert len(victims) == 1
                    assert victims[0] in resident - held
                    policy.remove(victims[0])
                    resident.remove(victims[0])
                policy.insert(key, parent, depth, now)
                resident.add(key)
            assert set(policy.victims(100, _any, now)) == resident
