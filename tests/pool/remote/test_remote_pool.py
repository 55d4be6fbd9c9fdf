"""Pools over one store: what one host saves, another recalls."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stores import MemoryStore

from kvrecall.block import BlockKey, TierName
from kvrecall.config import RecallSettings
from kvrecall.errors import ConfigError
from kvrecall.pool.base import Found, Located, RecallState, Verdict
from kvrecall.pool.changes import ChangeLog, Removed, Restart, Stored
from kvrecall.pool.pool import Pool
from kvrecall.pool.remote.backends import store_name
from kvrecall.pool.remote.tier import name_of
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.testing import chain, wait_until
from pool.inside import forget
from pool.remote.pools import NAMESPACE, NBYTES, OpenPool, find, recall, save, settings


def stored_there(store: MemoryStore, count: int) -> None:
    wait_until(lambda: len(store.values) == count)


def test_another_pool_recalls_what_one_saved(open_pool: OpenPool, store: MemoryStore) -> None:
    keys = chain(NAMESPACE, 20)
    save(open_pool(), keys)
    other = open_pool()
    assert other.find(keys) == Found((), pending=True)
    assert find(other, keys).tiers == (TierName.REMOTE,) * 20
    assert recall(other, keys) == (TierName.REMOTE,) * 20
    assert recall(other, keys) == (TierName.HOST,) * 20
    host, remote = other.stats().tiers
    assert (host.name, remote.name, remote.reads) == ("host", "remote", 20)


def test_what_came_from_the_store_is_written_to_the_disk_when_it_is_used_again(
    open_pool: OpenPool, tmp_path: Path
) -> None:
    """It is not durable here before."""
    keys = chain(NAMESPACE, 5)
    save(open_pool(), keys)
    pool = open_pool(tmp_path / "disk")
    assert recall(pool, keys) == (TierName.REMOTE,) * 5
    assert recall(pool, keys) == (TierName.HOST,) * 5
    wait_until(lambda: pool.stats().tiers[1].blocks == 5)
    assert pool.stats().tiers[1].name == "disk"


def remote_events(log: ChangeLog) -> tuple[list[BlockKey], list[BlockKey]]:
    """Remote blocks stored and removed since the last call."""
    changes = [one for one in log.take() if not isinstance(one, Restart)]
    there = [one for one in changes if one.tier is TierName.REMOTE]
    return (
        [one.key for one in there if isinstance(one, Stored)],
        [one.key for one in there if isinstance(one, Removed)],
    )


def watched(pool: Pool) -> tuple[ChangeLog, list[BlockKey]]:
    """A log, and the remote blocks with which it begins."""
    log = ChangeLog(pool.sweep)
    pool.watch(log)
    held: list[BlockKey] = []
    while not log.is_complete:
        held += remote_events(log)[0]
    return log, held


def test_a_watcher_is_told_what_its_pool_stores_and_finds_missing(
    open_pool: OpenPool, store: MemoryStore
) -> None:
    first, second = open_pool(), open_pool()
    logs = [watched(pool)[0] for pool in (first, second)]
    keys = chain(NAMESPACE, 4)
    save(first, keys)
    assert remote_events(logs[0]) == (keys, [])
    assert find(second, keys).tiers == (TierName.REMOTE,) * 4
    assert recall(second, keys) == (TierName.REMOTE,) * 4
    assert remote_events(logs[1]) == ([], []), "another host stored them"
    first.drop(keys[3:])
    assert remote_events(logs[0]) == ([], keys[3:])
    assert sorted(watched(first)[1]) == sorted(keys[:3])
    for name in remote_names(keys[1:2]):
        del store.values[name]  # the store evicts it
    forget(first, keys[:3])  # only the host
    assert len(recall(first, keys[:3])) < 3
    wait_until(lambda: remote_events(logs[0])[1] == keys[1:2])
    first.clear()
    assert sorted(remote_events(logs[0])[1]) == sorted([keys[0], keys[2]])


def test_the_name_of_a_store_is_the_same_on_all_hosts() -> None:
    def name(**remote: object) -> str:
        return store_name(RecallSettings.from_mapping({"remote": remote}).pool.remote)  # type: ignore[arg-type]

    bucket = name(kind="objects", url="s3://bucket/kv", endpoint="http://10.0.0.1:9000")
    assert bucket == name(kind="objects", url="s3://bucket/kv/", endpoint="http://10.0.0.1:9000")
    assert bucket != name(kind="objects", url="s3://bucket/other", endpoint="http://10.0.0.1:9000")
    mooncake = {"kind": "mooncake", "metadata_server": "P2PHANDSHAKE", "allow_plaintext": True}
    far = {**mooncake, "master_server_address": "10.0.0.1:50051"}
    one, two = (name(**far, local_hostname=f"10.0.0.{at}") for at in (2, 3))
    assert one == two
    assert one != name(**mooncake, master_server_address="10.0.0.9:50051", local_hostname="h")


def test_locates_single_blocks_in_the_store(open_pool: OpenPool, store: MemoryStore) -> None:
    keys = chain(NAMESPACE, 12)
    save(open_pool(), keys[1::2])
    other = open_pool()
    save(other, keys[:1])
    host, remote = TierName.HOST, TierName.REMOTE
    store.calls.clear()
    store.gate.clear()
    assert other.locate(keys) == Located((host,) + (None,) * 11, pending=True)
    assert other.locate(keys).pending, "while the store has not answered"
    assert other.stats().lookups == 0
    store.gate.set()
    wait_until(lambda: not other.locate(keys).pending)
    assert other.stats().hits == 7
    assert other.locate(keys[:4]).tiers == (host, remote, None, remote)
    assert store.calls == [("exists", 11)]
    assert recall(other, keys[3:4]) == (remote,)


def test_host_disk_and_remote_make_one_prefix(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    keys = chain(NAMESPACE, 30)
    first = open_pool(tmp_path / "first")
    save(first, keys)
    stored_there(store, 30)
    second = open_pool(tmp_path / "second")
    save(second, keys[:10])
    second.close()
    second = open_pool(tmp_path / "second")
    store.calls.clear()
    assert find(second, keys[:10]).tiers == (TierName.DISK,) * 10
    assert store.calls == [], "the store was asked for what is on disk"
    assert recall(second, keys[:5]) == (TierName.DISK,) * 5
    tiers = (TierName.HOST,) * 5 + (TierName.DISK,) * 5 + (TierName.REMOTE,) * 20
    assert find(second, keys).tiers == tiers
    assert store.calls == [("exists", 20)]
    assert recall(second, keys) == tiers
    assert [tier.name for tier in second.stats().tiers] == ["host", "disk", "remote"]


def test_what_is_only_in_the_store_is_kept_here_when_computed(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    keys = chain(NAMESPACE, 5)
    save(open_pool(), keys)
    pool = open_pool(tmp_path / "disk")
    find(pool, keys)
    save(pool, keys)
    assert find(pool, keys).tiers == (TierName.HOST,) * 5
    assert pool.stats().tiers[1].blocks == 5


def test_blocks_pushed_out_of_the_host_come_back(open_pool: OpenPool, store: MemoryStore) -> None:
    pool = open_pool()  # room for about 170 blocks
    chains = [chain(NAMESPACE, 40, f"chain {n}") for n in range(5)]
    for keys in chains:
        save(pool, keys)
    assert TierName.REMOTE in find(pool, chains[0]).tiers
    for keys in chains:
        find(pool, keys)
        assert len(recall(pool, keys)) == 40


def test_flush_needs_the_store_without_a_disk_only(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    keys = chain(NAMESPACE, 5)
    store.failing = OSError("down")
    pool = open_pool()
    save(pool, keys, flush=False)
    assert not pool.flush(keys, 2.0)
    store.failing = None
    store.gate.clear()
    save(open_pool(tmp_path / "disk"), keys)
    assert not store.values


def remote_names(keys: list[BlockKey]) -> set[str]:
    return {name_of(key) for key in keys}


def test_written_back_a_block_goes_to_the_store_when_it_leaves_the_host(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    """Room for about 170 blocks, of which half may be owed."""
    pool = open_pool(tmp_path / "disk", remote_write="back")
    chains = [chain(NAMESPACE, 40, f"chain {n}") for n in range(6)]
    save(pool, chains[0])
    save(pool, chains[1])
    assert not store.values, "they are in memory and on disk"
    for number, keys in enumerate(chains[2:], 2):
        save(pool, keys)
        wait_until(lambda n=number: 40 * (n + 1) - len(store.values) <= 86)  # what may be owed
    gone = [key for keys in chains for key in keys if pool.find([key]).tiers != (TierName.HOST,)]
    assert len(gone) >= 60
    wait_until(lambda: remote_names(gone) <= set(store.values))
    assert not remote_names(chains[5]) & set(store.values), "the warmest are not written"
    other = open_pool()
    assert find(other, chains[0]).tiers == (TierName.REMOTE,) * 40
    assert recall(other, chains[0]) == (TierName.REMOTE,) * 40


def test_written_back_the_rest_goes_to_the_store_when_the_pool_closes(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    pool = open_pool(tmp_path / "disk", remote_write="back")
    kept, dropped = chain(NAMESPACE, 20), chain(NAMESPACE, 20, "dropped")
    save(pool, kept)
    save(pool, dropped)
    pool.drop(dropped)
    pool.close()
    assert set(store.values) == remote_names(kept), "what was dropped is never written"


def test_written_back_without_a_disk_flush_writes(open_pool: OpenPool, store: MemoryStore) -> None:
    pool = open_pool(remote_write="back")
    first, second = chain(NAMESPACE, 20), chain(NAMESPACE, 20, "second")
    save(pool, first, flush=False)
    save(pool, second)
    assert set(store.values) == remote_names(second)
    pool.close()
    assert set(store.values) == remote_names(first + second)


@pytest.mark.parametrize("trouble", ["fails", "hangs"])
def test_written_back_a_store_in_trouble_costs_only_what_it_was_owed(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path, trouble: str
) -> None:
    pool = open_pool(tmp_path / "disk", remote_write="back")
    if trouble == "fails":
        store.failing = OSError("down")
    else:
        store.gate.clear()
    chains = [chain(NAMESPACE, 40, f"chain {n}") for n in range(10)]
    for keys in chains:
        save(pool, keys)  # none is refused, all are on disk
    on_disk = [tier for keys in chains for tier in find(pool, keys).tiers]
    assert len(on_disk) == 400
    assert on_disk.count(TierName.DISK) >= 230
    assert not store.values
    store.failing = None
    store.gate.set()
    absent = chain(NAMESPACE, 1, "absent")
    wait_until(lambda: pool.find(absent).pending)  # the store is used again
    late = [chain(NAMESPACE, 40, f"late {n}") for n in range(6)]
    for keys in late:
        save(pool, keys)
    pool.close()
    assert remote_names(late[-1]) <= set(store.values)


def test_written_back_a_quota_is_kept_without_refusing_new_blocks(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    """A quarter of the host, about 42 blocks. The end of a write to disk may be noticed a moment
    after ``flush``: until then its block is not evicted."""

    def save_all(keys: list[BlockKey]) -> None:
        def has_room() -> bool:
            given = pool.reserve(keys)
            pool.abandon(keys)
            return all(one.verdict is Verdict.RESERVED for one in given)

        wait_until(has_room)
        save(pool, keys)

    pool = open_pool(tmp_path / "disk", remote_write="back", tenant_quota="25%")
    for number in range(10):
        save_all(chain(NAMESPACE, 20, f"chain {number}"))
    assert pool.stats().tiers[0].blocks <= 42
    wait_until(lambda: len(store.values) >= 20)
    store.gate.clear()
    for number in range(10):
        save_all(chain(NAMESPACE, 20, f"while the store hangs {number}"))
    assert pool.stats().tiers[0].blocks <= 42


def test_a_hanging_store_holds_up_nothing_but_its_blocks(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    keys, local = chain(NAMESPACE, 20), chain(NAMESPACE, 20, "local")
    save(open_pool(), keys)
    pool = open_pool(tmp_path / "disk")
    save(pool, local)
    pool.close()
    pool = open_pool(tmp_path / "disk")
    find(pool, keys)
    store.gate.clear()
    ticket = pool.acquire(keys, 0.2)
    wait_until(lambda: pool.poll(ticket).state is RecallState.READY)
    assert pool.poll(ticket).offsets == ()
    pool.release(ticket)
    assert recall(pool, local) == (TierName.DISK,) * 20
    fresh = chain(NAMESPACE, 20, "fresh")
    save(pool, fresh)
    assert recall(pool, fresh) == (TierName.HOST,) * 20


def test_the_service_tells_that_it_is_asking(
    store: MemoryStore, open_pool: OpenPool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    keys = chain(NAMESPACE, 10)
    save(open_pool(), keys)
    service = ServiceThread(settings(request.node.name), tmp_path / "pool.sock")
    client = ServiceClient(tmp_path / "pool.sock", call_timeout_s=60.0)
    try:
        client.register(NAMESPACE, NBYTES)
        store.gate.clear()
        assert client.find(keys) == Found((), pending=True)
        store.gate.set()
        wait_until(lambda: not client.find(keys).pending)
        assert client.find(keys) == Found((TierName.REMOTE,) * 10)
        ticket = client.acquire(keys, 60.0)
        wait_until(lambda: client.poll(ticket).state is RecallState.READY)
        assert client.poll(ticket).tiers == (TierName.REMOTE,) * 10
        client.release(ticket)
    finally:
        client.close()
        service.close()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"remote": "mooncake"}, "must be an object"),
        ({"remote": {"name": "x"}}, "must be an object"),
        ({"remote_write": "off"}, "remote_write is set but remote is not"),
        ({"remote": {"kind": "objects"}, "remote_write": "never"}, "allowed: through, back, off"),
        ({"remote": {"kind": "objects"}, "backend": "service"}, "has no effect"),
    ],
)
def test_settings_that_are_wrong_are_named(raw: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RecallSettings.from_mapping(raw)


def test_a_wrong_kind_leaves_nothing_open(tmp_path: Path) -> None:
    raw = {"host_size": "1MiB", "disk_path": str(tmp_path), "disk_size": "64MiB"}
    wrong = RecallSettings.from_mapping({**raw, "remote": {"kind": "mongoose"}}).pool
    with pytest.raises(ConfigError, match="mongoose"):
        Pool.open(wrong)
    Pool.open(RecallSettings.from_mapping(raw).pool).close()
