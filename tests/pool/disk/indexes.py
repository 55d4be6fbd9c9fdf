"""Changes of a disk tier's index that are not found by the sums of its rows."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from kvrecall.pool.disk.index import INDEX_NAME, _plain, _sum
from kvrecall.testing import chain
from kvrecall.testing.tier_contract import NAMESPACE

KEYS = chain(NAMESPACE, 8)


def full(*_: object) -> None:
    """What a method of the index does on a medium that is full."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


@contextlib.contextmanager
def without_types(folder: Path) -> Iterator[sqlite3.Connection]:
    """The index of a folder that no tier uses. Meanwhile its columns take values of any type, as a
    damaged file has them."""
    path = folder / INDEX_NAME
    with contextlib.closing(_plain(path)) as db:
        made = db.execute("SELECT sql, name FROM sqlite_schema").fetchall()
    loose = [(re.sub(rb" STRICT,?", b"", sql), name) for sql, name in made]
    for schema in loose, made:
        with contextlib.closing(_plain(path)) as db:
            db.execute("PRAGMA writable_schema = ON")
            values = [(sql.decode(), name.decode()) for sql, name in schema]
            db.executemany("UPDATE sqlite_schema SET sql = ? WHERE name = ?", values)
        if schema is loose:
            with contextlib.closing(_plain(path)) as db:
                yield db


@contextlib.contextmanager
def forging(folder: Path) -> Iterator[sqlite3.Connection]:
    """The index of a folder that no tier uses, ``without_types``; its rows get right sums."""
    with without_types(folder) as db:
        db.execute("BEGIN")
        yield db
        digests = dict(db.execute("SELECT id, digest FROM namespaces"))
        rows = db.execute(
            "SELECT address, namespace, hash, parent, depth, nbytes, checksum, tenant,"
            " address + used + pinned FROM blocks"
        ).fetchall()
        for address, number, *columns, added in rows:
            total = _sum(digests.get(number), *columns) + added
            db.execute("UPDATE blocks SET sum = ? WHERE address = ?", (total, address))
        for number, *columns in db.execute("SELECT id, digest, parts, block_bytes FROM namespaces"):
            total = _sum(number, *columns)
            db.execute("UPDATE namespaces SET sum = ? WHERE id = ?", (total, number))
        for name, value in db.execute("SELECT name, value FROM meta"):
            db.execute("UPDATE meta SET sum = ? WHERE name = ?", (_sum(name, value), name.decode()))
        db.execute("COMMIT")
