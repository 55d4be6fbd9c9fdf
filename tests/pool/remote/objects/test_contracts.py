"""The contract of a store in a directory and in S3."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrecall.pool.remote.objects import make_store
from kvrecall.pool.remote.store import Store
from kvrecall.testing.store_contract import StoreContract
from pool.remote.objects.s3 import Server


class TestDirectory(StoreContract):
    def make(self, path: Path) -> Store:
        return make_store({"url": f"file://{path}/store"})


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        self.server = server

    def make(self, path: Path) -> Store:
        return make_store(self.server.options(path.name))
