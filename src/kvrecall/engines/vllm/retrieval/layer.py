"""One attention layer's digests, and its sparse attention over them."""

from __future__ import annotations

import torch

from kvrecall.engines.vllm.retrieval.activity import Activity
from kvrecall.engines.vllm.retrieval.kernel import KernelShape, attend, halves
from kvrecall.engines.vllm.retrieval.packing import KeyReader
from kvrecall.engines.vllm.retrieval.steps import SparseSequence, SparseStep
from kvrecall.errors import EngineError
from kvrecall.retrieval.digest import DIGESTS, digests_of
from kvrecall.retrieval.selection import ExactSelector
from kvrecall.retrieval.settings import RetrievalSettings

AT_ONCE = 64
"""Blocks unpacked at a time while digesting."""


class RetrievalLayer:
    """Digests ``[kv_heads, blocks, digests a block, width]`` of one layer, in the KV dtype.

    Memory: ``parts / (2 * digest_tokens)`` of the layer's KV cache (a sixteenth by default), taken
    from the system as blocks are first digested and never more.
    """

    def __init__(
        self,
        settings: RetrievalSettings,
        shape: KernelShape,
        reader: KeyReader,
        activity: Activity,
    ) -> None:
        self._settings = settings
        self._shape = shape
        self._reader = reader
        self._activity = activity
        self._kind = DIGESTS[settings.digest]
        self._selector = ExactSelector(self._kind)
        self._digests = torch.empty(0)
        self._head = torch.arange(shape.kv_heads, dtype=torch.int32)[:, None]

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Computes the digests of these blocks from the keys they hold. Must be full blocks."""
        if not len(block_ids):
            return
        if not self._digests.numel():
            self._digests = self._room(kv_cache)
        for ids in torch.split(block_ids, AT_ONCE):
            keys = self._reader.read(kv_cache, ids)
            digests = digests_of(self._kind, keys, self._settings.digest_tokens)
            self._digests[:, ids] = digests.transpose(0, 1).to(self._digests.dtype)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        scale: float,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attention of the step's sparse tokens, in order: ``[sequences, heads, dim]``."""
        shape = self._shape
        grouped = self.choose(query, step, scale)
        output = attend(
            grouped,
            halves(kv_cache),
            step.table,
            step.seq_lens,
            step.starts,
            step.plan,
            scale,
            softcap,
        )
        return output.view(len(step.sequences), shape.heads, shape.head_dim)

    def choose(self, query: torch.Tensor, step: SparseStep, scale: float) -> torch.Tensor:
        """Writes every sequence's chosen blocks into the step's table.

        ``query``: ``[sequences, heads, dim]``; returned as ``[sequences * kv_heads, group, dim]``.
        """
        shape = self._shape
        grouped = query.reshape(-1, shape.group, shape.head_dim)
        for at, sequence in enumerate(step.sequences):
            rows = slice(at * shape.kv_heads, (at + 1) * shape.kv_heads)
            self._choose(grouped[rows], sequence, step.table[rows], scale)
        return grouped

    def _choose(
        self, query: torch.Tensor, sequence: SparseSequence, rows: torch.Tensor, scale: float
    ) -> None:
        """Writes the chosen blocks into the sequence's rows of the table."""
        split = sequence.split
        if sequence.runs:
            runs = [self._digests[:, first:end] for first, end in sequence.runs]
        else:
            runs = [self._digests[:, sequence.blocks[sequence.places]]]
        chosen = self._selector.choose(query, runs, split.chosen, scale)
        # In the sequence's order, so that the sum does not depend on where the blocks lie.
        in_order = sequence.places[chosen].sort(-1).values
        ids = sequence.blocks[in_order] * self._shape.kv_heads + self._head
        rows[:, split.init : split.init + split.chosen] = ids
        heads = self._shape.kv_heads
        self._activity.layers_sparse += 1
        self._activity.blocks_considered += split.middle * heads
        self._activity.blocks_selected += split.chosen * heads
        self._activity.blocks_attended += split.attended_blocks * heads

    def _room(self, kv_cache: torch.Tensor) -> torch.Tensor:
        blocks, kv_heads, block_size, _ = kv_cache.shape
        if not kv_cache.is_contiguous():
            raise EngineError(
                f"retrieval attention needs each layer's KV cache in one piece; this one has shape "
                f"{tuple(kv_cache.shape)} and strides {kv_cache.stride()}. Take `retrieval` out of "
                "VLLM_PLUGINS"
            )
        per_block = block_size // self._settings.digest_tokens
        width = self._kind.parts * self._shape.head_dim
        return torch.empty(kv_heads, blocks, per_block, width, dtype=kv_cache.dtype)
