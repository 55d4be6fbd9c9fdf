"""Blocks encrypted and compressed on disk: the contracts, the bytes in files, folders written
otherwise, wrong keys, rotation, damage."""

from __future__ import annotations

import mmap
import random
import secrets
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.disks import DiskBench, DiskFaults, FaultyIo, open_disk
from typer.testing import CliRunner

from kvrecall.block import BlockKey
from kvrecall.config import Compression, DiskConfig, PoolConfig, RecallSettings
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool import Pool
from kvrecall.pool.cipher import TAG_BYTES, Cipher, make_key_file, read_keys, rotate_key_file
from kvrecall.pool.compression import Compressor
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk import codec as disk_codec
from kvrecall.pool.disk.codec import BlockCodec, make_codec
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Get, Outcome, Put, Tier
from kvrecall.pool_cli import app
from kvrecall.testing import chain, content, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, TierContract
from pool.test_compression import kv, noise

MIB = 1 << 20
KEYS = chain(NAMESPACE, 24)
OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)


def open_tier(folder: Path, *keys: bytes, block_bytes: int = BLOCK_BYTES) -> DiskBench:
    codec = BlockCodec(Cipher(keys)) if keys else None
    return open_disk(folder, 32 * MIB, block_bytes, codec=codec)


def fill(folder: Path, *keys: bytes, blocks: list[BlockKey] = KEYS) -> None:
    bench = open_tier(folder, *keys)
    assert bench.put(blocks) == [Outcome.STORED] * len(blocks)
    bench.tier.close()


