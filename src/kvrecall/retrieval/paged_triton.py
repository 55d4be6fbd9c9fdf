"""The Triton kernel of ``paged.py``. Imported only where it is used."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def attend_rows(
    query: Any, keys: Any, values: Any, table: Any, lengths: Any, output: Any, lse: Any,
    scale: Any, kv_heads: Any, width: Any, share: Any,
    key_block: Any, key_token: Any, key_head: Any, key_dim: Any,
    value_block: Any, value_token: Any, value_head: Any, value_dim: Any,
    GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """One program attends a row's query heads to its blocks ``[split * share, + share)``.

    ``DIM`` and ``SIZE`` are powers of two, at least 16; ``PADDED`` query heads, of which
    ``GROUP`` are real. Numerically stable in one pass (online softmax), in float32.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    head = row % kv_heads
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, DIM)
    tokens = tl.arange(0, SIZE)
    real = heads < GROUP
    at = row * GROUP + heads
    q = tl.load(query + at[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)
    length = tl.load(lengths + row)
    first = split * share
    last = tl.minimum(first + share, (length + SIZE - 1) // SIZE)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    summed = tl.zeros([PADDED, DIM], tl.float32)
    for place in range(first, last):
        block = tl.load(table + row * width + place).to(tl.int64)
        there = place * SIZE + tokens < length
        k_at = block * key_block + tokens[None, :] * key_token + head * key_head
        k = tl.load(keys + k_at + dims[:, None] * key_dim, mask=there[None, :], other=0.0)
        logits = tl.dot(q, k).to(tl.float32) * scale
        logits = tl.where(there[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        kept = tl.exp(top - higher)
        v_at = block * value_block + tokens[:, None] * value_token + head * value_head
        v = tl.load(values + v_at + dims[None, :] * value_dim, mask=there[:, None], other=0.0)
        summed = summed * kept[:, None] + tl.dot(weights.to(v.dtype), v).to(tl.float32)
        total = total * kept + tl.sum(weights, 1)
        top = higher
    out = (row * tl.num_programs(1) + split) * GROUP + heads
    tl.store(
        output + out[:, None] * DIM + dims[None, :], summed / total[:, None], mask=real[:, None]
    )
    tl.store(lse + out, top + tl.log(total), mask=real)
