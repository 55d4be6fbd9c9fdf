"""Plans a step: which of its sequences are attended to sparsely, and the block tables for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.attention.split import Gate, Split, split_of
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.freshness import Freshness
from kvrecall.engines.vllm.attention.recalled import OffloadedSequence
from kvrecall.engines.vllm.attention.rows import RowKernel

GATHER_RUNS = 16
"""Middle blocks in more runs than this are gathered before they are scored."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request of a step. ``tokens`` counts those of this step too."""

    query_tokens: int
    tokens: int
    prefilling: bool

    @property
    def decodes(self) -> bool:
        return self.query_tokens == 1 and not self.prefilling


@dataclass(frozen=True, slots=True)
class SparseSequence:
    """One decoded token and the middle blocks to choose from.

    ``row``: the request's place in the batch. ``blocks``: int32 ids of the middle blocks, in the
    sequence's order. Candidates are in the order of their ids: ``places`` says which of ``blocks``
    each is, ``runs`` gives their ids as half-open ranges, none if they are too scattered.
    ``away``: if its leading middle blocks are off the device; their ids then mean nothing, and
    there are no ``places`` and ``runs``.
    """

    row: int
    split: Split
    blocks: torch.Tensor
    places: torch.Tensor
    runs: tuple[tuple[int, int], ...]
    away: OffloadedSequence | None = None


@dataclass(frozen=True, slots=True)
class SparseStep:
    """What every sparse layer does in a step; the same for all, so it is made once.

    ``stale``: blocks whose digests must be computed first. ``table``: int32
    ``[sequences * kv_heads, width]``; every layer overwrites the chosen part of each row, from
    ``split.init`` on, before it attends. ``seq_lens``, ``starts``, ``plan``: the kernel's.
    """

    stale: torch.Tensor
    sequences: tuple[SparseSequence, ...]
    table: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    plan: Any

    def on(self, device: torch.device) -> SparseStep:
        """The same with its tensors there."""
        if device.type == "cpu":
            return self
        sequences = tuple(
            replace(one, blocks=one.blocks.to(device), places=one.places.to(device))
            for one in self.sequences
        )
        table, seq_lens = self.table.to(device), self.seq_lens.to(device)
        stale, starts = self.stale.to(device), self.starts.to(device)
        return SparseStep(stale, sequences, table, seq_lens, starts, self.plan)


class StepPlanner:
    """Plans the steps of one KV group."""

    def __init__(
        self,
        settings: RetrievalSettings,
        kernel: RowKernel,
        freshness: Freshness,
        activity: Activity,
    ) -> None:
        self._settings = settings
        self._kernel = kernel
        self._shape = shape = kernel.shape
        self._freshness = freshness
        self._activity = activity
        self._gate = Gate(settings, shape.token_bytes, kernel.overhead_bytes)

    def plan(
        self,
        rows: Sequence[BatchRow],
        block_table: torch.Tensor,
        offloaded: Mapping[int, OffloadedSequence] = MappingProxyType({}),
    ) -> SparseStep | None:
        """The step's plan, None if nothing is to be done beside dense attention.

        ``block_table``: int32 ``[requests, blocks]``, on the host. ``offloaded``: rows of sequences
        that are off the device in part.
        """
        self._activity.steps += 1
        stale = []
        sequences = []
        for index, row in enumerate(rows):
            if self._settings.regime(row.tokens) is Regime.DENSE:
                continue
            split = split_of(row.tokens, self._shape.block_size, self._settings)
            away = offloaded.get(index)
            if away is None and not self._gate.passes(row.tokens, split):
                self._activity.sequences_gated += row.decodes
                continue
            first = split.init + (away.count if away is not None else 0)
            full = row.tokens // self._shape.block_size
            stale.append(self._freshness.take_stale(block_table[index, first:full]))
            if row.decodes and away is not None:
                middle = block_table[index, split.init : split.local]
                none = torch.empty(0, dtype=torch.int64)
                sequences.append(SparseSequence(index, split, middle, none, (), away))
                self._activity.sequences_offloaded += 1
            elif row.decodes:
                sequences.append(self._sequence(index, split, block_table[index]))
        if not stale:
            return None
        digested = torch.cat(stale)
        self._activity.blocks_digested += len(digested)
        if not sequences:
            made = _only_digest(digested)
            return made.on(self._kernel.device) if len(digested) else None
        self._activity.steps_sparse += 1
        self._activity.sequences_sparse += len(sequences)
        return self._step(digested, sequences, block_table)

    def _sequence(self, row: int, split: Split, blocks: torch.Tensor) -> SparseSequence:
        middle = blocks[split.init : split.local]
        ids, places = middle.sort()
        breaks = (ids.diff() != 1).nonzero().flatten().tolist()
        runs: tuple[tuple[int, int], ...] = ()
        if len(breaks) < GATHER_RUNS:
            cuts = [0, *(at + 1 for at in breaks), split.middle]
            first = ids[cuts[:-1]].tolist()
            lengths = [end - begin for begin, end in pairwise(cuts)]
            runs = tuple((a, a + n) for a, n in zip(first, lengths, strict=True))
        return SparseSequence(row, split, middle, places, runs)

    def _step(
        self, stale: torch.Tensor, sequences: list[SparseSequence], block_table: torch.Tensor
    ) -> SparseStep:
        heads = self._shape.kv_heads
        width = max(sequence.split.attended_blocks for sequence in sequences)
        table = torch.zeros(len(sequences) * heads, width, dtype=torch.int32)
        head = torch.arange(heads, dtype=torch.int32)[:, None]
        for at, sequence in enumerate(sequences):
            split = sequence.split
            blocks = block_table[sequence.row]
            rows = table[at * heads : (at + 1) * heads]
            rows[:, : split.init] = blocks[: split.init] * heads + head
            last = split.init + split.chosen
            rows[:, last : split.attended_blocks] = (
                blocks[split.local : split.blocks] * heads + head
            )
        lens = [sequence.split.attended_tokens for sequence in sequences]
        seq_lens = torch.tensor(lens, dtype=torch.int32).repeat_interleave(heads)
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32)
        plan = self._kernel.plan(seq_lens, starts)
        made = SparseStep(stale, tuple(sequences), table, seq_lens, starts, plan)
        return made.on(self._kernel.device)


def _only_digest(stale: torch.Tensor) -> SparseStep:
    none = torch.empty(0, dtype=torch.int32)
    return SparseStep(stale, (), none, none, none, None)
