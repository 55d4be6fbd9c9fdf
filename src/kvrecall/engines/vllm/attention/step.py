"""Plans a step of retrieval once for all layers: which sequences are attended to sparsely, the work
beside dense attention of the whole batch, and which digests must be computed first.

Every (sequence, KV head) is a row of its own, so that each may have its own blocks; a row names a
block of a head by ``block * kv_heads + head``. Keys are stored after rotary embedding, so the order
of blocks does not matter; only the last one, which may be partial, must stay last.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kvrecall.attention.digest import Layout
from kvrecall.attention.index.base import EXACT
from kvrecall.attention.kernels.device import Addresses, Piece
from kvrecall.attention.kernels.search import Search, Sought, is_compiled
from kvrecall.attention.residency import DeviceResidency, Ints
from kvrecall.attention.selection import Gate, Split, split_of
from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, BlockCounts
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence

logger = logging.getLogger("vllm.kvrecall")


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
class Terms:
    """What a layer's attention takes beside queries, keys and values. ``scale``: of products;
    ``softcap``: bounds them, 0: not; ``sinks``: ``[heads]``, logits that take part in each query
    head's sum without a value, None: none; ``key_scale``, ``value_scale``: what a stored 1 is."""

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


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
class SparseSequence:
    """One decoded token and the middle blocks to choose from.

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


@dataclass(frozen=True, slots=True)
class SparseStep:
    """What every sparse layer does in a step; the same for all, so it is made once.

    ``stale``: blocks whose digests must be computed first, on the kernel's device; negative
    numbers are none. ``plan``: the kernel's own. ``search``: finds the blocks of all sequences
    with middle ones and enters them into the plan; None if the kernel ``chooses``, or an index or
    PyTorch does. ``counts``: of a layer.
    """

    stale: torch.Tensor
    sequences: tuple[SparseSequence, ...]
    plan: Any
    search: Search | None = None
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


@dataclass(frozen=True, slots=True)
class DensePart:
    """Requests of the batch that are attended to densely on the device, by themselves: ``tokens``
    are their places in the batch, ``metadata`` is vLLM's."""

    tokens: torch.Tensor
    metadata: Any


@dataclass(slots=True)
class KeptCopy:
    """Copies of a partially offloaded sequence that dense layers keep. ``pages``: of its blocks,
    the same in each layer; ``copied``: how many leading blocks a layer's pages hold for good, by
    its name."""

    pages: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    copied: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OffloadedRow:
    """A partially offloaded sequence of the batch. ``places``: of its tokens in the batch;
    ``table``: int32, its device blocks, on the host, meaningless where they are off the device;
    ``tokens``: its length; ``prefills``: all layers attend to it densely. ``metadata``: vLLM's of
    this sequence alone, where vLLM's kernel attends to it, its blocks in the pages of ``kept``;
    None: in their order."""

    sequence: OffloadedSequence
    places: slice
    table: torch.Tensor
    tokens: int
    prefills: bool
    metadata: Any = None
    kept: KeptCopy | None = None


@dataclass(frozen=True, slots=True)
class StepWork:
    """What layers do in a step beside, or instead of, dense attention of the whole batch.

    ``apart``: whether some of the batch is attended to by itself; otherwise all of it densely, on
    the device. ``beside_sparse``, ``beside_offloaded``: what a
    sparse layer attends to densely on the device, and what a dense layer does where sequences are
    ``offloaded``; None if nothing.
    """

    step: SparseStep | None
    apart: bool = False
    beside_sparse: DensePart | None = None
    offloaded: tuple[OffloadedRow, ...] = ()
    beside_offloaded: DensePart | None = None


@dataclass(frozen=True, slots=True)
class LeftBlocks:
    """Blocks of one layer that are off the device, where its kernel ``chooses``. ``digests``: int8
    ``[kv_heads, numbers, rows, width]``. ``layer_at``: where in a block's record the layer's page
    begins, in bytes."""

    digests: torch.Tensor
    residency: DeviceResidency
    layer_at: int