def in_the_clear(folder: Path, blocks: list[BlockKey] = KEYS) -> int:
    """How many blocks of ``blocks`` a look at the files of the folder finds bytes of."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return sum(any(content(key, 64) in data for data in files) for key in blocks)


class TestSealedBufferedDiskTier(TierContract):
    def make(self, path: Path) -> Tier:
        io = FaultyIo(DiskFaults(no_direct=True))
        return DiskTier(DiskConfig(path, 64 * MIB), io=io, codec=BlockCodec(Cipher([NEW, OLD])))


def test_the_tag_of_an_encrypted_block_is_no_checksum() -> None:
    assert BlockCodec().checksum_in(b"tag", 9, 9) == b"tag"
    assert BlockCodec(Cipher([NEW])).checksum_in(b"tag", 9, 9) is None


# -- the cipher ---------------------------------------------------------------------------------


def test_a_block_decrypts_only_as_it_was_encrypted() -> None:
    cipher = Cipher([OLD])
    plain = memoryview(bytearray(random.Random(1).randbytes(5000)))
    encrypted, opened = memoryview(bytearray(5000)), memoryview(bytearray(5000))
    proof = cipher.encrypt(b"label", [plain], [encrypted])
    assert len(proof) == TAG_BYTES
    assert cipher.decrypt(b"label", proof, [encrypted], [opened])
    assert opened == plain
    again = memoryview(bytearray(5000))
    assert cipher.encrypt(b"label", [plain], [again]) != proof, "the nonce is fresh"
    assert again != encrypted
    assert not cipher.decrypt(b"lab", proof, [encrypted], [opened])
    assert bytes(opened) == bytes(5000), "nothing unproven is left behind"
    assert not Cipher([NEW]).decrypt(b"label", proof, [encrypted], [opened])
    assert Cipher([NEW, OLD]).decrypt(b"label", proof, [encrypted], [opened])
    for at in range(TAG_BYTES):
        assert not cipher.decrypt(b"label", _flipped(proof, at), [encrypted], [opened])
    for at in (0, 2500, 4999):
        encrypted[at] ^= 1
        assert not cipher.decrypt(b"label", proof, [encrypted], [opened])
        encrypted[at] ^= 1
    assert not cipher.decrypt(b"label", proof, [encrypted[:-1]], [opened[:-1]])
    assert OLD.hex() not in repr(cipher)


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


# -- what lies on disk --------------------------------------------------------------------------


def test_an_onlooker_finds_blocks_without_a_key_and_none_with_one(tmp_path: Path) -> None:
    fill(tmp_path / "plain")
    assert in_the_clear(tmp_path / "plain") == len(KEYS), "else this test could not fail"
    fill(tmp_path / "encrypted", OLD)
    assert in_the_clear(tmp_path / "encrypted") == 0
    key_bytes = [OLD, OLD.hex().encode()]
    for path in (tmp_path / "encrypted").iterdir():
        assert not any(key in path.read_bytes() for key in key_bytes)


def test_what_the_slot_held_beyond_the_block_is_not_written(tmp_path: Path) -> None:
    bench = open_tier(tmp_path, OLD)
    secret = b"of another tenant, before" * 20
    bench.slot(0)[BLOCK_BYTES : BLOCK_BYTES + len(secret)] = secret
    bench.put(KEYS)
    assert bench.holds(KEYS), "puts leave their memory alone"
    bench.tier.close()
    assert not any(secret[:16] in path.read_bytes() for path in tmp_path.glob("slab-*"))


# -- other keys ---------------------------------------------------------------------------------


def test_another_key_finds_nothing_and_takes_the_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, OLD)
    bench = open_tier(tmp_path, NEW)
    assert "24 of 24 blocks" in caplog.text
    assert "encryption_key_file does not contain" in caplog.text
    assert bench.get(KEYS) == [Outcome.MISS] * len(KEYS)
    assert bench.tier.stats().used_bytes == 0
    assert bench.put(KEYS) == [Outcome.STORED] * len(KEYS)
    assert bench.get(KEYS) == [Outcome.LOADED] * len(KEYS)


def test_rotation_keeps_what_the_old_key_encrypted(tmp_path: Path) -> None:
    fill(tmp_path, OLD)
    more = chain(NAMESPACE, 5, "more")
    bench = open_tier(tmp_path, NEW, OLD)
    assert bench.get(KEYS) == [Outcome.LOADED] * len(KEYS)
    assert bench.holds(KEYS)
    bench.put(more)
    bench.tier.close()
    bench = open_tier(tmp_path, NEW)  # the old key is gone
    assert bench.get(more) == [Outcome.LOADED] * 5
    assert bench.get(KEYS) == [Outcome.MISS] * len(KEYS)


def test_a_folder_written_without_a_key_is_emptied_when_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    bench = open_tier(tmp_path, OLD)
    assert "written without encryption; deleted" in caplog.text
    assert in_the_clear(tmp_path) == 0
    assert bench.tier.stats().blocks == 0
    assert bench.put(KEYS) == [Outcome.STORED] * len(KEYS)


def test_an_encrypted_folder_is_refused_without_a_key_and_nothing_is_lost(tmp_path: Path) -> None:
    fill(tmp_path, OLD)
    with pytest.raises(TierError, match=r"encrypted with a key; set encryption_key_file"):
        open_tier(tmp_path)
    bench = open_tier(tmp_path, OLD)
    assert bench.get(KEYS) == [Outcome.LOADED] * len(KEYS)


# -- as people use it ---------------------------------------------------------------------------


def settings(folder: Path, **extra: str) -> PoolConfig:
    raw = {"host_size": 4 * MIB, "disk_path": str(folder / "disk"), "disk_size": 32 * MIB}
    return RecallSettings.from_mapping({**raw, **extra}).pool


def test_a_pool_by_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    config = settings(tmp_path, encryption_key_file=str(path))
    for _ in range(2):
        with Pool.open(config) as pool, closing(Engine(pool, BLOCK_BYTES)) as engine:
            pool.register(NAMESPACE, BLOCK_BYTES)
            if not pool.find(KEYS).blocks:
                engine.save(KEYS)
            assert pool.flush(KEYS, 60.0)
            assert len(engine.recall(KEYS)) == len(KEYS)
        rotate_key_file(path)
    assert in_the_clear(tmp_path / "disk") == 0
    assert len(read_keys(path)) == 3
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Pool.open(config)


def test_administration_needs_the_key_only_to_verify(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    folder = tmp_path / "disk"
    fill(folder, *read_keys(path))
    run = CliRunner()
    listed = run.invoke(app, ["ls", "--disk-path", str(folder), "--json"])
    assert '"disk_blocks":24' in listed.output
    blind = run.invoke(app, ["verify", "--disk-path", str(folder), "--yes"])
    assert blind.exit_code == 1
    assert "pass their key file with --encryption-key-file" in blind.output
    seeing = [
        "verify",
        "--disk-path",
        str(folder),
        "--encryption-key-file",
        str(path),
        "--json",
        "--yes",
    ]
    assert run.invoke(app, seeing).output.strip() == '{"checked":24,"damaged":0}'
    cleared = run.invoke(app, ["clear", "--disk-path", str(folder), "--json", "--yes"])
    assert cleared.output.strip() == '{"dropped":24,"pinned":0}'


# -- compressed ---------------------------------------------------------------------------------


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


def test_without_memory_to_compress_in_blocks_are_stored_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    keys = chain(NAMESPACE, 12)
    with Blocks(tier(tmp_path, "zstd")) as blocks:
        monkeypatch.setattr(disk_codec.Packer, "pack", fail)
        assert blocks.put(keys) == [Outcome.STORED] * 12
        assert blocks.get(keys) == [Outcome.LOADED] * 12
        assert blocks.tier.stats().errors


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


def test_behind_a_packed_block_are_zeros() -> None:
    """The memory it is packed in held another block, which did not shrink."""
    packer = disk_codec.Packer("zstd")
    loud = Put(KEYS[0], None, 0, noise(2 * MIB), 2 * MIB)
    quiet = Put(KEYS[1], None, 0, memoryview(bytearray(MIB)), MIB)
    plain, packed = packer.pack([loud, quiet])
    assert plain is loud
    assert packed.nbytes < MIB // 16
    assert not any(packed.data[packed.nbytes // 2 :])
