"""Staged values, plain and encrypted: the contracts, other keys, what the store sees."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from support.stores import SHARED, MemoryStore

from kvrecall.config import PoolConfig, RemoteConfig
from kvrecall.pool import Pool
from kvrecall.pool.cipher import TAG_BYTES, Cipher, make_key_file
from kvrecall.pool.remote.objects import make_store
from kvrecall.pool.remote.staged import StagedStore
from kvrecall.pool.remote.store import Store
from kvrecall.testing.blocks import chain, content, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.store_contract import Counter, StoreContract, names, value
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE

MIB = 1 << 20
OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)


class TestSealedWithSmallSections(StoreContract):
    """Batches that do not fit the memory for encrypted values go in parts."""

    def make(self, path: Path) -> Store:
        inner = make_store({"url": f"file://{path}/store"})
        return StagedStore(inner, Cipher([NEW, OLD]), section_bytes=3_100_000)


def encrypted(inner: Store, *keys: bytes, section_bytes: int = MIB) -> Counter:
    return Counter(StagedStore(inner, Cipher(keys), section_bytes=section_bytes))


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


def test_ciphers_work_where_a_stranger_does_not_reach() -> None:
    cipher = Meddled([OLD])
    cipher.stranger = Registered()
    counter = Counter(StagedStore(cipher.stranger, cipher, section_bytes=MIB))
    some = names(1)
    assert counter.put(some) == [True]
    assert counter.get(some) == [True]
    assert encrypted(cipher.stranger, OLD).get(some) == [True]


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
    with Pool.open(config) as pool:
        pool.register(NAMESPACE, BLOCK_BYTES)
        engine = Engine(pool, BLOCK_BYTES)
        engine.save(keys)
        assert pool.flush(keys, 60.0)
        assert store.inode != os.fstat(pool.arena_handle().fd).st_ino
        store.overwrite()
        assert len(engine.recall(keys)) == 12
        engine.close()
    del SHARED["registered"]


def test_no_two_blocks_are_encrypted_with_the_same_key() -> None:
    cipher = Cipher([OLD])
    salts = set()
    for _ in range(100):
        tag = cipher.encrypt(b"label", [memoryview(b"data")], [memoryview(bytearray(4))])
        salts.add(tag[4:20])
    assert len(tag) == TAG_BYTES
    assert len(salts) == 100


@pytest.mark.parametrize("at", [0, 4, 20, 40, 5000, -1])
def test_a_flipped_bit_is_not_there(at: int) -> None:
    inner = MemoryStore()
    counter = encrypted(inner, OLD)
    counter.put(names(1))
    ((name, data),) = inner.values.items()
    changed = bytearray(data)
    changed[at] ^= 1
    inner.values[name] = bytes(changed)
    assert counter.get(names(1)) == [False]


def test_values_do_not_change_places() -> None:
    inner = MemoryStore()
    counter = encrypted(inner, OLD)
    counter.put(names(2))
    one, two = inner.values
    inner.values[one], inner.values[two] = inner.values[two], inner.values[one]
    assert counter.get(names(2)) == [False, False]


def test_a_value_too_large_for_the_memory_is_shed_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inner = MemoryStore()
    counter = encrypted(inner, OLD, section_bytes=10_000)
    some = names(3)
    assert counter.put(some) == [False] * 3
    assert counter.get(some) == [False] * 3
    assert counter.put(some, nbytes=9000) == [True] * 3
    assert caplog.text.count("are too large to be stored") == 1


def test_a_pool_by_its_settings(tmp_path: Path) -> None:
    """Blocks reach a second host through the store, and nothing in the store is plain."""
    path = tmp_path / "key"
    make_key_file(path)
    remote = RemoteConfig("support.stores:make_store", {"name": "encrypted"})
    config = PoolConfig(4 * MIB, remote=remote, encryption_key_file=path)
    keys = chain(NAMESPACE, 12)
    with Pool.open(config) as first:
        first.register(NAMESPACE, BLOCK_BYTES)
        Engine(first, BLOCK_BYTES).save(keys)
        assert first.flush(keys, 60.0)
    stored = SHARED.pop("encrypted")
    assert len(stored.values) == 12
    assert not any(content(key, 32) in b"".join(stored.values.values()) for key in keys)
    stored.is_closed = False
    SHARED["encrypted"] = stored
    with Pool.open(config) as second:
        second.register(NAMESPACE, BLOCK_BYTES)
        wait_until(lambda: second.find(keys).blocks == 12)
        engine = Engine(second, BLOCK_BYTES)
        assert len(engine.recall(keys)) == 12
        engine.close()
    del SHARED["encrypted"]
