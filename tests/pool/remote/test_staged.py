"""Values passed on encrypted and compressed: the contracts, other keys and forms, what the store
sees."""

from __future__ import annotations

import os
import secrets
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.stores import SHARED, MemoryStore

from kvrecall.config import Compression, PoolConfig, RecallSettings, RemoteConfig
from kvrecall.errors import ConfigError
from kvrecall.pool import Pool
from kvrecall.pool.cipher import TAG_BYTES, Cipher, make_key_file
from kvrecall.pool.remote.objects import make_store
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Object, Store
from kvrecall.testing import chain, content, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.store_contract import Counter, StoreContract, names, value
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE
from pool.test_compression import kv

MIB = 1 << 20
OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)


class TestSealedWithSmallSections(StoreContract):
    """Batches that do not fit the memory for encrypted values go in parts."""

    compression: Compression = "none"

    def make(self, path: Path) -> Store:
        inner = make_store({"url": f"file://{path}/store"})
        return StagedStore(inner, Cipher([NEW, OLD]), self.compression, section_bytes=3_100_000)


class TestCompressedAndEncrypted(TestSealedWithSmallSections):
    compression = "lz4"


def encrypted(inner: Store, *keys: bytes, section_bytes: int = MIB) -> Counter:
    return Counter(StagedStore(inner, Cipher(keys), section_bytes=section_bytes))


class Host:
    """A host whose blocks shrink: ``put`` and ``get`` of values of 64 bytes and 64 KiB."""

    def __init__(
        self, inner: Store, compression: Compression = "zstd", cipher: Cipher | None = None
    ) -> None:
        self.store = StagedStore(inner, cipher, compression)

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


# -- encrypted ----------------------------------------------------------------------------------


def test_the_store_sees_no_plain_byte_and_no_plain_header() -> None:
    inner = MemoryStore()
    some = names(8)
    encrypted(inner, OLD).put(some)
    seen = b"".join(inner.values.values())
    assert len(seen) > 8 * 20_000
    for name in some:
        data = value(name, 20_000)
        assert not any(data[at : at + 16] in seen for at in (0, 48, 64, 10_000, 19_984))


def test_another_key_and_no_key_do_not_meet_it() -> None:
    inner = MemoryStore()
    some = names(4)
    encrypted(inner, OLD).put(some)
    for other in (encrypted(inner, NEW), Counter(inner)):
        assert other.store.exists(some) == [False] * 4
        assert other.get(some) == [False] * 4
        assert other.put(some) == [True] * 4
        assert other.get(some) == [True] * 4
    assert encrypted(inner, OLD).get(some) == [True] * 4


def test_rotation_keeps_what_the_old_key_encrypted() -> None:
    inner = MemoryStore()
    some = names(6)
    encrypted(inner, OLD).put(some[:3])
    both = encrypted(inner, NEW, OLD)
    both.put(some[3:])
    assert both.store.exists(some) == [True] * 6
    assert both.get(some) == [True] * 6
    assert encrypted(inner, NEW).get(some) == [False] * 3 + [True] * 3
    both.store.remove(some)
    assert inner.values == {}


class Registered(MemoryStore):
    """A store with memory that a stranger reaches: who overwrites it all when told to."""

    def attach(self, memory: memoryview, fd: int) -> None:
        self.memory, self.inode = memory, os.fstat(fd).st_ino

    def overwrite(self) -> None:
        self.memory[:] = b"\xff" * self.memory.nbytes


class Meddled(Cipher):
    """A cipher; before and after it works, the memory of ``stranger`` is overwritten."""

    stranger: Registered

    def encrypt(self, *arguments: Any) -> bytes:
        tag = super().encrypt(*arguments)
        self.stranger.overwrite()
        return tag

    def decrypt(self, *arguments: Any) -> bool:
        self.stranger.overwrite()
        return super().decrypt(*arguments)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_ciphers_work_where_a_stranger_does_not_reach(compression: Compression) -> None:
    cipher = Meddled([OLD])
    cipher.stranger = Registered()
    meddled = Counter(StagedStore(cipher.stranger, cipher, compression, section_bytes=MIB))
    right = Counter(StagedStore(cipher.stranger, Cipher([OLD]), compression, section_bytes=MIB))
    assert meddled.put(names(1)) == [True]
    assert meddled.get(names(1)) == [True]
    assert right.get(names(1)) == [True]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("key", [True, False], ids=["key", "no key"])
def test_the_arena_is_never_registered(tmp_path: Path, key: bool, compression: Any) -> None:
    if key:
        make_key_file(tmp_path / "key")
    store = SHARED["registered"] = Registered()
    remote = RemoteConfig(
        "support.stores:make_store", {"name": "registered"}, compression=compression
    )
    config = PoolConfig(
        4 * MIB, remote=remote, encryption_key_file=tmp_path / "key" if key else None
    )
    keys = chain(NAMESPACE, 12)
    with Pool.open(config) as pool, closing(Engine(pool, BLOCK_BYTES)) as engine:
        pool.register(NAMESPACE, BLOCK_BYTES)
        engine.save(keys)
        assert pool.flush(keys, 60.0)
        assert store.inode != os.fstat(pool.arena_handle().fd).st_ino
        store.overwrite()
        assert len(engine.recall(keys)) == 12
    del SHARED["registered"]


def test_no_two_blocks_are_encrypted_with_the_same_key() -> None:
    cipher = Cipher([OLD])
    salts = set()
    for _ in range(100):
        tag = cipher.encrypt(b"label", [memoryview(b"data")], [memoryview(bytearray(4))])
        salts.add(tag[4:20])
    assert len(tag) == TAG_BYTES
    assert len(salts) == 100


