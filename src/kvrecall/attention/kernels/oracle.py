"""Sparse attention in plain torch: slow and obvious, the reference of every kernel's tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvrecall.attention.digest import Digest
from kvrecall.attention.kernels.device import DeviceStep
from kvrecall.attention.selection import best_of, best_products, code_query


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of one token over the tokens ``mask`` names, None: all: float32 ``[heads, dim]``.

    ``query``: ``[heads, dim]``; ``keys``, ``values``: ``[tokens, kv_heads, dim]``; ``mask``: bool
    ``[kv_heads, tokens]``; ``sinks``: ``[heads]``, logits of no token; ``softcap``: bounds the
    others, 0: not; ``scale``: of products, None: by the heads' size.
    """
    heads, dim = query.shape
    kv_heads = keys.shape[1]
    grouped = query.float().view(kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("hgd,thd->hgt", grouped, keys.float()) * (scale or dim**-0.5)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().view(*logits.shape[:2], 1)], -1)
    weights = logits.softmax(-1)[..., : len(keys)]
    return torch.einsum("hgt,thd->hgd", weights, values.float()).reshape(heads, dim)


def logits_plainly(
    query: torch.Tensor, coded: torch.Tensor, kind: Digest, step: DeviceStep, scale: float
) -> list[torch.Tensor]:
    """As ``device.search_by_triton``: of each sequence, ``[kv_heads, group, middle]``."""
    found = []
    for facts, ids in zip(step.facts.tolist(), step.blocks, strict=True):
        token, init, middle = facts[:3]
        point = code_query(kind.of_query(query[token].view(step.kv_heads, step.group, -1)))
        found.append(best_products(point, coded[:, ids[init : init + middle].long()], scale))
    return found


def table_plainly(logits: Sequence[torch.Tensor], step: DeviceStep) -> list[torch.Tensor]:
    """As ``device.choose_by_triton``: of each sequence, ``[kv_heads, attended blocks]``."""
    tables = []
    for one, facts, ids in zip(logits, step.facts.tolist(), step.blocks, strict=False):
        _, init, middle, chosen, blocks = facts[:5]
        best = best_of(one, chosen).sort(-1).values + init
        first, last = (
            torch.arange(*ends).expand(step.kv_heads, -1)
            for ends in ((0, init), (init + middle, blocks))
        )
        tables.append(ids[torch.cat([first, best, last], 1)])
    return tables


def attend_plainly(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: DeviceStep,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """As ``device.attend_by_triton``: float32, zeros for tokens that are not the step's."""
    output = torch.zeros(query.shape)
    size, group = keys.shape[1], step.group
    for row, table in enumerate(step.table):
        at, head = divmod(row, step.kv_heads)
        token, length = step.facts[at, [0, 5]].tolist()
        if not length:
            continue
        blocks = table[: -(-length // size)].long()
        ours = slice(head * group, (head + 1) * group)
        k, v = (part[blocks, :, head].flatten(0, 1)[:length, None] for part in (keys, values))
        output[token, ours] = attention(query[token, ours], k, v, None, None, softcap, scale)
    return output
