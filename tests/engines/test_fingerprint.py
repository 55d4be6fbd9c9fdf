"""Every byte that KV depends on counts, and no other; fingerprints are remembered."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize("at", [0, 1, (1 << 20) + 12345, 100_000_001, LARGE - 1])
def test_one_byte_counts(model: Path, at: int) -> None:
    path = model / "model.safetensors"
    os.truncate(path, LARGE)  # a hole; read as zeros
    before = fingerprint_of(model)
    flip(path, at)
    assert fingerprint_of(model) != before


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("model.safetensors.index.json", True),
        ("adapter_config.json", True),
        ("sub/extra.bin", True),
        ("x.gguf", True),
        ("README.md", False),
        ("tokenizer.json", False),
        ("generation_config.json", False),
        (".git/x.bin", False),
        ("training_args.bin", False),
    ],
)
def test_files_that_shape_kv_count(model: Path, name: str, counts: bool) -> None:
    found = {fingerprint_of(model)}
    path = model / name
    path.parent.mkdir(exist_ok=True)
    for content in "12":
        path.write_text(content)
        found.add(fingerprint_of(model))
    assert len(found) == (3 if counts else 1)


def test_names_and_places(model: Path) -> None:
    """The folder's place means nothing, a file's name does, and no file can stand for another."""
    before = fingerprint_of(model)
    moved = model.rename(model.with_name("moved"))
    assert fingerprint_of(moved) == before
    (moved / "model.safetensors").rename(moved / "other.safetensors")
    assert fingerprint_of(moved) != before


def meddle(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Path], Any] = lambda _: None,
    after: Callable[[Path], Any] = lambda _: None,
) -> None:
    """Does something before and after each file is read."""

    def hashed(path: Path, progress: object = None) -> str:
        before(path)
        digest = hash_file(path)
        after(path)
        return digest

    monkeypatch.setattr(fingerprint, "hash_file", hashed)


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
    read: list[Path] = []
    meddle(monkeypatch, before=read.append)
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


@pytest.mark.parametrize(
    "content", ["", "not json", "[" * 100_000, "[]", '{"x": 3}', '{"x": [1, 2]}', "\0"]
)
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
    meddle(monkeypatch, after=lambda _: flip(model / "model.safetensors", 3))
    job = Fingerprint(model)
    assert job.wait(30)
    assert job.digest is None
    assert "changed while it was read" in job.failure
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
    meddle(monkeypatch, before=lambda _: gate.wait(30))
    job = Fingerprint(model)
    assert not job.is_over
    assert job.digest is None
    gate.set()
    assert job.wait(30)
    assert job.digest is not None
