"""``kvrecall bench tiers``: every store puts and gets the same blocks, round by round, by turns."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvrecall.lab.bench.report import Report, quantiles
from kvrecall.lab.bench.tiers.base import Medium, Store, StoreError, drop_from_memory, make_durable
from kvrecall.lab.bench.tiers.contenders import Contender, Ground
from kvrecall.lab.engines.server import Progress

PHASES = ("put", "durable", "cold", "warm")
"""``durable``: puts and the wait until all is on the medium. ``cold``: gets after the page cache
has let go of the files; of memory, the first round of a store, which touches its pages. ``warm``:
gets of the same blocks right after; of memory, every later round."""


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


@dataclass(slots=True)
class Times:
    """Seconds of a store's requests by phase, one list a round. ``fault``: why it was left out."""

    rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    fault: str = ""

    def note(self, phase: str, seconds: list[float]) -> None:
        self.rounds.setdefault(phase, []).append(seconds)


class Blocks:
    """The bytes: what is put lies in the first half of ``memory``, what is got in the second."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self._map = mmap.mmap(-1, 2 * size.nbytes)
        self.memory = memoryview(self._map)
        self._array = np.frombuffer(self.memory, dtype=np.uint8)
        for at in range(0, size.nbytes, 1 << 24):  # no two blocks are alike
            piece = os.urandom(min(1 << 24, size.nbytes - at))
            self.memory[at : at + len(piece)] = piece

    def sources(self, request: int) -> list[memoryview]:
        return self._views(request, 0)

    def targets(self, request: int) -> list[memoryview]:
        return self._views(request, self.size.nbytes)

    def forget(self) -> None:
        """Empties what was got."""
        self._array[self.size.nbytes :] = 0

    def check(self, request: int, found: Sequence[memoryview]) -> None:
        """Raises StoreError if that is not what was put."""
        for block, source in zip(found, self.sources(request), strict=True):
            if not np.array_equal(np.frombuffer(block, np.uint8), np.frombuffer(source, np.uint8)):
                raise StoreError("a get brought other bytes than were put")

    def _views(self, request: int, base: int) -> list[memoryview]:
        size = self.size
        first = base + request * size.request_blocks * size.block_bytes
        return [
            self.memory[first + n * size.block_bytes : first + (n + 1) * size.block_bytes]
            for n in range(size.request_blocks)
        ]


@dataclass(slots=True)
class Entrant:
    """A contender in this run: its folder, its store while that is open, its times so far."""

    contender: Contender
    folder: Path
    store: Store | None = None
    times: Times = field(default_factory=Times)

    def leave(self, error: Exception, progress: Progress) -> None:
        """It takes no further part, and the report says why."""
        lines = str(error).strip().splitlines()
        self.times.fault = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
        self.store = None
        progress(f"without {self.contender.name}: {self.times.fault}")


def measure_tiers(
    contenders: Sequence[Contender], size: Size, path: Path, progress: Progress
) -> Report:
    """Runs all ``contenders`` below ``path``; who cannot run is in the report with the reason."""
    path.mkdir(parents=True, exist_ok=True)
    blocks = Blocks(size)
    with tempfile.TemporaryDirectory(prefix="kvrecall-tiers-", dir=path) as name:
        entrants = [Entrant(one, Path(name) / _slug(one)) for one in contenders]
        with _opened(entrants, blocks, progress):
            for number in range(size.rounds):
                progress(f"round {number + 1} of {size.rounds}")
                turn = number % len(entrants)
                for entrant in (*entrants[turn:], *entrants[:turn]):
                    try:
                        _round(entrant, number, blocks)
                    except Exception as error:  # noqa: BLE001 - other people's code
                        entrant.leave(error, progress)
    return _report(contenders, size, {one.contender.name: one.times for one in entrants})


@contextlib.contextmanager
def _opened(entrants: Sequence[Entrant], blocks: Blocks, progress: Progress) -> Iterator[None]:
    """Opens the stores of those that can be; closes them at the end of the block."""
    size = blocks.size
    with contextlib.ExitStack() as stack:
        for entrant in entrants:
            entrant.folder.mkdir()
            ground = Ground(entrant.folder, blocks.memory, size.nbytes, size.block_bytes)
            try:
                entrant.store = entrant.contender.open(ground)
            except Exception as error:  # noqa: BLE001 - other people's code
                entrant.leave(error, progress)
                continue
            stack.callback(_close, entrant.store, entrant.contender.name, progress)
        yield


def _close(store: Store, name: str, progress: Progress) -> None:
    try:
        store.close()
    except Exception as error:  # noqa: BLE001 - other people's code; what it measured stands
        progress(f"{name} did not close: {error}")


def _slug(contender: Contender) -> str:
    return "".join(c if c.isalnum() else "-" for c in contender.name)


def _round(entrant: Entrant, number: int, blocks: Blocks) -> None:
    """Puts everything, gets it twice, removes it; every block that comes is compared. Nothing if
    the entrant has left."""
    store, times = entrant.store, entrant.times
    if store is None:
        return
    names = _names(number, blocks.size)
    seconds = []
    for request, mine in enumerate(names):
        sources = blocks.sources(request)
        store.prepare(mine, sources)
        began = time.perf_counter()
        store.put(mine, sources)
        seconds.append(time.perf_counter() - began)
    times.note("put", seconds)
    if entrant.contender.medium is Medium.DISK:
        began = time.perf_counter()
        make_durable(entrant.folder)
        times.note("durable", [sum(seconds) + time.perf_counter() - began])
        drop_from_memory(entrant.folder)
        times.note("cold", _gets(store, names, blocks))
        times.note("warm", _gets(store, names, blocks))
    else:
        times.note("warm" if number else "cold", _gets(store, names, blocks))
    for mine in names:
        store.remove(mine)


def _names(number: int, size: Size) -> list[list[bytes]]:
    """Names of a round's blocks, request by request; no other round has them."""
    return [
        [
            hashlib.sha256(f"{number}/{request}/{n}".encode()).digest()
            for n in range(size.request_blocks)
        ]
        for request in range(size.requests)
    ]


