"""Attention of decoded tokens over chosen blocks of a paged cache: in plain torch, and in Triton.

Every (sequence, KV head) has its own row of blocks. Both forms also return the logarithm of the
softmax's normaliser, so that parts of a sequence attended to apart can be put together.

The Triton form has run in Triton's interpreter only (tests/retrieval/test_paged.py), never on a
GPU, and nothing in vLLM calls it yet: see docs/retrieval.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrecall.errors import EngineError


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some tokens: float32 ``output [rows, group, dim]`` and ``lse [rows, group]``,
    the natural logarithm of the sum of exponents. A row is a (sequence, KV head)."""

    output: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """What is attended to. ``keys``, ``values``: ``[blocks, tokens, kv_heads, dim]``, of any
    strides. ``table``: int32 ``[sequences * kv_heads, width]``; ``lengths``: int32, tokens in each
    row's blocks, at least 1; only a row's last block may be partial."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]


def attend_plainly(query: torch.Tensor, paged: Paged, scale: float) -> Part:
    """The oracle. ``query``: ``[rows, group, dim]``."""
    outputs, normalisers = [], []
    size = paged.keys.shape[1]
    for row, length in enumerate(paged.lengths.tolist()):
        blocks = paged.table[row, : -(-length // size)].long()
        head = row % paged.kv_heads
        keys = paged.keys[blocks, :, head].flatten(0, 1)[:length].float()
        values = paged.values[blocks, :, head].flatten(0, 1)[:length].float()
        logits = query[row].float() @ keys.T * scale
        outputs.append(logits.softmax(-1) @ values)
        normalisers.append(logits.logsumexp(-1))
    return Part(torch.stack(outputs), torch.stack(normalisers))


def merged(parts: Part) -> Part:
    """Puts together what was attended to apart: parts along the second dimension, ``output
    [rows, parts, group, dim]``; one without tokens has ``lse`` -inf, and some part has tokens."""
    weights = parts.lse.softmax(1)
    output = (parts.output * weights[..., None]).nansum(1)
    return Part(output, parts.lse.logsumexp(1))


def attend_by_triton(query: torch.Tensor, paged: Paged, scale: float, splits: int = 1) -> Part:
    """As ``attend_plainly``, by a kernel in which ``splits`` programs share a row's blocks."""
    kernel = _kernel()
    rows, group, dim = query.shape
    size = paged.keys.shape[1]
    width = paged.table.shape[1]
    output = torch.empty(rows, splits, group, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, splits, group, dtype=torch.float32, device=query.device)
    query = query.contiguous()
    kernel[(rows, splits)](
        query, paged.keys, paged.values, paged.table, paged.lengths, output, lse,
        scale, paged.kv_heads, width, -(-width // splits),
        *paged.keys.stride(), *paged.values.stride(),
        GROUP=group, PADDED=max(16, 1 << (group - 1).bit_length()), DIM=dim, SIZE=size,
    )  # fmt: skip
    return merged(Part(output, lse))


def _kernel() -> Any:
    try:
        from kvrecall.retrieval.paged_triton import attend_rows
    except ImportError as error:
        raise EngineError(
            "retrieval attention on a GPU needs triton, which vLLM for CUDA brings; install it"
        ) from error
    return attend_rows
