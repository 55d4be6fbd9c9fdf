"""``kvrecall bench service``: look-ups, two clients that restore at once, start-up.

All measured against a real ``kvrecall pool serve`` process.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from kvrecall.bench import pool
from kvrecall.bench.report import Report, Times, cells, percentiles, progress
from kvrecall.block import BlockKey, Namespace
from kvrecall.config import DiskConfig
from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import RecallState
from kvrecall.pool.clock import Clock
from kvrecall.pool.disk.index import Index, IndexRow
from kvrecall.pool.disk.slabs import FileIo, SlabStore
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.processes.child import one_process
from kvrecall.processes.service import ServiceProcess
from kvrecall.testing import chain

NAMESPACE = Namespace.of({"purpose": "bench service"})
LOOKUP_BLOCKS = 1000
LOOKUP_GOAL_S = 0.002
COPY_GOAL = 0.9
START_GOAL_S = 3.0

_RESTORED = 64  # blocks of a restore
_BLOCK_BYTES = 1 << 20
_PIECES = 8  # pieces a block is copied in: a real one goes to a place in every layer
_TURN_S = 1.0
_LIMIT_S = 120.0  # of a turn
_SMALL = 4096
_MIB = 1 << 20

FOLDER_BLOCK = 4096
FOLDER_CHAIN = 50
"""Bytes of a block of ``write_folder``, and blocks of a chain."""
_WEEK_S = 7 * 24 * 3600


def measure_service(
    blocks: Annotated[int, typer.Option(min=1000, help="On disk, for the start-up.")] = 100_000,
    repetitions: Times = 5,
) -> Report:
    """The pool service: look-ups, two clients restoring at once, start-up with a full disk."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        folder = Path(name)
        progress(f"look-ups of {LOOKUP_BLOCKS} blocks")
        lookup = _lookup(folder / "lookup", 100 * repetitions)
        progress("two clients restoring at once, in turns with plain copies")
        turns = _restore(folder / "restore", repetitions)
        progress(f"storing {blocks} blocks on disk")
        service = ServiceProcess(folder / "start", 16 * _MIB, _disk_bytes(blocks))
        starts = _start_up(service, blocks, repetitions)
    return _report(lookup, turns, starts, blocks)


def _lookup(folder: Path, times: int) -> list[float]:
    seconds = []
    with ServiceProcess(folder, 64 * _MIB, 64 * _MIB) as service, ExitStack() as stack:
        client = ServiceClient(service.socket, 5.0)
        stack.callback(client.close)
        client.register(NAMESPACE, _SMALL)
        keys = chain(NAMESPACE, LOOKUP_BLOCKS)
        client.reserve(keys)
        client.commit(keys)
        for _ in range(times):
            began = time.perf_counter()
            found = client.find(keys).blocks
            seconds.append(time.perf_counter() - began)
            if found != LOOKUP_BLOCKS:
                raise TierError(f"the service found {found} of {LOOKUP_BLOCKS} blocks")
    return seconds


def _restore(folder: Path, repetitions: int) -> list[tuple[float, float]]:
    """Bytes a second, both clients together: through the pool, and plain, by turn."""
    turns = []
    with (
        ServiceProcess(folder, 3 * _RESTORED * _BLOCK_BYTES, 1024 * _MIB) as service,
        one_process(_begin_restoring, service.socket, "client 0") as first,
        one_process(_begin_restoring, service.socket, "client 1") as second,
    ):

        def together(way: str) -> float:
            rates = [one.submit(_rate_of, way) for one in (first, second)]
            return sum(rate.result(_LIMIT_S) for rate in rates)

        together("ready")
        together("plain")
        for number in range(2 * repetitions):
            order = ("pool", "plain") if number % 2 else ("plain", "pool")
            rates = {name: together(name) for name in order}
            turns.append((rates["pool"], rates["plain"]))
    return turns


_rates: dict[str, Callable[[], float]] = {}
"""In the process of a restoring client."""


def _begin_restoring(socket: Path, name: str) -> None:
    """A client that copies blocks out of the service's arena, as an engine's worker does: saves
    them, and makes ready to copy."""
    client = ServiceClient(socket, call_timeout_s=5.0)
    client.register(NAMESPACE, _BLOCK_BYTES)
    keys = chain(NAMESPACE, _RESTORED, name)
    arena = Arena.attach(client.arena_handle())
    arena.wait_ready()
    memory = arena.array()
    places = [answer.offset for answer in client.reserve(keys)]
    for place in places:
        memory[place : place + _BLOCK_BYTES] = place % 251
    client.commit(keys)
    own = np.ones((_RESTORED, _BLOCK_BYTES), dtype=np.uint8)

    def copy(offsets: Sequence[int]) -> None:
        step = _BLOCK_BYTES // _PIECES
        for row, offset in zip(own, offsets, strict=True):
            for at in range(0, _BLOCK_BYTES, step):
                row[at : at + step] = memory[offset + at : offset + at + step]

    def recall() -> None:
        """Find, acquire, poll, copy, release: the steps of an engine for a hit in the host."""
        ticket = client.acquire(keys[: client.find(keys).blocks], 5.0)
        while (found := client.poll(ticket)).state is RecallState.PENDING:
            pass
        if len(found.offsets) != len(keys):
            raise TierError(f"{len(found.offsets)} of {len(keys)} blocks came")
        copy(found.offsets)
        client.release(ticket)

    def rate_of(act: Callable[[], None]) -> float:
        act()
        rounds, began = 0, time.perf_counter()
        while (spent := time.perf_counter() - began) < _TURN_S:
            act()
            rounds += 1
        return rounds * own.nbytes / spent

    _rates.update(
        ready=lambda: 0.0,
        pool=lambda: rate_of(recall),
        plain=lambda: rate_of(lambda: copy(places)),
    )


