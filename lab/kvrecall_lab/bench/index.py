"""``bench index``: what the disk tier's index costs with very many blocks."""

from __future__ import annotations

import ctypes
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from kvrecall.bench.pool import NAMESPACE
from kvrecall.bench.report import Folder, Report, progress, timed
from kvrecall.bench.service import FOLDER_BLOCK as _BLOCK
from kvrecall.bench.service import FOLDER_CHAIN as _CHAIN
from kvrecall.bench.service import key_of, write_folder
from kvrecall.block import BlockKey
from kvrecall.config import DEFAULT_POLICY, Amount, DiskConfig, PoolTerms, TenantRules, TenantTerms
from kvrecall.pool.arena import Arena
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.pool import Pool

GOALS = {
    "bytes_a_block": 200.0,
    "open_s": 1.5,
    "find_1000_us": 150.0,
    "find_beside_eviction_us_p999": 2000.0,
}
"""Goals with a million blocks."""

_SHOWN = (
    "bytes_a_block", "bytes_a_block_with_quotas", "open_s", "first_hit_s", "read_s", "ranked_s",
    "find_1000_us", "find_1000_absent_us", "find_beside_eviction_us_p99",
    "find_beside_eviction_us_p999", "clear_s", "close_s",
)  # fmt: skip

_FOUND = 1000  # keys of a look-up
_EVICTED = 0.25  # of the blocks
_MIB = 1 << 20


def measure_index(
    blocks: Annotated[int, typer.Option(min=5000, help="Blocks in the folder.")] = 100_000,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = DEFAULT_POLICY,
    path: Folder = Path("var"),
    repeats: Annotated[int, typer.Option(min=1)] = 20,
    passes: Annotated[int, typer.Option(min=1, help="Folders measured, one by one.")] = 3,
) -> Report:
    """What the index of a disk tier costs: memory, opening, and look-ups, also beside eviction.

    The folder is a real one, with sparse slab files: its blocks have rows and slots, but no bytes.
    It is opened twice: the second time tenants have limits. Look-ups beside eviction are those
    made while the tier shrinks by a quarter, in processor time of the thread that looks up; the
    time for which a hypervisor takes the processor away counts, too. All is done in several
    passes, each with a folder of its own, and the medians tell; of memory the most.
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
    figures = {"blocks": blocks, "policy": policy, "passes": passes}
    for name in _SHOWN:
        choose = max if name.startswith("bytes") else statistics.median
        figures[name] = choose([one[name] for one in found])
    rows = [
        (name, f"{figures[name]:,.2f}", f"{goal:,.1f}" if goal else "")
        for name in _SHOWN
        for goal in (GOALS.get(name),)
    ]
    return Report("index", (f"{blocks:,} blocks", "measured", "goal"), tuple(rows), figures)


def _measure(config: DiskConfig, blocks: int, policy: str, repeats: int) -> dict[str, Any]:
    """One pass."""
    gc.freeze()  # as the service and vLLM's engine do: what was there before counts for nothing
    found: dict[str, Any] = {}
    before, began = _resident_bytes(), time.perf_counter()
    with _opened(config, policy) as (pool, tier):
        found["open_s"] = time.perf_counter() - began
        last = _chain(blocks // _CHAIN - 1)
        found["first_hit_s"] = _until(lambda: len(pool.find(last).tiers) == len(last), began)
        found["read_s"] = _until(lambda: tier.stats().blocks >= blocks, began)
        found["ranked_s"] = _until(tier._engine.recovered.is_set, began)
        found["bytes_a_block"] = (_resident_bytes() - before) / blocks
        found["find_1000_us"] = statistics.median(
            _find_us(pool, (_some(blocks, at) for at in range(repeats)))
        )
        found["find_1000_absent_us"] = statistics.median(_find_us(pool, map(_new, range(repeats))))
        found |= _find_beside_eviction(pool, tier, blocks)
    terms = PoolTerms(tenants=TenantRules(TenantTerms(disk=Amount(blocks * _BLOCK))))
    before = _resident_bytes()
    with _opened(config, policy, terms) as (pool, tier):
        tier._engine.recovered.wait()
        left = tier.stats().blocks
        found["bytes_a_block_with_quotas"] = (_resident_bytes() - before) / left
        found["clear_s"] = timed(pool.clear)
        began = time.perf_counter()
    found["close_s"] = time.perf_counter() - began
    gc.unfreeze()
    return found


@contextmanager
def _opened(
    config: DiskConfig, policy: str, terms: PoolTerms | None = None
) -> Iterator[tuple[Pool, DiskTier]]:
    """A pool on the folder."""
    tier = DiskTier(config, policy, terms=terms)
    with Pool(Arena.create(_MIB), tier, policy, terms=terms) as pool:
        pool.register(NAMESPACE, _BLOCK)
        yield pool, tier


def _until(is_so: Callable[[], bool], began: float) -> float:
    """Seconds since ``began`` once it is so."""
    while not is_so():
        time.sleep(0.001)
    return time.perf_counter() - began


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


def _find_us(pool: Pool, asked: Iterable[Sequence[BlockKey]]) -> list[float]:
    """Microseconds of thread time of look-ups of 1,000 blocks."""
    spent = []
    for keys in asked:
        began = time.thread_time()
        pool.find(keys)
        spent.append(1e6 * (time.thread_time() - began))
    return spent


def _find_beside_eviction(pool: Pool, tier: DiskTier, blocks: int) -> dict[str, float]:
    """Look-ups while the tier evicts."""
    left = int((1 - _EVICTED) * blocks)
    tier.resize(left * _BLOCK)
    asked = (_some(blocks, turn) for turn in itertools.count())
    spent = _find_us(pool, itertools.takewhile(lambda _: tier.stats().blocks > left, asked))
    p99, p999 = np.percentile(spent, (99, 99.9)).tolist()
    return {"find_beside_eviction_us_p99": p99, "find_beside_eviction_us_p999": p999}


def _new(kind: int) -> list[BlockKey]:
    """Keys that no block has."""
    return [key_of(-1 - number - _FOUND * kind) for number in range(_FOUND)]
