"""The folder of a disk tier: checked before any change, locked, owner-only."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kvrecall.errors import TierError

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
    return sum(name.stat().st_blocks * 512 for name in names)


def check_room(path: Path, capacity_bytes: int) -> None:
    """Raises TierError if ``path`` cannot become a tier of that size. Changes nothing."""
    if capacity_bytes < LEAST_BYTES:
        raise TierError(f"disk_size: {capacity_bytes} bytes is too small; the minimum is 8MiB")
    try:
        standing = standing_part(path)
    except OSError as error:
        raise TierError(
            f"disk_path: {path} cannot be reached: {error.strerror}; give this user access, or use "
            "another folder"
        ) from error
    if not standing.is_dir():
        raise TierError(f"disk_path: {standing} is not a folder")
    if standing == path and path.stat().st_mode & stat.S_ISVTX:
        raise TierError(
            f"disk_path: {path} is shared with other users; name a folder below it for the "
            "tier alone"
        )
    if not os.access(standing, os.R_OK | os.W_OK | os.X_OK):
        raise TierError(f"disk_path: {standing} is not writable for this user")
    system = os.statvfs(standing)
    free = system.f_bavail * system.f_frsize + own_bytes(path)
    if capacity_bytes > free:
        raise TierError(
            f"disk_size: {capacity_bytes / _GIB:.2f} GiB is more than the {free / _GIB:.2f} GiB "
            f"free on the file system of {path}; set a smaller disk_size or another disk_path"
        )


def _keep_private(folder: Path) -> None:
    """Has the folder and the tier's files in it readable by this user alone. Raises TierError if
    any of it is another user's, who could change it at any time."""
    for path in (folder, *(file for name in _OWN for file in folder.glob(name))):
        status = path.lstat()
        if status.st_uid != os.getuid():
            raise TierError(
                f"disk_path: {path} belongs to user {status.st_uid}, not to {os.getuid()}; give it "
                "to this user (chown), or use another folder"
            )
        if stat.S_IMODE(status.st_mode) & 0o077 and not stat.S_ISLNK(status.st_mode):
            path.chmod(status.st_mode & 0o700)


class FolderHeld(TierError):
    """Another process uses the folder."""


class FolderLock:
    """Held by the one process that uses the folder; the kernel releases it at any exit."""

    def __init__(self, path: Path) -> None:
        """Creates the folder if needed. Raises TierError if another process holds it, or another
        user owns it."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _keep_private(path)
            fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierError(f"disk_path: {path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise FolderHeld(
                f"disk_path: {path} is in use by process {holder}; stop it or use another folder"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
