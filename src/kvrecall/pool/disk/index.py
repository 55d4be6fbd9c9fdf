"""The disk tier's index: one SQLite file that maps blocks to slots.

A row exists only for a block whose bytes are durable; a slot is reused only after the deletion of
its old row is durable. Used by one thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvrecall.block import FORMAT_VERSION, NAMESPACE_BYTES, SHARED, BlockKey, Namespace, Tenant
from kvrecall.errors import TierError

_LOG = logging.getLogger(__name__)
INDEX_NAME = "index.sqlite"
_ASIDE_NAME = INDEX_NAME + ".aside"
_APPLICATION_ID = 0x6B767263  # "kvrc"
SCHEMA_VERSION = FORMAT_VERSION * 100 + 2
_UPGRADES = {
    101: (
        "ALTER TABLE blocks ADD COLUMN tenant BLOB NOT NULL DEFAULT X''",
        "ALTER TABLE blocks ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",
    ),
}
"""Migrations from each version to the next; versions that are missing here are too old."""
_PAGE = 4096
_LARGE = 128 << 20  # of a file that takes seconds to check: only if it was not closed well
_WAL_PAGES = 256
_SHM_BYTES = 256 << 10  # more than the log's shared memory file takes
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
WAL_BYTES = 4 << 20
"""Bound of the write-ahead log and its shared memory file: checkpoints run after 1 MiB, and a
transaction of ``MAX_ROWS`` rows adds 2.5 MiB at worst (a page for every row)."""
_READ_AT_ONCE = 1024  # rows: about a millisecond under the lock
MAX_ROWS = 512
"""Rows a transaction may insert, delete or update."""
ROW_BYTES = 288
"""Upper estimate of a row's bytes in the file, half-filled pages included."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE namespaces (
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, parts TEXT NOT NULL,
    block_bytes INTEGER NOT NULL
);
CREATE TABLE blocks (
    address INTEGER PRIMARY KEY, namespace INTEGER NOT NULL, hash BLOB NOT NULL, parent BLOB,
    depth INTEGER NOT NULL, nbytes INTEGER NOT NULL, checksum BLOB NOT NULL,
    used INTEGER NOT NULL, tenant BLOB NOT NULL, pinned INTEGER NOT NULL
);
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A stored block. ``address`` is its slot, ``tag`` the value that its bytes are verified
    against (see ``codec``), ``used`` the wall-clock second of its last use."""

    address: int
    key: BlockKey
    parent: BlockKey | None
    depth: int
    nbytes: int
    tag: bytes
    used: int
    tenant: Tenant = SHARED
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Many rows, by column."""

    addresses: Sequence[int]
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey | None]
    depths: Sequence[int]
    nbytes: Sequence[int]
    tags: Sequence[bytes]
    used: Sequence[int]
    tenants: Sequence[Tenant]
    pinned: Sequence[int]

    def row(self, place: int) -> Row:
        return Row(
            self.addresses[place],
            self.keys[place],
            self.parents[place],
            self.depths[place],
            self.nbytes[place],
            self.tags[place],
            self.used[place],
            self.tenants[place],
            bool(self.pinned[place]),
        )


