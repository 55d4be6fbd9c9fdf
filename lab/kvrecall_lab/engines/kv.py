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


def store_drawn(worker: Any, orders: Any, spread: float) -> None:
    """Called in a worker: draws random KV on the device and copies it to the arena, as
    ``StepOrders`` of stores say. ``spread``: of the logarithms of blocks' sizes; the more, the less
    the choice of blocks changes with the query."""
    import torch
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector = get_kv_transfer_group()._w
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    for store in orders.stores:
        ids = list(store.copy.block_ids)
        for layer in layers:
            drawn = layer.kv_cache[ids[0] : ids[-1] + 1].normal_()
            sizes = torch.randn(len(drawn), device=drawn.device).mul(spread).exp()
            drawn *= sizes.to(drawn.dtype).view(-1, *[1] * (drawn.dim() - 1))
        for group in connector._retrieval_groups:
            group.note_overwritten(ids)
    connector.start_stores(orders)
    while len(connector._report.stored) < len(orders.stores):
        connector.finished()
    connector.report()


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
