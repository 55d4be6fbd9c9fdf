"""``bench tiers``: every library puts and gets the same blocks, in turns."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvrecall.bench.report import GIB_S, Folder, Report, latencies, progress, timed
from kvrecall_lab.bench import peers, stores
from kvrecall_lab.bench.stores import Space, Store, StoreError

PHASES = ("put", "durable", "cold", "warm")
"""``durable``: puts and the wait until all is on the medium. ``cold``: gets after the files were
dropped from the page cache; of memory, the first round of a store, which touches its pages.
``warm``: gets of the same blocks right after; of memory, every later round."""

Candidates = Mapping[str, Callable[[Space], Store]]
MEMORY: Candidates = {
    "memory copy": stores.Copy,
    "kvrecall host": stores.HostStore,
    "LMCache CPU": peers.LmcacheCpu,
    "Mooncake client": peers.MooncakeClient,
}
DISK: Candidates = {
    "sequential file": stores.Sequential,
    "kvrecall disk": stores.DiskStore,
    "plain files": stores.PlainFiles,
    "plain files, checksums": stores.CheckedFiles,
    "diskcache": peers.DiskCache,
    "vLLM file system": peers.VllmFiles,
}
"""By name; the first of each medium is the limit that others are compared with. Of the libraries on
disk kvrecall's tier and the files with checksums verify what they read."""


@dataclass(frozen=True, slots=True)
class Size:
    """``requests`` requests of ``request_blocks`` blocks of ``block_bytes``, ``rounds`` times."""

    block_bytes: int = 1 << 20
    request_blocks: int = 16
    requests: int = 12
    rounds: int = 5

    @property
    def nbytes(self) -> int:
        return self.block_bytes * self.request_blocks * self.requests


