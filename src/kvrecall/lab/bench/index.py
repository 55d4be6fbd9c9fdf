"""``kvrecall bench index``: what the disk tier's index costs with very many blocks."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from kvrecall.block import BlockKey
from kvrecall.config import DEFAULT_POLICY, DiskConfig
from kvrecall.lab.bench.pool import NAMESPACE
from kvrecall.lab.bench.report import Folder, Report, progress, timed
from kvrecall.pool.arena import Arena
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.index import Index, Row, seconds_now
from kvrecall.pool.disk.slabs import FileIo, SlabStore
from kvrecall.pool.pool import Pool

GOALS = {
    "bytes_a_block": 200.0,
    "open_s": 1.5,
    "find_1000_us": 150.0,
    "longest_pause_ms": 5.0,
}
"""Goals with a million blocks."""

_SHOWN = (
    "bytes_a_block", "open_s", "first_hit_s", "read_s", "ranked_s", "find_1000_us",
    "find_1000_absent_us", "clear_s", "close_s",
)  # fmt: skip

_BLOCK = 4096
_CHAIN = 50  # blocks of a request
_FOUND = 1000  # keys of a look-up
_WEEK_S = 7 * 24 * 3600
_MIB = 1 << 20


def measure_index(
    blocks: Annotated[int, typer.Option(min=2000, help="Blocks in the folder.")] = 100_000,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = DEFAULT_POLICY,
    path: Folder = Path("var"),
    repeats: Annotated[int, typer.Option(min=1)] = 20,
) -> Report:
    """What the index of a disk tier costs: memory, opening, look-ups, and pauses.

    The folder is a real one, with sparse slab files: its blocks have rows and slots, but no bytes.
    A pause is processor time of one thread that holds the tier's lock, garbage collection
    included.
    """
    with tempfile.TemporaryDirectory(prefix="kvrecall-", dir=path) as name:
        config = DiskConfig(
            Path(name) / "tier", (8 << 20) + blocks * (_BLOCK + 512) * 5 // 4, direct_io=False
        )
        built_s = timed(lambda: write_folder(config, blocks))
        progress(f"folder of {blocks:,} blocks written in {built_s:.1f} s")
        figures = {"blocks": blocks, "policy": policy, **_measure(config, blocks, policy, repeats)}
    pauses: dict[str, float] = figures["pauses_ms"]  # type: ignore[assignment]
    rows = [
        (name, f"{figures[name]:,.2f}", f"{goal:,.1f}" if goal else "")
        for name in _SHOWN
        for goal in (GOALS.get(name),)
    ]
    rows += [(f"pause_ms: {what}", f"{ms:.2f}", "5.0") for what, ms in pauses.items()]
    return Report("index", (f"{blocks:,} blocks", "measured", "goal"), tuple(rows), figures)


class _SparseIo(FileIo):
    """Slab files without bytes."""

    def allocate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        pass


def key_of(number: int) -> BlockKey:
    """The key of one of the blocks of ``write_folder``."""
    return NAMESPACE.key(
        hashlib.blake2b(number.to_bytes(8, "little", signed=True), digest_size=32).digest()
    )


def write_folder(config: DiskConfig, blocks: int) -> None:
    """Fills an empty folder with chains that were used over a week, the last one latest: blocks of
    4 KiB with rows and slots, but no bytes."""
    config.path.mkdir(mode=0o700, exist_ok=True)
    index = Index.open(config.path)
    store = SlabStore(config.path, config.capacity_bytes, index.pool_id, _SparseIo(), direct=False)
    try:
        index.register(NAMESPACE, _BLOCK)
        began, done = seconds_now() - _WEEK_S, 0
        while done < blocks:
            slots = store.slot_class(_BLOCK)
            if not slots.free:
                assert store.grow(_BLOCK)
            addresses = slots.take(min(20_000, slots.free, blocks - done))
            index.insert(
                [
                    Row(
                        address,
                        key_of(number),
                        key_of(number - 1) if number % _CHAIN else None,
                        number % _CHAIN,
                        _BLOCK,
                        bytes(16),
                        began + number // _CHAIN * _CHAIN * _WEEK_S // blocks,
                    )
                    for number, address in enumerate(addresses, done)
                ]
            )
            done += len(addresses)
    finally:
        store.close()
        index.close()


def _measure(config: DiskConfig, blocks: int, policy: str, repeats: int) -> dict[str, object]:
    before = _resident_bytes()
    gc.freeze()  # as the service and vLLM's engine do: what was there before counts for nothing
    began = time.perf_counter()
    tier = DiskTier(config, policy)
    opened_s = time.perf_counter() - began
    with Pool(Arena.create(_MIB, background=False), tier, policy) as pool:
        pool.register(NAMESPACE, _BLOCK)
        latest = _chain(blocks // _CHAIN - 1)
        while len(pool.find(latest).tiers) < len(latest):
            time.sleep(0.001)
        hit_s = time.perf_counter() - began
        while tier.stats().blocks < blocks:
            time.sleep(0.001)
        read_s = time.perf_counter() - began
        tier._recovery.ended.wait()
        ranked_s = time.perf_counter() - began
        memory = _resident_bytes() - before
        find_us = _find_us(pool, (_some(blocks, turn) for turn in range(repeats)))
        absent_us = _find_us(pool, (_new(turn) for turn in range(repeats)))
        pauses, clear_s = _pauses(tier, blocks, repeats)
        began = time.perf_counter()
    close_s = time.perf_counter() - began
    gc.unfreeze()
    return {
        "bytes_a_block": memory / blocks,
        "open_s": opened_s,
        "first_hit_s": hit_s,
        "read_s": read_s,
        "ranked_s": ranked_s,
        "find_1000_us": find_us,
        "find_1000_absent_us": absent_us,
        "longest_pause_ms": max(pauses.values()),
        "pauses_ms": pauses,
        "clear_s": clear_s,
        "close_s": close_s,
    }


def _resident_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _chain(number: int) -> list[BlockKey]:
    return [key_of(place) for place in range(number * _CHAIN, (number + 1) * _CHAIN)]


def _some(blocks: int, turn: int) -> list[BlockKey]:
    """Keys of 1,000 blocks, of chains all over the folder; others every turn."""
    chains = blocks // _CHAIN
    step = max(1, chains // (_FOUND // _CHAIN))
    return [
        key for place in range(_FOUND // _CHAIN) for key in _chain((place * step + turn) % chains)
    ]


def _find_us(pool: Pool, asked: Iterable[Sequence[BlockKey]]) -> float:
    """Microseconds of thread time for a look-up of 1,000 blocks."""
    spent = []
    for keys in asked:
        began = time.thread_time()
        pool.find(keys)
        spent.append(1e6 * (time.thread_time() - began))
    return statistics.median(spent)


class _WatchedLock:
    """A lock that remembers the longest processor time for which a thread held it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._began = 0.0
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self.longest_s = max(self.longest_s, time.thread_time() - self._began)
        self._lock.release()