class RowKernel(ABC):
    """What carries a step out on a platform: attention of one token a row over the blocks the row
    names. The cache is ``[blocks, kv_heads, tokens, 2 * dim]``, keys and values in any order, on
    ``device``, as are all tensors given and returned."""

    shape: KernelShape
    device: torch.device
    chooses: bool
    """Whether it chooses the blocks of all sequences on the device at once: by an exact search that
    reads digests where they lie. Otherwise the layer does, on the host."""
    in_place: bool
    """Whether it reads offloaded blocks where they lie, in the arena. Otherwise they are recalled
    into slots."""
    overhead_bytes: int
    """See ``Gate``."""

    @abstractmethod
    def check(self, kv_cache: torch.Tensor) -> None:
        """Raises EngineError for a cache it cannot attend to."""

    @abstractmethod
    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of these blocks, as stored: ``[blocks, kv_heads, tokens, dim]``, of the shape's
        dtype."""

    @abstractmethod
    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        """Copies items from addresses in the arena to addresses in a cache, after the step's work
        so far and before what follows."""

    @abstractmethod
    def digests(self, blocks: int, rows: int, width: int) -> torch.Tensor:
        """Room for those of so many blocks: int8 ``[kv_heads, blocks, rows, width]``."""

    @abstractmethod
    def digest(
        self, kv_cache: torch.Tensor, block_ids: torch.Tensor, rows: torch.Tensor, layout: Layout
    ) -> None:
        """Writes the coded digests of these blocks, int64 on the device or negative for none, into
        ``rows``: int8 ``[kv_heads, blocks, rows, width]``."""

    @abstractmethod
    def plan(self, stale: torch.Tensor, sequences: Sequence[SparseSequence]) -> SparseStep:
        """The step of these sequences; ``stale`` is on the host."""

    @abstractmethod
    def choose(
        self,
        query: torch.Tensor,
        step: SparseStep,
        rows: torch.Tensor,
        layout: Layout,
        scale: float,
        left: LeftBlocks | None = None,
    ) -> None:
        """Chooses the blocks of the step's sequences on the device, if it ``chooses``, and admits
        those that are off it to slots. ``query``: ``[tokens, heads, dim]``; ``rows``: of
        ``digest``; ``left``: None if no sequence is partially offloaded."""

    @abstractmethod
    def fetch(self, step: SparseStep, kv_cache: torch.Tensor, left: LeftBlocks) -> None:
        """Copies the admitted blocks that are not in their slots yet into them. The step's table
        names such blocks by their numbers before, and by their slots afterwards."""

    @abstractmethod
    def residency(self, blocks: int) -> DeviceResidency:
        """Of a layer's cache of so many blocks, if it ``chooses``."""

    @abstractmethod
    def number(self, sequence: OffloadedSequence) -> None:
        """Numbers the sequence's blocks that have no number yet, if it ``chooses``."""

    @abstractmethod
    def forget(self, sequence: OffloadedSequence) -> None:
        """Takes the numbers of a sequence back, which has ended. It may have none."""

    @abstractmethod
    def collect(self, activity: Activity, wait: bool = False) -> None:
        """Adds to ``activity`` what the device has recalled, as far as it has told; ``wait``:
        until it has told all."""

    @abstractmethod
    def enter(self, step: SparseStep, at: int, ids: torch.Tensor) -> None:
        """The step's sequence ``at`` attends to these middle blocks: ids ``[kv_heads, chosen]``, on
        the host."""

    def enter_found(self, step: SparseStep, search: Search) -> None:
        """The step's sequences with middle blocks attend to those that this search of them finds
        in a layer: has it write them into the plan. Only if it does not ``choose``."""
        raise NotImplementedError(f"{type(self).__name__} chooses on its device")

    def enter_in_place(self, step: SparseStep, at: int, distances: Ints) -> None:
        """The step's sequence ``at``, which is partially offloaded, attends to middle blocks that
        begin so many bytes from the layer's cache, in it or not: ``[kv_heads, chosen]``. Only if it
        reads ``in_place``."""
        raise NotImplementedError(f"{type(self).__name__} attends to blocks of its cache")

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        terms: Terms,
    ) -> None:
        """Writes the attention of the step's tokens to their places in ``output``. ``query``,
        ``output``: ``[tokens, heads, dim]``."""


