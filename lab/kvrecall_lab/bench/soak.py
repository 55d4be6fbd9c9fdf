"""``bench soak``: a pool on a full disk for as long as one likes, with eviction all the
time: does memory stay flat, do latencies drift, is a block lost or wrong?
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from kvrecall.bench.pool import NAMESPACE
from kvrecall.bench.report import Folder, Report, progress
from kvrecall.block import BlockKey, TierName
from kvrecall.config import DEFAULT_POLICY, DiskConfig, PoolConfig
from kvrecall.errors import KvrecallError
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.pool.pool import Pool
from kvrecall.testing.blocks import chain, content, wait_until

BLOCK_BYTES = 64 << 10
_HOST_BLOCKS = 256
_DISK_BLOCKS = 2048
_SESSIONS = 3 * _DISK_BLOCKS // 20  # at once, of 20 blocks on average: three times what fits
_LAST_TURN = 20  # turns of two blocks
_THREADS = 2
_PARTS = 8
"""Of the time, for figures over time; the first fills the tiers and is not compared."""
_SAMPLED = 2000  # values of a figure in a part of the time
_REPORT_S = 60.0
_LOAD_S = 60.0


def measure_soak(
    minutes: Annotated[float, typer.Option(min=0.02, max=24 * 60, help="How long.")] = 60.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second.")] = 60.0,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = DEFAULT_POLICY,
    path: Folder = Path("var"),
) -> Report:
    """A pool on a full disk, with eviction all the time: memory, latencies, lost and wrong blocks.

    Sessions that come back and grow need three times the disk tier's room, which eight times the
    host's. Every byte recalled is compared; at the end the folder is opened again, and every block
    in it is read.
    """
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvrecall-soak-", dir=path) as name:
        disk = DiskConfig(Path(name) / "tier", _DISK_BLOCKS * (BLOCK_BYTES + 4096))
        config = PoolConfig(_HOST_BLOCKS * BLOCK_BYTES, disk, policy)
        run = _Run(60 * minutes, rate)
        with Pool.open(config) as pool:
            pool.register(NAMESPACE, BLOCK_BYTES)
            run.go(pool)
            wait_until(lambda: pool.stats().queued_writes == 0)
            stats = pool.stats().tiers[-1]
        progress("opening the folder again and reading every block")
        found, wrong = _read_all(config, run.sessions.ever)
    return _report(run, stats, found, wrong)


class _Sessions:
    """Sessions that come back, each with more blocks; ended ones are replaced. Thread-safe."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._lock = threading.Lock()
        self._idle = deque((number, 0) for number in range(_SESSIONS))
        self.ever = _SESSIONS

    @contextmanager
    def one(self) -> Iterator[list[BlockKey]]:
        """A session's chain, which no other thread has meanwhile; it is longer the next time."""
        with self._lock:
            self._idle.rotate(-int(self._rng.expovariate(1 / (_SESSIONS / 4))))
            number, turn = self._idle.popleft()
        yield keys_of(number, turn + 1)
        with self._lock:
            if turn + 1 == _LAST_TURN:
                number, turn = self.ever, -1
                self.ever += 1
            self._idle.append((number, turn + 1))


def keys_of(session: int, turns: int = _LAST_TURN) -> list[BlockKey]:
    return chain(NAMESPACE, 2 * turns, f"session {session}")


class _Sample:
    """Some of very many values, each as likely as another (algorithm R, Vitter 1985), in memory
    that does not grow: it is the process's own that is measured. Thread-safe."""

    def __init__(self) -> None:
        self._values = array("d", bytes(8 * _SAMPLED))
        self._count = 0
        self._rng = random.Random(0)
        self._lock = threading.Lock()

    def add(self, value: float) -> None:
        with self._lock:
            count = self._count
            place = count if count < _SAMPLED else self._rng.randrange(count + 1)
            if place < _SAMPLED:
                self._values[place] = value
            self._count += 1

    def __len__(self) -> int:
        return min(self._count, _SAMPLED)

    def median(self) -> float:
        return statistics.median(self._values[: len(self)])


@dataclass(slots=True)
class _Part:
    """What was seen in a part of the time: microseconds of the thread's processor time to find a
    block, milliseconds until blocks were there, memory of the process."""

    find_us: _Sample = field(default_factory=_Sample)
    disk_ms: _Sample = field(default_factory=_Sample)
    rss_mib: _Sample = field(default_factory=_Sample)


