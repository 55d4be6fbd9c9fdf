"""Every byte that KV depends on counts, and no other; fingerprints are remembered."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from kvrecall.engines import fingerprint
from kvrecall.engines.fingerprint import Fingerprint, Memory, files_of, fingerprint_of, hash_file

LARGE = 222 << 20
"""A file that an earlier version only sampled."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return folder


def flip(path: Path, at: int) -> None:
    """Changes one byte, and neither the size nor the modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 1, 8000, 16383])
def test_one_byte_counts(model: Path, at: int) -> None:
    before = fingerprint_of(model)
    flip(model / "model.safetensors", at)
    assert fingerprint_of(model) != before


@pytest.mark.parametrize("at", [0, 1, (1 << 20) + 12345, 100_000_001, LARGE - 1])
def test_one_byte_of_a_large_file_counts(model: Path, at: int) -> None:
    path = model / "model.safetensors"
    os.truncate(path, LARGE)  # a hole; read as zeros
    before = hash_file(path)
    flip(path, at)
    assert hash_file(path) != before


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "adapter_config.json", "sub/extra.bin", "x.gguf"]
)
def test_other_files_that_are_loaded_count(model: Path, name: str) -> None:
    before = fingerprint_of(model)
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    with_it = fingerprint_of(model)
    path.write_text("2")
    assert len({before, with_it, fingerprint_of(model)}) == 3


@pytest.mark.parametrize(
    "name",
    ["README.md", "tokenizer.json", "generation_config.json", ".git/x.bin", "training_args.bin"],
)
def test_files_that_shape_no_kv_do_not_count(model: Path, name: str) -> None:
    before = fingerprint_of(model)
    path = model / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("1")
    assert fingerprint_of(model) == before


def test_code_counts_where_it_is_run(model: Path) -> None:
    plain, run = fingerprint_of(model), fingerprint_of(model, code=True)
    (model / "modeling_x.py").write_text("a = 1")
    assert fingerprint_of(model) == plain
    assert fingerprint_of(model, code=True) != run


def test_names_and_places(model: Path) -> None:
    """The folder's place means nothing, a file's name does, and no file can stand for another."""
    before = fingerprint_of(model)
    moved = model.rename(model.with_name("moved"))
    assert fingerprint_of(moved) == before
    (moved / "model.safetensors").rename(moved / "other.safetensors")
    assert fingerprint_of(moved) != before


def test_a_hub_snapshot_is_what_its_links_point_to(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert fingerprint_of(snapshot) == fingerprint_of(model)
    flip(model / "model.safetensors", 5)
    assert fingerprint_of(snapshot) == fingerprint_of(model)


def settle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the files be older than what may be remembered."""
    monkeypatch.setattr(fingerprint, "_FRESH_S", 0.05)
    newest = max(file.ctime_ns for file in files_of(folder, code=True)) / 1e9
    time.sleep(max(0.0, newest + 0.1 - time.time()))


def test_what_was_read_is_remembered_until_it_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(tmp_path / "cache" / "fingerprints.json")
    settle(model, monkeypatch)
    before = fingerprint_of(model, memory=memory)
    assert len(memory.digests()) == 2
    real = hash_file
    read: list[Path] = []

    def counted(path: Path, progress: object = None) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(fingerprint, "hash_file", counted)
    assert fingerprint_of(model, memory=memory) == before
    assert read == []
    flip(model / "model.safetensors", 77)  # same size, same mtime: the ctime tells
    assert fingerprint_of(model, memory=memory) != before
    assert [path.name for path in read] == ["model.safetensors"]


def test_a_file_that_changed_a_moment_ago_is_not_remembered(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_FRESH_S", 3600.0)  # however long this test is held up
    memory = Memory(tmp_path / "fingerprints.json")
    os.utime(model / "config.json")
    fingerprint_of(model, memory=memory)
    assert not [path for path in memory.digests() if path.endswith("config.json")]


@pytest.mark.parametrize("content", ["", "not json", "[]", '{"x": 3}', '{"x": [1, 2]}', "\0"])
def test_a_damaged_memory_costs_only_time(model: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "fingerprints.json"
    before = fingerprint_of(model)
    damaged = content.replace('"x"', json.dumps(str(model / "model.safetensors")))
    path.write_text(damaged)
    assert fingerprint_of(model, memory=Memory(path)) == before
    assert fingerprint_of(model, memory=Memory(tmp_path / "model" / "config.json" / "x")) == before


def test_many_at_once_share_a_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(tmp_path / "fingerprints.json")
    folders = [tmp_path / f"m{i}" for i in range(8)]
    for i, folder in enumerate(folders):
        folder.mkdir()
        (folder / "a.safetensors").write_bytes(bytes([i]) * 1000)
    settle(folders[-1], monkeypatch)
    jobs = [Fingerprint(folder, memory=memory) for folder in folders]
    assert all(job.wait(30) for job in jobs)
    assert len({job.digest for job in jobs}) == len(folders)
    known = memory.digests()
    assert known
    assert all(job.digest == fingerprint_of(job._path, memory=memory) for job in jobs)


def test_a_folder_that_changes_while_it_is_read_has_no_fingerprint(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hash_file

    def meddled(path: Path, progress: object = None) -> str:
        digest = real(path)
        flip(model / "model.safetensors", 3)
        return digest

    monkeypatch.setattr(fingerprint, "hash_file", meddled)
    job = Fingerprint(model)
    assert job.wait(30)
    assert job.digest is None
    assert "changed while it was read" in job.failure
    assert not job.still_holds()


def test_it_no_longer_holds_when_a_file_is_replaced(model: Path) -> None:
    job = Fingerprint(model)
    assert job.wait(30)
    assert job.still_holds()
    flip(model / "model.safetensors", 3)
    assert not job.still_holds()


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no weight files"):
        fingerprint_of(tmp_path)
    with pytest.raises(OSError, match="nowhere"):
        fingerprint_of(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="not a regular file"):
        fingerprint_of(tmp_path)


def test_nobody_waits_while_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = hash_file

    def held(path: Path, progress: object = None) -> str:
        gate.wait(30)
        return real(path)

    monkeypatch.setattr(fingerprint, "hash_file", held)
    job = Fingerprint(model)
    assert not job.is_over
    assert job.digest is None
    gate.set()
    assert job.wait(30)
    assert job.digest is not None