@contextmanager
def _collections() -> Iterator[list[float]]:
    """The seconds that collections of garbage take meanwhile."""
    spent: list[float] = []
    began = 0.0

    def watch(phase: str, _: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.thread_time()
        else:
            spent.append(time.thread_time() - began)

    gc.callbacks.append(watch)
    try:
        yield spent
    finally:
        gc.callbacks.remove(watch)


def _pauses(tier: DiskTier, blocks: int, repeats: int) -> tuple[dict[str, float], float]:
    """The longest time that each operation holds the tier's lock, in milliseconds of processor
    time, and the longest collection of garbage; and the seconds that ``clear`` takes."""
    catalog = tier._catalog
    lock = catalog._lock = _WatchedLock(catalog._lock)  # type: ignore[assignment]
    assert isinstance(lock, _WatchedLock)
    found: dict[str, float] = {}

    def watch(what: str, call: Callable[[Sequence[BlockKey]], object], turns: int) -> None:
        lock.longest_s = 0.0
        for turn in range(turns):
            call(_some(blocks, 100 + turn))
        found[what] = 1e3 * lock.longest_s

    with _collections() as collected:
        watch("touch of 1,000", tier.touch, repeats)
        watch("acquire, release", lambda keys: _acquire(tier, keys), 1)
        watch("pin of 1,000", tier.pin, 1)
        watch("unpin of 1,000", tier.unpin, 1)
        watch("list", lambda keys: deque(tier.blocks(), maxlen=0), 1)
        watch("use of slabs", lambda keys: catalog.slab_uses(), 1)
        watch("eviction of 512", lambda keys: catalog.evict(512, _BLOCK), repeats)
        watch("eviction of bytes", lambda keys: catalog.evict_bytes(512 * _BLOCK), repeats)
        watch("drop of 1,000", tier.drop, 1)
        fresh = [key_of(blocks + number) for number in range(512)]
        now = seconds_now()
        rows = [Row(at << 12, key, None, 0, _BLOCK, bytes(16), now) for at, key in enumerate(fresh)]
        watch("new blocks, 512", lambda keys: catalog.publish(rows), 1)
        watch(
            "namespace of another size",
            lambda keys: catalog.forget_namespace(NAMESPACE.digest, but_of=_BLOCK),
            1,
        )
        began = time.thread_time()
        gc.collect()
        whole_s = time.thread_time() - began
        kept = collected[:-1]
        began = time.perf_counter()
        watch("clear", lambda keys: tier.clear(), 1)
        clear_s = time.perf_counter() - began
        kinds = itertools.count()
        watch("touch of 1,000 new ones", lambda keys: tier.touch(_new(next(kinds))), 3 * repeats)
    found["collection of garbage"] = 1e3 * max(kept, default=0.0)
    found["full collection of garbage"] = 1e3 * whole_s
    return found, clear_s


def _new(kind: int) -> list[BlockKey]:
    """Keys that no block has."""
    return [key_of(-1 - number - _FOUND * kind) for number in range(_FOUND)]


def _acquire(tier: DiskTier, keys: Sequence[BlockKey]) -> None:
    catalog = tier._catalog
    for entry in [entry for key in keys if (entry := catalog.acquire(key))]:
        catalog.release(entry)
