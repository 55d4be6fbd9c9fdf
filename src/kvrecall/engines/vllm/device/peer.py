"""How vLLM itself copies (its OffloadingConnector) and attends (FlashAttention), for comparison."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from kvrecall.engines.vllm.device.base import Batch


def offloading_load(device: torch.device, page_bytes: int) -> Callable[[Batch], None] | None:
    """Copies a batch of pages of this size from locked host memory to the device, as vLLM's
    connector would choose to, and waits for it. None where it has no such function."""
    if device.type == "cpu":
        return None
    try:
        from vllm.v1.kv_offload.cpu.gpu_worker import _select_swap_blocks_fn
    except ImportError:  # no vLLM, or one that does it otherwise
        return None
    copy = _select_swap_blocks_fn([[SimpleNamespace(page_size_bytes=page_bytes)]], gpu_to_cpu=False)
    stream = torch.Stream(device)

    def load(batch: Batch) -> None:
        columns = (batch.sources, batch.targets, batch.sizes)
        with stream:
            copy(*map(torch.from_numpy, columns))
        stream.synchronize()

    return load


def flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
) -> Callable[[], torch.Tensor] | None:
    """Attention of one token over the first ``length`` tokens of a paged cache, by the kernel with
    which vLLM would decode it. None without one.

    ``query``: ``[1, heads, dim]``; ``keys``, ``values``: ``[blocks, tokens, kv_heads, dim]``, in
    the sequence's order, of any strides but a last one of 1.
    """
    if query.device.type == "cpu":
        return None
    try:
        from vllm.v1.attention.backends.fa_utils import (
            flash_attn_varlen_func,
            get_flash_attn_version,
        )
    except ImportError:  # no vLLM
        return None
    version = get_flash_attn_version(head_size=query.shape[-1])
    if version is None:
        return None
    numbers = partial(torch.tensor, dtype=torch.int32, device=query.device)
    return partial(
        flash_attn_varlen_func,
        q=query, k=keys, v=values, max_seqlen_q=1, max_seqlen_k=length, causal=True,
        cu_seqlens_q=numbers([0, 1]), seqused_k=numbers([length]), fa_version=version,
        softmax_scale=query.shape[-1] ** -0.5, block_table=numbers([list(range(len(keys)))]),
    )  # fmt: skip
