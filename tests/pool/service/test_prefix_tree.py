"""What is cached as trees: built from blocks, asked of a service and by a pool inside an engine."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path

from kvrecall.block import SHARED, BlockKey, Namespace, Tenant, TierName, tenant_of
from kvrecall.config import PoolConfig
from kvrecall.pool import Pool
from kvrecall.pool.entries import BlockInfo
from kvrecall.pool.service.admin import MAX_BLOCKS, PrefixTrees, ServiceAdmin, Stat, prefix_trees
from kvrecall.pool.service.endpoint import AdminEndpoint, clear_dead

SPACE = Namespace.of({"dtype": "float32"})
WINDOWS = Namespace.of({"dtype": "float32", "group": "0: window of 40 tokens"})
NOW = 1000.0
SLOT = 4096
KNOWN = {SPACE.digest: ("model", SLOT)}


def key(name: str) -> BlockKey:
    return SPACE.key(name.encode().ljust(32, b"."))


def held(
    name: str, parent: str | None, depth: int, tier: TierName = TierName.HOST, **more: object
) -> BlockInfo:
    tenant = Tenant(str(more.get("tenant", SHARED)))
    used = float(str(more.get("used", NOW - 10)))
    above = None if parent is None else key(parent)
    return BlockInfo(key(name), tier, tenant, above, depth, SLOT, used, False)


def test_blocks_that_begin_alike_share_a_node() -> None:
    blocks = [
        held("a", None, 0),
        held("b", "a", 1, used=NOW - 5),
        held("b", "a", 1, TierName.DISK),
        held("c1", "b", 2),
        held("d1", "c1", 3, TierName.DISK, used=NOW - 2),
        held("c2", "b", 2, TierName.DISK),
    ]
    (tree,) = prefix_trees(blocks, KNOWN, NOW)
    assert (tree.model, tree.blocks) == ("model", 5)
    assert (tree.host_bytes, tree.disk_bytes) == (3 * SLOT, 3 * SLOT)
    assert tree.age_s == 2
    (trunk,) = tree.children
    assert (trunk.depth, trunk.blocks) == (0, 2)
    assert (trunk.host_bytes, trunk.disk_bytes) == (tree.host_bytes, tree.disk_bytes)
    assert trunk.name == key("b")[16:].hex()[:12]
    long, short = trunk.children
    assert (long.depth, long.blocks, short.blocks) == (2, 2, 1)
    assert (long.host_bytes, long.disk_bytes, short.disk_bytes) == (SLOT, SLOT, SLOT)
    assert (long.age_s, short.age_s) == (2, 10)


def test_tenants_and_orphans() -> None:
    blocks = [held("a", None, 0), held("z", "gone", 7), held("a", None, 0, tenant="t1")]
    trees = {tree.tenant: tree for tree in prefix_trees(blocks, KNOWN, NOW)}
    assert set(trees) == {str(SHARED), "t1"}
    assert sorted(node.depth for node in trees[str(SHARED)].children) == [0, 7]


def test_what_hangs_on_blocks_is_counted_and_not_drawn() -> None:
    """The windows of a hybrid model have a namespace of their own."""
    chain = [held("a", None, 0), held("b", "a", 1)]
    window = replace(held("b", "b", 2), key=WINDOWS.key(b"b".ljust(32, b".")))
    tree, beside = prefix_trees([*chain, window], KNOWN, NOW)
    assert [node.blocks for node in tree.children] == [2]
    assert (beside.blocks, beside.host_bytes, beside.children, beside.hidden) == (1, SLOT, [], 0)


def test_an_answer_is_bounded() -> None:
    """Long chains, wide fans and deep ladders of branches."""
    chain = [held(f"c{i}", f"c{i - 1}" if i else None, i) for i in range(20_000)]
    (tree,) = prefix_trees(chain, KNOWN, NOW)
    assert [node.blocks for node in tree.children] == [20_000]
    fan = [held(f"f{i}", None, 0) for i in range(500)]
    (tree,) = prefix_trees(fan, KNOWN, NOW)
    assert len(tree.children) + tree.hidden == 500
    assert len(tree.children) <= 20
    ladder = [held("l0", None, 0)]
    for i in range(1, 400):
        ladder += [held(f"l{i}", f"l{i - 1}", i), held(f"x{i}", f"l{i - 1}", i)]
    (tree,) = prefix_trees(ladder, KNOWN, NOW, limit=30)
    count = 0
    left = list(tree.children)
    while left:
        node = left.pop()
        count += 1
        left += node.children
    assert count <= 30


def test_a_pool_with_very_many_blocks_is_not_drawn() -> None:
    block = held("a", None, 0)
    (tree,) = prefix_trees([block] * (MAX_BLOCKS + 1), KNOWN, NOW)
    assert (tree.children, tree.hidden) == ([], -1)


def test_a_pool_inside_an_engine_can_be_asked(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    socket = folder / "engine.sock"
    pool = Pool.open(PoolConfig(1 << 20))
    endpoint = AdminEndpoint(pool, socket)
    try:
        pool.register(SPACE, SLOT)
        keys = [key("a"), key("b")]
        pool.reserve(keys, None, tenant_of("someone"))
        pool.commit(keys)
        with ServiceAdmin(socket, 60.0) as admin:
            (tree,) = admin.do(PrefixTrees())
            assert admin.do(Stat()).stats.tiers[0].blocks == 2
        assert (tree.namespace, tree.tenant, tree.block_bytes) == (
            SPACE.digest.hex(),
            tenant_of("someone"),
            SLOT,
        )
        assert [(node.depth, node.blocks) for node in tree.children] == [(0, 2)]
        assert "float32" in tree.model
    finally:
        endpoint.stop()
        pool.close()
        endpoint.close()
    assert list(folder.iterdir()) == []


def test_what_killed_servers_left_is_cleared(tmp_path: Path) -> None:
    """Those of dead servers are removed; those of running ones, a starting one and a service
    stay."""
    for name in ("serve-1", "serve-2", "serve-3", "pool"):
        for file in (tmp_path / f"{name}.sock", tmp_path / f"{name}.sock.lock"):
            file.touch()
            os.utime(file, (0, 0))
    (tmp_path / "serve-3.sock.lock").touch()
    with (tmp_path / "serve-2.sock.lock").open() as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        clear_dead(tmp_path / "serve-9.sock")
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {
        f"{n}.sock{end}" for n in ("serve-2", "serve-3", "pool") for end in ("", ".lock")
    }
    clear_dead(tmp_path / "serve-2.sock")  # its own is made anew by its lock
    assert (tmp_path / "serve-2.sock").exists()
