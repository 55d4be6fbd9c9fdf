"""The KV of a request on the device by layer and KV head, which engines of any number of ranks can
compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

Kv = Mapping[str, Mapping[int, Sequence[str]]]
"""By layer and by the token behind a block: a digest of each KV head's part of it."""


def device_kv(worker: Any, tables: Mapping[str, Mapping[int, int]]) -> Kv:
    """Called in a worker (``collective_rpc``): the heads of this rank. ``tables``: by layer, device
    blocks by the token behind them."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    return {
        name: {
            end: [_digest(head) for head in layers[name].kv_cache[block]]
            for end, block in blocks.items()
        }
        for name, blocks in tables.items()
        if name in layers
    }


def joined(ranks: Sequence[Kv]) -> dict[str, dict[int, list[str]]]:
    """The KV of tensor-parallel ranks, in their order, as that of one."""
    return {
        name: {end: [digest for rank in ranks for digest in rank[name][end]] for end in blocks}
        for name, blocks in ranks[0].items()
    }


def _digest(head: Any) -> str:
    """Of a tensor, of any dtype and layout."""
    import torch

    data = head.contiguous().view(torch.uint8).numpy().tobytes()
    return blake2b(data, digest_size=16).hexdigest()
