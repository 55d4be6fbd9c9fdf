"""The disk tier's index: one SQLite file that maps blocks to slots.

A row exists only for a block whose bytes are durable; a slot is reused only after the deletion of
its old row is durable. Used by one thread at a time.

What is read may be damaged. Each row has a sum: one that does not match is dropped. Where SQLite
cannot read on, or a value has a type that its column cannot have, the file is set aside and a new
one begun with what can be read of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
import xxhash

from kvrecall.block import FORMAT_VERSION, NAMESPACE_BYTES, SHARED, BlockKey, Namespace, Tenant
from kvrecall.errors import TierError
from kvrecall.pool.clock import Clock

_LOG = logging.getLogger(__name__)
Mark = Literal["sealed", "compressed"]
INDEX_NAME = "index.sqlite"
_ASIDE_NAME = INDEX_NAME + ".aside"
_APPLICATION_ID = 0x6B767263  # "kvrc"
SCHEMA_VERSION = FORMAT_VERSION * 100 + 4
_PAGE = 4096
_LARGE = 128 << 20  # of a file that takes seconds to check: only if it was not closed well
_WAL_PAGES = 256
_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
WAL_BYTES = 4 << 20
"""Bound of the write-ahead log: checkpoints run after 1 MiB, and a transaction of ``MAX_ROWS`` rows
adds 2.5 MiB at worst (a page for every row)."""
_READ_AT_ONCE = 1024  # rows: about a millisecond under the lock
MAX_ROWS = 512
"""Rows a transaction may insert, delete or update."""
ROW_BYTES = 288
"""Upper estimate of a row's bytes in the file, half-filled pages included."""

_SCHEMA: tuple[str, ...] = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT, sum INTEGER) STRICT, WITHOUT ROWID",
    "CREATE TABLE namespaces (id INTEGER PRIMARY KEY, digest BLOB, parts TEXT,"
    " block_bytes INTEGER, sum INTEGER) STRICT",
    "CREATE TABLE blocks (address INTEGER PRIMARY KEY, namespace INTEGER, hash BLOB, parent BLOB,"
    " depth INTEGER, nbytes INTEGER, checksum BLOB, used INTEGER, tenant BLOB, pinned INTEGER,"
    f" sum INTEGER /* format {SCHEMA_VERSION} */) STRICT",
)
"""``sum`` of a block's row: ``_sum`` of what never changes, plus address, last use and pin, so that
an update of these needs no other column."""
if sqlite3.sqlite_version_info < (3, 37):  # such as RHEL 9's: it has no STRICT
    _SCHEMA = tuple(re.sub(r" STRICT,?", "", statement) for statement in _SCHEMA)
_MARKS = ",".join("?" * 11)  # for a row of blocks
_PARTS = msgspec.json.Decoder(tuple[tuple[str, str], ...])
_T = TypeVar("_T")
_NOT_DAMAGE = {
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY,
}  # fmt: skip
"""Codes of errors that say nothing of what is in the file."""
READ_TRIES, AGAIN_S = 3, 1.0  # of what the medium does not read, and how far apart


class DamagedIndex(sqlite3.DatabaseError):
    """What the file holds cannot be."""


