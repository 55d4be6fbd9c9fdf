"""Measures one decoded token's attention, dense and by retrieval, on vLLM's CPU kernel.

Layers run in turn, as in a model, so that the processor's caches are used as in an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvrecall.attention.selection import Gate, Split, split_of
from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.bench.report import percentiles
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape, SparseStep
from kvrecall.engines.vllm.attention.checks import require_block_size
from kvrecall.engines.vllm.attention.cpu import CpuKernel, attend, halves, schedule
from kvrecall.engines.vllm.attention.offloaded import NearArena, OffloadedSequence, Records
from kvrecall.engines.vllm.attention.step import BatchRow, Freshness, StepPlanner
from kvrecall.errors import KvrecallError
from kvrecall.pool.arena import Arena

BLOCK = 128
LAYERS = 4


MODEL_LAYERS = 28
"""A step is planned once for all layers; its cost is shared by as many as Qwen2-7B has."""


def measure(tokens: int, settings: RetrievalSettings, rounds: int) -> dict[str, Any]:
    """Times one layer over a sequence of ``tokens`` random keys, dense and sparse interleaved, in
    milliseconds of the processor if there is one thread; past the offload boundary also with the
    middle blocks offloaded. The settings' gate is ignored but reported: ``gated``.

    Raises KvrecallError if there is nothing to select from, if retrieval did not act, if selecting
    every block differs from dense attention, or if offloaded blocks give another result.
    """
    require_block_size(BLOCK, settings)
    ungated = replace(settings, gate=False)
    split = split_of(tokens, BLOCK, ungated)
    if not Gate(ungated, token_bytes=1).passes(tokens, split):
        raise KvrecallError(
            f"--contexts {tokens} leaves no blocks to select from: the first "
            f"{settings.init_tokens} and the last {settings.local_tokens} tokens are always "
            f"attended to, and between them at least {settings.fewest_blocks} blocks; use a "
            "longer context"
        )
    trial = _Trial(settings, tokens)
    figures = {"context": tokens, "digest": f"{settings.digest} of {settings.tokens_a_digest}"}
    figures |= trial.run(rounds)
    if settings.regime(tokens, tokens) is Regime.OFFLOAD:
        figures |= trial.run_offloaded(rounds, figures)
    return figures


def isa_of(dtype: torch.dtype, head_dim: int, block_size: int = BLOCK) -> str:
    """The kernel's instruction set. Requests AMX tiles from the system first; in an engine, the
    first matrix product has done so before attention begins."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    return str(_get_attn_isa(dtype, block_size, head_dim, "auto"))


