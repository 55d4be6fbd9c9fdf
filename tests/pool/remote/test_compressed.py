"""Compressed values in a remote store: the contracts, hosts with and without, by the settings."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from support.stores import SHARED, MemoryStore

from kvrecall.config import Compression, PoolConfig, RecallSettings, RemoteConfig
from kvrecall.errors import ConfigError
from kvrecall.pool import Pool
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.remote.objects import make_store
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Object, Store
from kvrecall.testing.blocks import chain, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.store_contract import StoreContract
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE
from pool.test_compression import kv

MIB = 1 << 20
KEY = secrets.token_bytes(32)


class TestCompressedAndEncryptedDirectory(StoreContract):
    def make(self, path: Path) -> Store:
        inner = make_store({"url": f"file://{path}/store"})
        return StagedStore(inner, Cipher([KEY]), "lz4", section_bytes=3_100_000)


class Host:
    """A host whose blocks shrink: ``put`` and ``get`` of values of 64 bytes and 64 KiB."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, *seeds: int) -> list[bool]:
        return self.store.put([Object(f"v{seed}", _value(seed)) for seed in seeds])

    def get(self, *seeds: int) -> list[bool]:
        """Asserts that values that are found are right."""
        rooms = [(memoryview(bytearray(64)), memoryview(bytearray(65_536))) for _ in seeds]
        objects = [Object(f"v{seed}", room) for seed, room in zip(seeds, rooms, strict=True)]
        found = self.store.get(objects)
        for seed, room, is_there in zip(seeds, rooms, found, strict=True):
            if is_there:
                assert b"".join(room) == b"".join(_value(seed))
        return found


def _value(seed: int) -> tuple[memoryview, memoryview]:
    return memoryview(bytes([seed]) * 64), kv(65_536, seed=seed)


def host(inner: Store, compression: Compression = "zstd", cipher: Cipher | None = None) -> Host:
    return Host(StagedStore(inner, cipher, compression))


def test_the_store_holds_fewer_bytes() -> None:
    inner = MemoryStore()
    one = host(inner)
    assert one.put(1, 2, 3) == [True] * 3
    held = sum(map(len, inner.values.values()))
    assert held < 0.9 * 3 * (65_536 + 64)
    assert one.get(1, 2, 3, 4) == [True, True, True, False]
    assert isinstance(one.store, StagedStore)
    assert one.store.sizes == (3 * (65_536 + 64), held)


def test_hosts_with_and_without_compression_share_a_store() -> None:
    """One with it finds both forms; one without finds what is plain, and harms nothing."""
    inner = MemoryStore()
    with_it, without = host(inner), Host(inner)
    with_it.put(1, 2)
    without.put(3)
    assert with_it.store.exists(["v1", "v2", "v3", "v4"]) == [True, True, True, False]
    assert with_it.get(1, 2, 3, 4) == [True, True, True, False]
    assert without.store.exists(["v1", "v3"]) == [False, True]
    assert without.get(1, 3) == [False, True]
    assert without.put(1) == [True]
    assert without.get(1) == [True]
    assert with_it.get(1) == [True]
    with_it.store.remove(["v1", "v2", "v3"])
    assert inner.values == {}


def test_another_codec_is_no_other_store() -> None:
    inner = MemoryStore()
    host(inner).put(1)
    assert host(inner, "lz4").get(1) == [True]
    assert host(inner, "auto").get(1) == [True]


def test_a_slow_store_holds_compressed_values_by_itself() -> None:
    inner = MemoryStore()
    inner.delay_s = 0.05
    one = host(inner, "auto")
    one.put(1)  # nothing is known before
    assert set(inner.values) == {"v1"}
    one.put(2)
    assert set(inner.values) == {"v1", "v2-z"}
    assert one.get(1, 2) == [True, True]


@pytest.mark.parametrize("at", [0, 63, 64, 72, 96, 5000, -1])
def test_a_flipped_bit_is_not_there(at: int) -> None:
    inner = MemoryStore()
    one = host(inner)
    one.put(1)
    changed = bytearray(inner.values["v1-z"])
    changed[at] ^= 1
    inner.values["v1-z"] = bytes(changed)
    if 0 <= at < 64:  # the tier's header, which the tier checks
        with pytest.raises(AssertionError):
            one.get(1)
    else:
        assert one.get(1) == [False]


def test_a_value_that_was_cut_off_is_not_there() -> None:
    inner = MemoryStore()
    one = host(inner)
    one.put(1)
    whole = inner.values["v1-z"]
    for nbytes in (0, 63, 64, 95, 96, len(whole) - 1):
        inner.values["v1-z"] = whole[:nbytes]
        assert one.get(1) == [False]


def test_encrypted_values_are_compressed_before() -> None:
    inner = MemoryStore()
    one = host(inner, cipher=Cipher([KEY]))
    one.put(1)
    (stored,) = inner.values.values()
    assert len(stored) < 0.9 * 65_536
    assert b"kvrz" not in stored
    assert one.get(1) == [True]


def test_a_value_too_large_for_the_memory_is_shed_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Host(StagedStore(MemoryStore(), None, "zstd", section_bytes=10_000))
    assert one.put(1, 2) == [False, False]
    assert one.get(1) == [False]
    assert caplog.text.count("are too large to be stored") == 1


class _ExactStore:
    """A store as it was before there was compression."""

    exposed = ""

    def exists(self, names: object) -> list[bool]:
        return []

    def put(self, objects: object) -> list[bool]:
        return []

    def get(self, objects: object) -> list[bool]:
        return []

    def remove(self, names: object) -> None: ...

    def close(self) -> None: ...


def exact_store(options: object) -> _ExactStore:
    return _ExactStore()


def test_a_store_that_gets_known_sizes_only_is_refused() -> None:
    remote = RemoteConfig("pool.remote.test_compressed:exact_store", compression="zstd")
    with pytest.raises(ConfigError, match=r"remote_compression is 'zstd'.*needs get_up_to"):
        Pool.open(PoolConfig(4 * MIB, remote=remote))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"remote_compression": "zip"}, "allowed: none, lz4, zstd, auto"),
        ({"remote_compression": "zstd"}, "remote_compression is set but remote is not"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RecallSettings.from_mapping(settings)


@pytest.mark.parametrize("compression", ["lz4", "zstd", "auto"])
def test_a_pool_by_its_settings(compression: str) -> None:
    """Blocks reach a second host through the store, bit for bit."""
    name = f"compressed with {compression}"
    pool = RecallSettings.from_mapping(
        {
            "host_size": 4 * MIB,
            "remote": {"kind": "support.stores:make_store", "name": name},
            "remote_compression": compression,
        }
    ).pool
    keys = chain(NAMESPACE, 12)
    with Pool.open(pool) as first:
        first.register(NAMESPACE, BLOCK_BYTES)
        Engine(first, BLOCK_BYTES).save(keys)
        assert first.flush(keys, 60.0)
        if compression != "auto":
            remote = first.stats().tiers[-1]
            assert remote.given_bytes >= 12 * BLOCK_BYTES
            assert remote.compressed_bytes > 0
    stored = SHARED[name]
    assert len(stored.values) == 12
    stored.is_closed = False
    with Pool.open(pool) as second:
        second.register(NAMESPACE, BLOCK_BYTES)
        wait_until(lambda: second.find(keys).blocks == 12)
        engine = Engine(second, BLOCK_BYTES)
        assert len(engine.recall(keys)) == 12
        engine.close()
    del SHARED[name]
