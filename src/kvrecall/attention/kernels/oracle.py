"""Sparse attention in plain torch: slow and obvious, the reference of every kernel's tests."""

from __future__ import annotations

import torch

from kvrecall.attention.digest import encode
from kvrecall.attention.kernels.device import Paged, Part
from kvrecall.attention.selection import selector_of, split_of
from kvrecall.attention.settings import RetrievalSettings


def attended(
    query: torch.Tensor, keys: torch.Tensor, block_size: int, settings: RetrievalSettings
) -> torch.Tensor:
    """The tokens attended to: bool ``[kv_heads, tokens]``. ``query``: ``[heads, dim]`` of one
    token; ``keys``: ``[tokens, kv_heads, dim]``."""
    tokens, kv_heads, dim = keys.shape
    split = split_of(tokens, block_size, settings)
    mask = torch.zeros(kv_heads, split.blocks, dtype=torch.bool)
    mask[:, : split.init] = mask[:, split.local :] = True
    if split.chosen:
        layout = settings.layout(block_size)
        middle = keys[split.init * block_size : split.local * block_size].transpose(0, 1)
        digests = encode(layout.rows_of(middle.reshape(kv_heads, split.middle, block_size, dim)))
        grouped = query.view(kv_heads, -1, dim)
        selector = selector_of(layout)
        chosen = selector.choose(grouped, [digests], split.chosen, dim**-0.5)
        mask.scatter_(1, chosen + split.init, True)
    return mask.repeat_interleave(block_size, dim=1)[:, :tokens]


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of one token over the tokens ``mask`` names: float32 ``[heads, dim]``.

    ``query``: ``[heads, dim]``; ``keys``, ``values``: ``[tokens, kv_heads, dim]``; ``mask``: bool
    ``[kv_heads, tokens]``.
    """
    heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.float().view(kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("hgd,thd->hgt", grouped, keys.float()) * dim**-0.5
    weights = logits.masked_fill(~mask[:, None], float("-inf")).softmax(-1)
    return torch.einsum("hgt,thd->hgd", weights, values.float()).reshape(heads, dim)


def attend_plainly(query: torch.Tensor, paged: Paged, scale: float, softcap: float = 0.0) -> Part:
    """As ``device.attend_by_triton``."""
    outputs, normalisers = [], []
    size = paged.keys.shape[1]
    for row, length in enumerate(paged.lengths.tolist()):
        named = paged.table[row, : -(-length // size)].long()
        blocks, heads = named // paged.kv_heads, named % paged.kv_heads
        keys = paged.keys[blocks, :, heads].flatten(0, 1)[:length].float()
        values = paged.values[blocks, :, heads].flatten(0, 1)[:length].float()
        logits = query[row].float() @ keys.T * scale
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        outputs.append(logits.softmax(-1) @ values)
        normalisers.append(logits.logsumexp(-1))
    return Part(torch.stack(outputs), torch.stack(normalisers))
