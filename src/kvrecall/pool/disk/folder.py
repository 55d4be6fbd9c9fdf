"""The folder of a disk tier: checked before any change, locked, owner-only."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import stat
from pathlib import Path

from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.disk.index import is_damage
from kvrecall.pool.lockfile import LockHeld, lock_path, sign, signer
from kvrecall.secret import WRITE, exposure

_GIB = 1 << 30
LOCK_NAME = "lock"
LEAST_BYTES = 8 << 20
_OWN = (LOCK_NAME, "index.sqlite*", "slab-*.kv")
"""Names of a tier's files. It leaves others alone."""


def standing_part(path: Path) -> Path:
    """``path``, or the nearest part of it that exists. Raises OSError where that cannot be seen."""
    while not path.exists():
        path = path.parent
    return path


def own_bytes(path: Path) -> int:
    """Bytes on the medium that files of a tier in ``path`` already occupy."""
    if not path.is_dir():
        return 0
    names = (file for name in _OWN for file in path.glob(name))
    return sum(name.lstat().st_blocks * 512 for name in names)


class MediumFails(TierError):
    """The medium allows no tier now: it is full, or only to be read, or failing. The settings may
    be right."""


_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def refusal(path: Path, error: OSError | sqlite3.Error) -> TierError:
    """What an error says of the folder that it came from."""
    if isinstance(error, sqlite3.Error):
        fails = not is_damage(error)
        said = str(error)
        if (system := os.statvfs(path)).f_files and not system.f_favail:  # btrfs counts none
            said += "; its file system has no inodes left"
    else:
        fails = error.errno in _FAILS
        said = error.strerror or str(error)
    return (MediumFails if fails else TierError)(f"disk_path: {path}: {said}")


def check_room(path: Path, capacity_bytes: int) -> str:
    """Raises TierError if ``path`` cannot become a tier, ConfigError for too small a size. Returns
    what is doubtful: a file system that has less room now, "" if there is enough. Changes nothing.
    """
    if capacity_bytes < LEAST_BYTES:
        raise ConfigError(f"disk_size: {capacity_bytes} bytes is too small; the minimum is 8MiB")
    try:
        standing = standing_part(path)
    except OSError as error:
        raise TierError(
            f"disk_path: {path} cannot be reached: {error.strerror}; give this user access, or use "
            "another folder"
        ) from error
    if not standing.is_dir():
        raise TierError(f"disk_path: {standing} is not a folder")
    if standing == path:
        if path.stat().st_mode & stat.S_ISVTX:
            raise TierError(
                f"disk_path: {path} is shared with other users; name a folder below it for the "
                "tier alone"
            )
        _check_own(path, path.lstat())
    system = os.statvfs(standing)
    if system.f_flag & os.ST_RDONLY:
        raise MediumFails(f"disk_path: the file system of {standing} is mounted read-only")
    if not os.access(standing, os.R_OK | os.W_OK | os.X_OK):
        raise TierError(f"disk_path: {standing} is not writable for this user")
    whole = system.f_blocks * system.f_frsize
    if capacity_bytes > whole:
        raise TierError(
            f"disk_size: {capacity_bytes / _GIB:.2f} GiB is more than the {whole / _GIB:.2f} GiB "
            f"of the file system of {path}; set a smaller disk_size or another disk_path"
        )
    free = system.f_bavail * system.f_frsize + own_bytes(path)
    if capacity_bytes <= free:
        return ""
    return (
        f"disk_size: {capacity_bytes / _GIB:.2f} GiB is more than the {free / _GIB:.2f} GiB "
        f"free on the file system of {path}"
    )


def _check_own(folder: Path, status: os.stat_result) -> None:
    """Raises TierError unless the folder is this user's, and only this user can write to it."""
    if stat.S_ISLNK(status.st_mode):
        raise TierError(
            f"disk_path: {folder} is a symbolic link; name the folder that it leads to, "
            f"{os.path.realpath(folder)}"
        )
    if why := exposure(folder, status, WRITE):
        raise TierError(f"disk_path: {why}")


def _keep_private(fd: int, folder: Path) -> None:
    """Makes the folder of ``fd`` and the tier's files in it accessible to this user alone. Raises
    TierError if any of it is another user's, or a link."""
    _check_own(folder, os.fstat(fd))
    os.fchmod(fd, 0o700)
    for path in (file for name in _OWN for file in folder.glob(name)):
        status = path.lstat()
        if why := exposure(path, status, 0):
            raise TierError(f"disk_path: {why}")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise TierError(
                f"disk_path: {path} is a link, or not a file; remove it, or use another folder"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(status.st_mode & 0o700)


class FolderHeld(TierError):
    """Another process uses the folder."""


class FolderLock:
    """Held by the one process that uses the folder; the kernel releases it at any exit.

    It is on the folder, which cannot be removed while it holds files, and on a file in it, which
    other hosts of a network file system see.
    """

    def __init__(self, path: Path) -> None:
        """Creates the folder if needed. Raises TierError if another process holds it, another user
        owns or may write to it, or its path is a symbolic link."""
        with contextlib.ExitStack() as undo:
            try:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.fd = lock_path(path, os.O_RDONLY | os.O_DIRECTORY)
                undo.callback(os.close, self.fd)
                _keep_private(self.fd, path)
                self._file = lock_path(path / LOCK_NAME)
                undo.callback(os.close, self._file)
                sign(self._file)
            except LockHeld as error:
                lock = path / LOCK_NAME
                noted = lock.read_text("ascii", "replace") if os.access(lock, os.R_OK) else ""
                raise FolderHeld(
                    f"disk_path: {path} is in use by process {signer(str(error) or noted)}; stop "
                    "it or use another folder"
                ) from None
            except OSError as error:
                raise refusal(path, error) from error
            self._held = undo.pop_all()

    def release(self) -> None:
        """Idempotent."""
        self._held.close()
