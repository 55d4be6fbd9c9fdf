"""Slabs as files: what is durable when, and whose they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrecall.pool.disk.slabs import FileIo, SlabStore

SLOT = 8192
OWN, OTHER = b"a" * 16, b"b" * 16


def opened(folder: Path, io: FileIo | None = None, pool: bytes = OWN) -> SlabStore:
    return SlabStore(folder, 16 << 20, pool, io or FileIo(), direct=False)


def grown(folder: Path, io: FileIo | None = None) -> SlabStore:
    """A store with one slab."""
    store = opened(folder, io)
    assert store.grow(SLOT)
    return store


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """System calls that change the medium, with the name of their file, as they return."""
    made: list[tuple[str, str]] = []

    def note(name: str, real: Callable[..., Any]) -> None:
        def call(fd: int, *args: Any) -> Any:
            result = real(fd, *args)
            made.append((name, Path(os.readlink(f"/proc/self/fd/{fd}")).name))
            return result

        monkeypatch.setattr(os, name, call)

    for name in ("pwritev", "posix_fallocate", "fdatasync", "fsync"):
        note(name, getattr(os, name))
    return made


def test_a_slab_and_what_is_written_to_it_are_made_durable(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    """Its room, its header and its name in the folder, before it is used."""
    store, slab = grown(tmp_path), "slab-000000.kv"
    assert calls == [
        ("posix_fallocate", slab),
        ("pwritev", slab),
        ("fdatasync", slab),
        ("fsync", tmp_path.name),
    ]
    status = (tmp_path / slab).stat()
    assert status.st_blocks * 512 >= status.st_size > store.slabs()[0].slots * SLOT
    calls.clear()
    store.write(store.slabs()[0].base, [memoryview(bytes(SLOT))])
    store.sync(store.slabs()[0].base)
    assert calls == [("pwritev", slab), ("fdatasync", slab)]


class ShortIo(FileIo):
    """Writes of more than a page end early, as on a medium that has just become full."""

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().write(fd, [buffers[0][:4096]], offset)


def test_a_block_that_is_written_in_part_is_an_error(tmp_path: Path) -> None:
    store = grown(tmp_path, ShortIo())
    with pytest.raises(OSError, match="No space left"):
        store.write(store.slabs()[0].base, [memoryview(bytes(SLOT))])


def test_slabs_of_another_pool_are_not_taken_over(tmp_path: Path) -> None:
    grown(tmp_path).close()
    assert opened(tmp_path).recover([0]) == []
    assert opened(tmp_path, pool=OTHER).recover([0]) == [0]
    assert list(tmp_path.iterdir()) == []


def test_a_new_slab_takes_no_number_that_blocks_have(tmp_path: Path) -> None:
    """Also of a slab that is missing: rows still lead there."""
    grown(tmp_path).close()
    store = opened(tmp_path)
    assert store.recover([0, 7]) == [7]
    assert store.grow(SLOT)
    assert sorted(slab.number for slab in store.slabs()) == [0, 8]


def test_a_file_that_took_the_place_of_a_slab_stays(tmp_path: Path) -> None:
    store = grown(tmp_path)
    path = tmp_path / "slab-000000.kv"
    path.unlink()
    path.write_text("another program's")
    store.remove(0)
    assert path.read_text() == "another program's"