def is_damage(error: Exception) -> bool:
    """Whether an error means that the file's content is damaged, and not that the medium, or its
    access, fails."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    fails = code & 0xFF in _NOT_DAMAGE and code != sqlite3.SQLITE_IOERR_SHORT_READ  # no such page
    return isinstance(error, sqlite3.DatabaseError) and not fails


def _read_again(read: Callable[[], _T], tries: int = READ_TRIES) -> _T:
    """Its result, at a later try if the medium fails."""
    try:
        return read()
    except sqlite3.Error as error:
        if tries == 1 or is_damage(error):
            raise
    time.sleep(AGAIN_S)
    return _read_again(read, tries - 1)


def _sum(*fields: object) -> int:
    """Of the fields of a row."""
    whole: int = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(fields))
    return whole >> 4  # with what updates add to it, it fits SQLite's integers


def _are(kind: type, *fields: object) -> bool:
    """Whether fields are of that type: a right sum does not say so, as anyone can compute one."""
    return all(isinstance(field, kind) for field in fields)


class IndexRow(NamedTuple):
    """A stored block. ``address`` is its slot, ``tag`` the value that its bytes are verified
    against (see ``codec``), ``used`` the second of its last use."""

    address: int
    key: BlockKey
    parent: BlockKey | None
    depth: int
    nbytes: int
    tag: bytes
    used: int
    tenant: Tenant = SHARED
    pinned: bool = False


class Index:
    """An open index. Its methods raise sqlite3.Error when the medium fails, or the file turns out
    to be damaged (``is_damage``); their change is then not made."""

    def __init__(self, path: Path, clock: Clock, meta: dict[str, str] | None = None) -> None:
        """``meta``: what to note in a new file."""
        self._path = path
        self._clock = clock
        self._log_path = path.with_name(path.name + "-wal")
        self._begin(meta)

    def _begin(self, meta: dict[str, str] | None) -> None:
        """Opens the file; ``meta``: what to note in a new one."""
        self._connection = _plain(self._path)
        try:
            _set_up(self._connection, meta or {"pool_id": uuid.uuid4().hex})
            self._read_whole()
        except BaseException:
            self._connection.close()
            raise

    def _read_whole(self) -> None:
        """Reads what is noted of the file as a whole, and the namespaces."""
        connection = self._connection
        self._meta = _meta(connection)
        self.pool_id = bytes.fromhex(self._meta["pool_id"])
        self._spaces: dict[int, tuple[Namespace, int]] = {}
        bad: list[int] = []
        query = "SELECT id, digest, parts, block_bytes, sum FROM namespaces"
        for number, digest, parts, block_bytes, total in connection.execute(query):
            is_row = _are(bytes, digest, parts) and _are(int, block_bytes)
            if is_row and _sum(number, digest, parts, block_bytes) == total:
                with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
                    self._spaces[number] = (Namespace(digest, _PARTS.decode(parts)), block_bytes)
                    continue
            bad.append(number)
        self._ids = {space.digest: number for number, (space, _) in self._spaces.items()}
        self.damaged = len(bad)
        """Rows found damaged, of namespaces; those of blocks are reported by ``rows``."""
        # By how much this process's clock is ahead of the seconds in the file, which go on from
        # where they were when it was last noted in, see ``Clock``; 0 if what is noted is no time.
        self._ahead_s = 0
        seconds, _, note = self._meta.get("time", "").partition(" ")
        with contextlib.suppress(ValueError):
            ahead_s = self._clock() - int(seconds) - self._clock.since(note)
            self._ahead_s = round(ahead_s) if abs(ahead_s) < 1 << 40 else 0
        connection.executemany("DELETE FROM namespaces WHERE id = ?", [(one,) for one in bad])
        connection.execute("DELETE FROM meta WHERE name = 'ended'")
        self._meta.pop("ended", None)
        self.note_time()  # now the log exists
        self._inodes = [os.stat(file).st_ino for file in (self._path, self._log_path)]

    def note_time(self) -> None:
        """Notes what time it is. Durable on return; raises sqlite3.Error if the medium accepts no
        writes now."""
        self.note("time", f"{int(self._clock()) - self._ahead_s} {self._clock.note()}")

    @classmethod
    def open(cls, folder: Path, clock: Clock, why: str = "") -> Index:
        """Opens or creates the index of a folder. A foreign file is moved aside and replaced by an
        empty one; an older or damaged one by what can be read of it; one of a newer kvrecall raises
        TierError. ``why``: what is known to be damaged in it. Raises sqlite3.Error if the medium
        does not allow that now."""
        path = folder / INDEX_NAME
        if not why and path.exists():
            why = _unfit(path, trusting=path.stat().st_size > _LARGE)
        if not why:
            try:
                return cls(path, clock)
            except (sqlite3.DatabaseError, ValueError) as error:
                if isinstance(error, sqlite3.Error) and not is_damage(error):
                    raise
                why = f"it is damaged ({error})"
        aside = _move_aside(path, why)
        if aside.exists():
            with (
                contextlib.suppress(sqlite3.DatabaseError, ValueError),
                contextlib.closing(_plain(aside)) as old,
            ):
                index = cls(path, clock, _meta(old))
                index._take_over(old)
                return index
        return cls(path, clock)

    def _take_over(self, old: sqlite3.Connection) -> None:
        """Copies what can be read of an older or damaged file, as it is but for values of a wrong
        type: its sums are checked later, here as there. Takes some 15 s for a million rows."""
        for table, name in ("namespaces", "id"), ("blocks", "address"):
            kinds = self._connection.execute(f"SELECT type FROM pragma_table_info('{table}')")
            marks = ",".join(f"CAST(? AS {kind.decode()})" for (kind,) in kinds)
            query = f"SELECT * FROM {table} WHERE {name} > ? ORDER BY {name} LIMIT ?"
            last, at_once, gap = -1, MAX_ROWS, _PAGE
            while last < 1 << 62:
                try:
                    rows = old.execute(query, (last, at_once)).fetchall()
                except sqlite3.DatabaseError:
                    if at_once == 1:  # nothing more of this page: goes on behind it
                        last, gap = last + gap, 2 * gap
                    at_once = 1
                    continue
                if not rows:
                    break
                self._change(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", rows)
                highest, at_once = max(row[0] for row in rows), MAX_ROWS
                if highest > last:
                    last, gap = highest, _PAGE
                else:  # its pages are out of order
                    last, gap = last + gap, 2 * gap
        self._read_whole()

    def begin_anew(self, why: str) -> int:
        """Moves the file aside and begins an empty one for the same slabs; returns the bytes on the
        medium that this takes. If the medium refuses, every call fails until it is called again."""
        before, meta, spaces = aside_bytes(self._path.parent), self._meta, self._spaces
        self._connection.close()
        try:
            _move_aside(self._path, why)
            self._begin(meta)
            for namespace, block_bytes in spaces.values():
                self.register(namespace, block_bytes)
        except BaseException:
            self._connection.close()
            self._meta, self._spaces = meta, spaces
            raise
        return aside_bytes(self._path.parent) - before

    def rows(self) -> Iterator[tuple[list[IndexRow], list[int]]]:
        """All rows, in parts of neighbouring addresses: first the part with the row used last, so
        that what is asked for next is most likely among the first. With each part the addresses of
        those rows in it that are damaged, which are left out."""
        for _, first, last in sorted(_read_again(self._parts), key=lambda part: -part[0]):
            yield _read_again(partial(self._read, "address BETWEEN ? AND ?", first, last))

    def _read(self, where: str, *values: int) -> tuple[list[IndexRow], list[int]]:
        """The rows for which ``where`` is true, and the addresses of the damaged among them. Raises
        DamagedIndex if an address comes twice."""
        query = (
            "SELECT address, namespace, hash, parent, depth, nbytes, checksum,"
            " CAST(used AS INTEGER), tenant, CAST(pinned AS INTEGER),"
            f" sum - address - used - pinned FROM blocks WHERE {where} ORDER BY address"
        )
        found = self._connection.execute(query, values).fetchall()
        digests = {number: space.digest for number, (space, _) in self._spaces.items()}
        tenants: dict[bytes, Tenant] = {}
        rows, bad, before = [], [], -1
        for address, number, name, parent, depth, nbytes, tag, used, tenant, pinned, total in found:
            if address <= before:
                raise DamagedIndex("its rows are out of order")
            before = address
            digest = digests.get(number)
            right = _sum(digest, name, parent, depth, nbytes, tag, tenant)
            is_row = _are(bytes, name, parent or b"", tag, tenant) and _are(int, depth, nbytes)
            if digest is None or total != right or not is_row or depth >> 31:
                bad.append(address)
                continue
            above = None if parent is None else BlockKey(digest + parent)
            if tenant not in tenants:
                tenants[tenant] = Tenant(tenant.hex()) if tenant else SHARED
            key, last, whose = BlockKey(digest + name), used + self._ahead_s, tenants[tenant]
            rows.append(IndexRow(address, key, above, depth, nbytes, tag, last, whose, pinned))
        return rows, bad

    def _parts(self) -> list[tuple[int, int, int]]:
        """Parts of all rows: the latest use in it, its first and its last address."""
        query = (
            "SELECT coalesce(max(CAST(used AS INTEGER)), 0), min(address), max(address) FROM"
            " (SELECT used, address FROM blocks WHERE address > ? ORDER BY address LIMIT ?)"
        )
        last, parts = -1, list[tuple[int, int, int]]()
        while True:
            found = self._connection.execute(query, (last, _READ_AT_ONCE)).fetchone()
            if found[1] is None:
                return parts
            if not last < found[1] <= found[2]:
                raise DamagedIndex("its rows are out of order")
            parts.append(found)
            last = found[2]

    def pinned_keys(self) -> list[BlockKey]:
        """Keys of the blocks that are pinned."""
        return [row.key for row in self._read("pinned")[0]]

    def count_in_slabs(self, bits: int) -> dict[int, int]:
        """The number of rows by the slab that their address is in: what is left of it without its
        last ``bits``."""
        counts: dict[int, int] = {}
        begin = 0
        first = "SELECT address FROM blocks WHERE address >= ? ORDER BY address LIMIT 1"
        count = "SELECT count(*) FROM blocks WHERE address >= ? AND address < ?"
        most = 1 << 63
        while begin < most and (row := self._connection.execute(first, (begin,)).fetchone()):
            if row[0] < begin:
                raise DamagedIndex("its rows are out of order")
            slab = row[0] >> bits
            begin = slab + 1 << bits
            ends = (slab << bits, min(begin, most - 1))
            counts[slab] = self._connection.execute(count, ends).fetchone()[0]
        return counts

    def namespaces(self) -> list[tuple[Namespace, int]]:
        """Namespaces ever registered, with the bytes of their blocks."""
        return list(self._spaces.values())

    def knows(self, key: BlockKey) -> bool:
        """Whether the key's namespace is registered; rows of others cannot be inserted."""
        return key[:NAMESPACE_BYTES] in self._ids

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        """Records a namespace. Durable on return."""
        number = self._ids.get(namespace.digest) or max(self._spaces, default=0) + 1
        parts = json.dumps(namespace.parts)
        total = _sum(number, namespace.digest, parts.encode(), block_bytes)
        row = (number, namespace.digest, parts, block_bytes, total)
        self._change("INSERT OR REPLACE INTO namespaces VALUES (?, ?, ?, ?, ?)", [row])
        self._spaces[number] = (namespace, block_bytes)
        self._ids[namespace.digest] = number

    def _change(self, query: str, values: Iterable[Sequence[object]] = ((),)) -> None:
        """Executes the query with each of ``values``, all or none. Durable on return."""
        with self._connection as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(query, values)

    def insert(self, rows: Sequence[IndexRow]) -> None:
        """Adds at most ``MAX_ROWS`` rows, all or none. Durable on return."""
        self._change(f"INSERT INTO blocks VALUES ({_MARKS})", map(self._fields, rows))

    def _fields(self, row: IndexRow) -> tuple[object, ...]:
        digest, name = row.key[:NAMESPACE_BYTES], row.key[NAMESPACE_BYTES:]
        parent = None if row.parent is None else row.parent[NAMESPACE_BYTES:]
        tenant = b"" if row.tenant == SHARED else bytes.fromhex(row.tenant)
        total = _sum(digest, name, parent, row.depth, row.nbytes, row.tag, tenant)
        return (
            row.address,
            self._ids[digest],
            name,
            parent,
            row.depth,
            row.nbytes,
            row.tag,
            row.used - self._ahead_s,
            tenant,
            int(row.pinned),
            total + row.address + row.used - self._ahead_s + row.pinned,
        )

    def delete(self, addresses: Sequence[int]) -> None:
        """Deletes rows, all or none; missing ones are ignored. Durable on return."""
        self._change("DELETE FROM blocks WHERE address = ?", [(at,) for at in addresses])

    def delete_all(self) -> None:
        """Deletes every row. Durable on return."""
        self._change("DELETE FROM blocks")

    def update(
        self, column: Literal["used", "pinned", "address"], values: Sequence[tuple[int, int]]
    ) -> None:
        """Changes rows, all or none, by pairs of a value and the row's address: seconds of last
        uses, 1 or 0 for pinned or unpinned, or new addresses of blocks that were copied. Durable on
        return; at most ``MAX_ROWS``."""
        if column == "used":
            values = [(second - self._ahead_s, address) for second, address in values]
        query = f"UPDATE blocks SET sum = sum + ?1 - {column}, {column} = ?1 WHERE address = ?2"
        self._change(query, values)

    def compact(self, bound: int) -> None:
        """Returns the space of deleted rows to the file system if the file, without its log, is
        larger than ``bound``. Temporarily takes as much space as the remaining rows."""
        if os.stat(self._path).st_size > bound:
            self._connection.execute("PRAGMA max_page_count = 1073741823").fetchone()
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def note(self, name: str, value: str = "") -> None:
        """Notes a value, or a ``Mark``, of the file as a whole. Durable on return."""
        _put_meta(self._connection, name, value)
        self._meta[name] = value

    def reserve(self, nbytes: int) -> bool:
        """Ensures that the medium has space for ``nbytes`` of index and for its log, so that blocks
        that have a slot can also get a row. False if not; True also if the file system cannot
        tell. Raises OSError if the medium fails."""
        return _reserve(self._path, nbytes) and _reserve(self._log_path, WAL_BYTES)

    def has(self, mark: Mark) -> bool:
        """Whether the folder holds encrypted blocks only (``sealed``), or may hold compressed
        ones."""
        return mark in self._meta

    def limit(self, nbytes: int) -> None:
        """Limits the file to ``nbytes`` from now on; changes that need more fail."""
        pages = max(1, nbytes // _PAGE)
        self._connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()

    def is_in_place(self) -> bool:
        """Whether the files are still in place (neither deleted nor replaced)."""
        try:
            inodes = [os.stat(file).st_ino for file in (self._path, self._log_path)]
        except OSError as error:
            return error.errno != errno.ENOENT  # a medium that cannot tell took the rows
        return inodes == self._inodes

    def close(self, is_well: bool = True) -> None:
        """``is_well``: all of it could be read and written; it need not be checked when it is
        opened again."""
        with contextlib.suppress(sqlite3.Error):
            if is_well:
                self.note_time()
                self.note("ended")
        self._connection.close()


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """Opens the index of a folder for reading: a copy, if a tier may be using it meanwhile."""
    path, changed = folder / INDEX_NAME, 0
    with tempfile.TemporaryDirectory(prefix="kvrecall-index-") as name:
        uri, log = f"{path.absolute().as_uri()}?immutable=1", path.with_name(path.name + "-wal")
        while log.exists() and changed != (changed := path.stat().st_mtime_ns):  # from the log
            uri = shutil.copyfile(path, f"{name}/index")
            shutil.copyfile(log, f"{name}/index-wal")
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection


def counts_in(folder: Path) -> list[tuple[tuple[tuple[str, str], ...], int]]:
    """The parts of each namespace and how many blocks it has, most first, in the index of a folder
    that a tier may be using meanwhile. Changes nothing. TierError if it cannot be read."""
    query = (
        "SELECT parts, count(*) FROM blocks JOIN namespaces ON namespaces.id = blocks.namespace"
        " GROUP BY namespaces.id ORDER BY count(*) DESC"
    )
    try:
        with reading(folder) as index:
            return [(_PARTS.decode(parts), count) for parts, count in index.execute(query)]
    except (OSError, sqlite3.Error, msgspec.DecodeError, RecursionError, TypeError) as error:
        raise TierError(f"disk_path: {folder / INDEX_NAME} cannot be read: {error}") from error


def check_index(folder: Path) -> bool:
    """Whether the blocks of an unused folder are encrypted. Changes nothing. Raises TierError if
    the folder has no index, or one that a pool would move aside."""
    path = folder / INDEX_NAME
    if folder.is_file():
        raise TierError(f"disk_path: {folder} is a file; name the folder of a disk tier")
    if not path.exists() or (path.is_file() and path.stat().st_size == 0):
        if not folder.exists():
            raise TierError(f"disk_path: there is no folder {folder}; check the path")
        why = f"its {INDEX_NAME} is empty" if path.exists() else f"it has no {INDEX_NAME}"
        raise TierError(
            f"disk_path: no pool has written blocks to {folder} yet ({why}); name the disk_path of "
            "a pool"
        )
    try:
        if why := _unfit(path):
            raise TierError(
                f"disk_path: {path}: {why}; nothing is changed. A pool that is started on this "
                "folder moves the file aside and starts empty"
            )
        with contextlib.closing(_plain(path)) as connection:
            return "sealed" in _meta(connection)
    except sqlite3.Error as error:
        raise TierError(f"disk_path: {path} cannot be read: {error}") from error


def _meta(connection: sqlite3.Connection) -> dict[str, str]:
    """What is noted of the file as a whole. Raises DamagedIndex."""
    noted: dict[str, str] = {}
    for name, value, total in connection.execute("SELECT name, value, sum FROM meta"):
        if not (isinstance(name, bytes) and isinstance(value, bytes)) or _sum(name, value) != total:
            raise DamagedIndex("a row of meta")
        noted[name.decode()] = value.decode()
    if not re.fullmatch("[0-9a-f]{32}", noted.get("pool_id", "")):
        raise DamagedIndex("no pool_id")
    return noted


def _put_meta(connection: sqlite3.Connection, name: str, value: str) -> None:
    total = _sum(name.encode(), value.encode())
    connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (name, value, total))


