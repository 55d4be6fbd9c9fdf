"""The checksum of a block is computed once for all tiers, and never outlives the bytes it is of."""

from __future__ import annotations

import mmap
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.stores import MemoryStore

from kvrecall.block import BlockKey, TierName
from kvrecall.config import Compression, DiskConfig, RemoteConfig
from kvrecall.pool import tier as tiers
from kvrecall.pool.cipher import Cipher, make_key_file
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import Packer, make_codec
from kvrecall.pool.remote.tier import RemoteTier, name_of
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Checksum, Done, Get, Outcome, Put, Tier, checksum_of
from kvrecall.testing import chain, content, wait_until
from pool.inside import blocks_of
from pool.remote.pools import NAMESPACE, NBYTES, OpenPool, recall, save

MIB = 1 << 20


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[BlockKey]:
    """The keys of which a checksum was computed in order to store a block."""
    keys: list[BlockKey] = []

    def counted(key: BlockKey, data: memoryview) -> bytes:
        keys.append(key)
        return checksum_of(key, data)

    monkeypatch.setattr(tiers, "checksum_of", counted)
    return keys


# -- once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("remote_write", ["through", "back"])
def test_disk_and_store_share_a_checksum(
    open_pool: OpenPool,
    store: MemoryStore,
    tmp_path: Path,
    computed: list[BlockKey],
    remote_write: str,
) -> None:
    """Also if the store gets the blocks later."""
    keys = chain(NAMESPACE, 30)
    pool = open_pool(tmp_path / "disk", remote_write=remote_write)
    save(pool, keys)
    wait_until(lambda: len(store.values) == (30 if remote_write == "through" else 0))
    wait_until(lambda: pool.stats().queued_writes == 0)
    pool.close()
    assert len(store.values) == 30
    assert sorted(computed) == sorted(keys)
    assert recall(open_pool(), keys) == (TierName.REMOTE,) * 30


def test_what_comes_from_the_store_goes_to_disk_with_its_checksum(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path, computed: list[BlockKey]
) -> None:
    keys = chain(NAMESPACE, 10)
    save(open_pool(), keys)
    computed.clear()
    pool = open_pool(tmp_path / "disk")
    assert recall(pool, keys) == (TierName.REMOTE,) * 10
    assert pool.stats().tiers[1].blocks == 0
    assert recall(pool, keys) == (TierName.HOST,) * 10, "used again, they go to disk"
    wait_until(lambda: pool.stats().tiers[1].blocks == 10)
    assert computed == []
    pool.close()
    store.values.clear()
    assert recall(open_pool(tmp_path / "disk"), keys) == (TierName.DISK,) * 10


