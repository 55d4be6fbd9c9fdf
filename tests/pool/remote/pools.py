"""Pools over one store in memory, as the fixture ``open_pool`` opens them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvrecall.block import BlockKey, TierName
from kvrecall.config import PoolConfig, RecallSettings
from kvrecall.pool.base import Found, RecallState
from kvrecall.pool.pool import Pool
from kvrecall.testing import content, namespace, wait_until

NAMESPACE = namespace()
NBYTES = 10_000
OpenPool = Callable[..., Pool]


def settings(name: str, disk: Path | None = None, **more: object) -> PoolConfig:
    remote = {"kind": "support.stores:make_store", "name": name}
    raw: dict[str, object] = {"host_size": "2MiB", "remote": remote, **more}
    if disk is not None:
        raw |= {"disk_path": str(disk), "disk_size": "64MiB"}
    return RecallSettings.from_mapping(raw).pool


def save(pool: Pool, keys: Sequence[BlockKey], flush: bool = True, salt: bytes = b"") -> list[int]:
    """Saves blocks; returns their offsets. ``salt`` makes others."""
    offsets = [reservation.offset for reservation in pool.reserve(keys)]
    for key, offset in zip(keys, offsets, strict=True):
        pool.arena.view(offset, NBYTES)[:] = content(BlockKey(salt + key), NBYTES)
    pool.commit(keys)
    if flush:
        assert pool.flush(keys, 60.0)
    return offsets


def find(pool: Pool, keys: Sequence[BlockKey]) -> Found:
    wait_until(lambda: not pool.find(keys).pending)
    return pool.find(keys)


def recall(pool: Pool, keys: Sequence[BlockKey], salt: bytes = b"") -> tuple[TierName, ...]:
    """Recalls what is there, checks every byte, and says where the blocks were."""
    find(pool, keys)
    ticket = pool.acquire(keys, 60.0)
    wait_until(lambda: pool.poll(ticket).state is RecallState.READY)
    recalled = pool.poll(ticket)
    for key, offset in zip(keys, recalled.offsets, strict=False):
        assert bytes(pool.arena.view(offset, NBYTES)) == content(BlockKey(salt + key), NBYTES)
    pool.release(ticket)
    return recalled.tiers
