"""SQLite on a simulated disk: the library that Python's ``sqlite3`` uses, with a VFS in front of
its own one that tells the disk what is written, synced, created and removed.

It is the same library and module that the product uses, so nothing of ``sqlite3`` is imitated. Its
calls happen while one thread runs: no other runs before SQLite returns, and what a call takes
passes on the clock at once. The log's shared memory is not on the disk, as after a cut SQLite makes
it anew.
"""

from __future__ import annotations

import ctypes
import errno
import sqlite3
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int64, c_void_p, cast, memmove
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall_lab.faults.medium import Inode, System

_OK, _FULL, _READONLY, _CANTOPEN = 0, 13, 8, 14
_IOERR_READ, _IOERR_WRITE, _IOERR_FSYNC, _IOERR_TRUNCATE, _IOERR_DELETE = (
    10 | n << 8 for n in (1, 3, 4, 6, 10)
)
_CREATE = 0x4
_NEW_LOG = 0x800 | 0x4000 | 0x80000  # journals and logs: their folder is synced with them at first

# Names as pointers: SQLite keeps that of a file, and what follows it.
_OPEN = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, POINTER(c_int))
_DELETE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
_CLOSE = CFUNCTYPE(c_int, c_void_p)
_MOVE = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_TRUNCATE = CFUNCTYPE(c_int, c_void_p, c_int64)
_SYNC = CFUNCTYPE(c_int, c_void_p, c_int)


class _Vfs(ctypes.Structure):
    _fields_ = [
        ("iVersion", c_int),
        ("szOsFile", c_int),
        ("mxPathname", c_int),
        ("pNext", c_void_p),
        ("zName", c_char_p),
        ("pAppData", c_void_p),
        ("xOpen", c_void_p),
        ("xDelete", c_void_p),
        ("others", c_void_p * 14),
    ]


class _Methods(ctypes.Structure):
    _fields_ = [
        ("iVersion", c_int),
        ("xClose", c_void_p),
        ("xRead", c_void_p),
        ("xWrite", c_void_p),
        ("xTruncate", c_void_p),
        ("xSync", c_void_p),
        ("xFileSize", c_void_p),
        ("xLock", c_void_p),
        ("xUnlock", c_void_p),
        ("others", c_void_p * 10),
    ]


@dataclass(eq=False, slots=True)
class _Open:
    """An open file, and the process that opened it."""

    system: System
    inode: Inode
    syncs_folder: bool


