"""One sparse layer: the digests of its blocks, the selection, and attention over selected blocks.

Digests have checksums. A block's bytes are verified when they come from a disk or from another
host; in memory they are not, and are read once for every use. Digests are read once for a
sequence's whole life, and a damaged digest silently selects wrong blocks; but it can be recomputed
from the block's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from kvrecall.attention.residency import Ints
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import (
    AttentionKernel,
    AttentionParameters,
    DigestStore,
    Selection,
    SparseLayer,
    SparseStep,
)
from kvrecall.engines.vllm.attention.offloaded import (
    OffloadedSequence,
    checksums_of_layer,
    digests_of_layer,
)
from kvrecall.engines.vllm.device import device_of

CHECKSUM_BYTES = 8
"""Checksum bytes of a block's digests in a layer."""

_SEEN_EVERY = 16
"""Selected blocks are recorded in one of this many sparse steps."""

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # of the golden ratio, as a signed number


class RetrievalLayer:
    """Digests of one layer, coded in eight bits, and attention over the blocks they select.

    Memory: about ``rows * parts / (4 * block_size)`` of a layer's KV cache of 16 bits (a
    thirty-second by default), allocated as blocks are first digested and never more.
    """

    def __init__(
        self,
        name: str,
        settings: RetrievalSettings,
        kernel: AttentionKernel,
        activity: Activity,
        note: Callable[[Ints, Ints, int], None] | None = None,
    ) -> None:
        """As of ``SparseLayer``."""
        self._layer = SparseLayer(name, settings, activity, note)
        self._kernel = kernel
        self._activity, self._heads, self._is_noted = activity, kernel.shape.kv_heads, bool(note)
        self._selection: Selection | None = None
        self._checksums = torch.empty(0, CHECKSUM_BYTES, dtype=torch.uint8)
        self.digested = 0
        """How many blocks' digests it has computed."""

    def digest(
        self, kv_cache: torch.Tensor, block_ids: torch.Tensor, count: int | None = None
    ) -> None:
        """Computes the digests of these blocks from the keys they hold: full blocks, on the host
        or the kernel's device. ``count``: how many are no padding; None: all."""
        if not len(block_ids):
            return
        selection, ids = self._selection_of(kv_cache), self._sent(block_ids)
        self._kernel.digest(kv_cache, ids, selection.store)
        selection.store.wrote(ids)
        self.digested += len(block_ids) if count is None else count

    def sign(self, block_ids: torch.Tensor) -> None:
        """These blocks, whose digests are fresh, go to the pool: stores their digests'
        checksums."""
        ids = self._sent(block_ids)
        self._checksums[ids] = checksums_of(self._digests(ids))

    def damaged(self, block_ids: torch.Tensor) -> torch.Tensor:
        """The blocks among these, which came from the pool, whose digests are damaged. Accepts the
        digests of the others."""
        ids = self._sent(block_ids)
        assert self._selection is not None
        self._selection.store.wrote(ids)
        damaged = block_ids[damaged_among(self._digests(ids), self._checksums[ids]).cpu()]
        self._activity.digests_mended += len(damaged)
        return damaged

    def depart(
        self,
        sequence: OffloadedSequence,
        block_ids: Sequence[int] | torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> None:
        """Keeps the digests of blocks that are about to leave the device."""
        selection = self._selection_of(kv_cache)
        ids = self._sent(torch.as_tensor(block_ids, dtype=torch.int64))
        selection.depart(sequence, selection.store.rows[:, ids], kv_cache)

    def arrive(self, sequence: OffloadedSequence, kv_cache: torch.Tensor) -> None:
        """Takes the digests of a sequence that begins off the device from its blocks' records.
        Damaged digests are recomputed from the blocks' keys."""
        selection, records, offsets = (
            self._selection_of(kv_cache),
            sequence.records,
            sequence.offsets,
        )
        heads, _, *size = selection.store.rows.shape
        nbytes = heads * size[0] * size[1]
        pages = records.pages(offsets, digests_of_layer(self._layer.name), nbytes)
        signed = records.pages(offsets, checksums_of_layer(self._layer.name), CHECKSUM_BYTES)
        stored = torch.from_numpy(pages).view(torch.int8).view(len(pages), heads, *size)
        sums = checksums_of if self._kernel.device.type == "cpu" else sums_of
        damaged = (sums(stored) != torch.from_numpy(signed)).any(-1).nonzero().flatten()
        stored = self._sent(stored)  # verified on the host, which does not wait for the device
        if len(damaged):
            kept = records.pages(offsets[damaged.numpy()], self._layer.name, kv_cache[0].nbytes)
            blocks = _blocks_of(self._sent(torch.from_numpy(kept)), kv_cache)
            layout, ids = selection.store.layout, self._sent(torch.arange(len(blocks)))
            anew = DigestStore(self._kernel.shape, layout, len(blocks), self._kernel.device)
            self._kernel.digest(blocks, ids, anew)
            stored[self._sent(damaged)] = anew.rows.transpose(0, 1)
            self._activity.digests_mended += len(damaged)
        selection.depart(sequence, stored.transpose(0, 1), kv_cache)
        self._activity.bytes_digests += pages.nbytes + signed.nbytes

    def digest_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' bytes, a row a block: uint8 ``[blocks, kv_heads, bytes]``, a view."""
        rows = self._selection_of(kv_cache).store.rows
        return rows.flatten(2).view(torch.uint8).transpose(0, 1)

    def checksum_rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The digests' checksums, a row a block: uint8 ``[blocks, CHECKSUM_BYTES]``, not a copy."""
        self._selection_of(kv_cache)
        return self._checksums

    def forget(self, key: str) -> None:
        """The offloaded sequence has ended."""
        if self._selection is not None:
            self._selection.forget(key)

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
        self.select(query, step, parameters.scale * parameters.key_scale)
        self._kernel.attend(query, kv_cache, step, output, parameters)
        return output

    def select(self, query: torch.Tensor, step: SparseStep, scale: float) -> None:
        """Selects every sequence's blocks, as ``attend`` does: as of ``Selection.select``."""
        assert self._selection is not None
        # Few objects: after a layer's attention each waits for memory (docs/log.md).
        self._activity.count_layer(step.counts, self._heads)
        noted = self._is_noted and self._activity.steps_sparse % _SEEN_EVERY == 1
        self._selection.select(query, step, scale, noted)

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """On the kernel's device."""
        device = self._kernel.device
        return values if values.device == device else device_of(device).send(values)

    def _digests(self, ids: torch.Tensor) -> torch.Tensor:
        """Of blocks on the device: int8 ``[blocks, kv_heads, rows, width]``."""
        assert self._selection is not None
        return self._selection.store.rows[:, ids].transpose(0, 1)

    def _selection_of(self, kv_cache: torch.Tensor) -> Selection:
        if self._selection is None:
            self._selection = self._kernel.selection(self._layer, kv_cache)
            size = len(kv_cache), CHECKSUM_BYTES
            self._checksums = torch.empty(size, dtype=torch.uint8, device=kv_cache.device)
        return self._selection


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


def damaged_among(rows: torch.Tensor, checksums: torch.Tensor) -> torch.Tensor:
    """Which of the rows do not match their checksums: bool ``[blocks]``."""
    return (checksums_of(rows) != checksums).any(-1)


def _blocks_of(pages: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pages in storage form, uint8 ``[blocks, bytes]``, as blocks of a cache like that."""
    values = pages.view(like.dtype)
    return values.as_strided((len(values), *like.shape[1:]), (values.shape[1], *like.stride()[1:]))
