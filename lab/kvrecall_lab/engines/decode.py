"""Measures one decoded token's attention, dense and by retrieval, on vLLM's CPU kernel.

Layers run in turn, as in a model, so that the processor's caches are used as in an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvrecall.attention.selection import Split, split_of
from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape, SparseStep
from kvrecall.engines.vllm.attention.cpu import CpuKernel, attend, halves, schedule
from kvrecall.engines.vllm.attention.offloaded import NearArena, OffloadedSequence, Records
from kvrecall.engines.vllm.attention.step import BatchRow, Freshness, StepPlanner
from kvrecall.pool.arena import Arena

BLOCK = 128
LAYERS = 4


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds per layer, one value per round, dense and sparse alternating; of the processor if
    there is one thread.

    ``selection`` is part of ``sparse``. ``plan``: seconds of a step's planning, once for all
    layers. ``selected_share``: of the middle blocks; ``attended_share``: of the tokens;
    ``gated``: whether an engine would attend densely here; ``whole_error``: maximum difference to
    dense attention if every block is selected.
    """

    dense: tuple[float, ...]
    sparse: tuple[float, ...]
    selection: tuple[float, ...]
    plan: tuple[float, ...]
    selected_share: float
    attended_share: float
    gated: bool
    whole_error: float
    activity: dict[str, int]
    offload: OffloadTimes | None = None


@dataclass(frozen=True, slots=True)
class OffloadTimes:
    """The same with the middle blocks offloaded: ``seconds`` per layer, beside ``here``, of the
    same queries with all blocks on the device, alternating. ``in_place``: selected blocks read in
    the arena. ``device_blocks``, ``blocks``: the sequence's blocks on the device, and in total.
    ``error``: maximum difference between the two."""

    seconds: tuple[float, ...]
    here: tuple[float, ...]
    in_place: int
    device_blocks: int
    blocks: int
    error: float


