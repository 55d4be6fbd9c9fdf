"""What others can do with a file or folder by its owner and mode."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvrecall.ownership import ACCESS, WRITE, exposure

ME = os.geteuid()
FILE, FOLDER = stat.S_IFREG, stat.S_IFDIR


@pytest.mark.parametrize(
    ("mode", "owner", "forbidden", "root_too", "says"),
    [
        (FILE | 0o600, ME, ACCESS, False, ""),
        (FILE | 0o640, ME, ACCESS, False, "mode 0640, so others may read it; run: chmod 600 /p"),
        (FILE | 0o644, ME, WRITE, False, ""),
        (FILE | 0o666, ME, WRITE, False, "others can write to it; run: chmod 600 /p"),
        (FOLDER | 0o750, ME, ACCESS, False, "others may read it; run: chmod 700 /p"),
        (FOLDER | 0o770, ME, WRITE, False, "others can write to it; run: chmod 700 /p, or name a"),
        (FOLDER | 0o777, ME, 0, False, ""),
        (FOLDER | 0o700, ME + 1, WRITE, False, f"belongs to user {ME + 1}, not to {ME}; give"),
        (FILE | 0o600, ME + 1, ACCESS, True, "or use another file"),
        (FILE | 0o600, 0, ACCESS, True, ""),
        (FILE | 0o604, 0, ACCESS, True, "others may read it"),
    ],
)
def test_says_who_else_can_do_what_and_the_cure(
    mode: int, owner: int, forbidden: int, root_too: bool, says: str
) -> None:
    status = os.stat_result((mode, 1, 1, 1, owner, 0, 0, 0, 0, 0))
    why = exposure(Path("/p"), status, forbidden, root_too)
    assert says in why
    assert bool(says) == bool(why)
