"""``bench index``: what the disk tier's index costs with very many blocks."""

from __future__ import annotations

import ctypes
import gc
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import psutil
import typer

from kvrecall.bench.pool import NAMESPACE
from kvrecall.bench.report import Folder, Report, progress, timed
from kvrecall.bench.service import FOLDER_BLOCK as _BLOCK
from kvrecall.bench.service import FOLDER_CHAIN as _CHAIN
from kvrecall.bench.service import key_of, write_folder
from kvrecall.block import SHARED, BlockKey
from kvrecall.config import (
    DEFAULT_POLICY,
    Amount,
    DiskConfig,
    PoolTerms,
    TenantRules,
    TenantTerms,
)
from kvrecall.pool.admin import PoolAdmin
from kvrecall.pool.arena import Arena
from kvrecall.pool.changes import Cause
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.index import IndexRow
from kvrecall.pool.pool import Pool

GOALS = {
    "bytes_a_block": 200.0,
    "open_s": 1.5,
    "find_1000_us": 150.0,
    "longest_pause_ms": 5.0,
}
"""Goals with a million blocks."""

_SHOWN = (
    "bytes_a_block", "bytes_a_block_with_quotas", "open_s", "first_hit_s", "read_s", "ranked_s",
    "find_1000_us", "find_1000_absent_us", "clear_s", "close_s",
)  # fmt: skip

_FOUND = 1000  # keys of a look-up
_WEEK_S = 7 * 24 * 3600
_EVICTED = 512 * _BLOCK
_MIB = 1 << 20


def measure_index(
    blocks: Annotated[int, typer.Option(min=5000, help="Blocks in the folder.")] = 100_000,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = DEFAULT_POLICY,
    path: Folder = Path("var"),
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    passes: Annotated[int, typer.Option(min=1, help="Folders measured, one by one.")] = 3,
) -> Report:
    """What the index of a disk tier costs: memory, opening, look-ups, and pauses.

    The folder is a real one, with sparse slab files: its blocks have rows and slots, but no bytes.
    A pause is processor time of one thread that holds the tier's lock, garbage collection
    included. The folder is opened twice: the second time tenants have limits, and pauses are
    measured while blocks are found, with limits, and when blocks expire, the pool's lock included.

    Time for which a hypervisor takes the processor away counts as processor time, and so does time
    in which it makes memory slow. So all is done in several passes, each with a folder of its own:
    a pause of the code's is in each of them, and of each kind the pass with the shortest tells.
    longest_seen_ms is the longest of all.
    """
    path.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for number in range(passes):
        with tempfile.TemporaryDirectory(prefix="kvrecall-", dir=path) as name:
            config = DiskConfig(
                Path(name) / "tier", (8 << 20) + blocks * (_BLOCK + 512) * 21 // 20, direct_io=False
            )
            built_s = timed(partial(write_folder, config, blocks))
            progress(
                f"pass {number + 1} of {passes}: folder of {blocks:,} blocks written in "
                f"{built_s:.1f} s"
            )
            found.append(_measure(config, blocks, policy, repeats))
    figures = {"blocks": blocks, "policy": policy, "passes": passes, **_together(found)}
    pauses = figures["pauses_ms"]
    goal_ms = GOALS["longest_pause_ms"]
    rows = [
        (name, f"{figures[name]:,.2f}", f"{goal:,.1f}" if goal else "")
        for name in _SHOWN
        for goal in (GOALS.get(name),)
    ]
    rows += [(f"pause_ms: {what}", f"{ms:.2f}", f"{goal_ms}") for what, ms in pauses.items()]
    return Report("index", (f"{blocks:,} blocks", "measured", "goal"), tuple(rows), figures)


