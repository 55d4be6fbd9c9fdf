"""Sparse attention of a KV group's layers as every platform has it: ``AttentionKernel``, one for
the group, and ``RetrievalLayer``, one for each sparse layer.

Every (sequence, KV head) is a row of its own, so that each may have its own blocks. Keys are stored
after rotary embedding, so the order of blocks does not matter; only the last one, which may be
partial, must stay last.

Digests have checksums. A block's bytes are verified when they come from a disk or from another
host; in memory they are not, and are read once for every use. Digests are read once for a
sequence's whole life, and a damaged digest silently selects wrong blocks; but it can be recomputed
from the block's keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash

from kvrecall.attention.digest import LOADED_BYTES, Layout, coded_width
from kvrecall.attention.kernels.device import Ints
from kvrecall.attention.selection import Split
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity, RecallCounts
from kvrecall.engines.vllm.attention.offloaded import (
    OffloadedSequence,
    checksums_of_layer,
    digests_of_layer,
)
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Device

CHECKSUM_BYTES = 8
"""Checksum bytes of a block's digests in a layer."""

_SPARE = 64
"""Extra blocks to allocate when the memory for digests must grow."""

_SEEN_EVERY = 16
"""Selected blocks are recorded in one of this many sparse steps."""

SEEN_EVERY_REPLAYS = 4 * _SEEN_EVERY
"""Where graphs are replayed, which record nothing, none is for one of this many sparse steps."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # of the golden ratio, as a signed number

Note = Callable[[Ints, Ints, int], None]
"""As of ``HeatTotals.note``, of one layer."""


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The attention of a group of layers. ``dtype``: of queries, and of keys and values unless
    ``fp8``: the eight-bit float that these are kept as; ``isa``: the CPU's instruction set;
    ``sinks``: whether layers have them; ``latent``: whether keys contain the values (MLA);
    ``query``: that of queries, if vLLM codes them, too."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    isa: str
    fp8: torch.dtype | None = None
    sinks: bool = False
    latent: bool = False
    query: torch.dtype | None = None

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.heads // self.kv_heads

    @property
    def stored(self) -> torch.dtype:
        """Of a cache's tensors."""
        return self.dtype if self.fp8 is None else torch.uint8

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

    @property
    def of_kernel(self) -> dict[str, Any]:
        """Arguments of ``attend_by_triton``."""
        scale = self.scale * self.key_scale
        terms = {"scale": scale, "softcap": self.softcap, "sinks": self.sinks}
        return {**terms, "value_scale": self.value_scale}


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


@dataclass(frozen=True)
class SparseStep:
    """What every sparse layer does in a step; the same for all, so it is made once.

    ``stale``: blocks whose digests must be computed first, on the kernel's device, int64 or int32;
    ``filled``: how many blocks the step fills whose digests must be computed, too, if the plan
    names them; otherwise they are among the stale ones. ``plan``: the kernel's own. ``is_graph``:
    it is, or may be, replayed as a graph, for other sequences of as many requests. ``stale`` is
    computed before the replay, and what it fills before the next step. ``indexed``: those whose
    prompts are being computed, where vector indexes take their middle blocks."""

    stale: torch.Tensor
    sequences: tuple[SparseSequence, ...]
    plan: Any
    filled: int = 0
    is_graph: bool = False
    indexed: tuple[SparseSequence, ...] = ()

    @property
    def attends(self) -> bool:
        return bool(self.sequences) or self.is_graph

    @cached_property
    def counts(self) -> tuple[int, int, int, int]:
        """Of a layer: sequences with middle blocks, and, for each KV head, all of their middle
        blocks, those selected, and the blocks attended to."""
        splits = [one.split for one in self.sequences if one.split.middle]
        each = [(1, one.middle, one.chosen, one.attended_blocks) for one in splits]
        sequences, middle, chosen, attended = map(sum, zip((0, 0, 0, 0), *each, strict=True))
        return sequences, middle, chosen, attended


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
        """``by_block``: all heads' digests of a block lie side by side, as the pool keeps them, and
        each row is padded by zeros, for a GPU; otherwise all blocks' of a head do."""
        self.layout = layout
        self._shape = shape
        width, whole = layout.kind.parts * shape.head_dim, LOADED_BYTES if by_block else 1
        self._size = shape.kv_heads, coded_width(width, whole)
        self._device = device
        self._by_block = by_block
        self._blocks = blocks
        self.rows = self._new(layout.rows)
        """int8 ``[kv_heads, blocks, rows, width]``."""
        self.coarse = self._new(layout.coarse) if layout.coarse else None
        """A copy of the coarse ones among the rows, side by side; None if there are none."""
        self.written: torch.Tensor | None = None
        """int64 ``[blocks]``, how often each block's rows were written, if that is counted."""

    def like(self, blocks: int) -> DigestStore:
        """Another of so many blocks, which lie in it as in this one."""
        return DigestStore(self._shape, self.layout, blocks, self._device, self._by_block)

    def of(self, block_ids: torch.Tensor) -> torch.Tensor:
        """The rows of these blocks: int8 ``[blocks, kv_heads, rows, width]``, a copy."""
        return self.rows[:, block_ids].transpose(0, 1)

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
        make = torch.zeros if self._by_block else torch.empty
        made = make(*size, rows, width, dtype=torch.int8, device=self._device)
        return made.transpose(0, 1) if self._by_block else made