def test_values_do_not_change_places() -> None:
    inner = MemoryStore()
    counter = encrypted(inner, OLD)
    counter.put(names(2))
    one, two = inner.values
    inner.values[one], inner.values[two] = inner.values[two], inner.values[one]
    assert counter.get(names(2)) == [False, False]


# -- compressed ---------------------------------------------------------------------------------


def test_the_store_holds_fewer_bytes() -> None:
    inner = MemoryStore()
    host = Host(inner)
    assert host.put(1, 2, 3) == [True] * 3
    held = sum(map(len, inner.values.values()))
    assert held < 0.9 * 3 * (65_536 + 64)
    assert host.get(1, 2, 3, 4) == [True, True, True, False]
    assert host.store.sizes == (3 * (65_536 + 64), held)
    for compression in ("lz4", "auto"):
        assert Host(inner, compression).get(1) == [True], "another codec is no other store"


def test_hosts_with_and_without_compression_share_a_store() -> None:
    """One with it finds both forms; one without finds what is plain, and harms nothing."""
    inner = MemoryStore()
    with_it, without = Host(inner), Host(inner, "none")
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


def test_a_slow_store_holds_compressed_values_by_itself() -> None:
    inner = MemoryStore()
    inner.delay_s = 0.05
    host = Host(inner, "auto")
    host.put(1)  # nothing is known before
    assert set(inner.values) == {"v1"}
    host.put(2)
    assert set(inner.values) == {"v1", "v2-z"}
    assert host.get(1, 2) == [True, True]


def test_encrypted_values_are_compressed_before() -> None:
    inner = MemoryStore()
    host = Host(inner, cipher=Cipher([OLD]))
    host.put(1)
    (stored,) = inner.values.values()
    assert len(stored) < 0.9 * 65_536
    assert b"kvrz" not in stored
    assert host.get(1) == [True]


@pytest.mark.parametrize("at", [0, 4, 20, 40, 63, 64, 72, 96, 5000, -1])
@pytest.mark.parametrize("form", ["encrypted", "compressed", "both"])
def test_a_flipped_bit_is_not_there(at: int, form: str) -> None:
    inner = MemoryStore()
    cipher = None if form == "compressed" else Cipher([OLD])
    host = Host(inner, "none" if form == "encrypted" else "zstd", cipher)
    host.put(1)
    ((name, data),) = inner.values.items()
    changed = bytearray(data)
    changed[at] ^= 1
    inner.values[name] = bytes(changed)
    if form == "compressed" and 0 <= at < 64:  # the tier's header, which the tier checks
        with pytest.raises(AssertionError):
            host.get(1)
    else:
        assert host.get(1) == [False]


@pytest.mark.parametrize("cipher", [None, Cipher([OLD])], ids=["plain", "encrypted"])
def test_a_value_that_was_cut_off_is_not_there(cipher: Cipher | None) -> None:
    inner = MemoryStore()
    host = Host(inner, cipher=cipher)
    host.put(1)
    ((name, whole),) = inner.values.items()
    for nbytes in (0, 40, 63, 64, 95, 96, len(whole) - 1):
        inner.values[name] = whole[:nbytes]
        assert host.get(1) == [False]


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_value_too_large_for_the_memory_is_shed_and_said(
    compression: Compression, caplog: pytest.LogCaptureFixture
) -> None:
    cipher = Cipher([OLD])
    counter = Counter(StagedStore(MemoryStore(), cipher, compression, section_bytes=10_000))
    some = names(3)
    assert counter.put(some) == [False] * 3
    assert counter.get(some) == [False] * 3
    assert counter.put(some, nbytes=9000) == [True] * 3
    assert caplog.text.count("are too large to be stored") == 1


# -- by the settings ----------------------------------------------------------------------------


class ExactStore(MemoryStore):
    """A store as it was before there was compression."""

    get_up_to = None  # type: ignore[assignment]


def exact_store(options: object) -> ExactStore:
    return ExactStore()


def test_a_store_that_gets_known_sizes_only_is_refused() -> None:
    remote = RemoteConfig("pool.remote.test_staged:exact_store", compression="zstd")
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


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd", "auto"])
def test_a_pool_by_its_settings(compression: str, tmp_path: Path) -> None:
    """Blocks reach a second host through the store, bit for bit, and nothing in it is plain."""
    make_key_file(tmp_path / "key")
    name = f"by settings, {compression}"
    pool = RecallSettings.from_mapping(
        {
            "host_size": 4 * MIB,
            "remote": {"kind": "support.stores:make_store", "name": name},
            "remote_compression": compression,
            "encryption_key_file": str(tmp_path / "key"),
        }
    ).pool
    keys = chain(NAMESPACE, 12)
    with Pool.open(pool) as first:
        first.register(NAMESPACE, BLOCK_BYTES)
        Engine(first, BLOCK_BYTES).save(keys)
        assert first.flush(keys, 60.0)
        if compression in ("lz4", "zstd"):
            remote = first.stats().tiers[-1]
            assert remote.given_bytes >= 12 * BLOCK_BYTES
            assert remote.compressed_bytes > 0
    stored = SHARED[name]
    assert len(stored.values) == 12
    assert not any(content(key, 32) in b"".join(stored.values.values()) for key in keys)
    stored.is_closed = False
    with Pool.open(pool) as second, closing(Engine(second, BLOCK_BYTES)) as engine:
        second.register(NAMESPACE, BLOCK_BYTES)
        wait_until(lambda: second.find(keys).blocks == 12)
        assert len(engine.recall(keys)) == 12
    del SHARED[name]
