"""Imported before vLLM, makes an engine on a CPU use one of vLLM's attention backends for GPUs, and
retrieval's over it. Triton's kernels run in its interpreter (``TRITON_INTERPRET=1``).

``AS_GPU`` names the backend: ``TRITON_ATTN``, as it is; ``FLASH_ATTN``, whose two kernels do
not exist here: plain PyTorch replaces them, and the rest of the backend is vLLM's. With
``AS_GPU_AHEAD=1`` scheduling is asynchronous. In every step, block tables on the host must be those
on the device.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends import backends

# What vLLM looks at before it uses Triton: whether this build is for CPUs, and how new the GPU is.
backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))
torch.cuda.get_device_capability = lambda device=None: (9, 0)

NAME = os.environ["AS_GPU"]

from vllm import triton_utils  # noqa: E402

assert triton_utils.HAS_TRITON
del backends["cpu"]  # PyTorch's compiler would take it for one

from vllm.v1.attention.backends import flash_attn  # noqa: E402
from vllm.v1.attention.backends.registry import (  # noqa: E402
    AttentionBackendEnum,
    register_backend,
)

from engines.vllm.attention.interpreted import InterpretedDevice, fetch  # noqa: E402
from kvrecall.attention.kernels import device  # noqa: E402
from kvrecall.engines.vllm import device as devices  # noqa: E402
from kvrecall.engines.vllm.attention import backend, checks  # noqa: E402

device.fetch_by_triton = fetch
devices.FORMS["cpu"] = InterpretedDevice

checks.CPU_BACKENDS = {"CPU_ATTN": checks.CUDA_BACKENDS[NAME]}
register_backend(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum[NAME].get_path())


take, build = backend.runner.take_batch_blocks, backend.RetrievalBuilder.build


def checked(self: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
    """``build``, of which host and device tell the same."""
    if self._plain:
        return build(self, prefix, common, fast_build)
    blocks = take(self._layer_names[0])
    backend.runner.take_batch_blocks = lambda name: blocks
    if blocks is None:
        assert (common.slot_mapping < 0).all(), "the step writes, and is no dummy"
    else:
        table = torch.from_numpy(blocks.leading(*common.block_table_tensor.shape))
        for at, row in enumerate(backend._rows_of(common, blocks, self._decoded)):
            count = -(-row.tokens // self.block_size) if row.query_tokens else 0
            assert torch.equal(table[at, :count], common.block_table_tensor[at, :count])
    return build(self, prefix, common, fast_build)


backend.RetrievalBuilder.build = checked


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    **rest: Any,
) -> None:
    """Causal attention of FlashAttention's arguments."""
    starts = cu_seqlens_q.tolist()
    for row, length in enumerate(seqused_k.tolist()):
        first, end = starts[row : row + 2]
        blocks = block_table[row, : -(-length // k.shape[1])].long()
        group = q.shape[1] // k.shape[2]
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
            for cache in (k, v)
        )
        logits = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * softmax_scale
        seen = torch.arange(length) <= torch.arange(length - (end - first), length)[:, None]
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)


def store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *rest: Any,
) -> None:
    """Writes tokens into their slots."""
    real = slots[slots >= 0]
    blocks, places = real // key_cache.shape[1], real % key_cache.shape[1]
    there = (slots >= 0).nonzero().flatten()
    key_cache[blocks, places] = key[there]
    value_cache[blocks, places] = value[there]


if os.environ.get("AS_GPU_AHEAD") == "1":
    import attention.ahead  # noqa: F401

flash_attn.get_flash_attn_version = lambda *args, **kwargs: 2
flash_attn._FA4_DENSE_ATTENTION_KERNEL = attend
flash_attn.reshape_and_cache_flash = store