class Index:
    """An open index. Its methods raise sqlite3.Error when the medium fails; their change is then
    not made."""

    def __init__(self, path: Path, connection: sqlite3.Connection, pool_id: bytes) -> None:
        self._path = path
        self._connection = connection
        self._log_path = path.with_name(path.name + "-wal")
        self.pool_id = pool_id
        self._ids: dict[bytes, int] = {}
        for number, digest in connection.execute("SELECT id, digest FROM namespaces"):
            self._ids[bytes(digest)] = number
        query = "SELECT count(*) FROM meta WHERE name = 'compressed'"
        self.is_compressed = bool(connection.execute(query).fetchone()[0])
        """Whether blocks may be compressed; once they may, that stays."""
        connection.execute("DELETE FROM meta WHERE name = 'ended'")
        self.probe()  # now the log exists
        self._inodes = [os.stat(file).st_ino for file in (path, self._log_path)]

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Opens or creates the index of a folder. A damaged, foreign or older file is moved aside
        and replaced by an empty one; one of a newer kvrecall raises TierError."""
        path = folder / INDEX_NAME
        if path.exists():
            why = _unfit(path, trusting=path.stat().st_size > _LARGE)
            if why:
                _move_aside(path, why)
        try:
            connection = _connect(path)
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                _make_schema(connection)
            _upgrade(path, connection)
            row = connection.execute("SELECT value FROM meta WHERE name = 'pool_id'").fetchone()
            path.chmod(0o600)
            return cls(path, connection, bytes.fromhex(row[0]))
        except sqlite3.Error as error:
            raise TierError(f"disk_path: {path} cannot be opened: {error}") from error

    def rows(self) -> Iterator[Rows]:
        """All rows, in parts of neighbouring addresses: first the part with the row used last, so
        that what is asked for next is most likely among the first. Rows of unknown namespaces are
        left out."""
        digests = {number: digest for digest, number in self._ids.items()}
        names: dict[bytes, Tenant] = {b"": SHARED}  # one object for each
        query = (
            "SELECT address, namespace, hash, parent, depth, nbytes, checksum, used, tenant,"
            " pinned FROM blocks WHERE address BETWEEN ? AND ? ORDER BY address"
        )
        for _, first, last in sorted(self._parts(), key=lambda part: -part[0]):
            part = self._connection.execute(query, (first, last)).fetchall()
            if not {row[1] for row in part} <= digests.keys():
                part = [row for row in part if row[1] in digests]
            if not part:
                continue
            address, number, name, parent, depth, nbytes, tags, used, tenant, pinned = zip(
                *part, strict=True
            )
            spaces = [digests[n] for n in number]
            keys = [space + text for space, text in zip(spaces, name, strict=True)]
            parents = [
                None if text is None else space + text
                for space, text in zip(spaces, parent, strict=True)
            ]
            yield Rows(
                address,
                cast(list[BlockKey], keys),
                cast(list[BlockKey | None], parents),
                depth,
                nbytes,
                tags,
                used,
                [names.get(t) or names.setdefault(t, Tenant(t.hex())) for t in tenant],
                pinned,
            )

    def _parts(self) -> Iterator[tuple[int, int, int]]:
        """Parts of all rows: the latest use in it, its first and its last address."""
        query = (
            "SELECT max(used), min(address), max(address) FROM"
            " (SELECT used, address FROM blocks WHERE address > ? ORDER BY address LIMIT ?)"
        )
        last = -1
        while True:
            found = self._connection.execute(query, (last, _READ_AT_ONCE)).fetchone()
            if found[0] is None:
                return
            yield found
            last = found[2]

    def pinned_keys(self) -> list[BlockKey]:
        """Keys of the blocks that are pinned."""
        query = (
            "SELECT digest, hash FROM blocks JOIN namespaces ON namespaces.id = blocks.namespace"
            " WHERE pinned"
        )
        return [BlockKey(digest + name) for digest, name in self._connection.execute(query)]

    def count_in_slabs(self, bits: int) -> dict[int, int]:
        """The number of rows by the slab that their address is in: what is left of it without its
        last ``bits``."""
        counts: dict[int, int] = {}
        begin = 0
        first = "SELECT address FROM blocks WHERE address >= ? ORDER BY address LIMIT 1"
        count = "SELECT count(*) FROM blocks WHERE address >= ? AND address < ?"
        while row := self._connection.execute(first, (begin,)).fetchone():
            slab = row[0] >> bits
            begin = slab + 1 << bits
            ends = (slab << bits, begin)
            counts[slab] = self._connection.execute(count, ends).fetchone()[0]
        return counts

    def last_bytes(self) -> int | None:
        """Bytes of the block in the last slot; None without any block."""
        query = "SELECT nbytes FROM blocks ORDER BY address DESC LIMIT 1"
        row = self._connection.execute(query).fetchone()
        return None if row is None else int(row[0])

    def namespaces(self) -> list[tuple[Namespace, int]]:
        """Namespaces ever registered, with the bytes of their blocks."""
        query = "SELECT digest, parts, block_bytes FROM namespaces"
        return [
            (Namespace(bytes(digest), tuple((k, v) for k, v in json.loads(parts))), nbytes)
            for digest, parts, nbytes in self._connection.execute(query)
        ]

    def knows(self, key: BlockKey) -> bool:
        """Whether the key's namespace is registered; rows of others cannot be inserted."""
        return key[:NAMESPACE_BYTES] in self._ids

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        """Records a namespace. Durable on return."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            cursor = connection.execute(
                "INSERT INTO namespaces (digest, parts, block_bytes) VALUES (?, ?, ?)"
                " ON CONFLICT (digest) DO UPDATE SET parts = excluded.parts,"
                " block_bytes = excluded.block_bytes RETURNING id",
                (namespace.digest, json.dumps(namespace.parts), block_bytes),
            )
            self._ids[namespace.digest] = cursor.fetchone()[0]

    def insert(self, rows: Sequence[Row]) -> None:
        """Adds at most ``MAX_ROWS`` rows, all or none. Durable on return."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        row.address,
                        self._ids[row.key[:NAMESPACE_BYTES]],
                        row.key[NAMESPACE_BYTES:],
                        None if row.parent is None else row.parent[NAMESPACE_BYTES:],
                        row.depth,
                        row.nbytes,
                        row.tag,
                        row.used,
                        b"" if row.tenant == SHARED else bytes.fromhex(row.tenant),
                        int(row.pinned),
                    )
                    for row in rows
                ],
            )

    def delete(self, addresses: Sequence[int]) -> None:
        """Deletes rows, all or none; missing ones are ignored. Durable on return."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(
                "DELETE FROM blocks WHERE address = ?", [(a,) for a in addresses]
            )

    def delete_all(self) -> None:
        """Deletes every row. Durable on return."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("DELETE FROM blocks")

    def mark_used(self, uses: Sequence[tuple[int, int]]) -> None:
        """Records ``(wall-clock second, address)`` of last uses."""
        self._update("UPDATE blocks SET used = ? WHERE address = ?", uses)

    def mark_pinned(self, pins: Sequence[tuple[int, int]]) -> None:
        """Records ``(1 or 0, address)`` of blocks that were pinned or unpinned. Durable on
        return."""
        self._update("UPDATE blocks SET pinned = ? WHERE address = ?", pins)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Records ``(new, old)`` addresses of blocks that were copied, all or none. Durable on
        return; at most ``MAX_ROWS``."""
        self._update("UPDATE blocks SET address = ? WHERE address = ?", moves)

    def _update(self, query: str, rows: Sequence[tuple[int, int]]) -> None:
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(query, rows)

    def compact(self) -> None:
        """Returns the space of deleted rows to the file system. Temporarily takes as much space as
        the remaining rows."""
        self._connection.execute("PRAGMA max_page_count = 1073741823").fetchone()
        self._connection.execute("VACUUM")
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def probe(self) -> None:
        """Tests a durable write; raises sqlite3.Error if the medium accepts no writes now."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(
                "INSERT OR REPLACE INTO meta VALUES ('probe', ?)", (str(time.time()),)
            )

    def reserve(self, nbytes: int) -> bool:
        """Ensures that the medium has space for ``nbytes`` of index and for its log, so that blocks
        that have a slot can also get a row. False if not; True also if the file system cannot
        tell."""
        return _reserve(self._path, nbytes) and _reserve(self._log_path, WAL_BYTES - _SHM_BYTES)

    @property
    def is_encrypted(self) -> bool:
        """Whether the folder holds encrypted blocks only."""
        return _is_encrypted(self._connection)

    def mark_encrypted(self) -> None:
        """Marks the folder as encrypted, permanently. Durable on return."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('sealed', '1')")

    def mark_compressed(self) -> None:
        """Notes that blocks may be compressed from now on. Durable on return."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT OR REPLACE INTO meta VALUES ('compressed', '1')")
        self.is_compressed = True

    def limit(self, nbytes: int) -> None:
        """Limits the file to ``nbytes`` from now on; changes that need more fail."""
        pages = max(1, nbytes // _PAGE)
        self._connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()

    def file_bytes(self) -> int:
        """Bytes of the index file itself, without its log."""
        return os.stat(self._path).st_size

    def is_in_place(self) -> bool:
        """Whether the files are still in place (neither deleted nor replaced)."""
        try:
            inodes = [os.stat(file).st_ino for file in (self._path, self._log_path)]
        except FileNotFoundError:
            return False
        return inodes == self._inodes

    def close(self, is_well: bool = True) -> None:
        """``is_well``: all of it could be read and written; it need not be checked when it is
        opened again."""
        with contextlib.suppress(sqlite3.Error):
            if is_well:
                self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('ended', '')")
        self._connection.close()


def counts_in(folder: Path) -> list[tuple[tuple[tuple[str, str], ...], int]]:
    """The parts of each namespace and how many blocks it has, most first, in the index of a folder
    that a tier may be using meanwhile. Changes nothing. TierError if it cannot be read."""
    path = folder / INDEX_NAME
    query = (
        "SELECT parts, count(*) FROM blocks JOIN namespaces ON namespaces.id = blocks.namespace"
        " GROUP BY namespaces.id ORDER BY count(*) DESC"
    )
    # Without a log SQLite would make one; where there is none, no process has the index open.
    is_open = path.with_name(path.name + "-wal").exists()
    uri = f"{path.absolute().as_uri()}?{'mode=ro' if is_open else 'immutable=1'}"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as index:
            return [
                (tuple((name, text) for name, text in json.loads(parts)), count)
                for parts, count in index.execute(query)
            ]
    except (sqlite3.Error, ValueError) as error:
        raise TierError(f"disk_path: {path} cannot be read: {error}") from error


def check_index(folder: Path) -> bool:
    """Whether the blocks of an unused folder are encrypted. Changes nothing. Raises TierError if
    the folder has no index, or one that a pool would move aside."""
    path = folder / INDEX_NAME
    if folder.is_file():
        raise TierError(f"disk_path: {folder} is a file; name the folder of a disk tier")
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        why = f"its {INDEX_NAME} is empty" if path.exists() else f"there is no {INDEX_NAME} in it"
        raise TierError(f"disk_path: {folder} holds no blocks ({why})")
    if why := _unfit(path):
        raise TierError(
            f"disk_path: {path}: {why}; nothing is changed. A pool that is started on this folder "
            "moves the file aside and starts empty"
        )
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return _is_encrypted(connection)


def _is_encrypted(connection: sqlite3.Connection) -> bool:
    query = "SELECT count(*) FROM meta WHERE name = 'sealed'"
    return bool(connection.execute(query).fetchone()[0])


def _connect(path: Path) -> sqlite3.Connection:
    """Opens a database so that a finished transaction is durable."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA page_size = {_PAGE}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    connection.execute("PRAGMA locking_mode = NORMAL")
    return connection


def _make_schema(connection: sqlite3.Connection) -> None:
    connection.executescript("BEGIN IMMEDIATE;" + _SCHEMA)
    connection.execute("INSERT INTO meta VALUES ('pool_id', ?)", (uuid.uuid4().hex,))
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _upgrade(path: Path, connection: sqlite3.Connection) -> None:
    """Migrates an index of an earlier version to this one, all or nothing."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    while version < SCHEMA_VERSION:
        connection.execute("BEGIN IMMEDIATE")
        for statement in _UPGRADES[version]:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version + 1}")
        connection.execute("COMMIT")
        _LOG.info("disk tier: %s: migrated from format %d to %d", path, version, version + 1)
        version += 1


