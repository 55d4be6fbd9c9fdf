"""Compressed blocks on disk: the contract, bytes, room, folders written otherwise, damage."""

from __future__ import annotations

import mmap
import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrecall.block import BlockKey
from kvrecall.config import Compression, DiskConfig, RecallSettings
from kvrecall.errors import ConfigError
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.compression import Compressor
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk import codec as disk_codec
from kvrecall.pool.disk.codec import make_codec
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Get, Outcome, Put, Tier
from kvrecall.testing.blocks import chain, wait_until
from kvrecall.testing.tier_contract import NAMESPACE, TierContract
from pool.test_compression import kv, noise

MIB = 1 << 20
KIB64 = 65_536 + 8
KEY = secrets.token_bytes(32)


def tier(
    folder: Path, compression: Compression, nbytes: int = 64 * MIB, key: bytes | None = None
) -> DiskTier:
    codec = make_codec(None if key is None else Cipher([key]), compression)
    return DiskTier(DiskConfig(folder, nbytes), "lru", codec=codec)


class TestCompressedAndEncryptedDiskTier(TierContract):
    shrinks = True

    def make(self, path: Path) -> Tier:
        return tier(path, "lz4", key=KEY)


class Blocks:
    """Blocks like KV, or noise, in a tier that it closes."""

    def __init__(self, of: DiskTier, nbytes: int = KIB64, noisy: bool = False) -> None:
        self.tier = of
        self.nbytes = nbytes
        self._noisy = noisy
        of.register(NAMESPACE, nbytes)

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.close()

    def value(self, place: int) -> memoryview:
        return (noise if self._noisy else kv)(self.nbytes, seed=place)

    def put(self, keys: Sequence[BlockKey], first: int = 0) -> list[Outcome]:
        puts = []
        for place, key in enumerate(keys, first):
            slot = memoryview(mmap.mmap(-1, slot_bytes_of(self.nbytes)))
            slot[: self.nbytes] = self.value(place)
            puts.append(Put(key, keys[place - first - 1] if place > first else None, 0, slot,
                            self.nbytes))  # fmt: skip
        self.tier.submit_put(puts)
        return self._ended(len(puts))

    def get(self, keys: Sequence[BlockKey], first: int = 0) -> list[Outcome]:
        """Asserts that what is loaded is right."""
        slots = [memoryview(mmap.mmap(-1, slot_bytes_of(self.nbytes))) for _ in keys]
        self.tier.submit_get([Get(k, slot) for k, slot in zip(keys, slots, strict=True)])
        outcomes: dict[BlockKey, Outcome] = {}

        def all_done() -> bool:
            outcomes.update((done.key, done.outcome) for done in self.tier.poll(0.01))
            return len(outcomes) == len(keys)

        wait_until(all_done)
        for place, (key, slot) in enumerate(zip(keys, slots, strict=True), first):
            if outcomes[key] is Outcome.LOADED:
                assert slot[: self.nbytes] == self.value(place)
        return [outcomes[key] for key in keys]

    def _ended(self, count: int) -> list[Outcome]:
        done: list[Outcome] = []

        def all_done() -> bool:
            done.extend(one.outcome for one in self.tier.poll(0.01))
            return len(done) == count

        wait_until(all_done)
        return done


@pytest.mark.parametrize("key", [None, KEY], ids=["checksum", "encrypted"])
@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
@pytest.mark.parametrize("nbytes", [8, 4096, 8184, KIB64, 3 * MIB])
def test_bytes_return_also_after_opening_again(
    tmp_path: Path, compression: Compression, key: bytes | None, nbytes: int
) -> None:
    keys = chain(NAMESPACE, 6)
    with Blocks(tier(tmp_path, compression, key=key), nbytes) as blocks:
        assert blocks.put(keys) == [Outcome.STORED] * 6
        assert blocks.get(keys) == [Outcome.LOADED] * 6
    with Blocks(tier(tmp_path, compression, key=key), nbytes) as blocks:
        assert blocks.get(keys[::-1][:1], 5) == [Outcome.LOADED]
        assert blocks.get(keys) == [Outcome.LOADED] * 6
        assert [outcome for _, outcome in blocks.tier.check(keys)] == [Outcome.LOADED] * 6


