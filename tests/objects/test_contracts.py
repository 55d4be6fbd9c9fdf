"""The contract of a store in memory, a directory and S3, and of a tier over the latter two."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.objects.s3 import Server

from kvrecall.config import RemoteConfig
from kvrecall.pool.remote.objects import make_store
from kvrecall.pool.remote.store import Store
from kvrecall.pool.remote.tier import RemoteTier
from kvrecall.pool.tier import Tier
from kvrecall.testing.store_contract import StoreContract
from kvrecall.testing.tier_contract import TierContract


class TestMemory(StoreContract):
    outlives = False

    def make(self, path: Path) -> Store:
        return make_store({"url": "memory:///"})


class TestDirectory(StoreContract):
    def make(self, path: Path) -> Store:
        return make_store({"url": f"file://{path}/store"})


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make(self, path: Path) -> Store:
        return make_store(self.server.options(path.name))


class TestDirectoryTier(TierContract):
    def make(self, path: Path) -> Tier:
        return RemoteTier(make_store({"url": f"file://{path}/store"}), RemoteConfig("objects"))


class TestS3Tier(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make(self, path: Path) -> Tier:
        store = make_store(self.server.options(f"tier/{path.parent.name}"))
        return RemoteTier(store, RemoteConfig("objects", call_deadline_s=60.0))
