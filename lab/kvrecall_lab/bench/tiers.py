"""``bench tiers``: every library puts and gets the same blocks, in turns."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvrecall.bench.report import GIB_S, Folder, Report, latencies, progress, timed
from kvrecall_lab.bench.peers import (
    DiskCache,
    LmcacheCpu,
    LmcacheDisk,
    MooncakeClient,
    VllmFiles,
    find_peers,
)
from kvrecall_lab.bench.stores import (
    Copy,
    DiskStore,
    HostStore,
    Medium,
    PlainFiles,
    Sequential,
    Store,
    StoreError,
    drop_from_memory,
    make_durable,
)

PHASES = ("put", "durable", "cold", "warm")
"""``durable``: puts and the wait until all is on the medium. ``cold``: gets after the files were
dropped from the page cache; of memory, the first round of a store, which touches its pages.
``warm``: gets of the same blocks right after; of memory, every later round."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The resources of a store: its own folder, the memory that contains all blocks of the
    benchmark, and a capacity of ``nbytes`` for blocks of ``block_bytes``."""

    folder: Path
    memory: memoryview
    nbytes: int
    block_bytes: int

    @property
    def limit(self) -> int:
        """Bytes of memory that a store may use: 1.25 times its capacity."""
        return self.nbytes * 5 // 4 + (64 << 20)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library to measure. ``checks``: whether a get verifies the bytes. ``limit``: whether it is
    the limit that others are compared with."""

    name: str
    medium: Medium
    checks: bool
    story: str
    open: Callable[[Workspace], Store]
    limit: bool = False


_MEMORY, _DISK = Medium.MEMORY, Medium.DISK