def _reserve(path: Path, nbytes: int) -> bool:
    """Allocates the first ``nbytes`` of a file without changing its size."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        size = ctypes.c_int64(nbytes)
        if _LIBC.fallocate(fd, _KEEP_SIZE, ctypes.c_int64(0), size) == 0:
            return True
        return ctypes.get_errno() not in (errno.ENOSPC, errno.EDQUOT)
    finally:
        os.close(fd)


def _unfit(path: Path, trusting: bool = False) -> str:
    """Why the file cannot be used as an index; empty if it can. Raises TierError if it is newer, or
    cannot be read, which says nothing of what is in it. ``trusting``: a file that was closed well
    is not checked page by page; damage is then found when its rows are counted."""
    if not path.is_file():
        raise TierError(f"disk_path: {path} is not a file; remove it or use another folder")
    if not os.access(path, os.R_OK | os.W_OK):
        raise TierError(
            f"disk_path: {path}: Permission denied; give this user access to it, or use another "
            "folder"
        )
    try:
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            if version == 0 and owner == 0:
                tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
                return "it belongs to another program" if tables else ""
            if owner != _APPLICATION_ID:
                return "it belongs to another program"
            if version > SCHEMA_VERSION:
                raise TierError(
                    f"disk_path: {path} was written by a newer kvrecall (format {version}, this "
                    f"one reads {SCHEMA_VERSION}); update kvrecall or use another folder"
                )
            if version < SCHEMA_VERSION and version not in _UPGRADES:
                return f"its format {version} is older than {SCHEMA_VERSION}"
            query = "SELECT count(*) FROM meta WHERE name = 'ended'"
            if trusting and connection.execute(query).fetchone()[0]:
                return ""
            if trusting:
                _LOG.info("disk tier: checking %s, %d MiB", path, path.stat().st_size >> 20)
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            return "" if verdict == "ok" else f"it is damaged ({verdict})"
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        return f"it is damaged ({error})"


def aside_bytes(folder: Path) -> int:
    """Bytes of indexes that were moved aside."""
    aside = folder / _ASIDE_NAME
    return aside.stat().st_size if aside.exists() else 0


def _move_aside(path: Path, why: str) -> None:
    aside = path.with_name(_ASIDE_NAME)
    os.replace(path, aside)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    _LOG.warning("disk tier: %s: %s; renamed to %s, and the tier starts empty", path, why, aside)


def seconds_now() -> int:
    """Wall-clock time in whole seconds, as stored in ``Row.used``."""
    return int(time.time())
