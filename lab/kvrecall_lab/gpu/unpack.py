"""``python3 unpack.py KIT HOME``: unpacks a kit on the GPU machine, with nothing but Python.

HOME/site goes first on ``PYTHONPATH``; HOME/cache has kernels compiled before. All archives at
once, each by a process; then the Python files are compiled, which else the first server's start
would do.
"""

from __future__ import annotations

import compileall
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

SITE, CACHE = "site", "cache"
"""Folders of HOME; an archive's name begins with the one that it is for."""

SUFFIX = ".tar.xz"


def unpack(kit: Path, home: Path) -> float:
    """Returns the seconds that it took. Raises FileNotFoundError if the kit has no archives."""
    began = time.monotonic()
    archives = sorted(kit.glob(f"{SITE}-*{SUFFIX}"), key=lambda path: -path.stat().st_size)
    if not archives:
        raise FileNotFoundError(f"{kit} has no {SITE}-*{SUFFIX}; pack one first")
    with ProcessPoolExecutor() as workers:
        list(workers.map(partial(_extract, home), [*archives, *kit.glob(f"{CACHE}-*{SUFFIX}")]))
    compileall.compile_dir(home / SITE, quiet=2, workers=0)
    return time.monotonic() - began


def _extract(home: Path, archive: Path, tries: int = 9) -> None:
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(home / archive.name.partition("-")[0], filter="data")
    except FileExistsError:  # another archive's process made the same folder just then
        if not tries:
            raise
        _extract(home, archive, tries - 1)


if __name__ == "__main__":
    print(f"unpacked in {unpack(Path(sys.argv[1]), Path(sys.argv[2])):.1f} s", flush=True)
