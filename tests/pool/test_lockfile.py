"""Locks of paths."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from kvrecall.pool.lockfile import LockHeld, leads_to, lock_path, sign, signer


def test_the_lock_of_a_removed_file_is_not_the_lock_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleaner removes the file between its opening and its lock, and another process locks the
    path meanwhile."""
    path, others = tmp_path / "lock", list[int]()
    real = fcntl.flock

    def cleaned(fd: int, operation: int) -> None:
        if not others:
            path.unlink()
            others.append(os.open(path, os.O_RDWR | os.O_CREAT))
            os.write(others[0], b"7 of 9\n")
            real(others[0], fcntl.LOCK_EX)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", cleaned)
    with pytest.raises(LockHeld, match="7 of 9"):
        lock_path(path)
    os.close(others[0])
    fd = lock_path(path)
    assert leads_to(path, fd)
    path.unlink()
    assert not leads_to(path, fd)
    path.touch()
    assert not leads_to(path, fd), "another's by now"
    os.close(fd)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        lock_path(tmp_path / "lock")
    assert not (tmp_path / "elsewhere").exists()


def test_a_holder_on_another_host_is_named_with_it(tmp_path: Path) -> None:
    """Its number means another process, or none, on this one."""
    fd = lock_path(tmp_path / "lock")
    sign(fd)
    assert signer((tmp_path / "lock").read_text()) == str(os.getpid())
    assert signer("1 node-7\n") == "1 on node-7"
    os.close(fd)
