"""Imported before vLLM, has an engine on a CPU take vLLM's Triton attention, and retrieval's over
it, as on a GPU. Their kernels run in Triton's interpreter (``TRITON_INTERPRET=1``)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from triton.backends import backends

from kvrecall.engines.vllm.retrieval import plugin
from kvrecall.retrieval import coding

# What vLLM looks at before it uses Triton: whether this build is for CPUs, and how new the GPU is.
backends["cpu"] = SimpleNamespace(compiler=None, driver=SimpleNamespace(is_active=lambda: True))
torch.cuda.get_device_capability = lambda device=None: (9, 0)

plugin.CPU_BACKENDS = {"CPU_ATTN": plugin.CUDA_BACKENDS["TRITON_ATTN"]}
coding.on_device = lambda tensor: True

from vllm import triton_utils  # noqa: E402

assert triton_utils.HAS_TRITON
del backends["cpu"]  # PyTorch's compiler would take it for one

from vllm.v1.attention.backends.registry import (  # noqa: E402
    AttentionBackendEnum,
    register_backend,
)

register_backend(
    AttentionBackendEnum.CPU_ATTN, "vllm.v1.attention.backends.triton_attn.TritonAttentionBackend"
)
