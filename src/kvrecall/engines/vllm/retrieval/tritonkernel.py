"""Sparse attention of decoded tokens where vLLM keeps keys and values as they are: on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrecall.engines.vllm.retrieval.rows import Attended, KernelShape, RowKernel
from kvrecall.errors import EngineError
from kvrecall.retrieval.paged import Paged, attend_by_triton


@dataclass(frozen=True, slots=True)
class PlainReader:
    """Reads the half of ``[blocks, kv_heads, tokens, 2 * dim]`` that ``part`` names."""

    part: slice

    def read(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return kv_cache[..., self.part].index_select(0, block_ids)


class TritonKernel(RowKernel):
    """Our own kernel. Cache of any strides, blocks of a power of two of tokens."""

    def __init__(self, shape: KernelShape, device: torch.device) -> None:
        """Raises EngineError for blocks that it cannot read."""
        if shape.block_size < 16 or shape.block_size & (shape.block_size - 1):
            raise EngineError(
                f"retrieval attention on {device.type} needs a block size that is a power of two "
                f"of at least 16, and it is {shape.block_size}; pass --block-size 128"
            )
        self.shape = shape
        self.device = device

    @property
    def keys(self) -> PlainReader:
        return PlainReader(slice(0, self.shape.head_dim))

    @property
    def values(self) -> PlainReader:
        return PlainReader(slice(self.shape.head_dim, 2 * self.shape.head_dim))

    def check(self, kv_cache: torch.Tensor) -> None:
        shape = self.shape
        want = (shape.kv_heads, shape.block_size, 2 * shape.head_dim)
        if tuple(kv_cache.shape[1:]) != want or kv_cache.dtype != shape.dtype:
            raise EngineError(
                f"retrieval attention takes KV caches of {shape.dtype} and shape [blocks, "
                f"{', '.join(map(str, want))}]; this one is of {kv_cache.dtype} and "
                f"{list(kv_cache.shape)}. Take `retrieval` out of VLLM_PLUGINS"
            )

    def plan(self, seq_lens: torch.Tensor, starts: torch.Tensor) -> None:
        return None

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
        plan: None,
        scale: float,
        softcap: float,
    ) -> Attended:
        keys, values = torch.split(kv_cache.transpose(1, 2), self.shape.head_dim, -1)
        part = attend_by_triton(query, Paged(keys, values, table, seq_lens), scale, softcap)
        return Attended(part.output.to(query.dtype), part.lse)
