"""Pools over one store in memory, as the fixture ``open_pool`` opens them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvrecall.config import PoolConfig, RecallSettings
from kvrecall.pool.pool import Pool
from kvrecall.testing.blocks import namespace

NAMESPACE = namespace()
NBYTES = 10_000
OpenPool = Callable[..., Pool]


def settings(name: str, disk: Path | None = None, **more: object) -> PoolConfig:
    remote = {"kind": "support.stores:make_store", "name": name}
    raw: dict[str, object] = {"host_size": "2MiB", "remote": remote, **more}
    if disk is not None:
        raw |= {"disk_path": str(disk), "disk_size": "64MiB"}
    return RecallSettings.from_mapping(raw).pool
