"""The contract of a store over Mooncake, plain, encrypted and compressed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.pool.arena import Arena
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.remote.mooncake.settings import MooncakeSettings
from kvrecall.pool.remote.mooncake.store import MooncakeStore
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Object
from kvrecall.processes.service import Master
from kvrecall.testing.store_contract import Counter, StoreContract
from pool.remote.mooncake import needs_mooncake
from pool.remote.test_mooncake import Apart, Node, master, nodes
from pool.test_compression import kv

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
        return Counter(Apart(node, f"{path.name}."))


class CompressedNode(Node):
    """A host whose values are compressed, then also encrypted if there is a ``cipher``."""

    def __init__(self, master: Master, cipher: Cipher | None) -> None:
        self.arena = Arena.create(16 << 20)
        inner = MooncakeStore(MooncakeSettings.of(master.options()))
        self.store = StagedStore(inner, cipher, "zstd")  # type: ignore[assignment]


@pytest.fixture(scope="module", params=["plain", "encrypted"])
def compressed(master: Master, request: pytest.FixtureRequest) -> Iterator[CompressedNode]:
    cipher = Cipher([secrets.token_bytes(32)]) if request.param == "encrypted" else None
    node = CompressedNode(master, cipher)
    yield node
    node.close()


@needs_mooncake
def test_values_that_shrink(compressed: CompressedNode) -> None:
    """Mooncake gets values whose size is not known before."""
    store, arena = compressed.store, compressed.arena.memory
    names = [f"shrinks{seed}" for seed in range(8)]
    nbytes = 300_000
    for place, name in enumerate(names):
        part = arena[place * nbytes : (place + 1) * nbytes]
        part[:] = kv(nbytes, seed=place)
        assert store.put([Object(name, (memoryview(bytearray(64)), part))]) == [True]
        part[:] = bytes(nbytes)
    assert store.exists([*names, "never"]) == [True] * 8 + [False]
    objects = [
        Object(name, (memoryview(bytearray(64)), arena[at * nbytes : (at + 1) * nbytes]))
        for at, name in enumerate(names)
    ]
    assert store.get(objects) == [True] * 8
    for place, item in enumerate(objects):
        assert item.parts[1] == kv(nbytes, seed=place)
    given, stored = store.sizes  # type: ignore[attr-defined]
    assert stored < given
    store.remove(names)
    assert store.exists(names) == [False] * 8
