"""Reports of the pool alone: its look-ups, and its disk tier against the bare disk."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from kvrecall.lab.bench.probes import measure_disk, measure_lookup
from kvrecall.lab.bench.report import Report
from kvrecall.pool.cipher import Cipher
from kvrecall.pool.disk.seal import Sealed
from kvrecall.pool.keyfile import KEY_BYTES

BLOCK_BYTES = 1 << 20
LOOKUP_GOAL_US = 1000.0
READ_GOAL = 0.85

_CALLS = {
    "find_host": "find, all in host memory",
    "find_disk": "find, all on disk",
    "find_absent": "find, none there",
    "acquire_release_host": "acquire and release, in host memory",
    "touch": "touch",
    "reserve_present": "reserve, all there already",
    "reserve_64": "reserve 64 new blocks",
    "commit_64": "commit 64 new blocks",
}


def lookup_report() -> Report:
    """Medians of the pool's calls as the scheduler makes them."""
    found = measure_lookup()
    medians = cast(Mapping[str, float], found["median_us"])
    rows = tuple((_CALLS.get(name, name), f"{value:.0f}") for name, value in medians.items())
    note = f"goal: looking up {found['blocks']} blocks within {LOOKUP_GOAL_US:.0f} us, median"
    columns = (f"call, on {found['blocks']} blocks unless it says otherwise", "median us")
    return Report("lookup", columns, rows, found, (note,))


def disk_report(path: Path, nbytes: int, encrypted: bool = False) -> Report:
    """Bandwidths of the disk tier and of bare direct I/O below ``path``, of ``nbytes`` a round."""
    seal = Sealed(Cipher([secrets.token_bytes(KEY_BYTES)])) if encrypted else None
    found = measure_disk(path, nbytes, BLOCK_BYTES, seal=seal)
    rates = cast(Mapping[str, float], found)
    rows = tuple(
        (
            way,
            f"{rates[f'{name}_tier_bytes_per_s'] / 1e9:.2f}",
            f"{rates[f'{name}_raw_bytes_per_s'] / 1e9:.2f}",
            f"{rates[f'{name}_ratio']:.2f}",
        )
        for name, way in (("read", "disk -> arena"), ("write", "arena -> disk"))
    )
    direct = "direct I/O" if found["direct"] else "no direct I/O on this file system"
    notes = (
        f"{nbytes >> 20} MiB in blocks of {BLOCK_BYTES >> 10} KiB, "
        f"{'sealed with AES-256-GCM' if encrypted else 'checksums verified'}, {direct}",
        f"goal: reads at least {READ_GOAL} of the bare ones",
    )
    return Report("disk", ("", "tier GB/s", "bare GB/s", "ratio"), rows, found, notes)
