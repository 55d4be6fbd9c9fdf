"""The Triton kernels, launched by ``device.py``. Imported only where they are used.

A row is a (sequence, KV head): row ``sequence * kv_heads + head``. What a kernel knows of a
sequence are its facts, a row of ``FACTS`` numbers each (``device.py`` says which). Grids have the
sizes of a step's bucket: programs of what is not there end at once. A row's result depends on no
other row, on no size of the bucket, and not on the order of its programs, the last of which goes on
with what all of them have found (``triton_rows.py``).

A middle block that is off the device is named by ``-1 - number`` (``residency.DeviceResidency``).
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

from kvrecall.attention.kernels.triton_rows import (
    BLOCKS,
    CHOSEN,
    FACTS,
    INIT,
    LENGTH,
    MIDDLE,
    SLOTS,
    TOKEN,
    choose_row,
    combine_row,
    is_last,
)

# Triton compiles annotations, too, so only its own are used.

MAX_CODE = tl.constexpr(127.0)
LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)
ROUNDER = tl.constexpr(12582912.0)
"""Added and taken away, it rounds numbers of single precision to whole ones, halves to even."""
BUCKET = ["width", "candidates", "attended", "most_slots", "numbers", "splits"]
"""Arguments of a bucket's sizes, or that grow. A kernel is not compiled anew for their values: that
would take seconds in the middle of serving, and another order of sums would be other bits."""
PACKED = ["ids", "slots", "arrived"]
"""Arguments that begin somewhere in a step's packed numbers. Their alignment does not count."""

