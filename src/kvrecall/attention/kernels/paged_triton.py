"""The Triton kernel of ``paged.py``. Imported only where it is used."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton compiles annotations as it does the rest, so there are none but its own.
@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def attend_rows(  # type: ignore[no-untyped-def]
    query, keys, values, table, lengths, output, lse,
    scale, softcap, kv_heads, width, share,
    key_block, key_token, key_head, key_dim,
    value_block, value_token, value_head, value_dim,
    GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, TILE: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One program attends a row's query heads to its blocks ``[split * share, + share)``.

    It takes ``TILE`` tokens at a time of a block's ``SIZE``. ``SIZE``, ``TILE``, ``WIDE`` and
    ``PADDED`` are powers of two, at least 16; of ``WIDE`` coordinates ``DIM`` are real, of
    ``PADDED`` query heads ``GROUP``. Numerically stable in one pass (online softmax), in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, WIDE)
    tile = tl.arange(0, TILE)
    real = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    at = row * GROUP + heads
    q = tl.load(query + at[:, None] * DIM + dims[None, :], mask=real, other=0.0)
    length = tl.load(lengths + row)
    first = split * share
    end = tl.minimum((first + share) * SIZE, length)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    summed = tl.zeros([PADDED, WIDE], tl.float32)
    for begin in range(first * SIZE, end, TILE):
        named = tl.load(table + row * width + begin // SIZE).to(tl.int64)
        block = named // kv_heads
        head = named % kv_heads
        tokens = begin % SIZE + tile
        there = begin + tile < length
        k_at = block * key_block + tokens[None, :] * key_token + head * key_head
        k_there = there[None, :] & (dims < DIM)[:, None]
        k = tl.load(keys + k_at + dims[:, None] * key_dim, mask=k_there, other=0.0)
        logits = tl.dot(q, k, input_precision="ieee").to(tl.float32) * scale
        if CAPPED:
            logits = softcap * (2.0 / (1.0 + tl.exp(-2.0 * logits / softcap)) - 1.0)
        logits = tl.where(there[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        kept = tl.exp(top - higher)
        v_at = block * value_block + tokens[:, None] * value_token + head * value_head
        v_there = there[:, None] & (dims < DIM)[None, :]
        v = tl.load(values + v_at + dims[None, :] * value_dim, mask=v_there, other=0.0)
        summed = summed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(
            tl.float32
        )
        total = total * kept + tl.sum(weights, 1)
        top = higher
    out = (row * tl.num_programs(1) + split) * GROUP + heads
    tl.store(output + out[:, None] * DIM + dims[None, :], summed / total[:, None], mask=real)
    tl.store(lse + out, top + tl.log(total), mask=heads < GROUP)
