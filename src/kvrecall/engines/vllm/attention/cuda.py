"""vLLM's attention backends for NVIDIA GPUs, with retrieval.

vLLM's kernels do prefill and dense decoding; sparse decoding is kvrecall's own Triton kernel. A
step depends on the lengths of its sequences, so attention is not captured in CUDA graphs: vLLM
captures what lies between the layers' attention (piecewise).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from kvrecall.attention.digest import coded_width
from kvrecall.engines.vllm.attention.backend import RetrievalAttention, RetrievalBuilder
from kvrecall.engines.vllm.attention.base import CHECKSUM_BYTES, KernelShape
from kvrecall.engines.vllm.attention.checks import offload_hindrance
from kvrecall.engines.vllm.attention.copied import CopiedDense
from kvrecall.engines.vllm.attention.device_selection import TritonKernel
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.attention.step import BatchRow, DenseOffload, KeptCopy
from kvrecall.engines.vllm.compat import runner
from kvrecall.engines.vllm.compat.config import layer_index, most_of_ranks
from kvrecall.engines.vllm.device import device_of

logger = logging.getLogger("vllm.kvrecall")


class DeviceBuilder(RetrievalBuilder):
    """Retrieval beside the dense metadata of a backend for GPUs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    supports_update_block_table: bool = False
    device: torch.device
    use_full_cuda_graph: bool
    """FlashAttention's builder would keep its plan in one buffer, but a step may need two."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_full_cuda_graph = False

    def make_kernel(self, kv_cache_spec: Any) -> TritonKernel:
        heads, spec = next(iter(self._impls().values())).num_heads, kv_cache_spec
        shape = (heads, spec.num_kv_heads, spec.head_size, self.block_size, spec.dtype, "")
        kernel = TritonKernel(KernelShape(*shape), self.device)
        settings = active_settings(self.vllm_config)
        if settings.gate and self.device.type != "cpu":  # one that interprets is no measure
            speed = kernel.measure(settings)
            kernel.overhead_bytes = most_of_ranks(kernel.overhead_bytes, stages=False)
            logger.info(
                "kvrecall: retrieval: a kernel takes %.1f microseconds beside what it reads, and "
                "reads %.2f TB/s",
                speed.launch_s * 1e6,
                speed.bandwidth / 1e12,
            )
        return kernel

    def make_dense(self, name: str) -> DenseOffload:
        return CopiedDense(name, self._activity).attend

    def alone(self, common: Any, rows: Sequence[BatchRow], at: int, kept: KeptCopy | None) -> Any:
        blocks = -(-rows[at].tokens // self.block_size)
        if kept is None:
            places = torch.arange(blocks, dtype=torch.int32, device=self.device)
        else:
            pages = torch.from_numpy(kept.pages[:blocks].astype(np.int32))
            places = device_of(self.device).send(pages)
        return self.part(common, rows, [at], places[None])[1]


class DeviceAttention(RetrievalAttention):
    """Retrieval over the dense attention of a backend for GPUs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        runner.leave_room(share_beside)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False


def share_beside(vllm_config: Any, specs: Mapping[str, Any]) -> float:
    """The share of a GPU's memory for the KV cache that must be left for the digests of all blocks
    and, where sequences are to leave the device, for as many pages of dense layers as there are
    blocks. ``specs``: the layers' KV cache specs of vLLM's, by name."""
    settings = active_settings(vllm_config)
    long = settings.offload_boundary < vllm_config.model_config.max_model_len
    copies = long and offload_hindrance(vllm_config) is None
    kv = beside = 0
    for name, spec in specs.items():
        kv += spec.page_size_bytes
        if layer_index(name) >= settings.dense_layers:
            layout = settings.layout(spec.block_size, narrows=False)
            width = coded_width(layout.kind.parts * spec.head_size)
            beside += spec.num_kv_heads * layout.rows * width + CHECKSUM_BYTES
        elif copies:
            beside += spec.page_size_bytes
    return beside / (beside + kv)


class FlashBuilder(DeviceBuilder, FlashAttentionMetadataBuilder):
    """With FlashAttention's metadata."""


class FlashImpl(DeviceAttention, FlashAttentionImpl):
    """With FlashAttention."""


class FlashBackend(FlashAttentionBackend):
    """Registered in place of FLASH_ATTN under its name: the KV bytes are the same."""

    get_impl_cls = staticmethod(lambda: FlashImpl)
    get_builder_cls = staticmethod(lambda: FlashBuilder)


class TritonBuilder(DeviceBuilder, TritonAttentionMetadataBuilder):
    """With the metadata of vLLM's Triton attention."""


class TritonImpl(DeviceAttention, TritonAttentionImpl):
    """With vLLM's Triton attention."""


class TritonBackend(TritonAttentionBackend):
    """Registered in place of TRITON_ATTN under its name."""

    get_impl_cls = staticmethod(lambda: TritonImpl)
    get_builder_cls = staticmethod(lambda: TritonBuilder)