def _gets(store: Store, names: Sequence[Sequence[bytes]], blocks: Blocks) -> list[float]:
    blocks.forget()
    seconds = []
    for request, mine in enumerate(names):
        targets = blocks.targets(request)
        began = time.perf_counter()
        store.get(mine, targets)
        seconds.append(time.perf_counter() - began)
        blocks.check(request, store.landed(targets))
    return seconds


# -- what is reported -----------------------------------------------------------------------


def _figures(times: Times, limit: Times, size: Size) -> dict[str, object]:
    """By phase: GB/s (median of rounds), milliseconds a request, ratio to the limit."""
    found: dict[str, object] = {}
    for phase, rounds in times.rounds.items():
        each = [sum(seconds) for seconds in rounds]
        against = [sum(seconds) for seconds in limit.rounds.get(phase, [])]
        ratios = [bare / mine for bare, mine in zip(against, each, strict=False)]
        found[phase] = {
            "gb_s": round(size.nbytes / statistics.median(each) / 1e9, 3),
            "to_limit": round(statistics.median(ratios), 3) if ratios else None,
        }
        if phase != "durable":
            requests = [1e3 * value for seconds in rounds for value in seconds]
            found[phase] |= {"request_ms": quantiles(requests)}  # type: ignore[operator]
    return found


def _report(contenders: Sequence[Contender], size: Size, times: Mapping[str, Times]) -> Report:
    stores: dict[str, dict[str, object]] = {}
    absent: dict[str, str] = {}
    limits = {c.medium: times[c.name] for c in contenders if c.limit}
    for contender in contenders:
        if times[contender.name].fault:
            absent[contender.name] = times[contender.name].fault
            continue
        limit = limits.get(contender.medium, Times())
        stores[contender.name] = {
            "medium": str(contender.medium),
            "checks": contender.checks,
            "limit": contender.limit,
            "story": contender.story,
            **_figures(times[contender.name], limit, size),
        }
    figures: dict[str, object] = {
        "block_bytes": size.block_bytes,
        "request_blocks": size.request_blocks,
        "requests": size.requests,
        "rounds": size.rounds,
        "stores": stores,
        "absent": absent,
    }
    notes = (
        f"{size.requests} requests of {size.request_blocks} blocks of {size.block_bytes >> 10} KiB "
        f"a round, {size.rounds} rounds; every block got was compared",
        "GB/s: median of rounds; (..): ratio to the limit of the same medium, round by round; "
        "ms: a request",
        *(f"left out: {name}: {reason}" for name, reason in absent.items()),
    )
    columns = ("library", "put GB/s", "durable", "get cold", "ms p50/p95/p99", "get warm")
    rows = tuple((name, *_cells(found)) for name, found in stores.items())
    return Report("tiers", columns, rows, figures, notes)


def _cells(found: Mapping[str, object]) -> list[str]:
    cells = []
    for phase in PHASES:
        rate = found.get(phase)
        if not isinstance(rate, dict):
            cells += [""] * (2 if phase == "cold" else 1)
            continue
        ratio = f" ({rate['to_limit']:.2f})" if rate["to_limit"] is not None else ""
        cells.append(f"{rate['gb_s']:.2f}{ratio}")
        if phase == "cold":
            cells.append("/".join(f"{value:.1f}" for value in rate["request_ms"].values()))
    return cells
