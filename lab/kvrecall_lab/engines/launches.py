"""Counts what a sparse layer and a decode step ask of a device, without one.

Layers run on PyTorch's ``meta`` device, whose tensors hold no values (``meta``). A Triton
kernel counts as one operation, as does a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrecall.attention.selection import slots_of, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.backend import RetrievalAttention
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape, RetrievalLayer
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.step import BatchRow, Freshness, StepPlanner, StepWork
from kvrecall_lab.engines.meta import META, Operations, counting


class _Attention(RetrievalAttention):
    """A layer whose dense attention is not run."""

    def __init__(self, layer: RetrievalLayer) -> None:
        self.sparse_layer = layer

    def _parameters(self, layer: Any) -> AttentionParameters:
        return AttentionParameters(1.0)

    def _dense(self, *args: Any) -> torch.Tensor:
        raise AssertionError("the batch has no dense part")


class SparseSteps:
    """Decode steps of sequences that are all attended to sparsely."""

    def __init__(self, shape: KernelShape, settings: RetrievalSettings, layers: int) -> None:
        self._shape = shape
        self._settings = settings
        activity = Activity()
        self._kernel = kernel = TritonKernel(shape, META)
        self.planner = StepPlanner(settings, kernel, Freshness(), activity)
        self._layers = [
            kernel.layer(str(at), settings, activity, lambda *_: None) for at in range(layers)
        ]

    def run(self, *lengths: int, offloaded: bool = False) -> Operations:
        """One step, in which each sequence has so many tokens. ``offloaded``: all middle blocks
        have left the device before it."""
        shape, count = self._shape, len(lengths)
        width = -(-max(lengths) // shape.block_size)
        table = torch.arange(count * width, dtype=torch.int32).view(count, width)
        size = (count * width, shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        cache = torch.empty(size, dtype=shape.dtype, device=META)
        query = torch.empty(count, shape.heads, shape.head_dim, dtype=shape.dtype, device=META)
        output = torch.empty_like(query)
        left: dict[int, OffloadedSequence] = {}
        if offloaded:
            with counting():
                left = {at: self._depart(at, tokens, cache) for at, tokens in enumerate(lengths)}
        rows = [BatchRow(1, tokens, False) for tokens in lengths]
        with counting() as operations:
            step = self.planner.plan(rows, table, left)
            metadata = _Metadata(StepWork(step))
            for layer in self._layers:
                none: Any = None
                _Attention(layer).forward(none, query, none, none, cache, metadata, output)
        for sequence in left.values():
            for layer in self._layers:
                layer.forget(sequence.key)
        return operations

    def _depart(self, at: int, tokens: int, cache: torch.Tensor) -> OffloadedSequence:
        """All middle blocks of a sequence, which have one record here, leave the device."""
        split = split_of(tokens, self._shape.block_size, self._settings)
        most = slots_of(split, split.middle, self._settings)[1]
        places = {str(number): 0 for number in range(len(self._layers))}
        records = Records(np.zeros(cache[0].nbytes, dtype=np.uint8), places)
        offsets, slots = np.zeros(split.middle, dtype=np.int64), torch.arange(1, 1 + most)
        made = OffloadedSequence(str(at), split.init, offsets, slots.to(torch.int32), records)
        for layer in self._layers:
            layer.depart(made, torch.arange(split.middle), cache)
        return made


@dataclass(frozen=True, slots=True)
class _Metadata:
    retrieval: StepWork