def _rate_of(way: str) -> float:
    """Bytes a second. ``pool``: all blocks recalled through the service, again and again, and
    copied to the client's own memory; ``plain``: the same bytes of the same arena copied."""
    return _rates[way]()


def _disk_bytes(blocks: int) -> int:
    return blocks * slot_bytes_of(_SMALL) * 3 // 2 + 64 * _MIB


def _start_up(service: ServiceProcess, blocks: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds from starting the process until it serves, without and with blocks on disk, and until
    it has looked up the first 1,000 of them."""
    seconds: dict[str, list[float]] = {"empty": [], "ready": [], "first_find": []}

    def start(stored: int, *names: str) -> None:
        began = time.perf_counter()
        with service:
            ready = time.perf_counter() - began
            client = ServiceClient(service.socket, 5.0)
            wanted = [key_of(number) for number in range(LOOKUP_BLOCKS)] if stored else []
            found = client.find(wanted).blocks
            answered = time.perf_counter() - began
            client.close()
        if found != len(wanted):
            raise TierError(f"the service found {found} of {len(wanted)} blocks on disk")
        for name, value in zip(names, (ready, answered), strict=False):
            seconds[name].append(value)

    for _ in range(repetitions):
        start(0, "empty")
    write_folder(DiskConfig(service.disk, _disk_bytes(blocks), direct_io=False), blocks)
    progress("starting with them")
    for _ in range(repetitions):
        start(blocks, "ready", "first_find")
    return seconds


def _report(
    lookup: Sequence[float],
    turns: Sequence[tuple[float, float]],
    starts: Mapping[str, Sequence[float]],
    blocks: int,
) -> Report:
    find = percentiles(lookup)
    pool, plain = (percentiles(rates) for rates in zip(*turns, strict=True))
    ratio = percentiles([pooled / alone for pooled, alone in turns])
    start = {name: percentiles(seconds) for name, seconds in starts.items()}
    rows = (
        (
            f"look-up of {LOOKUP_BLOCKS} blocks, ms",
            *cells(find, 3, 1e3),
            f"{LOOKUP_GOAL_S * 1e3:g}",
        ),
        ("two clients at once, GiB/s", *cells(pool, 2, 2**-30), ""),
        ("two plain copies, GiB/s", *cells(plain, 2, 2**-30), ""),
        ("  ratio", *cells(ratio, 3), f"{COPY_GOAL:g}"),
        ("start, empty disk, s", *cells(start["empty"], 2), ""),
        (f"start, {blocks} blocks on disk, s", *cells(start["ready"], 2), f"{START_GOAL_S:g}"),
        (f"  and {LOOKUP_BLOCKS} of them looked up, s", *cells(start["first_find"], 2), ""),
    )
    figures: dict[str, object] = {
        "lookup_blocks": LOOKUP_BLOCKS,
        "lookup_s": find,
        "restore_bytes_per_s": pool,
        "plain_bytes_per_s": plain,
        "restore_to_plain": ratio,
        "blocks_on_disk": blocks,
        "start_s": start,
    }
    notes = (
        f"restore: {_RESTORED} blocks of {_BLOCK_BYTES >> 20} MiB each, found, leased, copied and "
        "released, by two processes; the plain ones copy the same bytes of the same arena",
        "start: from launching the process, imports included",
    )
    return Report("service", ("pool service", "p10", "median", "p90", "goal"), rows, figures, notes)


def key_of(number: int) -> BlockKey:
    """The key of one of the blocks of ``write_folder``."""
    return pool.NAMESPACE.key(
        hashlib.blake2b(number.to_bytes(8, "little", signed=True), digest_size=32).digest()
    )


class _SparseIo(FileIo):
    """Slab files without bytes."""

    def allocate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        pass


def write_folder(config: DiskConfig, blocks: int) -> None:
    """Fills an empty folder with chains that were used over a week, the last one latest: blocks of
    4 KiB with rows and slots, but no bytes."""
    config.path.mkdir(mode=0o700, exist_ok=True)
    clock = Clock()
    index = Index.open(config.path, clock)
    store = SlabStore(config.path, config.capacity_bytes, index.pool_id, _SparseIo(), direct=False)
    try:
        index.register(pool.NAMESPACE, FOLDER_BLOCK)
        began, done, tag = int(clock()) - _WEEK_S, 0, bytes(16)
        while done < blocks:
            slots = store.slot_class(FOLDER_BLOCK)
            if not slots.free:
                assert store.grow(FOLDER_BLOCK)
            addresses = slots.take(min(20_000, slots.free, blocks - done))
            keys = [key_of(number) for number in range(done - 1, done + len(addresses))]
            index.insert(
                [
                    IndexRow(
                        address,
                        keys[place + 1],
                        keys[place] if number % FOLDER_CHAIN else None,
                        number % FOLDER_CHAIN,
                        FOLDER_BLOCK,
                        tag,
                        began + number // FOLDER_CHAIN * FOLDER_CHAIN * _WEEK_S // blocks,
                    )
                    for place, (number, address) in enumerate(enumerate(addresses, done))
                ]
            )
            done += len(addresses)
    finally:
        store.close()
        index.close()
