"""Sparse attention in plain torch: slow, obvious, and what every kernel is tested against."""

from __future__ import annotations

import torch

from kvrecall.retrieval.digest import DIGESTS, digests_of
from kvrecall.retrieval.selection import ExactSelector
from kvrecall.retrieval.settings import RetrievalSettings
from kvrecall.retrieval.split import Split, split_of


def attended(
    query: torch.Tensor, keys: torch.Tensor, block_size: int, settings: RetrievalSettings
) -> torch.Tensor:
    """Which tokens take part: bool ``[kv_heads, tokens]``.

    ``query``: ``[heads, dim]`` of one token; ``keys``: ``[tokens, kv_heads, dim]``.
    """
    tokens, kv_heads, dim = keys.shape
    split = split_of(tokens, block_size, settings)
    mask = torch.zeros(kv_heads, split.blocks, dtype=torch.bool)
    mask[:, : split.init] = mask[:, split.local :] = True
    if split.chosen:
        grouped = query.view(kv_heads, -1, dim)
        chosen = _chosen(grouped, keys, split, settings)
        mask.scatter_(1, chosen + split.init, True)
    return mask.repeat_interleave(block_size, dim=1)[:, :tokens]


def _chosen(
    grouped: torch.Tensor, keys: torch.Tensor, split: Split, settings: RetrievalSettings
) -> torch.Tensor:
    kind = DIGESTS[settings.digest]
    first, last = split.init * split.block_size, split.local * split.block_size
    middle = keys[first:last].transpose(0, 1)
    blocks = middle.reshape(keys.shape[1], split.middle, split.block_size, keys.shape[2])
    digests = digests_of(kind, blocks, settings.tokens_a_digest).to(keys.dtype)
    scale = grouped.shape[-1] ** -0.5
    return ExactSelector(kind).choose(grouped, [digests], split.chosen, scale)


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