def measure_decode(
    tokens: int,
    settings: RetrievalSettings,
    rounds: int,
    heads: int = 16,
    kv_heads: int = 4,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> DecodeTimes:
    """Times a sequence of ``tokens`` random keys; the settings' gate is ignored but reported.

    Past the offload boundary also with the middle blocks offloaded.
    """
    isa = isa_of(dtype, head_dim)
    shape = KernelShape(heads, kv_heads, head_dim, BLOCK, dtype, isa)
    trial = _Trial(shape, settings, tokens)
    times = trial.run(rounds)
    if settings.regime(tokens, tokens) is not Regime.OFFLOAD:
        return times
    return replace(times, offload=trial.run_offloaded(rounds))


def isa_of(dtype: torch.dtype, head_dim: int, block_size: int = BLOCK) -> str:
    """The kernel's instruction set. Requests AMX tiles from the system first; in an engine, the
    first matrix product has done so before attention begins."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    return str(_get_attn_isa(dtype, block_size, head_dim, "auto"))


class _Trial:
    def __init__(self, shape: KernelShape, settings: RetrievalSettings, tokens: int) -> None:
        torch.manual_seed(0)
        self._shape = shape
        self._settings = settings
        self._rows = [BatchRow(1, tokens, False)]
        blocks = -(-tokens // BLOCK)
        size = (blocks + 1, shape.kv_heads, BLOCK, 2 * shape.head_dim)
        first = torch.randn(size).to(shape.dtype)
        self._caches = [first, *(first.clone() for _ in range(LAYERS - 1))]
        self._table = torch.arange(1, blocks + 1, dtype=torch.int32)[None]
        self._query = torch.randn(1, shape.heads, shape.head_dim).to(shape.dtype)
        self._scale = shape.head_dim**-0.5
        self._seq_lens = torch.tensor([tokens], dtype=torch.int32)
        self._starts = torch.tensor([0, 1], dtype=torch.int32)
        self._dense_plan = schedule(shape, self._seq_lens, self._starts, whole=True)
        self._activity = Activity()
        self._kernel = CpuKernel(shape)
        self._layers = [
            self._kernel.layer(str(at), settings, self._activity) for at in range(LAYERS)
        ]

    def run(self, rounds: int) -> DecodeTimes:
        step = self._step()
        if step is None or not step.sequences:
            raise ValueError("the sequence has no middle blocks to choose from")
        for layer, cache in zip(self._layers, self._caches, strict=True):
            layer.digest(cache, step.stale)
        times: dict[str, list[float]] = {"dense": [], "sparse": [], "selection": [], "plan": []}
        for at in range(rounds * LAYERS):
            layer, cache = self._layers[at % LAYERS], self._caches[at % LAYERS]
            acts: dict[str, Callable[[], object]] = {
                "dense": partial(self._dense, cache),
                "sparse": partial(
                    layer.attend, self._query, cache, step, AttentionParameters(self._scale)
                ),
                "selection": partial(layer.select, self._query, step, self._scale, False),
                "plan": self._step,
            }
            for name, act in acts.items():
                times[name].append(_seconds(act))
        split = step.sequences[0].split
        return DecodeTimes(
            dense=tuple(times["dense"]),
            sparse=tuple(times["sparse"]),
            selection=tuple(times["selection"]),
            plan=tuple(times["plan"]),
            selected_share=split.chosen / split.middle,
            attended_share=split.attended_tokens / self._rows[0].tokens,
            gated=self._step(gate=True) is None,
            whole_error=self._whole_error(),
            activity=self._activity.totals(),
        )

    def run_offloaded(self, rounds: int) -> OffloadTimes:
        """The same with all middle blocks in an arena. ``run`` must come first: it computes
        digests."""
        split = split_of(self._rows[0].tokens, BLOCK, self._settings)
        sequence, caches, table = self._depart(split)
        settings = replace(self._settings, gate=False, dense_boundary=0)
        planner = StepPlanner(settings, self._kernel, Freshness(), Activity())
        offloaded = planner.plan(self._rows, table, {0: sequence})
        here = self._step()
        assert offloaded is not None
        assert here is not None
        terms = AttentionParameters(self._scale)
        seconds: list[float] = []
        beside: list[float] = []
        error = 0.0
        before = self._activity.blocks_in_place
        for at in range(rounds):
            self._query = torch.randn(self._query.shape).to(self._query.dtype)
            turns = [(seconds, caches, offloaded), (beside, self._caches, here)]
            got: list[list[torch.Tensor]] = [[], []]
            for turn in (0, 1) if at % 2 else (1, 0):
                spent, those, step = turns[turn]
                for layer, cache in zip(self._layers, those, strict=True):
                    began = _now()
                    got[turn].append(layer.attend(self._query, cache, step, terms))
                    spent.append(_now() - began)
            for one, other in zip(*got, strict=True):
                error = max(error, float((one - other).abs().max()))
        return OffloadTimes(
            seconds=tuple(seconds),
            here=tuple(beside),
            in_place=self._activity.blocks_in_place - before,
            device_blocks=split.init + split.blocks - split.local,
            blocks=split.blocks,
            error=error,
        )

    def _depart(self, split: Split) -> tuple[OffloadedSequence, list[torch.Tensor], torch.Tensor]:
        """The sequence with its middle blocks in an arena, the device caches of its other blocks, a
        cache per layer, and its block table."""
        middle = self._table[0, split.init : split.local].to(torch.int64)
        kept = [*range(split.init), *range(split.local, split.blocks)]
        page = self._caches[0][0].nbytes
        self._arena = Arena.create(split.middle * LAYERS * page)
        memory = self._arena.array()
        pages = memory.reshape(split.middle, LAYERS, page)
        caches = []
        for at, cache in enumerate(self._caches):
            rows = cache.view(len(cache), -1).view(torch.uint8)
            pages[:, at] = rows[middle].numpy()
            small = torch.zeros((len(kept) + 1, *cache.shape[1:]), dtype=cache.dtype)
            small[1:] = cache[self._table[0, kept].to(torch.int64)]
            caches.append(small)
        places = {str(at): at * page for at in range(LAYERS)}
        records = Records(memory, places, self._arena.handle())
        named = {str(at): small for at, small in enumerate(caches)}
        self._near = NearArena(records, named)
        table = torch.zeros_like(self._table)
        table[0, kept] = torch.arange(1, len(kept) + 1, dtype=torch.int32)
        sequence = OffloadedSequence(
            "trial",
            split.init,
            np.arange(split.middle) * (LAYERS * page),
            torch.empty(0, dtype=torch.int32),
            records,
            self._near.bases,
        )
        for layer, small in zip(self._layers, caches, strict=True):
            layer.depart(sequence, middle, small)
        return sequence, caches, table

    def _dense(self, cache: torch.Tensor) -> torch.Tensor:
        return attend(
            self._shape,
            self._query,
            halves(cache, whole=True),
            self._table,
            self._seq_lens,
            self._starts,
            self._dense_plan,
            AttentionParameters(self._scale),
        )

    def _whole_error(self) -> float:
        step = self._step(topk_share=1.0)
        assert step is not None
        cache = self._caches[0]
        whole = self._layers[0].attend(self._query, cache, step, AttentionParameters(self._scale))
        return float((whole - self._dense(cache)).abs().max())

    def _step(self, **changed: Any) -> SparseStep | None:
        """Plans the step with these settings changed."""
        settings = replace(self._settings, **{"gate": False, "dense_boundary": 0, **changed})
        planner = StepPlanner(settings, self._kernel, Freshness(), Activity())
        return planner.plan(self._rows, self._table)


def _seconds(act: Callable[[], object]) -> float:
    started = _now()
    act()
    return _now() - started


def _now() -> float:
    """Of one thread the processor's time, which other processes affect least."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
