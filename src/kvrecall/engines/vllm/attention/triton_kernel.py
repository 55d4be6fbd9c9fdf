"""Sparse attention of decoded tokens over vLLM's own layout of keys and values, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrecall.attention.kernels.device import Addresses, Paged, Piece, attend_by_triton
from kvrecall.attention.selection import DEVICE_OVERHEAD_BYTES
from kvrecall.engines.vllm.attention.step import KernelShape, OffloadedRow, RowKernel, SparseStep
from kvrecall.engines.vllm.device import device_of
from kvrecall.errors import EngineError


class TritonKernel(RowKernel):
    """Our own kernel. Cache of any strides, blocks of a power of two of tokens."""

    overhead_bytes = DEVICE_OVERHEAD_BYTES

    def __init__(self, shape: KernelShape, device: torch.device) -> None:
        """Raises EngineError for blocks that it cannot read."""
        if shape.block_size < 16 or shape.block_size & (shape.block_size - 1):
            raise EngineError(
                f"retrieval attention on {device.type} needs a block size that is a power of two "
                f"of at least 16, and it is {shape.block_size}; pass --block-size 128"
            )
        self.shape = shape
        self.device = device

    def check(self, kv_cache: torch.Tensor) -> None:
        shape = self.shape
        want = (shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        if tuple(kv_cache.shape[1:]) != want or kv_cache.dtype != shape.dtype:
            raise EngineError(
                f"retrieval attention takes KV caches of {shape.dtype} and shape [blocks, "
                f"{', '.join(map(str, want))}]; this one is of {kv_cache.dtype} and "
                f"{list(kv_cache.shape)}. Remove `retrieval` from VLLM_PLUGINS"
            )

    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return kv_cache[..., : self.shape.head_dim].index_select(0, block_ids)

    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        device_of(self.device).move(sources, targets, piece)

    def digests(self, blocks: int, rows: int, width: int) -> torch.Tensor:
        """A block's together, as the pool keeps them."""
        size = (blocks, self.shape.kv_heads, rows, width)
        return torch.empty(size, dtype=torch.int8, device=self.device).transpose(0, 1)

    def plan(self, seq_lens: torch.Tensor, starts: torch.Tensor) -> None:
        return None

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        keys, values = torch.split(kv_cache.transpose(1, 2), self.shape.head_dim, -1)
        part = attend_by_triton(
            query, Paged(keys, values, step.table, step.seq_lens), scale, softcap
        )
        return part.output.to(query.dtype)


class CopiedLayer:
    """One layer's dense attention over partially offloaded sequences. Owned by the worker's thread.

    It needs all of a sequence's keys, and vLLM's kernels for GPUs read one cache. So the sequence's
    blocks of this layer, those in the arena and those on the device, are copied side by side for
    the call. The copy takes as much device memory as the sequence has in one layer, for as long as
    it lasts, and reads what is in the arena over the bus.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def forget(self, key: str, memory: bool = True) -> None:
        """Nothing is kept."""

    def attend(
        self,
        row: OffloadedRow,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        softcap: float,
        plainly: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> torch.Tensor:
        return plainly(self.copy(kv_cache, row), row.metadata)

    def copy(self, kv_cache: torch.Tensor, row: OffloadedRow) -> torch.Tensor:
        """Copies of the sequence's blocks in its order: a cache of the same strides in a block."""
        sequence, size = row.sequence, kv_cache.element_size()
        count = -(-row.tokens // kv_cache.shape[2])
        elements = kv_cache[0].numel()
        room = torch.empty(count * elements, dtype=kv_cache.dtype, device=kv_cache.device)
        ids = row.table[:count].numpy().astype(np.int64)
        sources = kv_cache.data_ptr() + ids * (kv_cache.stride(0) * size)
        middle = slice(sequence.init, sequence.init + sequence.count)
        sources[middle] = sequence.addresses(self._name)
        nbytes = elements * size
        targets = room.data_ptr() + np.arange(count, dtype=np.int64) * nbytes
        device_of(kv_cache.device).move(sources, targets, Piece(1, nbytes, 0))
        return room.as_strided((count, *kv_cache.shape[1:]), (elements, *kv_cache.stride()[1:]))
