"""The service's client is a pool like any other: the contract suites and the state machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, settings
from support.pool_machine import PoolMachine

from kvrecall.block import BlockKey
from kvrecall.config import DiskConfig, PoolConfig, PoolTerms
from kvrecall.pool.admin import PoolAdmin
from kvrecall.pool.base import PoolClient
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.service.endpoint import ServiceThread
from kvrecall.testing.pool_contract import PoolContract
from pool.terms_contract import TermsContract

MIB = 1 << 20


class OwnService(ServiceClient):
    """A client with a service to itself, which ends with it."""

    def __init__(
        self, host_bytes: int, disk: DiskConfig | None, terms: PoolTerms | None = None
    ) -> None:
        folder = self.folder = Path(tempfile.mkdtemp(prefix="kvrecall-test-"))
        config = PoolConfig(host_bytes, disk, terms=terms or PoolTerms())
        self.service = ServiceThread(config, folder / "pool.sock")
        super().__init__(folder / "pool.sock", call_timeout_s=60.0)

    def close(self) -> None:
        super().close()
        self.service.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class TestServiceClient(PoolContract):
    def make(self, host_bytes: int, disk_path: Path | None) -> PoolClient:
        disk = None if disk_path is None else DiskConfig(disk_path, 64 * MIB)
        return OwnService(host_bytes, disk)

    def drop(self, pool: PoolClient, keys: Sequence[BlockKey]) -> None:
        assert isinstance(pool, OwnService)
        pool.service.pool.drop(keys)


class TestTermsOfService(TermsContract):
    def make(self, host_bytes: int, disk_path: Path | None, terms: PoolTerms) -> PoolClient:
        disk = None if disk_path is None else DiskConfig(disk_path, 64 * MIB)
        return OwnService(host_bytes, disk, terms)

    def pool_of(self, pool: PoolClient) -> Pool:
        assert isinstance(pool, OwnService)
        return pool.service.pool


class ServiceMachine(PoolMachine):
    def open_pool(self, folder: Path) -> PoolClient:
        return OwnService(1 * MIB, DiskConfig(folder, 32 * MIB), self.terms)

    def admin(self) -> PoolAdmin:
        assert isinstance(self.pool, OwnService)
        self.pool.find(())  # what was told has come to it
        return self.pool.service.pool.admin


TestServiceMachine = ServiceMachine.TestCase
TestServiceMachine.settings = settings(
    max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
