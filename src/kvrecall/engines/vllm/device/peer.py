"""How vLLM's own OffloadingConnector copies, for comparison."""

from __future__ import annotations

from collections.abc import Callable
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