class _Trial:
    def __init__(self, settings: RetrievalSettings, tokens: int) -> None:
        torch.manual_seed(0)
        isa = isa_of(torch.bfloat16, 128)
        self._shape = shape = KernelShape(16, 4, 128, BLOCK, torch.bfloat16, isa)
        self._settings = settings
        self._rows = [BatchRow(1, tokens, False)]
        blocks = -(-tokens // BLOCK)
        size = (blocks + 1, shape.kv_heads, BLOCK, 2 * shape.head_dim)
        first = torch.randn(size).to(shape.dtype)
        self._caches = [first, *(first.clone() for _ in range(LAYERS - 1))]
        self._table = torch.arange(1, blocks + 1, dtype=torch.int32)[None]
        self._query = torch.randn(1, shape.heads, shape.head_dim).to(shape.dtype)
        self._scale = shape.head_dim**-0.5
        self._terms = AttentionParameters(self._scale)
        self._seq_lens = torch.tensor([tokens], dtype=torch.int32)
        self._starts = torch.tensor([0, 1], dtype=torch.int32)
        self._dense_plan = schedule(shape, self._seq_lens, self._starts, whole=True)
        self._activity = Activity()
        self._kernel = CpuKernel(shape)
        self._layers = [
            self._kernel.layer(str(at), settings, self._activity) for at in range(LAYERS)
        ]

    def run(self, rounds: int) -> dict[str, Any]:
        step = self._step()
        assert step is not None
        for layer, cache in zip(self._layers, self._caches, strict=True):
            layer.digest(cache, step.stale)
        times: dict[str, list[float]] = {"dense": [], "sparse": [], "selection": [], "plan": []}
        for at in range(rounds * LAYERS):
            layer, cache = self._layers[at % LAYERS], self._caches[at % LAYERS]
            acts: dict[str, Callable[[], object]] = {
                "dense": partial(self._dense, cache),
                "sparse": partial(layer.attend, self._query, cache, step, self._terms),
                "selection": partial(layer.select, self._query, step, self._scale, False),
                "plan": self._step,
            }
            for name, act in acts.items():
                began = _now()
                act()
                times[name].append((_now() - began) * 1e3)
        if not self._activity.totals()["blocks_selected"]:
            raise KvrecallError(
                "retrieval did not act: no block was selected; the figures are meaningless"
            )
        if (error := self._whole_error()) > 0.02:
            raise KvrecallError(
                f"selecting every block differs from dense attention by {error:.3f}"
            )
        split = step.sequences[0].split
        spent = {name: percentiles(values) for name, values in times.items()}
        planned = spent["plan"]["p50"] / MODEL_LAYERS
        return {
            "dense_ms": spent["dense"]["p50"],
            "sparse_ms": round(spent["sparse"]["p50"] + planned, 6),
            "selection_ms": spent["selection"]["p50"],
            "plan_ms_a_step": spent["plan"]["p50"],
            **{
                name: round((spent["sparse"][rank] + planned) / spent["dense"][rank], 4)
                for name, rank in (("attention_ratio", "p50"), ("attention_ratio_p10", "p10"))
            },
            "selection_share": round(spent["selection"]["p50"] / spent["sparse"]["p50"], 4),
            "selected_share": round(split.chosen / split.middle, 4),
            "attended_share": round(split.attended_tokens / self._rows[0].tokens, 4),
            "gated": self._step(gate=True) is None,
            "active": True,
            "percentiles_ms": spent,
            "activity": self._activity.totals(),
        }

    def run_offloaded(self, rounds: int, before: Mapping[str, Any]) -> dict[str, Any]:
        """The same with all middle blocks in an arena, and ``to_device``: beside the same queries
        with all blocks on the device, interleaved. ``before``: what ``run`` gave, which computes
        digests."""
        split = split_of(self._rows[0].tokens, BLOCK, self._settings)
        sequence, caches, table = self._depart(split)
        settings = replace(self._settings, gate=False, dense_boundary=0)
        planner = StepPlanner(settings, self._kernel, Freshness(), Activity())
        steps = [planner.plan(self._rows, table, {0: sequence}), self._step()]
        seconds: list[list[float]] = [[], []]
        in_place = self._activity.blocks_in_place
        for at in range(rounds):
            self._query = torch.randn(self._query.shape).to(self._query.dtype)
            got: list[list[torch.Tensor]] = [[], []]
            for turn in (0, 1) if at % 2 else (1, 0):
                step = steps[turn]
                assert step is not None
                for layer, cache in zip(self._layers, (caches, self._caches)[turn], strict=True):
                    began = _now()
                    got[turn].append(layer.attend(self._query, cache, step, self._terms))
                    seconds[turn].append((_now() - began) * 1e3)
            if not all(map(torch.equal, *got)):
                raise KvrecallError("blocks off the device give other results")
        if self._activity.blocks_in_place == in_place:
            raise KvrecallError(
                "offload did not act: no block was read in the arena; the figures are meaningless"
            )
        spent, beside = (percentiles(values) for values in seconds)
        offload_ms = spent["p50"] + before["plan_ms_a_step"] / MODEL_LAYERS
        return {
            "offload_ms": round(offload_ms, 6),
            "offload_ratio": round(offload_ms / before["dense_ms"], 4),
            "offload_to_device": round(spent["p50"] / beside["p50"], 4),
            "offload_to_device_p10": round(spent["p10"] / beside["p10"], 4),
            "device_blocks_ratio": round(1 - split.middle / split.blocks, 4),
        }

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
            self._near,
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
            self._terms,
        )

    def _whole_error(self) -> float:
        """The most by which selecting every block differs from dense attention."""
        step = self._step(topk_share=1.0)
        assert step is not None
        cache = self._caches[0]
        whole = self._layers[0].attend(self._query, cache, step, self._terms)
        return float((whole - self._dense(cache)).abs().max())

    def _step(self, **changed: Any) -> SparseStep | None:
        """Plans the step with these settings changed."""
        settings = replace(self._settings, **{"gate": False, "dense_boundary": 0, **changed})
        planner = StepPlanner(settings, self._kernel, Freshness(), Activity())
        return planner.plan(self._rows, self._table)


def _now() -> float:
    """Of one thread the processor's time, which other processes affect least."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()
