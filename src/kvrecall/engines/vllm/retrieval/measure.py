"""Measures one decoded token's attention, dense and by retrieval, on vLLM's CPU kernel.

Layers are taken in turn, as a model's are, so that nothing stays in the processor's caches from
one to the next that would not in an engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvrecall.engines.vllm.retrieval.activity import Activity
from kvrecall.engines.vllm.retrieval.freshness import Freshness
from kvrecall.engines.vllm.retrieval.kernel import (
    KernelShape,
    attend,
    halves,
    reader_of,
    schedule,
)
from kvrecall.engines.vllm.retrieval.layer import RetrievalLayer
from kvrecall.engines.vllm.retrieval.steps import BatchRow, SparseStep, StepPlanner
from kvrecall.retrieval.settings import RetrievalSettings

BLOCK = 128
LAYERS = 4


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Seconds a layer, one value a round, dense and sparse taking turns.

    ``selection`` is part of ``sparse``. ``plan``: seconds of a step's planning, once for all
    layers. ``selected_share``: middle blocks chosen; ``attended_share``: tokens attended to;
    ``gated``: whether an engine would attend densely here; ``whole_error``: largest difference to
    dense attention if every block is chosen.
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


def measure_decode(
    tokens: int,
    settings: RetrievalSettings,
    rounds: int,
    heads: int = 16,
    kv_heads: int = 4,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> DecodeTimes:
    """Times a sequence of ``tokens`` random keys; the settings' gate is ignored but reported."""
    isa = _get_attn_isa(dtype, BLOCK, head_dim, "auto")
    shape = KernelShape(heads, kv_heads, head_dim, BLOCK, dtype, isa)
    return _Trial(shape, settings, tokens).run(rounds)


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
        reader = reader_of(shape)
        self._layers = [
            RetrievalLayer(settings, shape, reader, self._activity) for _ in self._caches
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
                "sparse": partial(layer.attend, self._query, cache, step, self._scale),
                "selection": partial(layer.choose, self._query, step, self._scale),
                "plan": self._step,
            }
            for name, act in acts.items():
                times[name].append(_seconds(act))
        split = step.sequences[0].split
        return DecodeTimes(
            **{name: tuple(values) for name, values in times.items()},
            selected_share=split.chosen / split.middle,
            attended_share=split.attended_tokens / self._rows[0].tokens,
            gated=self._step(gate=True) is None,
            whole_error=self._whole_error(),
            activity=self._activity.totals(),
        )

    def _dense(self, cache: torch.Tensor) -> torch.Tensor:
        return attend(
            self._query,
            halves(cache, whole=True),
            self._table,
            self._seq_lens,
            self._starts,
            self._dense_plan,
            self._scale,
        )

    def _whole_error(self) -> float:
        step = self._step(topk_share=1.0)
        assert step is not None
        cache = self._caches[0]
        whole = self._layers[0].attend(self._query, cache, step, self._scale)
        return float((whole - self._dense(cache)).abs().max())

    def _step(self, **changed: Any) -> SparseStep | None:
        """Plans the step anew, by the settings with these changed."""
        settings = replace(self._settings, **{"gate": False, "dense_boundary": 0, **changed})
        planner = StepPlanner(settings, self._shape, Freshness(BLOCK), Activity())
        return planner.plan(self._rows, self._table)


def _seconds(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started