jit = partial(triton.jit, do_not_specialize=BUCKET, do_not_specialize_on_alignment=PACKED)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def digest_blocks(  # type: ignore[no-untyped-def]
    ids, keys, coded, floats,
    key_block, key_token, key_head, key_dim,
    coded_head, coded_block, coded_row, float_head, float_block, float_row,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
):  # fmt: skip
    """Program ``(i, head)`` codes the digests of block ``ids[i]``, none if that is negative.

    ``BOUNDS``: a row has the largest and the smallest coordinates of its tokens, else their mean.
    """
    block = tl.load(ids + tl.program_id(0)).to(tl.int64)
    if block < 0:
        return
    head = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    tokens = rows[:, None] * (SIZE // ROWS) + tl.arange(0, SIZE // ROWS)[None, :]
    dims = tl.arange(0, WIDE)
    real = dims < DIM
    at = keys + block * key_block + head * key_head + tokens[:, :, None] * key_token
    at = at + dims[None, None, :] * key_dim
    there = (tokens >= 0)[:, :, None] & real[None, None, :]
    found = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if BOUNDS:
        high = tl.max(found, 1)
        low = tl.min(found, 1)
        largest = tl.maximum(tl.abs(high), tl.abs(low))
    else:
        high = tl.div_rn(tl.sum(found, 1), tl.full([ROWS, WIDE], SIZE // ROWS, tl.float32))
        largest = tl.abs(high)
    most = tl.max(tl.reshape(largest, [ROWS * WIDE]), 0)
    scale = tl.maximum(tl.div_rn(most, MAX_CODE), LEAST_SCALE)
    steps = tl.zeros([ROWS, WIDE], tl.float32) + scale
    out = coded + head * coded_head + block * coded_block
    out = out + rows[:, None] * coded_row + dims[None, :]
    out_scale = floats + head * float_head + block * float_block + rows * float_row
    codes = tl.div_rn(high, steps) + ROUNDER - ROUNDER
    tl.store(out, codes.to(tl.int8), mask=(rows >= 0)[:, None] & real[None, :])
    if BOUNDS:
        codes = tl.div_rn(low, steps) + ROUNDER - ROUNDER
        tl.store(out + DIM, codes.to(tl.int8), mask=(rows >= 0)[:, None] & real[None, :])
        tl.store(out_scale + DIM // 2, tl.zeros([ROWS], tl.float32) + scale)
    else:
        tl.store(out_scale + DIM // 4, tl.zeros([ROWS], tl.float32) + scale)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def choose_blocks(  # type: ignore[no-untyped-def]
    query, facts, blocks, coded, floats, left, logits, scores, table, slots, missed,
    place, state, counts, arrived,
    factor, kv_heads, width, candidates, attended, most_slots, numbers, state_part, state_head,
    query_token, query_head, coded_head, coded_block, coded_row, float_head, float_block,
    GROUP: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    BOUNDS: tl.constexpr, LEFT: tl.constexpr, RECALLS: tl.constexpr, CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
):  # fmt: skip
    """Program ``(row, part)`` finds the best digest of ``TILES`` times ``TILE`` middle blocks for
    each of the row's query heads: a logit for each. The row's last one then chooses by them
    (``choose_row``). With ``LEFT``, digests of blocks off the device are in ``left``, in the
    strides of ``coded``.

    Queries are coded as digests are; whole numbers are multiplied and added without rounding.
    ``TILE * ROWS``, ``WIDE`` and ``PADDED`` are powers of two, at least 32, 32 and 16; of ``WIDE``
    coordinates ``DIM`` are real, of ``PADDED`` query heads ``GROUP``.
    """
    row = tl.program_id(0).to(tl.int64)
    fact = facts + row // kv_heads * FACTS
    middle = tl.load(fact + MIDDLE)
    begin = tl.program_id(1) * (TILE * TILES)
    wanted = tl.maximum(tl.cdiv(middle, TILE * TILES), 1)
    programs = tl.where(tl.load(fact + BLOCKS) > 0, wanted, 0)
    if tl.program_id(1) >= programs:
        return
    head = row % kv_heads
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, WIDE)
    here = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    from_query = query + tl.load(fact + TOKEN).to(tl.int64) * query_token
    q_at = (head * GROUP + heads)[:, None] * query_head + dims[None, :]
    q = tl.load(from_query + q_at, mask=here, other=0.0).to(tl.float32)
    of_query = tl.maximum(tl.div_rn(tl.max(tl.abs(q), 1), MAX_CODE), LEAST_SCALE)
    codes = tl.div_rn(q, tl.broadcast_to(of_query[:, None], [PADDED, WIDE])) + ROUNDER - ROUNDER
    if BOUNDS:
        positive = tl.maximum(codes, 0.0).to(tl.int8)
        negative = tl.minimum(codes, 0.0).to(tl.int8)
        scale_at = DIM // 2
    else:
        positive = codes.to(tl.int8)
        negative = positive
        scale_at = DIM // 4
    named = blocks + row // kv_heads * width + tl.load(fact + INIT)
    many = tl.arange(0, TILE * ROWS)
    each = tl.arange(0, TILE)
    for first in range(begin, tl.minimum(begin + TILE * TILES, middle), TILE):
        inside = first + many // ROWS < middle
        block = tl.load(named + first + many // ROWS, mask=inside, other=0).to(tl.int64)
        at = coded + head * coded_head + (many % ROWS) * coded_row
        if LEFT:
            further = left.to(tl.int64) - coded.to(tl.int64)
            at += tl.where(block < 0, further, 0)
            block = tl.where(block < 0, -1 - block, block)
        at += block * coded_block
        k_here = inside[None, :] & (dims < DIM)[:, None]
        k = tl.load(at[None, :] + dims[:, None], mask=k_here, other=0)
        sums = tl.dot(positive, k, out_dtype=tl.int32)
        if BOUNDS:
            low = tl.load(at[None, :] + (DIM + dims)[:, None], mask=k_here, other=0)
            sums += tl.dot(negative, low, out_dtype=tl.int32)
        most = tl.max(tl.reshape(sums, [PADDED, TILE, ROWS]), 2)
        tile = first + each
        which = tl.load(named + tile, mask=tile < middle, other=0).to(tl.int64)
        scales = floats + head * float_head + scale_at
        if LEFT:
            scales += tl.where(which < 0, (left.to(tl.int64) - coded.to(tl.int64)) // 4, 0)
            which = tl.where(which < 0, -1 - which, which)
        of_block = tl.load(scales + which * float_block, mask=tile < middle, other=0.0)
        out = most.to(tl.float32) * ((of_query * factor)[:, None] * of_block[None, :])
        out_at = (row * GROUP + heads)[:, None] * candidates + tile[None, :]
        tl.store(logits + out_at, out, mask=(heads < GROUP)[:, None] & (tile < middle)[None, :])
    if is_last(arrived, row, programs):
        choose_row(
            row, facts, blocks, logits, scores, table, slots, missed, place, state, counts,
            kv_heads, width, candidates, attended, most_slots, numbers, state_part, state_head,
            GROUP, HEADS, CHUNK, SEARCH, RECALLS,
        )  # fmt: skip


@jit  # type: ignore[untyped-decorator,unused-ignore]
def fetch_blocks(  # type: ignore[no-untyped-def]
    facts, table, missed, place, addresses, cache, layer_at,
    kv_heads, attended, most_slots, numbers, cache_block, cache_head, words, runs, step,
    LANES: tl.constexpr, RUNS: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program ``(row, lane)`` copies each ``LANES``th piece of the row's missed blocks from host
    memory into their slots. The first names the slots in the row's table, too.

    ``addresses``: of each number's record in host memory, in which the layer's page begins at byte
    ``layer_at``; ``cache``: the address of the layer's first block. A KV head's part of a page lies
    like that of a cache's block: ``runs`` runs of ``words`` words of four bytes, ``step`` words
    apart; heads are ``cache_head``, blocks ``cache_block`` words apart. A piece are ``RUNS`` runs
    by ``WORDS`` words.
    """
    row = tl.program_id(0).to(tl.int64)
    fact = facts + row // kv_heads * FACTS
    if tl.load(fact + SLOTS) == 0:
        return
    head = row % kv_heads
    mine = place + head * numbers
    lost = missed + row * (most_slots + 1)
    across = tl.cdiv(words, WORDS)
    pieces = tl.cdiv(runs, RUNS) * across
    for at in range(tl.program_id(1), tl.load(lost) * pieces, LANES):
        number = tl.load(lost + 1 + at // pieces)
        run = at % pieces // across * RUNS + tl.arange(0, RUNS)
        word = at % across * WORDS + tl.arange(0, WORDS)
        here = head * cache_head + run[:, None].to(tl.int64) * step + word[None, :]
        there = (run < runs)[:, None] & (word < words)[None, :]
        source = (tl.load(addresses + number) + layer_at).to(tl.pointer_type(tl.int32))
        target = cache.to(tl.pointer_type(tl.int32))
        target += tl.load(mine + number).to(tl.int64) * cache_block
        tl.store(target + here, tl.load(source + here, mask=there, other=0), mask=there)
    if tl.program_id(1) == 0:
        many = tl.arange(0, CHUNK)
        chosen = tl.load(fact + CHOSEN)
        named = table + row * attended + tl.load(fact + INIT)
        for first in range(0, chosen, CHUNK):
            block = tl.load(named + first + many, mask=first + many < chosen, other=0)
            slot = tl.load(mine + (-1 - block), mask=block < 0, other=0)
            tl.store(named + first + many, slot, mask=block < 0)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def attend_rows(  # type: ignore[no-untyped-def]
    query, facts, keys, values, table, parts, lse, sinks, output, arrived,
    scale, softcap, kv_heads, attended, share, splits, query_token, query_head,
    key_block, key_token, key_head, key_dim,
    value_block, value_token, value_head, value_dim, output_token, output_head,
    GROUP: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Program ``(row, split)`` attends the row's query heads to its blocks ``[split * share,
    + share)``; of rows that would have more than ``SPLITS`` splits, each has a larger share. The
    row's last one then adds all of them up (``combine_row``).

    It takes ``TILE`` tokens at a time of a block's ``SIZE``. ``SIZE``, ``TILE``, ``WIDE`` and
    ``PADDED`` are powers of two, at least 16; of ``WIDE`` coordinates ``DIM`` are real, of
    ``PADDED`` query heads ``GROUP``. Numerically stable in one pass (online softmax), in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    fact = facts + row // kv_heads * FACTS
    length = tl.load(fact + LENGTH)
    share = tl.maximum(share, tl.cdiv(length, SIZE * SPLITS))
    first = tl.program_id(1) * share * SIZE
    if first >= length:
        return
    head = row % kv_heads
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, WIDE)
    tile = tl.arange(0, TILE)
    real = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    token = tl.load(fact + TOKEN).to(tl.int64)
    from_query = query + token * query_token
    q_at = (head * GROUP + heads)[:, None] * query_head + dims[None, :]
    q = tl.load(from_query + q_at, mask=real, other=0.0)
    end = tl.minimum(first + share * SIZE, length)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    summed = tl.zeros([PADDED, WIDE], tl.float32)
    for begin in range(first, end, TILE):
        block = tl.load(table + row * attended + begin // SIZE).to(tl.int64)
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
    out = (row * splits + tl.program_id(1)) * GROUP + heads
    tl.store(parts + out[:, None] * DIM + dims[None, :], summed / total[:, None], mask=real)
    tl.store(lse + out, top + tl.log(total), mask=heads < GROUP)
    used = tl.cdiv(length, share * SIZE)
    if is_last(arrived, row, used):
        combine_row(
            row, used, parts, lse, sinks, output + token * output_token, kv_heads, splits,
            output_head, GROUP, HEADS, DIM, WIDE, CHUNK, SINKS,
        )  # fmt: skip


@jit  # type: ignore[untyped-decorator,unused-ignore]
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
