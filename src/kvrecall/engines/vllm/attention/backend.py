"""vLLM's CPU attention backend with retrieval."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from kvrecall.engines.vllm.attention.attending import RetrievalAttention
from kvrecall.engines.vllm.attention.building import RetrievalBuilding
from kvrecall.engines.vllm.attention.dense import DenseLayer
from kvrecall.engines.vllm.attention.kernel import CpuKernel
from kvrecall.engines.vllm.attention.rows import KernelShape
from kvrecall.engines.vllm.attention.work import AwayRow


class RetrievalBackend(CPUAttentionBackend):
    """Registered in place of CPU_ATTN, and goes by its name: the KV bytes are the same."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return RetrievalImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return RetrievalMetadataBuilder


class RetrievalMetadataBuilder(RetrievalBuilding, CPUAttentionMetadataBuilder):
    """Retrieval beside vLLM's dense metadata."""

    def make_kernel(self, kv_cache_spec: Any) -> CpuKernel:
        shape = (self.num_heads, self.num_kv_heads, self.head_dim, self.block_size)
        return CpuKernel(KernelShape(*shape, self.dtype, self.isa))

    def make_whole(self) -> DenseLayer:
        return DenseLayer(self._kernel.shape)


class RetrievalImpl(RetrievalAttention[DenseLayer], CPUAttentionBackendImpl):
    """Retrieval over vLLM's dense attention."""

    def _attend_away(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        row: AwayRow,
        output: torch.Tensor,
    ) -> None:
        assert self._whole is not None
        part = query[row.places].reshape(-1, self.num_heads, self.head_size).contiguous()
        attended = self._whole.attend(
            part, kv_cache, row.sequence, row.table, row.tokens, self.scale, self.logits_soft_cap
        )
        output[row.places] = attended.view_as(output[row.places])
