"""vLLM's reference backend for latent attention (MLA) on a CPU, with retrieval.

A token's keys and values are one latent, which all query heads attend to. A decoded query is
multiplied into the latent space before it attends, so the search there is the same as for keys of
one head, as wide as a latent. Prefill, over keys and values of full size, is vLLM's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kvrecall.engines.vllm.attention.backend import RetrievalAttention, RetrievalBuilder
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape, SparseStep
from kvrecall.engines.vllm.attention.cpu import CpuKernel
from kvrecall.engines.vllm.attention.host_selection import HostPlan
from kvrecall.engines.vllm.attention.step import BatchRow


class LatentKernel(CpuKernel):
    """vLLM's decode kernel. The cache is ``[blocks, tokens, dim]``; values are the first
    coordinates of a latent."""

    def read_keys(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return kv_cache.index_select(0, block_ids)[:, None]

    def _work(self, plan: HostPlan) -> None:
        """The kernel needs none."""

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        output: torch.Tensor,
        parameters: AttentionParameters,
    ) -> None:
        """``output``: ``[tokens, heads, value width]``."""
        plan = step.plan
        found = output.new_zeros(len(plan.tokens), *output.shape[1:])
        rows = query[plan.tokens].contiguous()
        scale = parameters.scale
        ops.mla_decode_kvcache_cpu(found, rows, kv_cache, scale, plan.table, plan.seq_lens)
        output[plan.tokens] = found


class LatentImpl(RetrievalAttention, CPUMLAImpl):
    """Retrieval over vLLM's latent attention."""

    attn_type = "decoder"
    alibi_slopes = sliding_window = sinks = logits_soft_cap = None

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        *args: Any,
        **more: Any,
    ) -> None:
        """Prefill, in a step that may decode nothing. Arguments as vLLM has them."""
        cache = kv_c_and_k_pe_cache
        if not attn_metadata.num_decodes:
            self._digest(cache, getattr(attn_metadata, "retrieval", None))
        super().forward_mha(q, kv_c_normed, k_pe, cache, attn_metadata, *args, **more)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the requests that decode, which are the first of the batch with a token each."""
        cache = kv_c_and_k_pe_cache
        step = self._digest(cache, getattr(attn_metadata, "retrieval", None))
        if step is None or not step.sequences:
            return super().forward_mqa(q, cache, attn_metadata, layer)
        assert self.sparse_layer is not None
        query = torch.cat(q, -1) if isinstance(q, tuple) else q
        output = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        sparse = {sequence.row for sequence in step.sequences}
        others = torch.tensor([at for at in range(len(query)) if at not in sparse])
        if len(others):
            decode = attn_metadata.decode
            part = replace(
                decode, block_table=decode.block_table[others], seq_lens=decode.seq_lens[others]
            )
            beside = replace(attn_metadata, decode=part)
            output[others] = super().forward_mqa(query[others], cache, beside, layer)[0]
        self.sparse_layer.attend(query, cache, step, AttentionParameters(self.scale), output)
        return output, None


class LatentBuilder(RetrievalBuilder, MLACommonMetadataBuilder):
    """Retrieval beside vLLM's metadata."""

    def make_kernel(self, kv_cache_spec: Any) -> LatentKernel:
        spec = kv_cache_spec
        shape = (self.num_heads, 1, spec.head_size, spec.block_size, spec.dtype, "")
        return LatentKernel(KernelShape(*shape, latent=True))

    def make_dense(self, name: str) -> None:
        """Latents stay on the device."""

    def _without(self, taken: Collection[int], common: Any, rows: Sequence[BatchRow]) -> None:
        """The layers find the others in vLLM's metadata of the batch, of which each builder makes
        one a step."""


class LatentBackend(CPUMLABackend):
    """Registered in place of CPU_MLA under its name: the KV bytes are the same."""

    get_impl_cls = staticmethod(lambda: LatentImpl)
    get_builder_cls = staticmethod(lambda: LatentBuilder)
