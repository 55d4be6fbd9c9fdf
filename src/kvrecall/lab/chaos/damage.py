"""Damage to a disk folder, in use or not: flipped bytes, files cut short or deleted.

It reads the tier's index to hit bytes of blocks rather than free slots, and to know whose they are.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvrecall.block import BlockKey
from kvrecall.pool.disk.index import INDEX_NAME

_SHIFT = 40
_QUERY = (
    "SELECT address, digest, hash, nbytes FROM blocks JOIN namespaces "
    "ON namespaces.id = blocks.namespace"
)


@dataclass(frozen=True, slots=True)
class Stored:
    """A row of the index: where the bytes of a block lie."""

    key: BlockKey
    slab: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Blow:
    """What was done, and the blocks whose loss it excuses."""

    what: str
    keys: frozenset[BlockKey]
    count: int


def stored(folder: Path, in_use: bool) -> list[Stored]:
    """Rows of the index of ``folder``. ``in_use``: a process has it open. Nothing is changed.
    Empty where it cannot be read now."""
    try:
        with _connection(folder, in_use) as connection:
            rows = connection.execute(_QUERY).fetchall()
    except (sqlite3.Error, OSError):
        return []
    return [
        Stored(
            BlockKey(bytes(digest) + bytes(name)),
            address >> _SHIFT,
            address & (1 << _SHIFT) - 1,
            nbytes,
        )
        for address, digest, name, nbytes in rows
    ]


@contextmanager
def _connection(folder: Path, in_use: bool) -> Iterator[sqlite3.Connection]:
    """Of an index in use, a second reader; else of a copy, as the last one to close an index
    would tidy it up."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-index-") as name:
        source = folder
        if not in_use:
            source = Path(name)
            for file in folder.glob(INDEX_NAME + "*"):
                shutil.copyfile(file, source / file.name)
        uri = f"file:{source / INDEX_NAME}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
            yield connection


class Vandal:
    """Damages the disk tier in ``folder``. Deterministic for a given folder and dice. ``rough``:
    share of the blows that cost a whole slab."""

    def __init__(self, folder: Path, dice: random.Random, rough: float = 0.12) -> None:
        self._folder = folder
        self._rough = rough
        self._dice = dice

    def strike(self, in_use: bool) -> Blow | None:
        """Damages something; None if there is nothing (any more). ``in_use`` as in ``stored``."""
        rows = stored(self._folder, in_use)
        if not rows:
            return None
        rough = self._dice.random() < self._rough
        blow = self._cut(rows) if rough else self._flip(rows)
        if blow is None:
            return None
        # A slot may have been given to another block between the look and the blow.
        now = {(row.slab, row.offset): row for row in stored(self._folder, in_use)}
        hit = {(row.slab, row.offset) for row in rows if row.key in blow.keys}
        later = {now[place].key for place in hit if place in now}
        if rough:
            slabs = {slab for slab, _ in hit}
            later |= {row.key for row in now.values() if row.slab in slabs}
        return Blow(blow.what, blow.keys | later, blow.count)

    def _flip(self, rows: list[Stored]) -> Blow | None:
        keys = set()
        for row in self._dice.sample(rows, min(len(rows), self._dice.randint(1, 4))):
            try:
                fd = os.open(self._path(row.slab), os.O_RDWR)
            except FileNotFoundError:
                continue
            try:
                for _ in range(self._dice.randint(1, 3)):
                    if self._alter(fd, row):
                        keys.add(row.key)
                os.fdatasync(fd)
            finally:
                os.close(fd)
        return Blow("bytes flipped", frozenset(keys), len(keys)) if keys else None

    def _alter(self, fd: int, row: Stored) -> bool:
        """Changes a byte of a block, or all of up to two pages, as a torn or misplaced write
        would. A changed byte is seldom seen in what a model says; pages are."""
        length = 1 if self._dice.random() < 0.5 else min(row.nbytes, 2 * mmap.PAGESIZE)
        place = row.offset + self._dice.randrange(row.nbytes - length + 1)
        old = os.pread(fd, length, place)
        new = bytes(byte ^ self._dice.randrange(1, 256) for byte in old)
        return os.pwrite(fd, new, place) > 0

    def _cut(self, rows: list[Stored]) -> Blow | None:
        """Shortens or deletes a slab: the tier then gives up all of its blocks."""
        slab = self._dice.choice(sorted({row.slab for row in rows}))
        path = self._path(slab)
        keys = frozenset(row.key for row in rows if row.slab == slab)
        try:
            if self._dice.random() < 0.5:
                path.unlink()
                return Blow(f"{path.name} deleted", keys, 1)
            os.truncate(path, self._dice.randrange(path.stat().st_size))
        except FileNotFoundError:
            return None
        return Blow(f"{path.name} cut short", keys, 1)

    def _path(self, slab: int) -> Path:
        return self._folder / f"slab-{slab:06d}.kv"
