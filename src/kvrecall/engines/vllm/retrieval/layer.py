"""One attention layer's digests, and its sparse attention over them."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvrecall.engines.vllm.retrieval.activity import Activity
from kvrecall.engines.vllm.retrieval.kernel import KernelShape, attend, halves
from kvrecall.engines.vllm.retrieval.packing import KeyReader
from kvrecall.engines.vllm.retrieval.recalled import OffloadedSequence, RecalledBlocks, Records
from kvrecall.engines.vllm.retrieval.steps import SparseSequence, SparseStep
from kvrecall.engines.vllm.warmth import WORKER
from kvrecall.engines.vllm.wire import Departure
from kvrecall.errors import EngineError
from kvrecall.retrieval.digest import DIGESTS, digests_of
from kvrecall.retrieval.selection import ExactSelector
from kvrecall.retrieval.settings import RetrievalSettings
from kvrecall.retrieval.split import Split

SEEN_EVERY = 16
"""Of so many sparse steps it is noted in one where blocks were chosen."""

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
        number: int | None = None,
    ) -> None:
        """``number``: the layer's, under which it is told where it chose blocks; None: nowhere."""
        self._number = number
        self._settings = settings
        self._shape = shape
        self._reader = reader
        self._activity = activity
        self._kind = DIGESTS[settings.digest]
        self._selector = ExactSelector(self._kind)
        self._digests = torch.empty(0)
        self._head = torch.arange(shape.kv_heads, dtype=torch.int32)[:, None]
        self._recalled: dict[str, RecalledBlocks] = {}

    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Computes the digests of these blocks from the keys they hold. Must be full blocks."""
        if not len(block_ids):
            return
        if not self._digests.numel():
            self._digests = self._room(kv_cache)
        for ids in torch.split(block_ids, AT_ONCE):
            keys = self._reader.read(kv_cache, ids)
            digests = digests_of(self._kind, keys, self._settings.tokens_a_digest)
            self._digests[:, ids] = digests.transpose(0, 1).to(self._digests.dtype)

    def depart(
        self,
        sequence: OffloadedSequence,
        departure: Departure,
        kv_cache: torch.Tensor,
        records: Records,
        name: str,
    ) -> None:
        """Keeps the digests of blocks that are about to leave the device. ``name``: the layer's."""
        if not self._digests.numel():
            self._digests = self._room(kv_cache)
        recalled = self._recalled.get(sequence.key)
        if recalled is None:
            recalled = RecalledBlocks(sequence, kv_cache, records, name, self._activity)
            self._recalled[sequence.key] = recalled
        recalled.depart(self._digests[:, list(departure.block_ids)])

    def forget(self, key: str) -> None:
        """The sequence is no more."""
        self._recalled.pop(key, None)

    def settle(self) -> None:
        """Ends all copies made ahead."""
        for recalled in self._recalled.values():
            recalled.settle()

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
        if sequence.away is not None:
            ids = self._recall(query, sequence, sequence.away, scale)
        else:
            ids = self._on_device(query, sequence, scale)
        heads = self._shape.kv_heads
        rows[:, split.init : split.init + split.chosen] = ids * heads + self._head
        self._activity.layers_sparse += 1
        self._activity.blocks_considered += split.middle * heads
        self._activity.blocks_selected += split.chosen * heads
        self._activity.blocks_attended += split.attended_blocks * heads

    def _on_device(
        self, query: torch.Tensor, sequence: SparseSequence, scale: float
    ) -> torch.Tensor:
        """Device blocks of those chosen: int32 ``[kv_heads, chosen]``."""
        if sequence.runs:
            runs = [self._digests[:, first:end] for first, end in sequence.runs]
        else:
            runs = [self._digests[:, sequence.blocks[sequence.places]]]
        chosen = self._selector.choose(query, runs, sequence.split.chosen, scale)
        # In the sequence's order, so that the sum does not depend on where the blocks lie.
        in_order = sequence.places[chosen].sort(-1).values
        self._see(in_order, sequence.split)
        return sequence.blocks[in_order]

    def _recall(
        self,
        query: torch.Tensor,
        sequence: SparseSequence,
        away: OffloadedSequence,
        scale: float,
    ) -> torch.Tensor:
        """As ``_on_device``, after loading what is missing of the blocks that have left."""
        recalled = self._recalled[away.key]
        stayed = sequence.blocks[away.count :]
        runs = [recalled.digests]
        if len(stayed):
            runs.append(self._digests[:, stayed])
        split = sequence.split
        ahead = min(self._ahead_of(split), split.middle - split.chosen)
        select = self._selector.rank if ahead else self._selector.choose
        ranked = select(query, runs, split.chosen + ahead, scale)
        chosen = ranked[:, : split.chosen].sort(-1).values
        self._see(chosen, split)
        left = chosen < away.count
        slots = recalled.fetch(chosen.numpy(), left.numpy())
        ids = torch.where(left, away.slots[torch.from_numpy(slots)], sequence.blocks[chosen])
        if ahead:
            later = ranked[:, split.chosen :]
            recalled.fetch_ahead(later.numpy(), (later < away.count).numpy())
        return ids

    def _see(self, chosen: torch.Tensor, split: Split) -> None:
        """Notes, now and then, which of the middle blocks were chosen: ``[kv_heads, chosen]``."""
        if self._number is not None and self._activity.steps_sparse % SEEN_EVERY == 1:
            middle = np.arange(split.init, split.local)
            WORKER.note(self._number, middle, chosen.numpy() + split.init, split.blocks)

    def _ahead_of(self, split: Split) -> int:
        return math.ceil(split.middle * self._settings.prefetch_share)

    def _room(self, kv_cache: torch.Tensor) -> torch.Tensor:
        blocks, kv_heads, block_size, _ = kv_cache.shape
        if not kv_cache.is_contiguous():
            raise EngineError(
                f"retrieval attention needs each layer's KV cache in one piece; this one has shape "
                f"{tuple(kv_cache.shape)} and strides {kv_cache.stride()}. Take `retrieval` out of "
                "VLLM_PLUGINS"
            )
        per_block = block_size // self._settings.tokens_a_digest
        width = self._kind.parts * self._shape.head_dim
        return torch.empty(kv_heads, blocks, per_block, width, dtype=kv_cache.dtype)
