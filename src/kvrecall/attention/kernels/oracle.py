"""Sparse attention in plain torch: slow, obvious, and what every kernel is tested against."""

from __future__ import annotations

import torch

from kvrecall.attention.coding import encode
from kvrecall.attention.layout import Layout
from kvrecall.attention.selection import selector_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.attention.split import Split, split_of


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
        for head, chosen in enumerate(_chosen(grouped, keys, split, settings)):
            mask[head, chosen + split.init] = True
    return mask.repeat_interleave(block_size, dim=1)[:, :tokens]


def _chosen(
    grouped: torch.Tensor, keys: torch.Tensor, split: Split, settings: RetrievalSettings
) -> list[torch.Tensor]:
    """Each KV head's chosen middle blocks."""
    layout = Layout.of(settings, split.block_size)
    first, last = split.init * split.block_size, split.local * split.block_size
    middle = keys[first:last].transpose(0, 1)
    blocks = middle.reshape(keys.shape[1], split.middle, split.block_size, keys.shape[2])
    digests = encode(layout.rows_of(blocks, blocks), layout.rest)
    scale = grouped.shape[-1] ** -0.5
    choice = selector_of(settings, layout).choose(grouped, [digests], split.chosen, scale)
    if choice.taken is None:
        return list(choice.blocks)
    return [blocks[taken] for blocks, taken in zip(choice.blocks, choice.taken, strict=True)]


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


def attention_and_rest(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """As ``attention``, where every block that takes no part has one key, the mean of its keys, and
    one value, their mean, that weigh as much as ``block_size`` tokens."""
    heads, dim = query.shape
    tokens, kv_heads, _ = keys.shape
    grouped = query.float().view(kv_heads, heads // kv_heads, dim)
    output = torch.empty(kv_heads, heads // kv_heads, dim)
    for head in range(kv_heads):
        out = [at for at in range(0, tokens, block_size) if not mask[head, at]]
        rest = [slice(at, at + block_size) for at in out]
        mean_keys = [keys[one, head].float().mean(0) for one in rest]
        mean_values = [values[one, head].float().mean(0) for one in rest]
        all_keys = torch.stack([*keys[mask[head], head].float(), *mean_keys])
        all_values = torch.stack([*values[mask[head], head].float(), *mean_values])
        weights = torch.tensor([1.0] * int(mask[head].sum()) + [float(block_size)] * len(rest))
        logits = grouped[head] @ all_keys.T * dim**-0.5 + weights.log()
        output[head] = logits.softmax(-1) @ all_values
    return output.reshape(heads, dim)
