"""Plans a step of retrieval once for all layers: which sequences are attended to sparsely, the work
beside dense attention of the whole batch, and which digests must be computed first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvrecall.attention.index import EXACT
from kvrecall.attention.selection import Gate, Split, split_of
from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import (
    AttentionKernel,
    RetrievalLayer,
    SparseSequence,
    SparseStep,
)
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.engines.vllm.device import device_of

logger = logging.getLogger("vllm.kvrecall")


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request of a step. ``tokens`` counts those of this step too; ``prompt_tokens``: of its
    prompt. One that is not ``prefilling`` decodes the token sampled last, and drafts of those that
    may follow it."""

    query_tokens: int
    tokens: int
    prefilling: bool
    prompt_tokens: int = 0

    @property
    def decodes(self) -> bool:
        return self.query_tokens > 0 and not self.prefilling

    @property
    def lengths(self) -> range:
        """Tokens of the sequence up to each of this step's."""
        return range(self.tokens - self.query_tokens + 1, self.tokens + 1)

    def regime(self, settings: RetrievalSettings, tokens: int | None = None) -> Regime:
        """How it is attended to while it decodes, at this length or another."""
        return settings.regime(self.tokens if tokens is None else tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class OffloadedRow:
    """A partially offloaded sequence of the batch. ``places``: of its tokens in the batch;
    ``table``: int32, its device blocks, on the host, meaningless where they are off the device;
    ``tokens``: its length; ``prefills``: all layers attend to it densely. ``metadata``: vLLM's of
    this sequence alone, where vLLM's kernel attends to it, its blocks in their order."""

    sequence: OffloadedSequence
    places: slice
    table: torch.Tensor
    tokens: int
    prefills: bool
    metadata: Any = None


DenseOffload = Callable[..., torch.Tensor]
"""A layer's dense attention over a partially offloaded sequence. Takes its ``OffloadedRow``, the
queries of the row's tokens, the layer's cache, which has a part of the sequence,
``AttentionParameters``, and vLLM's attention of these tokens over a cache, by metadata."""

Beside = tuple[torch.Tensor, Any]
"""Requests of the batch that are attended to densely on the device, by themselves: the places of
their tokens in the batch, and vLLM's metadata."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What layers do in a step beside, or instead of, dense attention of the whole batch.

    ``beside_sparse``, ``beside_offloaded``: what a sparse layer attends to densely on the device,
    and what a dense layer does where sequences are ``offloaded``; None if nothing. ``is_kept``: a
    dense layer with copies of what left attends where a sparse one does, to all blocks."""

    step: SparseStep | None
    beside_sparse: Beside | None = None
    offloaded: tuple[OffloadedRow, ...] = ()
    beside_offloaded: Beside | None = None
    is_kept: bool = True


class Freshness:
    """Which blocks' digests are those of the keys the blocks now hold: one flag a device block, for
    all layers of a KV group. Owned by the worker's thread.

    A digest is a function of a block's keys alone: whatever writes a block, be it the engine's
    forward pass or a load from the pool, makes its digest stale, and a stale digest is computed
    anew from the keys before it is next used.

    The digests of a step count as fresh when it is planned. If its forward pass fails and the
    engine goes on, some layers have not made them, and their counts tell: then all are stale. A
    replayed graph runs no layer's Python, so its digests are counted when it is planned.
    """

    def __init__(self) -> None:
        self._fresh = np.zeros(0, dtype=np.bool_)
        self._taken = 0
        self._layers: list[tuple[RetrievalLayer, int]] = []  # and its count when none was taken

    def follow(self, layer: RetrievalLayer) -> None:
        """The layer digests from now on what is taken."""
        self._layers.append((layer, layer.digested - self._taken))

    @property
    def is_empty(self) -> bool:
        """Whether no digest has been computed yet."""
        return not len(self._fresh)

    def wrote_blocks(self, block_ids: Iterable[int]) -> None:
        """These blocks are being written."""
        ids = np.fromiter(block_ids, dtype=np.int64)
        self._fresh[ids[ids < len(self._fresh)]] = False

    def restored_blocks(self, block_ids: Iterable[int]) -> None:
        """These blocks were written, and their digests with them, in all layers."""
        ids = np.fromiter(block_ids, dtype=np.int64)
        self._reach(int(ids.max(initial=-1)))
        self._fresh[ids] = True

    def take_stale(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Those of the blocks that are stale, each once, int64, in the order given. Every layer
        digests them before the next call."""
        if any(layer.digested - first != self._taken for layer, first in self._layers):
            self._fresh[:] = False
            self._layers = [(layer, layer.digested - self._taken) for layer, _ in self._layers]
        ids = block_ids.numpy().astype(np.int64)
        self._reach(int(ids.max(initial=-1)))
        stale = ids[~self._fresh[ids]]
        if len(stale) > 1:  # sequences may share blocks
            stale = stale[np.sort(np.unique(stale, return_index=True)[1])]
        self._fresh[stale] = True
        self._taken += len(stale)
        return torch.from_numpy(stale)

    def _reach(self, most: int) -> None:
        if most >= len(self._fresh):
            self._fresh = np.pad(self._fresh, (0, 2 * most + 2 - len(self._fresh)))


class StepPlanner:
    """Plans the steps of one KV group."""

    def __init__(
        self,
        settings: RetrievalSettings,
        kernel: AttentionKernel,
        freshness: Freshness,
        activity: Activity,
        token_bytes: int = 0,
    ) -> None:
        """``token_bytes``: of the layer by which the gate decides for all; 0: of the kernel's."""
        self._settings = settings
        self._kernel = kernel
        self._block_size = kernel.shape.block_size
        self._freshness = freshness
        self._activity = activity
        token_bytes = token_bytes or kernel.shape.token_bytes
        self.gate = Gate(settings, token_bytes, kernel.overhead_bytes, kernel.on_host)
        self._told = False
        searched = settings.index == EXACT
        self._layout = settings.layout(self._block_size, kernel.on_host) if searched else None

    def plan(
        self,
        rows: Sequence[BatchRow],
        block_table: torch.Tensor,
        offloaded: Mapping[int, OffloadedSequence] = MappingProxyType({}),
        on_device: torch.Tensor | None = None,
        is_graph: bool = False,
    ) -> SparseStep | None:
        """The step's plan, None if nothing is to be done beside dense attention.

        ``block_table``: int32 ``[requests, blocks]``, on the host. ``offloaded``: rows of partially
        offloaded sequences. ``on_device``: the block table on the kernel's device; None: it is
        sent. ``is_graph``: a graph is replayed for the step, in which each row has a token or is
        padding.

        Where a device attends to any row sparsely it attends to all that decode, and a graph to
        all rows: to those that are dense without a choice.
        """
        activity = self._activity
        activity.steps += 1
        full, gated = [], 0
        sequences: list[SparseSequence] = []
        whole: list[SparseSequence] = []
        indexed: list[SparseSequence] = []
        firsts = accumulate((row.query_tokens for row in rows), initial=0)
        for index, (row, token) in enumerate(zip(rows, firsts, strict=False)):
            is_dense = row.regime(self._settings) is Regime.DENSE
            if not row.query_tokens or (is_dense and self._kernel.on_host):
                continue
            sequence = offloaded.get(index)
            lengths = row.lengths if row.decodes else (row.tokens,)
            splits = [self._split(row, length, sequence is not None) for length in lengths]
            is_sparse = any(split.middle for split in splits)
            if is_sparse:
                first = splits[-1].init + (0 if sequence is None else sequence.count)
                end = (row.tokens - is_graph) // self._block_size  # what a graph fills is next
                full.append(block_table[index, first:end])
            elif not is_dense:
                activity.sequences_gated += len(splits) * row.decodes
                gated += row.decodes
            if is_sparse and not row.decodes and self._layout is None:
                ids = block_table[index]
                indexed.append(SparseSequence(index, token, splits[0], ids, sequence))
            if not (row.decodes or is_graph):
                continue
            for place, split in enumerate(splits):
                table = block_table[index, : split.blocks]
                if sequence is not None:
                    table = sequence.named(table)
                if not row.decodes:
                    split = split.whole
                one = SparseSequence(index, token + place, split, table, sequence)
                (sequences if is_sparse and row.decodes else whole).append(one)
            activity.sequences_offloaded += len(splits) * (sequence is not None)
        if gated and not sequences:
            self._tell_gated(gated)
        if not (full or is_graph):
            return None
        stale = self._freshness.take_stale(torch.cat([*full, torch.empty(0, dtype=torch.int32)]))
        activity.blocks_digested += len(stale)
        if not (sequences or indexed or len(stale) or is_graph):
            return None
        activity.steps_sparse += bool(sequences)
        activity.sequences_sparse += sum(bool(one.split.middle) for one in sequences)
        if (sequences or is_graph) and not self._kernel.on_host:
            sequences = sorted([*sequences, *whole], key=lambda one: one.token)
        if on_device is None:
            on_device = device_of(self._kernel.device).send(block_table)
        graph_rows = len(rows) if is_graph else 0
        step = self._kernel.schedule(stale, sequences, self._layout, on_device, graph_rows)
        return replace(step, indexed=tuple(indexed)) if indexed else step

    def _split(self, row: BatchRow, tokens: int, offloaded: bool) -> Split:
        """Of the row's sequence at that length: without middle blocks if it is dense there."""
        split = split_of(tokens, self._block_size, self._settings)
        sparse = row.regime(self._settings, tokens) is not Regime.DENSE
        if offloaded or (sparse and self.gate.passes(tokens, split)):
            return split
        return split.whole

    def _tell_gated(self, sequences: int) -> None:
        """Logs once that retrieval did not act although sequences are past the boundary."""
        if self._told or not self._settings.gate or self._settings.topk_share == 1:
            return
        self._told = True
        logger.info(
            "kvrecall: retrieval: all sequences past VLLM_RETRIEVAL_DENSE_BOUNDARY=%d that decode "
            "now (%d) are attended to densely: sparse attention would be slower. "
            "VLLM_RETRIEVAL_GATE=0 attends to them sparsely anyway",
            self._settings.dense_boundary,
            sequences,
        )