def test_of_threads_that_need_a_checksum_one_computes_it(computed: list[BlockKey]) -> None:
    (key,) = chain(NAMESPACE, 1)
    data = memoryview(content(key, 64 * MIB))
    one, begin, results = Checksum(), threading.Barrier(4), []

    def need() -> None:
        begin.wait()
        results.append(one.of(key, data))

    threads = [threading.Thread(target=need) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [checksum_of(key, data)] * 4
    assert computed == [key]


@pytest.mark.parametrize(("remote_write", "known"), [("through", False), ("back", True)])
def test_a_checksum_is_kept_while_the_block_is_owed_to_a_tier(
    open_pool: OpenPool, tmp_path: Path, remote_write: str, known: bool
) -> None:
    keys = chain(NAMESPACE, 5)
    pool = open_pool(tmp_path / "disk", remote_write=remote_write)
    save(pool, keys)
    blocks = [block for block in blocks_of(pool) if block.key in keys]
    wait_until(lambda: not any(block.io_refs for block in blocks))
    assert [block.checksum is not None for block in blocks] == [known] * 5


# -- of these bytes and no others ----------------------------------------------------------


def test_what_changed_in_memory_after_it_was_written_is_found_damaged(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    """A byte flips between the write to disk and that to the store: the store's copy is refused,
    the disk's is right. Without the first checksum the wrong byte would have got a right one."""
    keys = chain(NAMESPACE, 3)
    pool = open_pool(tmp_path / "disk", remote_write="back")
    offsets = save(pool, keys)
    pool.arena.view(offsets[1], NBYTES)[5000] ^= 1
    pool.close()
    assert len(store.values) == 3
    other = open_pool()
    assert recall(other, keys) == (TierName.REMOTE,)
    assert other.stats().tiers[-1].corrupt == 1
    wait_until(lambda: name_of(keys[1]) not in store.values)
    assert recall(open_pool(tmp_path / "disk"), keys) == (TierName.DISK,) * 3


def test_a_slot_that_is_used_again_has_no_old_checksum(
    open_pool: OpenPool, store: MemoryStore, tmp_path: Path
) -> None:
    """Other blocks in the slots of dropped ones, and the same keys anew with other bytes."""
    first, second = chain(NAMESPACE, 20), chain(NAMESPACE, 20, "second")
    pool = open_pool(tmp_path / "disk", remote_write="back")
    slots = save(pool, first)
    wait_until(lambda: not any(block.io_refs for block in blocks_of(pool)))
    pool.drop(first)
    assert set(save(pool, second)) & set(slots), "other slots: nothing is shown"
    save(pool, first, salt=b"anew")
    pool.close()
    assert len(store.values) == 40
    for other in (open_pool(), open_pool(tmp_path / "disk")):
        assert len(recall(other, second)) == 20
        assert len(recall(other, first, salt=b"anew")) == 20
        assert sum(tier.corrupt for tier in other.stats().tiers) == 0


@pytest.mark.parametrize(
    ("disk_first", "disk_compression", "remote_compression", "key_file"),
    [
        (True, "none", "zstd", False),
        (True, "zstd", "none", True),
        (False, "zstd", "zstd", False),
        (False, "none", "none", True),
        (False, "zstd", "zstd", True),
    ],
)
def test_every_form_of_a_block_comes_back(
    open_pool: OpenPool,
    store: MemoryStore,
    tmp_path: Path,
    disk_first: bool,
    disk_compression: str,
    remote_compression: str,
    key_file: bool,
) -> None:
    """Whichever tier computes the checksum first, plain, compressed or encrypted: both have the
    block, and what came from one goes on to the other."""
    forms: dict[str, object] = {"remote_compression": remote_compression}
    if key_file:
        make_key_file(tmp_path / "key")
        forms["encryption_key_file"] = str(tmp_path / "key")
    on_disk = forms | {"disk_compression": disk_compression}
    keys = chain(NAMESPACE, 12)
    if disk_first:
        pool = open_pool(tmp_path / "disk", remote_write="back", **on_disk)
        save(pool, keys)
    else:
        save(open_pool(**forms), keys)
        pool = open_pool(tmp_path / "disk", **on_disk)
        assert recall(pool, keys) == (TierName.REMOTE,) * 12
        assert recall(pool, keys) == (TierName.HOST,) * 12
        wait_until(lambda: pool.stats().tiers[1].blocks == 12)
    pool.close()
    assert len(store.values) == 12
    assert recall(open_pool(**forms), keys) == (TierName.REMOTE,) * 12
    store.values.clear()
    assert recall(open_pool(tmp_path / "disk", **on_disk), keys) == (TierName.DISK,) * 12


def test_a_compressed_form_has_a_checksum_of_its_own() -> None:
    """Also if that of the plain block was known before, or is asked for after."""
    (key,) = chain(NAMESPACE, 1)
    data = memoryview(bytearray(content(key, 65536)))
    for known in (None, checksum_of(key, data)):
        put = Put(key, None, 0, data, len(data), checksum=Checksum(known))
        (packed,) = Packer("zstd").pack([put])
        assert packed.nbytes < put.nbytes
        assert packed.compute_checksum() == checksum_of(key, packed.data[: packed.nbytes])
        assert put.compute_checksum() == checksum_of(key, data)


# -- what tiers make of a known one ----------------------------------------------------------


def disk_tier(folder: Path, compression: Compression = "none", encrypts: bool = False) -> Tier:
    cipher = Cipher([secrets.token_bytes(32)]) if encrypts else None
    return DiskTier(DiskConfig(folder, 64 * MIB), codec=make_codec(cipher, compression))


def remote_tier(folder: Path) -> Tier:
    return RemoteTier(MemoryStore(), RemoteConfig("memory"))


def ended(tier: Tier) -> Done:
    done: list[Done] = []

    def one_is_there() -> bool:
        done.extend(tier.poll(0.01))
        return bool(done)

    wait_until(one_is_there)
    return done[0]


def put_and_get(tier: Tier, key: BlockKey, known: bytes | None) -> tuple[Done, bytes]:
    """Puts the block ``content(key)`` and gets it; what the get ended with, and the bytes got."""
    slot = memoryview(mmap.mmap(-1, slot_bytes_of(NBYTES)))
    slot[:NBYTES] = content(key, NBYTES)
    tier.register(NAMESPACE, NBYTES)
    try:
        tier.submit_put([Put(key, None, 0, slot, NBYTES, checksum=Checksum(known))])
        assert ended(tier).outcome is Outcome.STORED
        into = memoryview(mmap.mmap(-1, len(slot)))
        tier.submit_get([Get(key, into)])
        return ended(tier), bytes(into[:NBYTES])
    finally:
        tier.close()


@pytest.mark.parametrize("make", [disk_tier, remote_tier])
def test_a_known_checksum_is_stored_and_told_by_a_get(
    tmp_path: Path, make: Callable[[Path], Tier], computed: list[BlockKey]
) -> None:
    (key,) = chain(NAMESPACE, 1)
    right = checksum_of(key, memoryview(content(key, NBYTES)))
    done, got = put_and_get(make(tmp_path), key, right)
    assert (done, got) == (Done(key, Outcome.LOADED, right), content(key, NBYTES))
    assert computed == []


@pytest.mark.parametrize("make", [disk_tier, remote_tier])
def test_bytes_that_are_not_those_of_the_known_checksum_are_never_loaded(
    tmp_path: Path, make: Callable[[Path], Tier]
) -> None:
    key, other = chain(NAMESPACE, 2)
    for number, wrong in enumerate(
        (
            checksum_of(other, memoryview(content(key, NBYTES))),
            checksum_of(key, memoryview(content(other, NBYTES))),
        )
    ):
        done, _ = put_and_get(make(tmp_path / str(number)), key, wrong)
        assert done == Done(key, Outcome.CORRUPT)


@pytest.mark.parametrize(
    ("compression", "encrypts"), [("zstd", False), ("none", True), ("zstd", True)]
)
def test_a_tag_of_another_form_is_not_told_as_the_checksum(
    tmp_path: Path, compression: Compression, encrypts: bool
) -> None:
    (key,) = chain(NAMESPACE, 1)
    done, got = put_and_get(disk_tier(tmp_path, compression, encrypts), key, None)
    assert (done, got) == (Done(key, Outcome.LOADED, None), content(key, NBYTES))