class Freshness:
    """Which blocks' digests are those of the keys the blocks now hold: one flag a device block, for
    all layers of a KV group. Owned by the worker's thread.

    A digest is a function of a block's keys alone: whatever writes a block, be it the engine's
    forward pass or a load from the pool, makes its digest stale, and a stale digest is computed
    anew from the keys before it is next used.

    The digests of a step count as fresh when it is planned. If its forward pass fails and the
    engine goes on, some layers have not made them: then all digests are stale.
    """

    def __init__(self) -> None:
        self._fresh = np.zeros(0, dtype=np.bool_)
        self._layers_left = 0

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

    def planned(self, layers: int) -> None:
        """So many layers are to digest in the step's forward pass what was taken for it."""
        self._layers_left = layers

    def layer_digested(self) -> None:
        """One of them has done so."""
        self._layers_left -= 1

    def take_stale(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Those of the blocks that are stale, which the caller digests at once, in all layers, or
        has ``planned``. int64, in the order given."""
        if self._layers_left > 0:
            self._fresh[:] = False
            self._layers_left = 0
        ids = block_ids.numpy().astype(np.int64)
        self._reach(int(ids.max(initial=-1)))
        stale = ids[~self._fresh[ids]]
        self._fresh[stale] = True
        return torch.from_numpy(stale)

    def _reach(self, most: int) -> None:
        if most >= len(self._fresh):
            self._fresh = np.pad(self._fresh, (0, 2 * most + 2 - len(self._fresh)))


class StepPlanner:
    """Plans the steps of one KV group."""

    def __init__(
        self,
        settings: RetrievalSettings,
        kernel: RowKernel,
        freshness: Freshness,
        activity: Activity,
        token_bytes: int = 0,
    ) -> None:
        """``token_bytes``: of the layer by which the gate decides for all; 0: of the kernel's."""
        self._settings = settings
        self._kernel = kernel
        self._shape = shape = kernel.shape
        self._freshness = freshness
        self._activity = activity
        token_bytes = token_bytes or shape.token_bytes
        self.gate = Gate(settings, token_bytes, kernel.overhead_bytes, not kernel.chooses)
        self._told = False
        self._layout = settings.layout(shape.block_size, not kernel.chooses)
        self._query_size = shape.kv_heads, shape.group, shape.head_dim
        self._searches = settings.index == EXACT and not kernel.chooses and is_compiled()

    def plan(
        self,
        rows: Sequence[BatchRow],
        block_table: torch.Tensor,
        offloaded: Mapping[int, OffloadedSequence] = MappingProxyType({}),
    ) -> SparseStep | None:
        """The step's plan, None if nothing is to be done beside dense attention.

        ``block_table``: int32 ``[requests, blocks]``, on the host. ``offloaded``: rows of partially
        offloaded sequences.
        """
        self._activity.steps += 1
        self._kernel.collect(self._activity)
        stale = []
        sequences: list[SparseSequence] = []
        gated = 0
        firsts = accumulate((row.query_tokens for row in rows), initial=0)
        for index, (row, token) in enumerate(zip(rows, firsts, strict=False)):
            if row.regime(self._settings) is Regime.DENSE:
                continue
            sequence = offloaded.get(index)
            lengths = row.lengths if row.decodes else (row.tokens,)
            splits = [self._split(row, length, sequence is not None) for length in lengths]
            if not any(split.middle for split in splits):
                self._activity.sequences_gated += len(splits) * row.decodes
                gated += row.decodes
                continue
            last = splits[-1]
            first = last.init + (sequence.count if sequence is not None else 0)
            full = row.tokens // self._shape.block_size
            stale.append(self._freshness.take_stale(block_table[index, first:full]))
            if not row.decodes:
                continue
            for place, split in enumerate(splits):
                table = block_table[index, : split.blocks]
                if sequence is not None:
                    table = sequence.named(table)
                sequences.append(SparseSequence(index, token + place, split, table, sequence))
            self._activity.sequences_offloaded += len(splits) * (sequence is not None)
        if gated and not sequences:
            self._tell_gated(gated)
        if not stale:
            return None
        digested = torch.cat(stale)
        self._activity.blocks_digested += len(digested)
        if not sequences and not len(digested):
            return None
        self._activity.steps_sparse += bool(sequences)
        self._activity.sequences_sparse += sum(bool(one.split.middle) for one in sequences)
        step = self._kernel.plan(digested, sequences)
        sought = [_sought(one) for one in sequences if one.split.middle]
        if not (self._searches and sought):
            return step
        search = Search(self._query_size, self._layout, sought)
        self._kernel.enter_found(step, search)
        return replace(step, search=search)

    def _split(self, row: BatchRow, tokens: int, offloaded: bool) -> Split:
        """Of the row's sequence at that length: without middle blocks if it is dense there."""
        split = split_of(tokens, self._shape.block_size, self._settings)
        sparse = row.regime(self._settings, tokens) is not Regime.DENSE
        if offloaded or (sparse and self.gate.passes(tokens, split)):
            return split
        return replace(split, init=split.blocks, local=split.blocks, chosen=0)

    def _tell_gated(self, sequences: int) -> None:
        """Logs once that retrieval did not act although sequences are past the boundary."""
        if self._told or not self._settings.gate or self._settings.topk_share == 1:
            return
        self._told = True
        logger.info(
            "kvrecall: retrieval: all sequences past VLLM_RETRIEVAL_DENSE_BOUNDARY=%d that decode "
            "now (%d) are attended to densely: sparse attention would be slower. "
            "VLLM_RETRIEVAL_GATE=0 attends to them sparsely all the same",
            self._settings.dense_boundary,
            sequences,
        )


def _sought(sequence: SparseSequence) -> Sought:
    """Among its middle blocks: first those that are off the device, then the others."""
    left = 0 if sequence.offloaded is None else sequence.offloaded.count
    here = sequence.blocks[left:].numpy().astype(np.int64)
    parts = [here] if sequence.offloaded is None else [np.arange(left), here]
    return Sought(parts, sequence.split.chosen, sequence.token)