class RetrievalLayer(ABC):
    """One sparse layer: the digests of its blocks, coded in eight bits, the selection of blocks by
    them, and attention over these. Owned by the worker's thread.

    Memory: about ``rows * parts / (4 * block_size)`` of a layer's KV cache of 16 bits (a
    thirty-second by default), allocated as blocks are first digested and never more.
    """

    store: DigestStore
    """Of the blocks on the device, once the cache is known."""
    _cache: torch.Tensor

    def __init__(
        self,
        kernel: AttentionKernel,
        name: str,
        settings: RetrievalSettings,
        activity: Activity,
        note: Note | None = None,
    ) -> None:
        """``name``: vLLM's; ``note``: records where blocks are selected; None: nothing does."""
        self.name, self.settings = name, settings
        self._kernel, self._activity, self._note = kernel, activity, note
        self._shape = kernel.shape
        self._is_open = False
        self._checksums = torch.empty(0, CHECKSUM_BYTES, dtype=torch.uint8)
        self.digested = 0
        """How many blocks' digests it has computed."""

    # ---- what differs by platform --------------------------------------------------------

    @abstractmethod
    def open(self, kv_cache: torch.Tensor) -> DigestStore:
        """The cache is known: room for the digests of its blocks. Raises EngineError for a cache
        that the kernel cannot attend to."""

    @abstractmethod
    def select(self, query: torch.Tensor, step: SparseStep, scale: float, noted: bool) -> None:
        """Selects the blocks of all the step's sequences and enters them into its plan; recalls
        those that the kernel must have on the device. ``query``: ``[tokens, heads, dim]``;
        ``scale``: of its products with keys as they are stored; ``noted``: whether to record what
        is selected."""

    @abstractmethod
    def leave(
        self, sequence: OffloadedSequence, digests: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        """Takes the digests of the next blocks to leave the device, ``[kv_heads, blocks, rows,
        width]``; the sequence already includes these blocks. Pages in the arena have the layout of
        the cache's blocks. Raises IndexError for blocks outside the arena or the cache."""

    @abstractmethod
    def forget(self, key: str) -> None:
        """The offloaded sequence has ended."""

    # ---- digests -------------------------------------------------------------------------

    def digest_step(self, kv_cache: torch.Tensor, step: SparseStep) -> None:
        """Computes the step's digests; a graph's are, before it is replayed."""
        self._open(kv_cache)
        if not step.is_graph:
            self.digest(kv_cache, step.stale)
            if step.filled:
                self.digest(kv_cache, step.plan.facts, step.filled)

    def replay(self, step: SparseStep) -> None:
        """A graph is about to be replayed for the step, without this layer's Python: computes what
        it needs before, and counts what it does."""
        self.digest(self._cache, step.stale)
        self._activity.count_layer(step.counts, self._shape.kv_heads)

    def digest(
        self, kv_cache: torch.Tensor, block_ids: torch.Tensor, count: int | None = None
    ) -> None:
        """Computes the digests of these blocks from the keys they hold: full blocks, on the host
        or the kernel's device, or as its plan names them. ``count``: how many these are; None:
        all."""
        if not block_ids.numel():
            return
        self._open(kv_cache)
        ids = self._sent(block_ids)
        self._kernel.digest(kv_cache, ids, self.store)
        if count is None:  # a plan's blocks are on a device, whose stores keep no copies
            self.store.wrote(ids)
        self.digested += len(block_ids) if count is None else count

    def sign(self, block_ids: torch.Tensor) -> None:
        """These blocks, whose digests are fresh, go to the pool: stores their digests'
        checksums."""
        ids = self._sent(block_ids)
        self._checksums[ids] = checksums_of(self.store.of(ids))

    def damaged(self, block_ids: torch.Tensor) -> torch.Tensor:
        """The blocks among these, which came from the pool, whose digests are damaged. Accepts the
        digests of the others."""
        ids = self._sent(block_ids)
        self.store.wrote(ids)
        sums = checksums_of(self.store.of(ids))
        damaged = block_ids[(sums != self._checksums[ids]).any(-1).cpu()]
        self._activity.digests_mended += len(damaged)
        return damaged

    def digest_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' bytes, a row a block: uint8 ``[blocks, kv_heads, bytes]``, a view."""
        self._open(kv_cache)
        return self.store.rows.flatten(2).view(torch.uint8).transpose(0, 1)

    def checksum_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' checksums, a row a block: uint8 ``[blocks, CHECKSUM_BYTES]``, not a copy."""
        self._open(kv_cache)
        return self._checksums

    def depart(
        self, sequence: OffloadedSequence, block_ids: torch.Tensor, kv_cache: torch.Tensor
    ) -> None:
        """Keeps the digests of blocks that are about to leave the device. ``block_ids``: int64."""
        self._open(kv_cache)
        self.leave(sequence, self.store.rows[:, self._sent(block_ids)], kv_cache)

    def arrive(self, sequence: OffloadedSequence, kv_cache: torch.Tensor) -> None:
        """Takes the digests of a sequence that begins off the device from its blocks' records.
        Damaged digests are recomputed from the blocks' keys."""
        self._open(kv_cache)
        records, offsets = sequence.records, sequence.offsets
        heads, _, *size = self.store.rows.shape
        nbytes = heads * size[0] * size[1]
        pages = records.pages(offsets, digests_of_layer(self.name), nbytes)
        signed = records.pages(offsets, checksums_of_layer(self.name), CHECKSUM_BYTES)
        stored = torch.from_numpy(pages).view(torch.int8).view(len(pages), heads, *size)
        sums = checksums_of if self._kernel.device.type == "cpu" else sums_of
        damaged = (sums(stored) != torch.from_numpy(signed)).any(-1).nonzero().flatten()
        stored = self._sent(stored)  # verified on the host, which does not wait for the device
        if len(damaged):
            kept = records.pages(offsets[damaged.numpy()], self.name, kv_cache[0].nbytes)
            blocks = _blocks_of(self._sent(torch.from_numpy(kept)), kv_cache)
            anew = self.store.like(len(blocks))
            self._kernel.digest(blocks, self._sent(torch.arange(len(blocks))), anew)
            stored[self._sent(damaged)] = anew.rows.transpose(0, 1)
            self._activity.digests_mended += len(damaged)
        self.leave(sequence, stored.transpose(0, 1), kv_cache)
        self._activity.bytes_digests += pages.nbytes + signed.nbytes

    # ---- attention -----------------------------------------------------------------------

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        parameters: AttentionParameters,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the attention of the step's sparse tokens to their places in ``output``, and
        returns it. ``query``, ``output``: ``[tokens, heads, dim]``, of the whole batch."""
        output = torch.empty_like(query) if output is None else output
        # Few objects: after a layer's attention each waits for memory (archive/log.md).
        self._activity.count_layer(step.counts, self._shape.kv_heads)
        due = self._activity.steps_sparse % _SEEN_EVERY == 1 and not step.is_graph
        noted = due and self._note is not None
        self.select(query, step, parameters.scale * parameters.key_scale, noted)
        self._kernel.attend(query, kv_cache, step, output, parameters)
        return output

    def note_selected(self, split: Split, places: Ints) -> None:
        """Which of a sequence's middle blocks are selected: ``[kv_heads, chosen]``."""
        assert self._note is not None
        self._note(np.arange(split.init, split.local), places + split.init, split.blocks)

    def _open(self, kv_cache: torch.Tensor) -> None:
        if not self._is_open:
            self.store, self._cache = self.open(kv_cache), kv_cache
            size = len(kv_cache), CHECKSUM_BYTES
            self._checksums = torch.empty(size, dtype=torch.uint8, device=kv_cache.device)
            self._is_open = True

    @property
    def _device(self) -> Device:
        return device_of(self._kernel.device)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """On the kernel's device."""
        return values if values.device == self._kernel.device else self._device.send(values)


class AttentionKernel(ABC):
    """Sparse attention on one platform: four methods, of which a step calls ``schedule`` once, and
    every layer ``digest``, its own ``select``, and ``attend``, in this order. All of a step's state
    is in what ``schedule`` returns and in the layers. The cache is ``[blocks, kv_heads, tokens,
    2 * dim]``, keys and values in any order, on ``device``."""

    shape: KernelShape
    device: torch.device
    on_host: bool
    """Whether blocks are selected on the host and read where they lie, also in the arena.
    Otherwise the device selects them, by an exact search, and recalls them into slots."""
    overhead_bytes: int
    """See ``Gate``."""
    counts: RecallCounts | None = None
    """What its device counts."""

    layers: type[RetrievalLayer]
    """Its kind of layers."""

    def has_room(self, count: int, sequences: int) -> bool:
        """Whether so many blocks more may leave the device, and sequences to which some belong."""
        return True

    def layer(self, *args: Any) -> RetrievalLayer:
        """A new layer, which takes these arguments."""
        return self.layers(self, *args)

    @abstractmethod
    def digest(self, kv_cache: torch.Tensor, block_ids: torch.Tensor, store: DigestStore) -> None:
        """Writes the coded digests of these blocks into the store's rows. ``block_ids``: as of
        ``SparseStep.stale``, or a plan's."""

    @abstractmethod
    def schedule(
        self,
        stale: torch.Tensor,
        sequences: Sequence[SparseSequence],
        layout: Layout | None,
        table: torch.Tensor,
        graph_rows: int = 0,
    ) -> SparseStep:
        """The step of these sequences. ``stale``: on the host. ``layout``: of the digests that are
        searched; None: vector indexes are. ``table``: int32 ``[requests, blocks]``, the batch's
        block table, on the kernel's device. ``graph_rows``: requests of the graph that is replayed
        for it, one token each, padding among them; 0: none is."""

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


def checksums_of(rows: torch.Tensor) -> torch.Tensor:
    """Of rows ``[blocks, ...]``: uint8 ``[blocks, CHECKSUM_BYTES]``."""
    if not len(rows):
        return torch.empty(0, CHECKSUM_BYTES, dtype=torch.uint8, device=rows.device)
    if not rows.is_cpu:
        return sums_of(rows)
    bytes_of = rows.contiguous().view(len(rows), -1).view(torch.uint8).numpy()
    sums = b"".join(xxhash.xxh3_64_digest(row) for row in bytes_of)
    return torch.from_numpy(np.frombuffer(sums, np.uint8).copy()).view(len(rows), CHECKSUM_BYTES)


def sums_of(rows: torch.Tensor) -> torch.Tensor:
    """Like ``checksums_of``, with operations of every device: a sum of words, each times an odd
    number of its place, modulo 2**64, so any one changed word is detected. The number of bytes is a
    multiple of four."""
    words = rows.contiguous().view(len(rows), -1).view(torch.int32).to(torch.int64)
    places = torch.arange(1, 2 * words.shape[1], 2, device=rows.device) * _ODD
    return (words * places).sum(1, keepdim=True).view(torch.uint8)


def _blocks_of(pages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pages in storage form, uint8 ``[blocks, bytes]``, as blocks of a cache like that."""
    values = pages.view(like.dtype)
    return values.as_strided((len(values), *like.shape[1:]), (values.shape[1], *like.stride()[1:]))
