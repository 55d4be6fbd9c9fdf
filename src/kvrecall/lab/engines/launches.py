"""Counts what a sparse layer and a decode step ask of a device, without one.

Layers run on PyTorch's ``meta`` device, whose tensors hold no values (``device.meta``). A Triton
kernel counts as one operation, as does a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.backend import RetrievalAttention
from kvrecall.engines.vllm.attention.layer import RetrievalLayer
from kvrecall.engines.vllm.attention.step import (
    BatchRow,
    Freshness,
    KernelShape,
    StepPlanner,
    StepWork,
)
from kvrecall.engines.vllm.attention.triton_kernel import TritonKernel
from kvrecall.engines.vllm.device.meta import META, Operations, counting


class _Attention(RetrievalAttention):
    """A layer whose dense attention is not run."""

    def __init__(self, layer: RetrievalLayer) -> None:
        self.sparse_layer = layer
        self.scale, self.logits_soft_cap = 1.0, 0.0

    def _dense(self, *args: Any) -> torch.Tensor:
        raise AssertionError("the batch has no dense part")


class SparseSteps:
    """Decode steps of sequences that are all attended to sparsely."""

    def __init__(self, shape: KernelShape, settings: RetrievalSettings, layers: int) -> None:
        self._shape = shape
        activity = Activity()
        self._kernel = kernel = TritonKernel(shape, META)
        self.planner = StepPlanner(settings, kernel, Freshness(), activity)
        self._layers = [
            RetrievalLayer(str(at), settings, kernel, activity, lambda *_: None)
            for at in range(layers)
        ]

    def run(self, *lengths: int) -> Operations:
        """One step, in which each sequence has so many tokens."""
        shape, count = self._shape, len(lengths)
        width = -(-max(lengths) // shape.block_size)
        table = torch.arange(count * width, dtype=torch.int32).view(count, width)
        size = (count * width, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        cache = torch.empty(size, dtype=shape.dtype, device=META)
        query = torch.empty(count, shape.heads, shape.head_dim, dtype=shape.dtype, device=META)
        output = torch.empty_like(query)
        with counting() as operations:
            step = self.planner.plan([BatchRow(1, tokens, False) for tokens in lengths], table)
            metadata = _Metadata(StepWork(step, True))
            for layer in self._layers:
                none: Any = None
                _Attention(layer).forward(none, query, none, none, cache, metadata, output)
        return operations


@dataclass(frozen=True, slots=True)
class _Metadata:
    retrieval: StepWork
