"""The contract of a store over Mooncake, plain and encrypted."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.lab.masters import Master
from kvrecall.pool.arena import Arena
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.remote.encrypted import EncryptedStore
from kvrecall.pool.remote.mooncake import MooncakeSettings, MooncakeStore
from kvrecall.testing.store_contract import Counter, StoreContract
from tests.remote.mooncake import needs_mooncake
from tests.remote.test_mooncake import Apart, Node, master, nodes

__all__ = ["master", "nodes"]  # fixtures


@needs_mooncake
class TestMooncakeStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _nodes(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.opened = 0

    def open(self, path: Path) -> Counter:
        """On one node after the other; with names of each test's own."""
        node = self.nodes[self.opened % 2]
        self.opened += 1
        return Counter(Apart(node, f"{path.name}."), node.arena.memory)


class EncryptedNode(Node):
    """A host whose client of Mooncake sees encrypted values only."""

    def __init__(self, master: Master) -> None:
        self.arena = Arena.create(16 << 20)
        inner = MooncakeStore(MooncakeSettings.of(master.options()))
        self.store = EncryptedStore(inner, Cipher([secrets.token_bytes(32)]))  # type: ignore[assignment]
        self.store.attach(self.arena.memory)


@pytest.fixture(scope="module")
def encrypted(master: Master) -> Iterator[EncryptedNode]:
    node = EncryptedNode(master)
    yield node
    node.close()


@needs_mooncake
class TestEncryptedMooncakeStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _node(self, encrypted: EncryptedNode) -> None:
        self.node = encrypted

    def open(self, path: Path) -> Counter:
        return Counter(Apart(self.node, f"{path.name}."), self.node.arena.memory)