CANDIDATES = (
    Candidate(
        "memory copy", _MEMORY, False, "one thread copies the bytes",
        lambda w: Copy(memoryview(mmap.mmap(-1, w.nbytes))), limit=True,
    ),
    Candidate(
        "kvrecall host", _MEMORY, False, "the pool's arena: found, leased, copied, released",
        lambda w: HostStore(w.limit, w.block_bytes),
    ),
    Candidate(
        "LMCache CPU", _MEMORY, False, "LocalCPUBackend",
        lambda w: LmcacheCpu(w.limit, w.block_bytes),
    ),
    Candidate(
        "Mooncake client", _MEMORY, False,
        "batch_put_from and batch_get_into; this process lends the memory, so it is copied locally",
        lambda w: MooncakeClient(w.folder, w.nbytes, w.memory),
    ),
    Candidate(
        "sequential file", _DISK, False,
        "one preallocated file, direct I/O, a request in one call, fdatasync after each",
        lambda w: Sequential(w.folder, w.nbytes), limit=True,
    ),
    Candidate(
        "kvrecall disk", _DISK, True,
        "the disk tier as it is: XXH3 verified, direct I/O, a put ends when it is durable",
        lambda w: DiskStore(w.folder, w.nbytes, w.block_bytes),
    ),
    Candidate(
        "plain files", _DISK, False, "a file a block, buffered, renamed into place",
        lambda w: PlainFiles(w.folder, checks=False),
    ),
    Candidate(
        "plain files, checksums", _DISK, True, "the same with an XXH3 behind each block",
        lambda w: PlainFiles(w.folder, checks=True),
    ),
    Candidate(
        "diskcache", _DISK, False, "diskcache.Cache, read as a file",
        lambda w: DiskCache(w.folder, w.nbytes),
    ),
    Candidate(
        "LMCache disk", _DISK, False, "LocalDiskBackend as it comes: buffered, 4 threads",
        lambda w: LmcacheDisk(w.folder, w.limit, w.block_bytes, direct=False),
    ),
    Candidate(
        "LMCache disk, direct", _DISK, False, "LocalDiskBackend with use_odirect",
        lambda w: LmcacheDisk(w.folder, w.limit, w.block_bytes, direct=True),
    ),
    Candidate(
        "vLLM file system", _DISK, False,
        "vLLM's FileSystemTierManager: direct I/O, a request a job",
        lambda w: VllmFiles(w.folder, w.memory, w.block_bytes),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """``requests`` requests of ``request_blocks`` blocks of ``block_bytes``, ``rounds`` times."""

    block_bytes: int = 1 << 20
    request_blocks: int = 16
    requests: int = 12
    rounds: int = 5

    @property
    def request_bytes(self) -> int:
        return self.block_bytes * self.request_blocks

    @property
    def nbytes(self) -> int:
        return self.request_bytes * self.requests


class Blocks:
    """The bytes: puts read the first half of ``memory``, gets write the second."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.memory = memoryview(mmap.mmap(-1, 2 * size.nbytes))
        array = np.frombuffer(self.memory, dtype=np.uint8).reshape(2, size.requests, -1)
        self._put, self._got = array
        for request in self._put:  # no two blocks are alike
            request[:] = np.frombuffer(os.urandom(len(request)), dtype=np.uint8)

    def sources(self, request: int) -> list[memoryview]:
        return self._views(request * self.size.request_bytes)

    def targets(self, request: int) -> list[memoryview]:
        return self._views(request * self.size.request_bytes + self.size.nbytes)

    def forget(self) -> None:
        """Clears the second half."""
        self._got[:] = 0

    def check(self, request: int) -> None:
        """Raises StoreError if a get returned other bytes than were put."""
        if not np.array_equal(self._got[request], self._put[request]):
            raise StoreError("a get returned other bytes than were put")

    def _views(self, first: int) -> list[memoryview]:
        ends = range(first, first + self.size.request_bytes + 1, self.size.block_bytes)
        return [self.memory[begin:end] for begin, end in itertools.pairwise(ends)]


@dataclass(slots=True)
class _Entry:
    """A candidate in this run: its store while open, and seconds of its requests by phase, a list
    per round. ``fault``: why it was left out."""

    candidate: Candidate
    folder: Path
    store: Store | None = None
    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    fault: str = ""

    def note(self, phase: str, seconds: list[float]) -> None:
        self.rounds.setdefault(phase, []).append(seconds)

    def leave_out(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()
        self.fault = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        self.store = None
        progress(f"without {self.candidate.name}: {self.fault}")


def measure_tiers(
    path: Folder = Path("var"),
    rounds: Annotated[int, typer.Option(min=2)] = 5,
    requests: Annotated[int, typer.Option(min=1, help="Requests of 16 MiB a round.")] = 12,
) -> Report:
    """Host and disk tier against other projects' libraries: same blocks, same bytes."""
    find_peers()
    return compare(CANDIDATES, Size(requests=requests, rounds=rounds), path)


def compare(candidates: Sequence[Candidate], size: Size, path: Path) -> Report:
    """Measures all ``candidates`` below ``path``; one that cannot run is in the report with the
    reason."""
    path.mkdir(parents=True, exist_ok=True)
    blocks = Blocks(size)
    with (
        tempfile.TemporaryDirectory(prefix="kvrecall-tiers-", dir=path) as name,
        contextlib.ExitStack() as stack,
    ):
        entries = []
        for candidate in candidates:
            folder = "".join(c if c.isalnum() else "-" for c in candidate.name)
            entries.append(_Entry(candidate, Path(name) / folder))
            _open(entries[-1], blocks, stack)
        for number in range(size.rounds):
            progress(f"round {number + 1} of {size.rounds}")
            turn = number % len(entries)
            for entry in (*entries[turn:], *entries[:turn]):
                try:
                    _round(entry, number, blocks)
                except Exception as error:  # noqa: BLE001 - other projects' code
                    entry.leave_out(error)
    return _report(entries, size)


def _open(entry: _Entry, blocks: Blocks, stack: contextlib.ExitStack) -> None:
    """Opens a candidate's store, which ``stack`` closes, or leaves it out."""
    size, name = blocks.size, entry.candidate.name
    entry.folder.mkdir()
    space = Workspace(entry.folder, blocks.memory, size.nbytes, size.block_bytes)
    try:
        store = entry.store = entry.candidate.open(space)
    except Exception as error:  # noqa: BLE001 - other projects' code
        entry.leave_out(error)
        return

    def close() -> None:
        try:
            store.close()
        except Exception as error:  # noqa: BLE001 - other projects' code; what it measured stands
            progress(f"{name} did not close: {error}")

    stack.callback(close)


def _round(entry: _Entry, number: int, blocks: Blocks) -> None:
    """Puts everything, gets it twice, removes it; compares every block. Does nothing if the entry
    was left out."""
    store, size = entry.store, blocks.size
    if store is None:
        return
    names = [  # of a round's blocks, request by request; unique to the round
        [
            hashlib.sha256(f"{number}/{request}/{n}".encode()).digest()
            for n in range(size.request_blocks)
        ]
        for request in range(size.requests)
    ]
    seconds = []
    for request, mine in enumerate(names):
        sources = blocks.sources(request)
        store.prepare(mine, sources)
        began = time.perf_counter()
        store.put(mine, sources)
        seconds.append(time.perf_counter() - began)
    entry.note("put", seconds)
    if entry.candidate.medium is Medium.DISK:
        entry.note("durable", [sum(seconds) + timed(lambda: make_durable(entry.folder))])
        drop_from_memory(entry.folder)
        entry.note("cold", _gets(store, names, blocks))
        entry.note("warm", _gets(store, names, blocks))
    else:
        entry.note("warm" if number else "cold", _gets(store, names, blocks))
    for mine in names:
        store.remove(mine)


def _gets(store: Store, names: Sequence[Sequence[bytes]], blocks: Blocks) -> list[float]:
    blocks.forget()
    seconds = []
    for request, mine in enumerate(names):
        targets = blocks.targets(request)
        began = time.perf_counter()
        store.get(mine, targets)
        seconds.append(time.perf_counter() - began)
        store.land(targets)
        blocks.check(request)
    return seconds


def _report(entries: Sequence[_Entry], size: Size) -> Report:
    stores: dict[str, dict[str, Any]] = {}
    absent = {entry.candidate.name: entry.fault for entry in entries if entry.fault}
    limits = {e.candidate.medium: e.rounds for e in entries if e.candidate.limit}
    for entry in entries:
        one = entry.candidate
        if entry.fault:
            continue
        stores[one.name] = {
            "medium": str(one.medium),
            "checks": one.checks,
            "limit": one.limit,
            "story": one.story,
        }
        for phase, rounds in entry.rounds.items():
            each = [sum(seconds) for seconds in rounds]
            bare = [sum(seconds) for seconds in limits.get(one.medium, {}).get(phase, [])]
            ratios = [limit / mine for limit, mine in zip(bare, each, strict=False)]
            figures: dict[str, Any] = {
                "gb_s": round(size.nbytes / statistics.median(each) / 1e9, 3),
                "to_limit": round(statistics.median(ratios), 3) if ratios else None,
            }
            if phase != "durable":
                requests = [1e3 * value for seconds in rounds for value in seconds]
                figures["request_ms"] = latencies(requests)
            stores[one.name][phase] = figures
    notes = (
        f"{size.requests} requests of {size.request_blocks} blocks of {size.block_bytes >> 10} KiB "
        f"a round, {size.rounds} rounds; every block got was compared",
        "GiB/s: median of rounds; (..): ratio to the limit of the same medium, round by round; "
        "ms: a request",
        *(f"left out: {name}: {reason}" for name, reason in absent.items()),
    )
    figures = {
        "block_bytes": size.block_bytes,
        "request_blocks": size.request_blocks,
        "requests": size.requests,
        "rounds": size.rounds,
        "stores": stores,
        "absent": absent,
    }
    columns = ("library", "put GiB/s", "durable", "get cold", "ms p50/p95/p99", "get warm")
    rows = tuple((name, *_cells(found)) for name, found in stores.items())
    return Report("tiers", columns, rows, figures, notes)


def _cells(found: dict[str, Any]) -> list[str]:
    texts = []
    for phase in PHASES:
        one = found.get(phase)
        if one is None:
            texts += [""] * (2 if phase == "cold" else 1)
            continue
        ratio = f" ({one['to_limit']:.2f})" if one["to_limit"] is not None else ""
        texts.append(f"{one['gb_s'] * GIB_S:.2f}{ratio}")
        if phase == "cold":
            texts.append("/".join(f"{value:.1f}" for value in one["request_ms"].values()))
    return texts
