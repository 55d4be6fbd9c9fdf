from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvrecall.block import TierName
from kvrecall.config import DiskConfig, PoolConfig, PoolTerms, TenantRules, TenantTerms
from kvrecall.errors import ConfigError
from kvrecall.pool import Pool, admin
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import PoolClient, RecallState, Verdict
from kvrecall.pool.changes import Cause
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk import DiskTier
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import (
    BLOCK_BYTES,
    NAMESPACE,
    SLOT_BYTES,
    Engine,
    PoolContract,
)
from pool.terms_contract import TermsContract

MIB = 1 << 20


class TestPool(PoolContract):
    def make(self, host_bytes: int, disk_path: Path | None) -> PoolClient:
        disk = None if disk_path is None else DiskConfig(disk_path, 64 * MIB)
        return Pool.open(PoolConfig(host_bytes, disk))


class TestTerms(TermsContract):
    def make(self, host_bytes: int, disk_path: Path | None, terms: PoolTerms) -> PoolClient:
        disk = None if disk_path is None else DiskConfig(disk_path, 64 * MIB)
        return Pool.open(PoolConfig(host_bytes, disk, terms=terms))


def test_hanging_blocks_keep_their_parents_and_depths_through_a_restart(tmp_path: Path) -> None:
    windows = namespace("windows")
    keys, hanging = chain(NAMESPACE, 6), chain(windows, 3)
    config = PoolConfig(64 * SLOT_BYTES, DiskConfig(tmp_path, 64 << 20))
    places = {hanging[0]: (keys[1], 2), hanging[1]: (keys[5], 6), hanging[2]: (keys[5], 6)}
    for boot in range(2):
        with Pool.open(config) as pool, closing(Engine(pool)) as engine:
            for name in (NAMESPACE, windows):
                pool.register(name, BLOCK_BYTES)
            if boot == 0:
                engine.save(keys)
                engine.save(hanging, parents=[keys[1], keys[5], keys[5]])
                assert pool.flush([*keys, *hanging], 60.0)
            else:
                engine.recall(keys)
                engine.recall(hanging, parents=[keys[1], keys[5], keys[5]])
            blocks = {block.key: block for block in pool.host_blocks()}
            for key, place in places.items():
                assert (blocks[key].parent, blocks[key].depth) == place
            assert [blocks[key].parent for key in keys] == [None, *keys[:-1]]


def test_chains_reserved_in_one_call_are_cut_where_the_policy_refuses_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the chain of the block that it does not admit."""
    one, two, full = (chain(NAMESPACE, 3, name) for name in ("one", "two", "full"))
    with Pool.open(PoolConfig(6 * SLOT_BYTES)) as pool, closing(Engine(pool)) as engine:
        pool.register(NAMESPACE, BLOCK_BYTES)
        engine.save([*full, *chain(NAMESPACE, 3, "more")])
        monkeypatch.setattr(pool._host, "admits", lambda key, parent: key != one[1])
        answers = pool.reserve([*one, *two], parents=[None, *one[:-1], None, *two[:-1]])
        assert [answer.verdict for answer in answers] == [
            Verdict.RESERVED, Verdict.REFUSED, Verdict.REFUSED, *[Verdict.RESERVED] * 3
        ]  # fmt: skip
        pool.commit([one[0], *two])
        blocks = {block.key: block for block in pool.host_blocks()}
        assert [blocks[key].depth for key in two] == [0, 1, 2]
        assert [blocks[key].parent for key in two] == [None, *two[:-1]]


def test_find_sees_one_prefix_whichever_tier_holds_which_block(tmp_path: Path) -> None:
    """Runs of host and disk in every order, and the first hole in each place."""
    keys = chain(NAMESPACE, 24)
    config = PoolConfig(64 * SLOT_BYTES, DiskConfig(tmp_path, 64 << 20))
    for hosted in (range(8), range(8, 16), range(16, 24), range(0, 24, 3), range(24), ()):
        for hole in (0, 7, 12, 23, 24):
            with Pool.open(config) as pool, closing(Engine(pool)) as engine:
                pool.register(NAMESPACE, BLOCK_BYTES)
                engine.save(keys)
                assert pool.flush(keys, 60.0)
                dropped = [key for place, key in enumerate(keys) if place not in hosted]
                pool._evictor.drop(dropped, Cause.CAPACITY)
                if hole < 24:
                    pool.drop([keys[hole]])
                expected = [
                    TierName.HOST if place in hosted else TierName.DISK for place in range(hole)
                ]
                assert list(pool.find(keys).tiers) == expected
                assert list(pool.find(tuple(keys[:hole])).tiers) == expected
                pool.clear()


def test_blocks_expire_that_are_old_and_not_pinned_in_every_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "_AT_ONCE", 3)  # several parts
    now = [3_000_000_000.0]
    disk = DiskTier(DiskConfig(tmp_path, 64 * MIB), clock=Clock(lambda: now[0], lambda: now[0]))
    with Pool(Arena.create(8 * SLOT_BYTES), disk, clock=lambda: now[0]) as pool:
        pool.register(NAMESPACE, BLOCK_BYTES)
        engine = Engine(pool)
        recalled, old, pinned, used, both = (
            chain(NAMESPACE, 4, name) for name in ("recalled", "old", "pinned", "used", "both")
        )
        chains = (recalled, old, pinned, used, both)
        for keys in chains:
            engine.save(keys)
            assert pool.flush(keys, 60.0)
        assert not any(map(pool.is_in_host, (*recalled, *old)))
        assert all(map(pool.is_in_host, both))
        pool.admin.pin(pinned)
        now[0] += 200.0
        pool.touch(used)
        ticket = pool.acquire(recalled[:2], 60.0)  # young in the host, and old on disk
        wait_until(lambda: pool.poll(ticket).state is RecallState.READY)
        pool.release(ticket)
        rules = TenantRules(TenantTerms(ttl_s=100.0))
        admin.PoolAdmin(pool, disk, PoolTerms(tenants=rules), lambda: now[0]).expire()
        on_disk = [[disk.contains(key) for key in keys] for keys in chains]
        assert on_disk[0] == [True, True, False, False]
        assert [sum(some) for some in on_disk[1:]] == [0, 4, 4, 0]
        assert not any(map(pool.is_in_host, both))
        engine.close()


def test_the_host_does_not_shrink_below_twice_its_pins() -> None:
    with Pool.open(PoolConfig(64 * SLOT_BYTES)) as pool:
        pool.register(NAMESPACE, BLOCK_BYTES)
        keys = chain(NAMESPACE, 8)
        pool.reserve(keys)
        pool.commit(keys)
        pool.pin(keys)
        with pytest.raises(ConfigError, match="are pinned, more than pin_limit"):
            pool.resize_host(15 * SLOT_BYTES)
        pool.resize_host(16 * SLOT_BYTES)
        assert pool.stats().tiers[0].capacity_bytes == 16 * SLOT_BYTES