def test_the_same_disk_holds_more_blocks(tmp_path: Path) -> None:
    """Capacity is counted in stored bytes, and the statistics say what became of the blocks."""
    keys = chain(NAMESPACE, 400)
    held = {}
    for compression in ("none", "zstd"):
        with Blocks(tier(tmp_path / compression, compression, 16 * MIB)) as blocks:  # type: ignore[arg-type]
            for at in range(0, len(keys), 40):
                blocks.put(keys[at : at + 40], at)
            stats = blocks.tier.stats()
            held[compression] = stats.blocks
            there = [key for key in keys if blocks.tier.contains(key)]
            assert len(there) == stats.blocks
            assert stats.used_bytes <= 16 * MIB
            assert blocks.get(there[:1], keys.index(there[0])) == [Outcome.LOADED]
    assert held["zstd"] > 1.25 * held["none"]
    shrunk_to = stats.compressed_bytes / stats.given_bytes
    assert shrunk_to < 0.85
    assert held["zstd"] > 0.95 * held["none"] / shrunk_to, "all that compression saves"
    assert stats.given_bytes == 400 * KIB64


def test_what_does_not_shrink_is_stored_plain_and_read_in_place(tmp_path: Path) -> None:
    keys = chain(NAMESPACE, 30)
    with Blocks(tier(tmp_path, "zstd"), noisy=True) as blocks:
        assert blocks.put(keys) == [Outcome.STORED] * 30
        assert blocks.get(keys) == [Outcome.LOADED] * 30
        stats = blocks.tier.stats()
        assert stats.compressed_bytes == stats.given_bytes


def test_a_folder_may_be_opened_with_and_without(tmp_path: Path) -> None:
    keys = chain(NAMESPACE, 12)
    ways: list[Compression] = ["none", "zstd", "none", "lz4"]
    for turn, compression in enumerate(ways):
        with Blocks(tier(tmp_path, compression)) as blocks:
            assert blocks.get(keys[: 3 * turn]) == [Outcome.LOADED] * (3 * turn)
            mine = keys[3 * turn : 3 * turn + 3]
            assert blocks.put(mine, 3 * turn) == [Outcome.STORED] * 3
            assert blocks.get(keys[: 3 * turn + 3]) == [Outcome.LOADED] * (3 * turn + 3)


def test_blocks_of_another_size_are_not_taken_for_compressed_ones(tmp_path: Path) -> None:
    keys = chain(NAMESPACE, 3)
    with Blocks(tier(tmp_path, "zstd"), 30_000) as blocks:
        blocks.put(keys)
        blocks.tier.register(NAMESPACE, KIB64)
        assert not any(blocks.tier.contains(key) for key in keys)
    with Blocks(tier(tmp_path, "zstd"), KIB64) as blocks:
        assert blocks.put(keys) == [Outcome.STORED] * 3
        assert blocks.get(keys) == [Outcome.LOADED] * 3


@pytest.mark.parametrize("key", [None, KEY], ids=["checksum", "encrypted"])
def test_damage_is_found_and_the_block_dropped(tmp_path: Path, key: bytes | None) -> None:
    """By the tag of the stored bytes, which are compressed, then encrypted."""
    keys = chain(NAMESPACE, 4)
    with Blocks(tier(tmp_path, "zstd", key=key)) as blocks:
        blocks.put(keys)
        stats = blocks.tier.stats()
        assert stats.compressed_bytes < 0.85 * stats.given_bytes
    (slab,) = tmp_path.glob("slab-*.kv")
    assert (b"kvrz" in slab.read_bytes()) == (key is None), "frames are encrypted too"
    with slab.open("r+b") as file:
        file.seek(4096 + 20_000)  # inside the first block's frame
        file.write(b"\xff" * 64)
    with Blocks(tier(tmp_path, "zstd", key=key)) as blocks:
        outcomes = blocks.get(keys)
        assert outcomes.count(Outcome.CORRUPT) == 1
        assert outcomes.count(Outcome.LOADED) == 3
        lost = keys[outcomes.index(Outcome.CORRUPT)]
        assert not blocks.tier.contains(lost)


def test_only_threads_of_the_tier_compress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the one that stores or asks, which may be the engine's."""
    seen: set[str] = set()
    ours = Compressor.pack

    def watched(self: Compressor, *args: Any) -> int:
        seen.add(threading.current_thread().name)
        return ours(self, *args)

    monkeypatch.setattr(Compressor, "pack", watched)
    theirs = disk_codec.unpack

    def unpack(frame: memoryview, into: memoryview) -> bool:
        seen.add(threading.current_thread().name)
        return theirs(frame, into)

    monkeypatch.setattr(disk_codec, "unpack", unpack)
    keys = chain(NAMESPACE, 40)
    for compression in ("zstd", "auto"):
        with Blocks(tier(tmp_path / compression, compression)) as blocks:  # type: ignore[arg-type]
            assert blocks.put(keys) == [Outcome.STORED] * 40
            assert blocks.get(keys) == [Outcome.LOADED] * 40
    assert seen
    assert all(name.startswith(("kvrecall-flush", "kvrecall-read")) for name in seen), seen


def test_the_setting_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="disk_compression is set but disk_path is not"):
        RecallSettings.from_mapping({"disk_compression": "zstd"})