class SimulatedVfs:
    """Is SQLite's default from its creation on: for files of the ``system``, as it is when they are
    opened, and for others of the process as before. One for each process."""

    def __init__(self) -> None:
        """Raises RuntimeError if ``sqlite3`` has no library of its own to be found."""
        self.system: System | None = None
        self.files: dict[int, _Open] = {}
        mapped = Path("/proc/self/maps").read_text().split()
        paths = [word for word in mapped if "/libsqlite3.so" in word]
        if not paths:
            raise RuntimeError(
                f"this Python has SQLite {sqlite3.sqlite_version} inside itself; the simulation "
                "needs one that loads libsqlite3.so, as Debian's and python.org's images do"
            )
        library = ctypes.CDLL(paths[0])
        library.sqlite3_vfs_find.restype = POINTER(_Vfs)
        base = library.sqlite3_vfs_find(None)
        self._vfs = _Vfs()
        memmove(ctypes.byref(self._vfs), base, ctypes.sizeof(_Vfs))
        self._base_open = cast(base.contents.xOpen, _OPEN)
        self._base_delete = cast(base.contents.xDelete, _DELETE)
        self._calls = [_OPEN(self._open), _DELETE(self._delete)]
        self._vfs.zName = b"kvrecall-simulated"
        self._vfs.pNext = None
        self._vfs.xOpen, self._vfs.xDelete = (cast(call, c_void_p) for call in self._calls)
        self._tables: dict[int, tuple[_Methods, _Methods, list[Any]]] = {}
        if library.sqlite3_vfs_register(ctypes.byref(self._vfs), 1):
            raise RuntimeError("SQLite takes no other VFS")

    def open_files(self, system: System) -> int:
        return sum(file.system is system for file in self.files.values())

    # -- the calls of the VFS --------------------------------------------------------------

    def _open(self, vfs: int, name: int | None, file: int, flags: int, out: Any) -> int:
        system = self.system
        own = None if system is None or name is None else system.name_of(_text(name))
        if system is None or not own:
            return int(self._base_open(vfs, name, file, flags, out))
        is_new = own not in system.disk.names
        if is_new and not flags & _CREATE:
            return int(self._base_open(vfs, name, file, flags, out))
        if code := self._fails(system, "create" if is_new else "open"):
            cast(file, POINTER(c_void_p))[0] = None
            return _FULL if code == errno.ENOSPC else _CANTOPEN
        result = int(self._base_open(vfs, name, file, flags, out))
        if result == _OK:
            if is_new:
                system.disk.change(own, "", Inode())
            inode = system.disk.names[own]
            self.files[file] = _Open(system, inode, is_new and flags & _NEW_LOG > 0)
            self._redirect(file)
        return result

    def _delete(self, vfs: int, name: int, syncs: int) -> int:
        system = self.system
        own = None if system is None else system.name_of(_text(name))
        if system is None or not own:
            return int(self._base_delete(vfs, name, syncs))
        if own not in system.disk.names:
            return int(self._base_delete(vfs, name, 0))
        if self._fails(system, "unlink"):
            return _IOERR_DELETE
        result = int(self._base_delete(vfs, name, 0))
        if result == _OK:
            system.disk.change(own, "", None)
            if syncs and not system.troubles.lies:
                system.disk.sync_folder()
        return result

    def _redirect(self, file: int) -> None:
        """Puts the calls of this class into the table of an open file."""
        place = cast(file, POINTER(c_void_p))
        at = place[0] or 0
        if at not in self._tables:
            base = _Methods.from_address(at)
            table = _Methods()
            memmove(ctypes.byref(table), at, ctypes.sizeof(_Methods))
            calls: list[Any] = [
                _CLOSE(self._close_of(cast(base.xClose, _CLOSE))),
                _MOVE(self._read_of(cast(base.xRead, _MOVE))),
                _MOVE(self._write_of(cast(base.xWrite, _MOVE))),
                _TRUNCATE(self._truncate_of(cast(base.xTruncate, _TRUNCATE))),
                _SYNC(self._sync_of(cast(base.xSync, _SYNC))),
                *[_SYNC(lambda *_: _OK)] * 2,  # which a killed process would have lost
            ]
            names = ("xClose", "xRead", "xWrite", "xTruncate", "xSync", "xLock", "xUnlock")
            for name, call in zip(names, calls, strict=True):
                setattr(table, name, cast(call, c_void_p))
            self._tables[at] = (base, table, calls)
        place[0] = ctypes.addressof(self._tables[at][1])

    def _close_of(self, base: Any) -> Any:
        def close(file: int) -> int:
            self.files.pop(file, None)
            return int(base(file))

        return close

    def _read_of(self, base: Any) -> Any:
        def read(file: int, into: int, nbytes: int, offset: int) -> int:
            one = self.files[file]
            system = one.system
            if not system.is_dead and self._fails(system, "read"):
                return _IOERR_READ
            result = int(base(file, into, nbytes, offset))
            if not system.is_dead:
                data = memoryview((ctypes.c_ubyte * nbytes).from_address(into)).cast("B")
                system.spoil(one.inode, [data] if result == _OK else [], offset)
            return result

        return read

    def _write_of(self, base: Any) -> Any:
        def write(file: int, data: int, nbytes: int, offset: int) -> int:
            one = self.files[file]
            system, was_dead = one.system, one.system.is_dead
            code = self._fails(system, "write")
            offset = system.landing(one.inode, nbytes, offset)
            arrives = not code or (system.was_cut and system.machine.chance.random() < 0.5)
            if arrives and not was_dead:
                one.inode.pending.append((offset, ctypes.string_at(data, nbytes)))
            if code:
                return _FULL if code == errno.ENOSPC else _IOERR_WRITE
            return int(base(file, data, nbytes, offset))

        return write

    def _truncate_of(self, base: Any) -> Any:
        def truncate(file: int, nbytes: int) -> int:
            one = self.files[file]
            if self._fails(one.system, "truncate"):
                return _IOERR_TRUNCATE
            one.inode.pending.append(nbytes)
            return int(base(file, nbytes))

        return truncate

    def _sync_of(self, base: Any) -> Any:
        def sync(file: int, flags: int) -> int:
            one = self.files[file]
            system, was_dead = one.system, one.system.is_dead
            if self._fails(system, "sync"):
                if not was_dead and not system.is_dead:
                    system.failed_sync(one.inode)
                return _IOERR_FSYNC
            if system.troubles.lies:
                system.faults += 1
                return _OK
            one.inode.sync()
            if one.syncs_folder:
                one.syncs_folder = False
                system.disk.sync_folder()
            return _OK

        return sync

    @staticmethod
    def _fails(system: System, kind: str) -> int:
        """The errno of a call; any if the machine is dead."""
        if system.is_dead:
            return errno.EIO
        code = system.fails(kind)
        if not (code or system.is_dead):
            seconds = system.seconds()
            system.machine.now += seconds
            system.machine.leapt += seconds
        return code


def _text(name: int) -> str:
    return ctypes.string_at(name).decode()
