"""The pool service: how long a look-up takes, what two engines restore at once, how it starts.

All against a real ``kvrecall pool serve`` process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvrecall.config import DiskConfig
from kvrecall.errors import TierError
from kvrecall.lab.bench.report import Report, percentiles
from kvrecall.lab.bench.restorer import SPACE
from kvrecall.lab.engines.server import Progress
from kvrecall.lab.engines.service import ServiceProcess
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.service.client import ServiceClient
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.pool.tier import Put
from kvrecall.testing.blocks import chain

LOOKUP_BLOCKS = 1000
LOOKUP_GOAL_S = 0.002
BUS_GOAL = 0.9
START_GOAL_S = 3.0

_RESTORED = 64  # blocks of a restore
_BLOCK_BYTES = 1 << 20
_TURN_S = 1.0
_SMALL = 4096
_MIB = 1 << 20


def measure_service(blocks: int, repetitions: int, progress: Progress) -> Report:
    """Runs the three parts; ``blocks`` are committed on disk for the start-up."""
    with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
        folder = Path(name)
        progress(f"look-ups of {LOOKUP_BLOCKS} blocks")
        lookup = _lookup(folder / "lookup", 100 * repetitions)
        progress("two clients restoring at once, in turns with plain copies")
        turns = _restore(folder / "restore", repetitions)
        progress(f"storing {blocks} blocks on disk")
        starts = _start_up(folder / "start", blocks, repetitions, progress)
    return _report(lookup, turns, starts, blocks)


def _lookup(folder: Path, times: int) -> list[float]:
    service = ServiceProcess(folder, 64 * _MIB, 64 * _MIB)
    seconds = []
    with ExitStack() as stack:
        stack.callback(service.stop)
        service.start()
        client = ServiceClient(service.socket, 5.0)
        stack.callback(client.close)
        client.register(SPACE, _SMALL)
        keys = chain(SPACE, LOOKUP_BLOCKS)
        client.reserve(keys)
        client.commit(keys)
        for _ in range(times):
            began = time.perf_counter()
            found = client.find(keys).blocks
            seconds.append(time.perf_counter() - began)
            if found != LOOKUP_BLOCKS:
                raise TierError(f"the service found {found} of {LOOKUP_BLOCKS} blocks")
    return seconds


class _Clients:
    """Two restoring processes that obey at the same time."""

    def __init__(self, socket: Path, stack: ExitStack) -> None:
        launch = [sys.executable, "-m", "kvrecall.lab.bench.restorer", str(socket)]
        self._processes = [
            subprocess.Popen(
                [*launch, f"client {number}", str(_RESTORED), str(_BLOCK_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(2)
        ]
        for process in self._processes:
            stack.callback(self._end, process)
        for process in self._processes:
            if self._line(process) != "ready\n":
                raise TierError("a restoring process did not start")

    def together(self, order: str) -> float:
        """Bytes a second of both."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{order} {_TURN_S}\n")
            process.stdin.flush()
        found = [json.loads(self._line(process)) for process in self._processes]
        return float(sum(one["bytes"] / one["seconds"] for one in found))

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise TierError("a restoring process has ended")
        return line

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _restore(folder: Path, repetitions: int) -> list[tuple[float, float]]:
    """Bytes a second, both clients together: through the pool, and plain, by turn."""
    service = ServiceProcess(folder, 3 * _RESTORED * _BLOCK_BYTES, 1024 * _MIB)
    with ExitStack() as stack:
        stack.callback(service.stop)
        service.start()
        clients = _Clients(service.socket, stack)
        clients.together("plain")
        turns = []
        for number in range(2 * repetitions):
            order = ("pool", "plain") if number % 2 else ("plain", "pool")
            rates = {name: clients.together(name) for name in order}
            turns.append((rates["pool"], rates["plain"]))
        return turns


def _start_up(
    folder: Path, blocks: int, repetitions: int, progress: Progress
) -> dict[str, list[float]]:
    """Seconds from starting the process until it serves, without and with blocks on disk, and
    until it was asked for the first 1,000 of them."""
    disk_bytes = blocks * slot_bytes_of(_SMALL) * 3 // 2 + 64 * _MIB
    service = ServiceProcess(folder, 16 * _MIB, disk_bytes)
    empty = [_start(service, ())[0] for _ in range(repetitions)]
    keys = _fill(service.disk, disk_bytes, blocks)
    progress("starting with them")
    full = [_start(service, keys) for _ in range(repetitions)]
    return {
        "empty": empty,
        "ready": [ready for ready, _ in full],
        "first_find": [found for _, found in full],
    }


def _start(service: ServiceProcess, keys: Sequence[bytes]) -> tuple[float, float]:
    began = time.perf_counter()
    service.start()
    ready = time.perf_counter() - began
    try:
        client = ServiceClient(service.socket, 5.0)
        wanted = chain(SPACE, len(keys[:LOOKUP_BLOCKS]))
        found = client.find(wanted).blocks
        asked = time.perf_counter() - began
        client.close()
        if found != len(wanted):
            raise TierError(f"the service found {found} of {len(wanted)} blocks on disk")
    finally:
        service.stop()
    return ready, asked


def _fill(folder: Path, disk_bytes: int, blocks: int) -> Sequence[bytes]:
    """Stores ``blocks`` blocks of one page in a disk folder, as a service would have."""
    keys = chain(SPACE, blocks)
    page = memoryview(bytearray(_SMALL))
    with ExitStack() as stack:
        tier = DiskTier(DiskConfig(folder, disk_bytes, direct_io=False))
        stack.callback(tier.close)
        tier.register(SPACE, _SMALL)
        for first in range(0, blocks, 5000):
            part = keys[first : first + 5000]
            tier.submit_put([Put(key, None, first, page, _SMALL) for key in part])
            while tier.queued()[0]:
                time.sleep(0.005)
        stored = tier.stats().blocks
    if stored != blocks:
        raise TierError(f"{stored} of {blocks} blocks were stored")
    return keys


def _report(
    lookup: Sequence[float],
    turns: Sequence[tuple[float, float]],
    starts: dict[str, list[float]],
    blocks: int,
) -> Report:
    find = percentiles(lookup)
    pool, plain = (percentiles([turn[place] for turn in turns]) for place in (0, 1))
    ratio = percentiles([pooled / alone for pooled, alone in turns])
    start = {name: percentiles(seconds) for name, seconds in starts.items()}
    ms = {name: find[name] * 1e3 for name in ("p10", "p50", "p90")}
    rows = (
        _row(f"look-up of {LOOKUP_BLOCKS} blocks, ms", ms, 3, LOOKUP_GOAL_S * 1e3),
        _row("two clients at once, GB/s", {k: pool[k] / 1e9 for k in ms}, 2, None),
        _row("two plain copies, GB/s", {k: plain[k] / 1e9 for k in ms}, 2, None),
        _row("  ratio", ratio, 3, BUS_GOAL),
        _row("start, empty disk, s", start["empty"], 2, None),
        _row(f"start, {blocks} blocks on disk, s", start["ready"], 2, START_GOAL_S),
        _row(f"  and {LOOKUP_BLOCKS} of them looked up, s", start["first_find"], 2, None),
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
    columns = ("pool service", "p10", "median", "p90", "goal")
    return Report("service", columns, rows, figures, notes)


def _row(name: str, values: dict[str, float], digits: int, goal: float | None) -> tuple[str, ...]:
    shown = (f"{values[rank]:.{digits}f}" for rank in ("p10", "p50", "p90"))
    return (name, *shown, "" if goal is None else f"{goal:g}")
