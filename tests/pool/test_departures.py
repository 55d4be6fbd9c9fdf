"""Why a block is not in the pool: what is remembered, how much of it, and of whom."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import pytest
from support.stores import MemoryStore

from kvrecall.block import Namespace, TierName
from kvrecall.config import (
    Amount,
    DiskConfig,
    PoolConfig,
    PoolTerms,
    RemoteConfig,
    TenantRules,
    TenantTerms,
)
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import Presence
from kvrecall.pool.changes import Cause
from kvrecall.pool.departures import Departures, Refusal
from kvrecall.pool.names import CompactNames, DictNames, Names
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.testing import chain, wait_until
from kvrecall.testing.pool_contract import BLOCK_BYTES, NAMESPACE, SLOT_BYTES, Engine

MIB = 1 << 20
KEYS = chain(NAMESPACE, 64)


def open_pool(
    path: Path | None = None, blocks: int = 16, policy: str = "lru", **terms: object
) -> Pool:
    disk = None if path is None else DiskConfig(path, 64 * MIB)
    config = PoolConfig(blocks * SLOT_BYTES, disk, policy, terms=PoolTerms(**terms))
    pool = Pool.open(config)
    pool.register(NAMESPACE, BLOCK_BYTES)
    return pool


@pytest.mark.parametrize("names", [DictNames(), CompactNames()])
def test_the_latest_departures_are_remembered_and_no_more(names: Names) -> None:
    clock = itertools.count(100.0)
    left = Departures(names, lambda: next(clock), most=8)
    for key in KEYS[:12]:
        left.note(key, Cause.CAPACITY)
    left.note(KEYS[4], Refusal.QUOTA)  # again: the latest counts
    assert [left.of(key) is not None for key in KEYS[:12]] == [False] * 4 + [True] + [True] * 7
    found = left.of(KEYS[4])
    assert found is not None
    assert (found.what, found.at) == (Refusal.QUOTA, 112.0)
    assert left.of(KEYS[5]).what is Cause.CAPACITY
    for key in KEYS[20:28]:
        left.note(key, Cause.DROPPED)
    assert all(left.of(key) is None for key in KEYS[:12])
    assert len(names) == 8  # a name that nothing remembers is gone


def test_a_name_is_shared_with_the_policys_memory() -> None:
    """hazard remembers an evicted block, too: it has one number."""
    with open_pool(policy="hazard") as pool, closing(Engine(pool)) as engine:
        for start in range(0, 64, 16):
            pool.touch(KEYS[start : start + 16])
            engine.save(KEYS[start : start + 16])
        names = pool._host._names
        assert len(names) == len(KEYS)
        assert engine.why(KEYS[0]).cause == Cause.CAPACITY


def test_the_last_tier_that_a_block_left_is_named(tmp_path: Path) -> None:
    with open_pool(tmp_path) as pool, closing(Engine(pool)) as engine:
        engine.save(KEYS[:8])
        assert pool.flush(KEYS[:8], 60.0)
        wait_until(lambda: pool.stats().queued_writes == 0)  # a moment after they are durable
        engine.save(KEYS[8:24])  # drives them out of the host
        assert engine.why(KEYS[0]) == engine.why(KEYS[1])
        assert engine.why(KEYS[0]).presence is Presence.HERE
        assert engine.why(KEYS[0]).tier == TierName.DISK
        pool.admin.drop(KEYS[:1])
        left = engine.why(KEYS[0])
        assert (left.tier, left.cause) == (TierName.DISK, Cause.DROPPED)
        pool.clear()
        assert engine.why(KEYS[8]).cause == Cause.CLEARED


def test_a_damaged_block_is_gone_as_damaged(tmp_path: Path) -> None:
    with open_pool(tmp_path) as pool, closing(Engine(pool)) as engine:
        engine.save(KEYS[:4])
        assert pool.flush(KEYS[:4], 60.0)
        wait_until(lambda: pool.stats().queued_writes == 0)  # a moment after they are durable
        engine.save(KEYS[8:24])
        for slab in tmp_path.glob("slab-*.kv"):
            size = slab.stat().st_size
            with slab.open("r+b") as file:
                for at in range(8192, size, 4096):
                    file.seek(at + 17)
                    file.write(b"\xff\x00\xff")
        assert engine.recall(KEYS[:4]) == ()
        assert engine.why(KEYS[0]).cause == Cause.CORRUPT


def test_a_quota_and_a_policy_refuse() -> None:
    rules = TenantRules(TenantTerms(host=Amount(4 * SLOT_BYTES)))
    with open_pool(tenants=rules) as pool, closing(Engine(pool)) as engine:
        engine.save(KEYS[:4])
        ticket = pool.acquire(KEYS[:4], 60.0)
        engine.save(KEYS[10:11])
        assert engine.why(KEYS[10]) == engine.why(KEYS[10])
        refused = engine.why(KEYS[10])
        assert (refused.presence, refused.cause) == (Presence.REFUSED, Refusal.QUOTA)
        pool.release(ticket)
        engine.save(KEYS[11:13])
        assert engine.why(KEYS[3]).cause == Cause.QUOTA


def test_another_namespace_is_told_by_what_differs(tmp_path: Path) -> None:
    other = Namespace.of({"model": "model", "weights": "others", "kv_dtype": "fp8"})
    own = Namespace.of({"model": "model", "weights": "ours"})
    with open_pool(tmp_path) as pool, closing(Engine(pool)) as engine:
        pool.register(other, BLOCK_BYTES)
        theirs = chain(other, 2)
        engine.save(theirs)
        assert pool.flush(theirs, 60.0)
    with open_pool(tmp_path) as pool, closing(Engine(pool)) as engine:
        pool.register(own, BLOCK_BYTES)
        wait_until(lambda: pool.find(theirs).blocks == 2)
        found = engine.why(chain(own, 2)[1])
        assert (found.presence, found.tier) == (Presence.ELSEWHERE, TierName.DISK)
        assert found.fields == ("kv_dtype", "weights")
        assert engine.why(chain(own, 3)[2]).presence is Presence.UNKNOWN


def test_a_store_that_does_not_answer_is_away() -> None:
    store = MemoryStore()
    store.failing = OSError("away")
    arena = Arena.create(16 * SLOT_BYTES)
    with Pool(arena, RemoteTier(store, RemoteConfig("test")), "lru") as pool:
        pool.register(NAMESPACE, BLOCK_BYTES)
        pool.find(KEYS[:1])
        wait_until(lambda: not pool.find(KEYS[:1]).pending)
        wait_until(lambda: pool.why(KEYS[0]).presence is Presence.AWAY)
        assert pool.why(KEYS[0]).tier == TierName.REMOTE