def _plain(path: Path) -> sqlite3.Connection:
    """A connection with the file to itself, so that the index of the log is in memory and not in a
    mapped file, whose pages a full btrfs refuses with SIGBUS. Texts are bytes: their UTF-8 may be
    damaged."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.text_factory = bytes
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    return connection


def _set_up(connection: sqlite3.Connection, meta: dict[str, str]) -> None:
    """Makes a finished transaction durable, and the tables of an empty file. ``meta``: what to note
    in it."""
    connection.execute(f"PRAGMA page_size = {_PAGE}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    if _schema(connection):
        return
    connection.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA:
        connection.execute(statement)
    for name, value in meta.items():
        _put_meta(connection, name, value)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _schema(connection: sqlite3.Connection) -> tuple[bytes, ...]:
    """The statements that made what the file holds."""
    found = connection.execute("SELECT sql FROM sqlite_schema WHERE sql NOT NULL ORDER BY rowid")
    return tuple(sql for (sql,) in found)


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
        with contextlib.closing(_plain(path)) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            owner = connection.execute("PRAGMA application_id").fetchone()[0]
            schema = _schema(connection)
            if schema != tuple(statement.encode() for statement in _SCHEMA):
                if not schema and version == owner == 0:
                    return ""
                if owner != _APPLICATION_ID:
                    return "it belongs to another program"
                if version > SCHEMA_VERSION:
                    raise TierError(
                        f"disk_path: {path} was written by a newer kvrecall (format {version}, "
                        f"this one reads {SCHEMA_VERSION}); update kvrecall or use another folder"
                    )
                if version < SCHEMA_VERSION:
                    return f"its format {version} is older than {SCHEMA_VERSION}"
                return "it is damaged (its schema)"
            with path.open("rb") as file:
                if not set(file.read(20)[18:]) <= {1, 2}:  # SQLite would only read it
                    return "it is damaged (its header)"
            was_closed_well = "ended" in _meta(connection)
            if trusting and was_closed_well:
                return ""
            if trusting:
                _LOG.info("disk tier: checking %s, %d MiB", path, path.stat().st_size >> 20)
            for _ in range(READ_TRIES):
                verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                said = " ".join(verdict.decode(errors="replace").split())
                code = re.search(r"error code=(\d+)", said)  # of a page that could not be read
                if code is None or int(code[1]) & 0xFF not in _NOT_DAMAGE:
                    break
                time.sleep(AGAIN_S)
            return "" if said == "ok" else f"it is damaged ({said})"
    except (sqlite3.DatabaseError, ValueError) as error:
        if isinstance(error, sqlite3.Error) and not is_damage(error):
            raise
        return f"it is damaged ({error})"


def aside_bytes(folder: Path) -> int:
    """Bytes of indexes that were moved aside; what the medium does not show counts nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for file in folder.glob(_ASIDE_NAME + "*"):
            with contextlib.suppress(OSError):
                total += file.stat().st_size
    return total


def _move_aside(path: Path, why: str) -> Path:
    """Renames an index that is unfit, and says so; returns its new path."""
    aside = path.with_name(_ASIDE_NAME)
    for suffix in ("", "-wal"):
        old, new = (file.with_name(file.name + suffix) for file in (path, aside))
        new.unlink(missing_ok=True)
        if old.exists():
            os.replace(old, new)
    for file in (path, aside):
        file.with_name(file.name + "-shm").unlink(missing_ok=True)
    _LOG.warning("disk tier: %s: %s; renamed to %s, and a new one was started", path, why, aside)
    return aside