class _Run:
    """Requests for some time, and what they saw."""

    def __init__(self, seconds: float, rate: float) -> None:
        self._seconds = seconds
        self._rate = rate
        self.sessions = _Sessions()
        self.parts = [_Part() for _ in range(_PARTS)]
        self.requests = self.saved = self.recalled = self.short = self.wrong = 0
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._began = 0.0

    def go(self, pool: Pool) -> None:
        """Raises what a request raised."""
        self._began = time.monotonic()
        threads = [threading.Thread(target=self._serve, args=(pool, n)) for n in range(_THREADS)]
        for thread in threads:
            thread.start()
        said = self._began
        while any(thread.is_alive() for thread in threads):
            time.sleep(min(1.0, self._seconds / 50))
            self._part().rss_mib.add(_rss_mib())
            if time.monotonic() - said > _REPORT_S:
                said = time.monotonic()
                disk = pool.stats().tiers[-1]
                progress(
                    f"{self.requests:,} requests, {disk.evictions:,} blocks evicted, "
                    f"{_rss_mib():.0f} MiB"
                )
        if self._failure is not None:
            raise self._failure

    def _part(self) -> _Part:
        share = (time.monotonic() - self._began) / self._seconds
        return self.parts[min(_PARTS - 1, int(share * _PARTS))]

    def _serve(self, pool: Pool, number: int) -> None:
        """One thread's requests, at its share of the rate."""
        turn = 0
        try:
            while (now := time.monotonic()) < self._began + self._seconds and not self._failure:
                due = self._began + (turn * _THREADS + number) / self._rate
                if due > now:
                    time.sleep(min(due - now, 0.5))
                    continue
                turn += 1
                with self.sessions.one() as keys:
                    self._request(pool, keys)
        except BaseException as error:  # noqa: BLE001 - raised by ``go``
            self._failure = error

    def _request(self, pool: Pool, keys: Sequence[BlockKey]) -> None:
        began = time.thread_time()
        tiers = pool.find(keys).tiers
        find_us = 1e6 * (time.thread_time() - began) / len(keys)
        part = self._part()
        began = time.monotonic()
        ticket = pool.acquire(keys[: len(tiers)], _LOAD_S) if tiers else 0
        came = 0
        wrong = 0
        if tiers:
            while (recall := pool.poll(ticket)).state is not RecallState.READY:
                time.sleep(0.0005)
            waited_ms = 1e3 * (time.monotonic() - began)
            came = len(recall.offsets)
            got = pool.read(recall.offsets, 0, BLOCK_BYTES)
            wrong = sum(
                block != content(key, BLOCK_BYTES) for key, block in zip(keys, got, strict=False)
            )
            pool.release(ticket)
            if TierName.DISK in tiers:
                part.disk_ms.add(waited_ms / tiers.count(TierName.DISK))
        pool.touch(keys)
        saved = self._save(pool, keys[came:])
        part.find_us.add(find_us)
        with self._lock:
            self.requests += 1
            self.saved += saved
            self.recalled += came
            self.short += came < len(tiers)
            self.wrong += wrong

    def _save(self, pool: Pool, keys: Sequence[BlockKey]) -> int:
        reserved = [
            (key, answer.offset)
            for key, answer in zip(keys, pool.reserve(keys), strict=True)
            if answer.verdict is Verdict.RESERVED
        ]
        for key, offset in reserved:
            pool.arena.view(offset, BLOCK_BYTES)[:] = content(key, BLOCK_BYTES)
        pool.commit([key for key, _ in reserved])
        return len(reserved)


def _rss_mib() -> float:
    return psutil.Process().memory_info().rss / (1 << 20)


def _read_all(config: PoolConfig, sessions: int) -> tuple[int, int]:
    """Blocks that a new pool on the folder finds, and those with other bytes."""
    found = wrong = 0
    with Pool.open(config) as pool:
        pool.register(NAMESPACE, BLOCK_BYTES)
        for session in range(sessions):
            keys = keys_of(session)
            there = pool.locate(keys).tiers
            for key, tier in zip(keys, there, strict=True):
                if tier is None:
                    continue
                ticket = pool.acquire([key], _LOAD_S)
                while (recall := pool.poll(ticket)).state is not RecallState.READY:
                    time.sleep(0.0005)
                (block,) = pool.read(recall.offsets, 0, BLOCK_BYTES) or [b""]
                found += 1
                wrong += block != content(key, BLOCK_BYTES)
                pool.release(ticket)
    return found, wrong


def _report(run: _Run, disk: Any, found: int, wrong: int) -> Report:
    gc.collect()
    parts = run.parts[1:]
    memory = [part.rss_mib.median() for part in parts if part.rss_mib]
    find = [part.find_us.median() for part in parts if part.find_us]
    load = [part.disk_ms.median() for part in parts if part.disk_ms]
    if not (memory and find and load) or not disk.evictions:
        raise KvrecallError("too short: the disk was not full; give more --minutes or --rate")
    figures = {
        "minutes": round(run._seconds / 60, 2),
        "requests": run.requests,
        "blocks_saved": run.saved,
        "blocks_recalled": run.recalled,
        "blocks_evicted": disk.evictions,
        "written_gib": round(disk.write_bytes / 2**30, 2),
        "read_gib": round(disk.read_bytes / 2**30, 2),
        "wrong": run.wrong + wrong,
        "corrupt": disk.corrupt,
        "errors": disk.errors,
        "shed": disk.dropped,
        "hits_cut_short": run.short,
        "lost": disk.blocks - found,
        "blocks_after_reopening": found,
        "rss_mib": [round(one, 1) for one in memory],
        "rss_growth_mib": round(memory[-1] - memory[0], 1),
        "find_us_a_block": [round(one, 2) for one in find],
        "find_drift": round(find[-1] / find[0], 2),
        "disk_ms_a_block": [round(one, 2) for one in load],
        "disk_drift": round(load[-1] / load[0], 2),
    }
    rows = tuple(
        (f"{(place + 1) / _PARTS:.0%} to {(place + 2) / _PARTS:.0%} of the time",
         f"{memory[place]:,.1f}", f"{find[place]:.2f}", f"{load[place]:.2f}")
        for place in range(min(map(len, (memory, find, load))))
    )  # fmt: skip
    notes = (
        f"{run.requests:,} requests saved {run.saved:,} blocks of {BLOCK_BYTES >> 10} KiB and "
        f"recalled {run.recalled:,}; {disk.evictions:,} were evicted from disk",
        f"wrong {figures['wrong']}, corrupt {disk.corrupt}, I/O errors {disk.errors}, lost "
        f"{figures['lost']} of the {disk.blocks:,} on disk at the end",
    )
    columns = ("", "process, MiB", "find a block, us", "load a block from disk, ms")
    return Report("soak", columns, rows, figures, notes)