def _together(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several passes: the most memory, the medians of times, and of each kind of pause the
    shortest of the passes' longest."""
    together: dict[str, Any] = {
        name: (max if name.startswith("bytes") else statistics.median)([one[name] for one in found])
        for name in _SHOWN
    }
    each = [one["pauses_ms"] for one in found]
    pauses = {what: min(one[what] for one in each) for what in each[0]}
    together["longest_pause_ms"] = max(pauses.values())
    together["longest_seen_ms"] = max(max(one.values()) for one in each)
    together["pauses_ms"] = pauses
    return together


def _measure(config: DiskConfig, blocks: int, policy: str, repeats: int) -> dict[str, Any]:
    """One pass."""
    gc.freeze()  # as the service and vLLM's engine do: what was there before counts for nothing
    with _opened(config, policy) as (pool, tier, opened):
        opened.wait_hit(_chain(blocks // _CHAIN - 1))
        opened.wait_all(blocks)
        memory = _resident_bytes() - opened.memory
        find_us = _find_us(pool, (_some(blocks, turn) for turn in range(repeats)))
        absent_us = _find_us(pool, (_new(turn) for turn in range(repeats)))
        pauses = _pauses(tier, blocks, repeats)
    limit = Amount(blocks * _BLOCK)
    terms = PoolTerms(tenants=TenantRules(TenantTerms(disk=limit)))
    with _opened(config, policy, terms) as (pool, tier, limited):
        pauses |= _pauses_meanwhile(tier, blocks)
        left = tier.stats().blocks
        limited_memory = _resident_bytes() - limited.memory
        more, clear_s = _pauses_with_limits(pool, tier, blocks, repeats)
        pauses |= more
        began = time.perf_counter()
    close_s = time.perf_counter() - began
    gc.unfreeze()
    return {
        "bytes_a_block": memory / blocks,
        "bytes_a_block_with_quotas": limited_memory / left,
        "open_s": opened.opened_s,
        "first_hit_s": opened.hit_s,
        "read_s": opened.read_s,
        "ranked_s": opened.ranked_s,
        "find_1000_us": find_us,
        "find_1000_absent_us": absent_us,
        "pauses_ms": pauses,
        "clear_s": clear_s,
        "close_s": close_s,
    }


class _Opening:
    """What opening a tier takes: memory before, in bytes, and seconds since it began."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.tier: DiskTier
        self.pool: Pool
        self.opened_s = self.hit_s = self.read_s = self.ranked_s = 0.0
        self._began = time.perf_counter()

    def passed_s(self) -> float:
        return time.perf_counter() - self._began

    def wait_hit(self, chain: Sequence[BlockKey]) -> None:
        while len(self.pool.find(chain).tiers) < len(chain):
            time.sleep(0.001)
        self.hit_s = self.passed_s()

    def wait_all(self, blocks: int) -> None:
        while self.tier.stats().blocks < blocks:
            time.sleep(0.001)
        self.read_s = self.passed_s()
        self.tier._engine.recovered.wait()
        self.ranked_s = self.passed_s()


@contextmanager
def _opened(
    config: DiskConfig, policy: str, terms: PoolTerms | None = None
) -> Iterator[tuple[Pool, DiskTier, _Opening]]:
    """A pool on the folder."""
    opening = _Opening(_resident_bytes())
    tier = opening.tier = DiskTier(config, policy, terms=terms)
    opening.opened_s = opening.passed_s()
    with Pool(Arena.create(_MIB), tier, policy, terms=terms) as pool:
        pool.register(NAMESPACE, _BLOCK)
        opening.pool = pool
        yield pool, tier, opening


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
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


class WatchedLock:
    """A lock, locked or not, that remembers the most processor time that a thread held it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._began: dict[int, float] = {}  # by thread: who waits for a condition lets others in
        self.begin()

    def begin(self) -> None:
        """Forgets what it remembers."""
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began[threading.get_ident()] = time.thread_time()

    def __exit__(self, *_: object) -> None:
        spent_s = time.thread_time() - self._began[threading.get_ident()]
        self.longest_s = max(self.longest_s, spent_s)
        self._lock.release()


class _Watch:
    """The longest time that each operation holds a lock, in milliseconds of processor time."""

    def __init__(self, *locks: WatchedLock) -> None:
        self._locks = locks
        self.found: dict[str, float] = {}

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        for lock in self._locks:
            lock.begin()
        yield
        self.found[what] = 1e3 * max(lock.longest_s for lock in self._locks)

    def calls(
        self,
        what: str,
        call: Callable[[Sequence[BlockKey]], object],
        keys: Iterable[list[BlockKey]],
    ) -> None:
        with self.of(what):
            for each in keys:
                call(each)


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


def _watch_tier(tier: DiskTier) -> WatchedLock:
    catalog = tier.catalog
    lock = cast(object, catalog._lock)
    if isinstance(lock, WatchedLock):
        return lock
    watched = WatchedLock(lock)  # the same for threads that wait for it now
    catalog._lock = watched
    return watched


def _by_owner(tier: DiskTier, call: Callable[[], object]) -> None:
    """Makes a call in the thread that owns the eviction orders."""
    flusher, ended = tier._flusher, threading.Event()

    def tend() -> None:
        del flusher._tend
        call()
        ended.set()
        flusher._tend()

    flusher._tend = tend  # type: ignore[method-assign]
    flusher.hurry()
    ended.wait()


def _pauses(tier: DiskTier, blocks: int, repeats: int) -> dict[str, float]:
    """Of operations on a tier that is at rest, and of collections of garbage."""
    catalog = tier.catalog
    watch = _Watch(_watch_tier(tier))
    once, often = [_some(blocks, 100)], [_some(blocks, 100 + turn) for turn in range(repeats)]
    few = often[: max(1, blocks // 40_000)]  # some of the blocks only
    fresh = [key_of(blocks + number) for number in range(512)]
    now = int(catalog.now())
    rows = [
        IndexRow(at << 12, key, None, 0, _BLOCK, bytes(16), now) for at, key in enumerate(fresh)
    ]
    with _collections() as collected:
        watch.calls("touch of 1,000", tier.touch, often)
        watch.calls("acquire, release", lambda keys: _acquire(tier, keys), once)
        watch.calls("pin of 1,000", tier.catalog.pin, once)
        watch.calls("unpin of 1,000", tier.catalog.unpin, once)
        with watch.of("list"):
            deque(tier.catalog.infos(), maxlen=0)
        watch.calls("use of slabs", lambda _: catalog.slab_uses(), once)
        evict = partial(catalog.evict, _EVICTED, _BLOCK)
        evict_bytes = partial(catalog.evict, _EVICTED)
        watch.calls("eviction of 512", lambda _: _by_owner(tier, evict), few)
        watch.calls("eviction of bytes", lambda _: _by_owner(tier, evict_bytes), few)
        watch.calls("drop of 1,000", tier.drop, once)
        watch.calls(
            "new blocks, 512", lambda _: _by_owner(tier, partial(catalog.publish, rows)), once
        )
        watch.calls("touch of 1,000 new ones", tier.touch, map(_new, range(repeats)))
        watch.calls(
            "namespace of another size",
            lambda _: catalog.forget_namespace(NAMESPACE.digest, but_of=_BLOCK),
            once,
        )
        began = time.thread_time()
        gc.collect()
        whole_s = time.thread_time() - began
    catalog.forget(fresh, Cause.DROPPED)
    watch.found["collection of garbage"] = 1e3 * max(collected[:-1], default=0.0)
    watch.found["full collection of garbage"] = 1e3 * whole_s
    return watch.found


def _pauses_meanwhile(tier: DiskTier, blocks: int) -> dict[str, float]:
    """Of what finds the folder's blocks, and of touches meanwhile."""
    watch, turn = _Watch(_watch_tier(tier)), 0
    with watch.of("while blocks are found"):
        while not tier._engine.recovered.wait(0.01):
            tier.touch(_some(blocks, turn))
            turn += 1
    return watch.found


def _pauses_with_limits(
    pool: Pool, tier: DiskTier, blocks: int, repeats: int
) -> tuple[dict[str, float], float]:
    """Of operations on a tier whose tenants have limits, the pool's lock included, until all is
    cleared; and the seconds that takes."""
    catalog, tenant = tier.catalog, SHARED
    lock = pool._changed._lock = WatchedLock(pool._changed._lock)  # type: ignore[attr-defined]
    watch = _Watch(_watch_tier(tier), lock)
    often = [_some(blocks, 100 + turn) for turn in range(repeats)]
    old = PoolTerms(tenants=TenantRules(TenantTerms(ttl_s=0.9 * _WEEK_S)))
    room = blocks * _BLOCK - tier.stats().used_bytes

    watch.calls("quotas: touch of 1,000", pool.touch, often)
    watch.calls(
        "quotas: room for 512",
        lambda keys: _by_owner(
            tier, partial(catalog.make_way, tenant, room + 512 * _BLOCK, keys[0])
        ),
        often,
    )
    with watch.of("expiry of a tenth"):
        PoolAdmin(pool, tier, old, pool.admin.now).expire()
    watch.calls("quotas: list of tenants", lambda _: tier.catalog.tenants(), often)
    began = time.perf_counter()
    with watch.of("clear"):
        tier.clear()
    clear_s = time.perf_counter() - began
    fresh = map(_new, range(repeats, 4 * repeats))
    watch.calls("touch of 1,000 new ones, cleared", tier.touch, fresh)
    return watch.found, clear_s


def _new(kind: int) -> list[BlockKey]:
    """Keys that no block has."""
    return [key_of(-1 - number - _FOUND * kind) for number in range(_FOUND)]


def _acquire(tier: DiskTier, keys: Sequence[BlockKey]) -> None:
    catalog = tier.catalog
    for entry in [entry for key in keys if (entry := catalog.acquire(key))]:
        catalog.release(entry)
