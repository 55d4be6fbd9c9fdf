"""``bench vectors``: vector indexes in place of the exact search for blocks.

No model and no engine: one KV head with random keys in clusters, as those of texts are, and queries
near some of them. A layer of a model searches once for each of its KV heads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer

from kvrecall.attention.digest import Layout, encode
from kvrecall.attention.index.base import EXACT, INDEXES, index_factory
from kvrecall.attention.index.search import SequenceIndex
from kvrecall.attention.kernels import search as compiled
from kvrecall.attention.selection import selector_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import (
    Report,
    Threads,
    Times,
    lengths_in,
    names_in,
    percentiles,
    progress,
    timed,
)
from kvrecall.errors import ConfigError
from kvrecall_lab.bench.decode import use_threads

Search = Callable[..., torch.Tensor]

GROUP, DIM, BLOCK = 4, 128, 128
_CLUSTERS, _RUN = 64, 24  # of keys; successive ones are of the same cluster
_AT_ONCE = 2048  # blocks


def measure_vectors(
    lengths: Annotated[str, typer.Option(help="Tokens of the sequence.")] = "64K,128K",
    shares: Annotated[str, typer.Option(help="Shares of the middle blocks selected.")] = "0.2,0.02",
    indexes: Annotated[
        str, typer.Option(help="Names, or package.module:Factory, beside the exact search.")
    ] = ",".join(INDEXES),
    rounds: Times = 20,
    threads: Threads = None,
) -> Report:
    """What vector indexes find of the exact search's blocks, and what that costs."""
    threads = use_threads(threads)
    points = [
        point
        for tokens in lengths_in(lengths)
        for share in names_in(shares)
        for point in _compare(tokens, float(share), names_in(indexes), rounds)
    ]
    rows = tuple(
        (
            f"{point['tokens']:,}",
            f"{point['share']:g}",
            point["index"],
            f"{point['found']:.3f}",
            f"{point['ms']['p50']:.2f}",
            f"{point['ms_a_block']:.2f}",
            f"{point['build_s']:.2f}",
            f"{point['nbytes'] / 2**20:.1f}",
        )
        for point in points
    )
    columns = ("context", "share", "index", "found", "ms", "ms to add a block", "s to build", "MiB")
    notes = (
        f"one KV head of {DIM}, {GROUP} query heads, blocks of {BLOCK} tokens; threads: {threads}",
        "found: share of the blocks of the exact search; random keys in clusters",
    )
    return Report("vectors", columns, rows, {"threads": threads, "points": points}, notes)


def _compare(
    tokens: int, share: float, names: tuple[str, ...], rounds: int
) -> list[dict[str, Any]]:
    """A point of the exact search, and of each index."""
    settings = replace(RetrievalSettings(), topk_share=share)
    split, layout = split_of(tokens, BLOCK, settings), settings.layout(BLOCK)
    if split.chosen >= split.middle:
        raise ConfigError(f"--lengths: {tokens} tokens leave no blocks to select from")
    progress(f"{tokens:,} tokens, share {share:g}: {split.middle:,} blocks to select from")
    keys = _Keys()
    parts = [_AT_ONCE] * (split.middle // _AT_ONCE) + [split.middle % _AT_ONCE + 1]
    coded = torch.cat([encode(layout.rows_of(keys.blocks(part))) for part in parts])[None]
    rows, next_block = coded[:, :-1], coded[:, -1:]
    searches: dict[str, Search] = {EXACT: _exact(layout, rows, split.chosen)}
    made: dict[str, SequenceIndex] = {}
    seconds: dict[str, float] = {}
    for name in names:
        factory = index_factory(name)
        if factory is None:
            raise ConfigError(f"--indexes: {name} is always there")
        progress(f"building {name}")
        made[name] = index = SequenceIndex(factory, layout, 1, DIM)
        seconds[name] = timed(partial(index.add, rows))
        searches[name] = index.choose
    times: dict[str, list[float]] = {name: [] for name in searches}
    found = dict.fromkeys(searches, 0)
    for _ in range(rounds):
        query, blocks = keys.query(), set[int]()
        for name, search in searches.items():
            began = time.perf_counter()
            chosen = search(query, count=split.chosen, scale=DIM**-0.5)
            times[name].append(1e3 * (time.perf_counter() - began))
            ours = set(chosen[0].tolist())
            blocks = blocks or ours  # the exact search is the first
            found[name] += len(ours & blocks)
    points = []
    for name in searches:
        point = {
            "tokens": tokens,
            "share": share,
            "index": name,
            "found": round(found[name] / rounds / split.chosen, 4),
            "ms": percentiles(times[name]),
            "ms_a_block": 0.0,
            "build_s": round(seconds.get(name, 0.0), 3),
            "nbytes": rows.numel(),
        }
        if name in made:
            point["nbytes"] = made[name].nbytes
            point["ms_a_block"] = round(1e3 * timed(partial(made[name].add, next_block)), 4)
            made[name].close()
        points.append(point)
    return points


def _exact(layout: Layout, rows: torch.Tensor, count: int) -> Search:
    """The exact search, as engines do it."""
    if not compiled.is_compiled():
        return partial(selector_of(layout).choose, runs=[rows])
    coarse = rows[:, :, layout.coarse_rows].contiguous() if layout.coarse else None
    sought = compiled.Sought([np.arange(rows.shape[1])], count)
    prepared = compiled.Search((1, GROUP, DIM), layout, [sought])
    placed = [compiled.Placed(layout, [(rows, coarse)])]

    def search(query: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        prepared.run(query, placed, scale)
        return prepared.found[0]

    return search


class _Keys:
    """Unit vectors around ``_CLUSTERS`` centres, ``_RUN`` tokens long, and queries near them."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._centres = self._normal(_CLUSTERS, DIM)

    def _normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self._random)

    def blocks(self, count: int) -> torch.Tensor:
        """float32 ``[count, BLOCK, DIM]``."""
        runs = -(-count * BLOCK // _RUN)
        of_run = torch.randint(_CLUSTERS, (runs,), generator=self._random)
        centres = self._centres[of_run.repeat_interleave(_RUN)[: count * BLOCK]]
        return (centres + self._normal(count * BLOCK, DIM)).view(count, BLOCK, DIM)

    def query(self) -> torch.Tensor:
        """float32 ``[1, GROUP, DIM]``."""
        centre = self._centres[torch.randint(_CLUSTERS, (1,), generator=self._random)]
        return (centre + self._normal(GROUP, DIM))[None]
