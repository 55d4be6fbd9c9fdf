"""Tenants, pins, sizes and write policies through a service."""

from __future__ import annotations

from pathlib import Path

from support.terms_contract import TermsContract

from kvrecall.config import DiskConfig, PoolTerms
from kvrecall.pool.base import PoolClient
from kvrecall.pool.pool import Pool

from .test_contract import MIB, OwnService


class TestTermsOfService(TermsContract):
    def make(self, host_bytes: int, disk_path: Path | None, terms: PoolTerms) -> PoolClient:
        disk = None if disk_path is None else DiskConfig(disk_path, 64 * MIB)
        return OwnService(host_bytes, disk, terms)

    def pool_of(self, pool: PoolClient) -> Pool:
        assert isinstance(pool, OwnService)
        return pool.service.pool