class Blocks:
    """The bytes: puts read the first half of ``memory``, gets write the second."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.memory = memoryview(mmap.mmap(-1, 2 * size.nbytes))
        array = np.frombuffer(self.memory, dtype=np.uint8).reshape(2, size.requests, -1)
        self._put, self.got = array
        for request in self._put:  # no two blocks are alike
            request[:] = np.frombuffer(os.urandom(len(request)), dtype=np.uint8)

    def views(self, half: int, request: int) -> list[memoryview]:
        size, count = self.size.block_bytes, self.size.request_blocks
        first = (half * self.size.requests + request) * count
        return [self.memory[at * size : (at + 1) * size] for at in range(first, first + count)]

    def check(self, request: int) -> None:
        """Raises StoreError if a get returned other bytes than were put."""
        if not np.array_equal(self.got[request], self._put[request]):
            raise StoreError("a get returned other bytes than were put")


@dataclass(slots=True)
class _Entry:
    """A candidate in this run: its store while open, and seconds of its requests by phase, a list
    per round. ``fault``: why it was left out. ``limit``: the name of its medium's."""

    name: str
    limit: str
    folder: Path
    store: Store | None = None
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    fault: str = ""

    @property
    def on_disk(self) -> bool:
        return self.limit in DISK

    def note(self, phase: str, seconds: list[float]) -> None:
        self.rounds.setdefault(phase, []).append(seconds)

    def leave_out(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        self.fault = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        self.store = None
        progress(f"without {self.name}: {self.fault}")


def measure_tiers(
    path: Folder = Path("var"),
    rounds: Annotated[int, typer.Option(min=2)] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests of 16 MiB a round.")] = 12,
) -> Report:
    """Host and disk tier against other projects' libraries: same blocks, same bytes."""
    peers.find_peers()
    return compare({**MEMORY, **DISK}, Size(requests=requests, rounds=rounds), path)


def compare(candidates: Candidates, size: Size, path: Path) -> Report:
    """Measures all ``candidates`` below ``path``; one that cannot run is in the report with the
    reason."""
    path.mkdir(parents=True, exist_ok=True)
    blocks = Blocks(size)
    entries = []
    with (
        tempfile.TemporaryDirectory(prefix="kvrecall-tiers-", dir=path) as name,
        contextlib.ExitStack() as stack,
    ):
        for number, (label, make) in enumerate(candidates.items()):
            limit = next(iter(DISK if label in DISK else MEMORY))
            entry = _Entry(label, limit, Path(name) / str(number))
            entries.append(entry)
            entry.folder.mkdir()
            try:
                space = Space(entry.folder, blocks.memory, size.nbytes, size.block_bytes)
                entry.store = make(space)
                stack.callback(_close, label, entry.store)
            except Exception as error:  # noqa: BLE001 - other projects' code
                entry.leave_out(error)
        for number in range(size.rounds):
            progress(f"round {number + 1} of {size.rounds}")
            turn = number % len(entries)
            for entry in (*entries[turn:], *entries[:turn]):
                try:
                    if entry.store is not None:
                        _round(entry, entry.store, number, blocks)
                except Exception as error:  # noqa: BLE001 - other projects' code
                    entry.leave_out(error)
    return _report(entries, size)


def _close(name: str, store: Store) -> None:
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 - other projects' code; what it measured stands
        progress(f"{name} did not close: {error}")


def _round(entry: _Entry, store: Store, number: int, blocks: Blocks) -> None:
    """Puts everything, gets it twice, removes it; compares every block."""
    size = blocks.size
    names = [  # of a round's blocks, request by request; unique to the round
        [
            hashlib.sha256(f"{number}/{request}/{n}".encode()).digest()
            for n in range(size.request_blocks)
        ]
        for request in range(size.requests)
    ]
    seconds = []
    for request, mine in enumerate(names):
        sources = blocks.views(0, request)
        began = time.perf_counter()
        store.put(mine, sources)
        seconds.append(time.perf_counter() - began)
    entry.note("put", seconds)
    if entry.on_disk:
        waited = timed(lambda: _each_file(entry.folder, os.fsync))
        entry.note("durable", [sum(seconds) + waited])
        _each_file(entry.folder, lambda fd: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
        entry.note("cold", _gets(store, names, blocks))
        entry.note("warm", _gets(store, names, blocks))
    else:
        entry.note("warm" if number else "cold", _gets(store, names, blocks))
    for mine in names:
        store.remove(mine)


def _each_file(folder: Path, act: Callable[[int], object]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                act(file.fileno())


def _gets(store: Store, names: Sequence[Sequence[bytes]], blocks: Blocks) -> list[float]:
    blocks.got[:] = 0
    seconds = []
    for request, mine in enumerate(names):
        targets = blocks.views(1, request)
        began = time.perf_counter()
        store.get(mine, targets)
        seconds.append(time.perf_counter() - began)
        blocks.check(request)
    return seconds


def _report(entries: Sequence[_Entry], size: Size) -> Report:
    stored: dict[str, dict[str, Any]] = {}
    absent = {entry.name: entry.fault for entry in entries if entry.fault}
    by_name = {entry.name: entry for entry in entries}
    rows: list[tuple[str, ...]] = []
    for entry in entries:
        if entry.fault:
            continue
        limit = by_name.get(entry.limit)
        cells, phases = [], stored.setdefault(entry.name, {})
        for phase in PHASES:
            rounds = entry.rounds.get(phase, [])
            if not rounds:
                cells.append("")
                continue
            each = [sum(seconds) for seconds in rounds]
            bare = [sum(seconds) for seconds in limit.rounds.get(phase, [])] if limit else []
            ratios = [ours / mine for ours, mine in zip(bare, each, strict=False)]
            rate = size.nbytes / statistics.median(each) / 1e9
            to_limit = round(statistics.median(ratios), 3) if ratios else None
            waits = latencies([1e3 * value for seconds in rounds for value in seconds])
            phases[phase] = {"gb_s": round(rate, 3), "to_limit": to_limit, "request_ms": waits}
            cells.append(f"{rate * GIB_S:.2f}" + (f" ({to_limit:.2f})" if to_limit else ""))
        cold = "/".join(f"{value:.1f}" for value in phases["cold"]["request_ms"].values())
        rows.append((entry.name, *cells, cold))
    notes = (
        f"{size.requests} requests of {size.request_blocks} blocks of {size.block_bytes >> 10} KiB "
        f"a round, {size.rounds} rounds; every block got was compared",
        "GiB/s: median of rounds; (..): ratio to the limit of the same medium, round by round",
        *(f"left out: {name}: {reason}" for name, reason in absent.items()),
    )
    figures = {
        "block_bytes": size.block_bytes,
        "request_blocks": size.request_blocks,
        "requests": size.requests,
        "rounds": size.rounds,
        "stores": stored,
        "absent": absent,
    }
    columns = ("library", "put GiB/s", "durable", "get cold", "get warm", "ms cold p50/p95/p99")
    return Report("tiers", columns, tuple(rows), figures, notes)
