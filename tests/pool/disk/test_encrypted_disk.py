"""Encrypted blocks on disk: the contract, the plaintext in files, wrong keys, rotation."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest
from support.disks import DiskBench, DiskFaults, FaultyIo, open_disk
from typer.testing import CliRunner

from kvrecall.block import BlockKey
from kvrecall.config import DiskConfig, PoolConfig, RecallSettings
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool import Pool
from kvrecall.pool.cipher import TAG_BYTES, Cipher, make_key_file, read_keys, rotate_key_file
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import Encrypted
from kvrecall.pool.tier import Outcome, Tier
from kvrecall.pool_cli import app
from kvrecall.testing.blocks import chain, content, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall.testing.tier_contract import BLOCK_BYTES, NAMESPACE, TierContract

MIB = 1 << 20
KEYS = chain(NAMESPACE, 24)
OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)


def open_tier(folder: Path, *keys: bytes, block_bytes: int = BLOCK_BYTES) -> DiskBench:
    codec = Encrypted(Cipher(keys)) if keys else None
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
        return DiskTier(DiskConfig(path, 64 * MIB), io=io, codec=Encrypted(Cipher([NEW, OLD])))


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
    bench.tier.close()


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
    bench.tier.close()


def test_a_folder_written_without_a_key_is_emptied_when_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path)
    bench = open_tier(tmp_path, OLD)
    assert "written without encryption; deleted" in caplog.text
    assert in_the_clear(tmp_path) == 0
    assert bench.tier.stats().blocks == 0
    assert bench.put(KEYS) == [Outcome.STORED] * len(KEYS)
    bench.tier.close()


def test_an_encrypted_folder_is_refused_without_a_key_and_nothing_is_lost(tmp_path: Path) -> None:
    fill(tmp_path, OLD)
    with pytest.raises(TierError, match=r"encrypted with a key; set encryption_key_file"):
        open_tier(tmp_path)
    bench = open_tier(tmp_path, OLD)
    assert bench.get(KEYS) == [Outcome.LOADED] * len(KEYS)
    bench.tier.close()


# -- as people use it ---------------------------------------------------------------------------


def settings(folder: Path, **extra: str) -> PoolConfig:
    raw = {"host_size": 4 * MIB, "disk_path": str(folder / "disk"), "disk_size": 32 * MIB}
    return RecallSettings.from_mapping({**raw, **extra}).pool


def test_a_pool_by_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key_file(path)
    config = settings(tmp_path, encryption_key_file=str(path))
    for _ in range(2):
        with Pool.open(config) as pool:
            pool.register(NAMESPACE, BLOCK_BYTES)
            engine = Engine(pool, BLOCK_BYTES)
            if not pool.find(KEYS).blocks:
                engine.save(KEYS)
            assert pool.flush(KEYS, 60.0)
            assert len(engine.recall(KEYS)) == len(KEYS)
            engine.close()
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
    blind = run.invoke(app, ["verify", "--disk-path", str(folder)])
    assert blind.exit_code == 1
    assert "pass their key file with --encryption-key-file" in blind.output
    seeing = ["verify", "--disk-path", str(folder), "--encryption-key-file", str(path), "--json"]
    assert run.invoke(app, seeing).output.strip() == '{"checked":24,"damaged":0}'
    cleared = run.invoke(app, ["clear", "--disk-path", str(folder), "--json"])
    assert cleared.output.strip() == '{"dropped":24,"pinned":0}'


def test_an_encrypted_disk_that_shrinks_keeps_what_is_used(tmp_path: Path) -> None:
    """Blocks that move to another slot open there: their proof is of their key, not their place."""
    bench = open_tier(tmp_path, NEW)
    chains = [chain(NAMESPACE, 200, str(number)) for number in range(9)]
    for keys in chains:
        assert bench.put(keys) == [Outcome.STORED] * 200
    bench.tier.touch(chains[0])
    bench.tier.resize(16 * MIB)
    disk = bench.tier
    wait_until(lambda: disk.stats().evictions > 0 and disk.surplus_bytes == 0)
    assert bench.get(chains[0]) == [Outcome.LOADED] * 200
    assert bench.holds(chains[0])
    bench.tier.close()
