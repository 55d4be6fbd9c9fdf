"""The Triton kernels, launched by ``device.py``. Imported only where they are used."""

from __future__ import annotations

import triton
import triton.language as tl

# Triton compiles annotations, too, so only its own are used.


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


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def best_rows(  # type: ignore[no-untyped-def]
    codes, scales, coded, floats, places, best, blocks,
    coded_head, coded_block, coded_row, float_head, float_block,
    GROUP: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PLACED: tl.constexpr,
):  # fmt: skip
    """One program finds the best row of ``TILE`` blocks of a head, for each query head.

    Whole numbers are multiplied and added without rounding. ``TILE * ROWS``, ``WIDE`` and
    ``PADDED`` are powers of two, at least 32, 32 and 16; of ``WIDE`` codes ``WIDTH`` are real, of
    ``PADDED`` query heads ``GROUP``.
    """
    head = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    heads = tl.arange(0, PADDED)
    codes_of = tl.arange(0, WIDE)
    q_there = (heads < GROUP)[:, None] & (codes_of < WIDTH)[None, :]
    q_at = (head * GROUP + heads)[:, None] * WIDTH + codes_of[None, :]
    q = tl.load(codes + q_at, mask=q_there, other=0)
    many = tl.arange(0, TILE * ROWS)
    at = first + many // ROWS
    there = at < blocks
    block = at.to(tl.int64)
    if PLACED:
        block = tl.load(places + head * blocks + at, mask=there, other=0)
    row = coded + head * coded_head + block * coded_block + (many % ROWS) * coded_row
    k_there = there[None, :] & (codes_of < WIDTH)[:, None]
    k = tl.load(row[None, :] + codes_of[:, None], mask=k_there, other=0)
    sums = tl.dot(q, k, out_dtype=tl.int32)
    most = tl.max(tl.reshape(sums, [PADDED, TILE, ROWS]), 2)
    tile = first + tl.arange(0, TILE)
    inside = tile < blocks
    which = tile.to(tl.int64)
    if PLACED:
        which = tl.load(places + head * blocks + tile, mask=inside, other=0)
    of_block = tl.load(
        floats + head * float_head + which * float_block + WIDTH // 4, mask=inside, other=0.0
    )
    of_query = tl.load(scales + head * GROUP + heads, mask=heads < GROUP, other=0.0)
    out = most.to(tl.float32) * (of_query[:, None] * of_block[None, :])
    out_at = (head * GROUP + heads)[:, None] * blocks + tile[None, :]
    tl.store(best + out_at, out, mask=(heads < GROUP)[:, None] & inside[None, :])


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def move_words(  # type: ignore[no-untyped-def]
    sources, targets, words, step, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Program ``(item, piece, part)`` copies ``AT_ONCE`` words of four bytes, of the ``words`` of a
    piece; pieces are ``step`` words apart. ``sources``, ``targets``: addresses."""
    item = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * step
    at = tl.program_id(2) * AT_ONCE + tl.arange(0, AT_ONCE)
    source = tl.load(sources + item).to(tl.pointer_type(tl.int32))
    target = tl.load(targets + item).to(tl.pointer_type(tl.int32))
    there = at < words
    tl.store(target + first + at, tl.load(source + first + at, mask=there, other=0), mask=there)
