"""Sparse attention of a KV group's layers as every platform has it: ``AttentionKernel``, one for
the group, and ``Selection``, one for each layer.

Every (sequence, KV head) is a row of its own, so that each may have its own blocks. Keys are stored
after rotary embedding, so the order of blocks does not matter; only the last one, which may be
partial, must stay last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvrecall.attention.digest import Layout, coded_width
from kvrecall.attention.residency import Ints
from kvrecall.attention.selection import Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, BlockCounts, RecallCounts
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence

_SPARE = 64
"""Extra blocks to allocate when the memory for digests must grow."""


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The attention of a group of layers. ``dtype``: of queries, and of keys and values unless
    ``fp8``: the eight-bit float that these are kept as; ``isa``: the CPU's instruction set;
    ``sinks``: whether layers have them; ``latent``: whether keys contain the values (MLA)."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    isa: str
    fp8: torch.dtype | None = None
    sinks: bool = False
    latent: bool = False

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, in one layer."""
        parts = 1 if self.latent else 2
        return parts * self.kv_heads * self.head_dim * (self.fp8 or self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class AttentionParameters:
    """What a layer's attention takes beside queries, keys and values. ``scale``: of products;
    ``softcap``: bounds them, 0: not; ``sinks``: ``[heads]``, logits that take part in each query
    head's sum without a value, None: none; ``key_scale``, ``value_scale``: what a stored 1 is."""

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """``name``: vLLM's. ``note``: records where blocks are selected, as ``HeatTotals.note``; None:
    nothing does."""

    name: str
    settings: RetrievalSettings
    activity: Activity
    note: Callable[[Ints, Ints, int], None] | None = None

    def note_selected(self, split: Split, places: Ints) -> None:
        """Which of a sequence's middle blocks are selected: ``[kv_heads, chosen]``."""
        assert self.note is not None
        self.note(np.arange(split.init, split.local), places + split.init, split.blocks)


@dataclass(frozen=True, slots=True)
class SparseSequence:
    """One decoded token and the middle blocks to select from.

    ``row``: the request's place in the batch, ``token``: its token's. ``table``: int32 ids of the
    blocks up to that token, ``blocks``: of the middle ones, in the sequence's order, on the host;
    without middle blocks it attends to all. ``offloaded``: if its leading middle blocks are off the
    device; their ids then mean nothing, or are as of ``OffloadedSequence.named``.
    """

    row: int
    token: int
    split: Split
    table: torch.Tensor
    offloaded: OffloadedSequence | None = None

    @property
    def blocks(self) -> torch.Tensor:
        return self.table[self.split.init : self.split.local]

    @property
    def left(self) -> int:
        """How many of its middle blocks are off the device."""
        return 0 if self.offloaded is None else self.offloaded.count


@dataclass(frozen=True, slots=True)
class SparseStep:
    """What every sparse layer does in a step; the same for all, so it is made once.

    ``stale``: blocks whose digests must be computed first, on the kernel's device, int64 or int32;
    negative numbers are padding; ``stale_count``: how many are not. ``plan``: the kernel's own.
    ``counts``: of a layer.
    """

    stale: torch.Tensor
    stale_count: int
    sequences: tuple[SparseSequence, ...]
    plan: Any
    counts: BlockCounts = field(init=False)

    def __post_init__(self) -> None:
        splits = [one.split for one in self.sequences if one.split.middle]
        counts = BlockCounts(
            len(splits),
            sum(split.middle for split in splits),
            sum(split.chosen for split in splits),
            sum(split.attended_blocks for split in splits),
        )
        object.__setattr__(self, "counts", counts)


class DigestStore:
    """The coded digests of blocks, by their numbers, in one layer. On a CPU the system gives memory
    as it is written."""

    def __init__(
        self,
        shape: KernelShape,
        layout: Layout,
        blocks: int = 0,
        device: torch.device | None = None,
        by_block: bool = False,
    ) -> None:
        """``by_block``: all heads' digests of a block lie side by side, as the pool keeps them;
        otherwise all blocks' of a head do."""
        self.layout = layout
        self._size = shape.kv_heads, coded_width(layout.kind.parts * shape.head_dim)
        self._device = device
        self._by_block = by_block
        self._blocks = blocks
        self.rows = self._new(layout.rows)
        """int8 ``[kv_heads, blocks, rows, width]``."""
        self.coarse = self._new(layout.coarse) if layout.coarse else None
        """A copy of the coarse ones among the rows, side by side; None if there are none."""
        self.written: torch.Tensor | None = None
        """int64 ``[blocks]``, how often each block's rows were written, if that is counted."""

    def write(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """``rows``: ``[kv_heads, blocks, rows, width]``, coded."""
        self.rows[:, block_ids] = rows
        self.wrote(block_ids)

    def wrote(self, block_ids: torch.Tensor) -> None:
        """The rows of these blocks were written through a view."""
        if self.coarse is not None:
            self.coarse[:, block_ids] = self.rows[:, block_ids, self.layout.coarse_rows]
        if self.written is not None:
            self.written[block_ids] += 1

    def reach(self, blocks: int) -> None:
        """Grows to at least that many blocks; present ones stay."""
        if blocks <= self._blocks:
            return
        before, self._blocks = self._blocks, blocks + _SPARE
        rows, coarse = self.rows, self.coarse
        self.rows = self._new(self.layout.rows)
        self.rows[:, :before] = rows
        if coarse is not None:
            self.coarse = self._new(self.layout.coarse)
            self.coarse[:, :before] = coarse

    def _new(self, rows: int) -> torch.Tensor:
        heads, width = self._size
        size = (self._blocks, heads) if self._by_block else (heads, self._blocks)
        made = torch.empty(*size, rows, width, dtype=torch.int8, device=self._device)
        return made.transpose(0, 1) if self._by_block else made


class Selection(ABC):
    """One layer's digests, and the selection of blocks by them. Owned by the worker's thread."""

    store: DigestStore
    """Of the blocks on the device."""

    @abstractmethod
    def select(self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool) -> None:
        """Selects the blocks of all the step's sequences and enters them into its plan; recalls
        those that the kernel must have on the device. ``query``: ``[tokens, heads, dim]``;
        ``scale``: of its products with keys as they are stored; ``noted``: whether to record what
        is selected."""

    @abstractmethod
    def depart(
        self, sequence: OffloadedSequence, digests: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        """Takes the digests of the next blocks to leave the device, ``[kv_heads, blocks, rows,
        width]``; the sequence already includes these blocks. Pages in the arena have the layout of
        the cache's blocks. Raises IndexError for blocks outside the arena or the cache."""

    @abstractmethod
    def forget(self, key: str) -> None:
        """The offloaded sequence has ended."""


class AttentionKernel(ABC):
    """Sparse attention on one platform: four methods, of which a step calls ``schedule`` once, and
    every layer ``digest``, its selection's ``select``, and ``attend``, in this order. All of a
    step's state is in what ``schedule`` returns and in the selections. The cache is ``[blocks,
    kv_heads, tokens, 2 * dim]``, keys and values in any order, on ``device``."""

    shape: KernelShape
    device: torch.device
    on_host: bool
    """Whether blocks are selected on the host and read where they lie, also in the arena.
    Otherwise the device selects them, by an exact search, and recalls them into slots."""
    overhead_bytes: int
    """See ``Gate``."""
    counts: RecallCounts | None = None
    """What its device counts."""

    @abstractmethod
    def selection(self, layer: SparseLayer, kv_cache: torch.Tensor) -> Selection:
        """A new layer's. Raises EngineError for a cache that the kernel cannot attend to."""

    @abstractmethod
    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor, store: DigestStore) -> None:
        """Writes the coded digests of these blocks into the store's rows. ``block_ids``: as of
        ``SparseStep.stale``."""

    @abstractmethod
    def schedule(
        self, stale: torch.Tensor, sequences: Sequence[SparseSequence], layout: Layout | None
    ) -> SparseStep:
        """The step of these sequences. ``stale``: on the host. ``layout``: of the digests that are
        searched; None: vector indexes are."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        parameters: AttentionParameters,
    ) -> None:
        """Writes the attention of the step's tokens over the selected blocks to their places in
        ``output``. ``query``, ``output``: ``[tokens, heads, dim]``."""
