"""Whether files and folders that must be this user's alone are."""

from __future__ import annotations

import os
import stat
from pathlib import Path

WRITE = 0o022
ACCESS = 0o077
"""What others may not do: write, or anything."""


def exposure(path: Path, status: os.stat_result, forbidden: int, root_too: bool = False) -> str:
    """Why others can change the file or folder at ``path``, or do what is ``forbidden``, with the
    cure; "" if they cannot. ``root_too``: it may be root's."""
    is_folder = stat.S_ISDIR(status.st_mode)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() and not (root_too and status.st_uid == 0):
        return (
            f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}; give it to this user "
            f"(chown), or use another {'folder' if is_folder else 'file'}"
        )
    if not mode & forbidden:
        return ""
    do, cure = "may read", f"run: chmod {700 if is_folder else 600} {path}"
    if forbidden == WRITE:
        do = "can write to"
        if is_folder:
            cure += ", or name a folder below it, which kvrecall makes"
    return f"{path} has mode {mode:04o}, so others {do} it; {cure}"
