"""Attention of decoded tokens over chosen blocks of a paged cache: in plain torch, and in Triton.

Every (sequence, KV head) has its own row of blocks. Both forms also return the logarithm of the
softmax's normaliser, so that parts of a sequence attended to apart can be put together.

The Triton form has run in Triton's interpreter only (tests/retrieval/test_kernels.py), never on a
GPU: see docs/retrieval.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrecall.attention.kernels.launching import kernel_of, next_power

_TOKENS_A_PROGRAM = 512
_TOKENS_AT_ONCE = 64
"""More do not fit a multiprocessor's registers (tests/retrieval/test_kernels.py)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Attention over some tokens: float32 ``output [rows, group, dim]`` and ``lse [rows, group]``,
    the natural logarithm of the sum of exponents. A row is a (sequence, KV head)."""

    output: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class Paged:
    """What is attended to. ``keys``, ``values``: ``[blocks, tokens, kv_heads, dim]``, of any
    strides. ``table``: int32 ``[rows, width]``, of ``block * kv_heads + head``; ``lengths``: int32,
    tokens in each row's blocks, at least 1; only a row's last block may be partial."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]


def attend_plainly(query: torch.Tensor, paged: Paged, scale: float, softcap: float = 0.0) -> Part:
    """The oracle. ``query``: ``[rows, group, dim]``; ``softcap``: logits are held within it by a
    hyperbolic tangent; 0: they are not."""
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


def merged(parts: Part) -> Part:
    """Puts together what was attended to apart: parts along the second dimension, ``output
    [rows, parts, group, dim]``; one without tokens has ``lse`` -inf, and some part has tokens."""
    weights = parts.lse.softmax(1)
    output = (parts.output * weights[..., None]).nansum(1)
    return Part(output, parts.lse.logsumexp(1))


def attend_by_triton(
    query: torch.Tensor, paged: Paged, scale: float, softcap: float = 0.0, share: int = 0
) -> Part:
    """As ``attend_plainly``, by a kernel of which a program takes ``share`` of a row's blocks; 0:
    as many as have 512 tokens. So what is computed of a row does not depend on other rows. Blocks
    of a power of two of tokens, at least 16."""
    kernel = kernel_of("paged_triton", "attend_rows")
    rows, group, dim = query.shape
    size, width = paged.keys.shape[1], paged.table.shape[1]
    share = share or max(1, _TOKENS_A_PROGRAM // size)
    splits = -(-width // share)
    output = torch.empty(rows, splits, group, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(rows, splits, group, dtype=torch.float32, device=query.device)
    kernel[(rows, splits)](
        query.contiguous(), paged.keys, paged.values, paged.table, paged.lengths, output, lse,
        scale, softcap, paged.kv_heads, paged.table.stride(0), share,
        *paged.keys.stride(), *paged.values.stride(),
        GROUP=group, PADDED=max(16, next_power(group)), DIM=dim, WIDE=max(16, next_power(dim)),
        SIZE=size, TILE=min(size, _TOKENS_AT_ONCE), CAPPED=softcap > 0,
    )  # fmt: skip
    return merged(Part(output, lse))
