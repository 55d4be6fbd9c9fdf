from __future__ import annotations

from pathlib import Path

from support.terms_contract import TermsContract

from kvrecall.config import DiskConfig, PoolConfig, PoolTerms
from kvrecall.pool import Pool
from kvrecall.pool.base import PoolClient
from kvrecall.testing.pool_contract import PoolContract

MIB = 1 << 20


class TestPool(PoolContract):
    def make(self, host_bytes: int, disk_path: Path | None) -> PoolClient:
        disk = None if disk_path is None else DiskConfig(disk_path, 64 * MIB)
        return Pool.open(PoolConfig(host_bytes, disk))


class TestTerms(TermsContract):
    def make(self, host_bytes: int, disk_path: Path | None, terms: PoolTerms) -> PoolClient:
        disk = None if disk_path is None else DiskConfig(disk_path, 64 * MIB)
        return Pool.open(PoolConfig(host_bytes, disk, terms=terms))
