"""The Triton kernels, launched by ``device.py``. Imported only where they are used.

A row is a (sequence, KV head): row ``sequence * kv_heads + head``. What a kernel knows of a
sequence are its facts, a row of ``FACTS`` numbers each (``device.py`` says which). Grids follow
from the number of sequences: programs of what is not there end at once. A row's result depends on
no other row, on no size of a buffer or grid, and not on the order of its programs, the last of
which goes on with what all of them have found.

A middle block that is off the device is named by ``-1 - number`` (``device.DeviceResidency``).
"""

from __future__ import annotations

from functools import partial

import triton
import triton.language as tl

FACTS = tl.constexpr(11)
TOKEN = tl.constexpr(0)
INIT = tl.constexpr(1)
MIDDLE = tl.constexpr(2)
CHOSEN = tl.constexpr(3)
BLOCKS = tl.constexpr(4)
LENGTH = tl.constexpr(5)
SLOTS = tl.constexpr(6)
ROW = tl.constexpr(8)
LEFT = tl.constexpr(9)
HELD = tl.constexpr(10)
# Triton compiles annotations, too, so only its own are used.

LATE = tl.constexpr(1 << 30)
"""Greater than every number. A table adds it to the numbers of chosen blocks that are in no slot
yet."""

MAX_CODE = tl.constexpr(127.0)
LEAST_SCALE = tl.constexpr(1.1754943508222875e-38)
ROUNDER = tl.constexpr(12582912.0)
"""Added and taken away, it rounds numbers of single precision to whole ones, halves to even."""
SIZES = ["ids_at", "ids_step", "width", "most", "most_slots", "numbers", "splits"]
SIZES += ["state_part", "state_head"]
"""Arguments of buffers' sizes or a cache's, or that differ by layer. A kernel is not compiled anew
for their values: that would take seconds in the middle of serving, and another order of sums would
be other bits."""
PACKED = ["targets"]
"""Arguments that begin somewhere in others. Their alignment does not count."""

jit = partial(triton.jit, do_not_specialize=SIZES, do_not_specialize_on_alignment=PACKED)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def begin_overlapped(OVERLAPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """With ``OVERLAPS`` the program began before the kernel launched before it has ended, and waits
    for it here, before it reads anything; and it lets the next one begin so."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def middle_blocks(  # type: ignore[no-untyped-def]
    fact, blocks, names, at, there, width, most_slots, RECALLS: tl.constexpr
):  # fmt: skip
    """The ids of a sequence's middle blocks ``at``, where they are ``there``."""
    named = blocks + tl.load(fact + ROW).to(tl.int64) * width + tl.load(fact + INIT)
    if RECALLS:
        off = there & (at < tl.load(fact + LEFT))
        numbers = names + tl.load(fact + HELD).to(tl.int64) * most_slots
        block = tl.load(named + at, mask=there & (at >= tl.load(fact + LEFT)), other=0)
        return tl.where(off, -1 - tl.load(numbers + at, mask=off, other=0), block)
    return tl.load(named + at, mask=there, other=0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def is_last(arrived, row, programs):  # type: ignore[no-untyped-def]
    """Whether this is the last of a row's ``programs`` to come here, and so sees what all of them
    have written. They count themselves in ``arrived[row]``, which is 0 before and afterwards.

    The barrier puts the writes of all threads of a program before its count, which releases them;
    who counts last acquires what was released. Which program that is must not change what it does.
    """
    tl.debug_barrier()
    before = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
    last = before == programs - 1
    tl.store(arrived + row, 0, mask=last)
    return last


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def reaches(bits, least, step):  # type: ignore[no-untyped-def]
    """For each number 1 in a field of 21 bits for each of ``least`` plus 1, 2 and 3 times ``step``
    that it is not below: added up, they are three counts."""
    one = (bits >= least + step).to(tl.int64)
    two = (bits >= least + 2 * step).to(tl.int64)
    return one + (two << 21) + ((bits >= least + 3 * step).to(tl.int64) << 42)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def raised(counts, least, step, count, wanted):  # type: ignore[no-untyped-def]
    """The highest of ``least``, which ``count`` numbers reach, and those above it of ``reaches``
    that at least ``wanted`` reach, and how many do."""
    for field in tl.static_range(3):
        reached = ((counts >> (21 * field)) & 0x1FFFFF).to(tl.int32)
        count = tl.where(reached >= wanted, reached, count)
        least = tl.where(reached >= wanted, least + step, least)
    return least, count


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def choose_row(  # type: ignore[no-untyped-def]
    row, facts, blocks, names, logits, scores, table, slots, missed, place, state, counts,
    kv_heads, width, most, most_slots, numbers, state_part, state_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, SEARCH: tl.constexpr,
    RECALLS: tl.constexpr,
):  # fmt: skip
    """Writes a row's table by its logits: the ids of its first blocks, of the best of its middle
    ones, and of its last ones, all in the sequence's order. With ``RECALLS`` it then admits those
    that are off the device to the sequence's slots. Of ``HEADS`` query heads, a power of two,
    ``GROUP`` are real.

    Each query head's logits are made a distribution, and those of the group are added up. The
    bits of positive numbers of single precision are in their order, so the least score that is
    chosen is found by them, two at a time, until no more are as high than are chosen. Of blocks of
    that very score the first ones are chosen. The bits of the first ``SEARCH`` blocks are kept in
    registers meanwhile.
    """
    fact = facts + row // kv_heads * FACTS
    init = tl.load(fact + INIT)
    middle = tl.load(fact + MIDDLE)
    chosen = tl.load(fact + CHOSEN)
    named = blocks + tl.load(fact + ROW).to(tl.int64) * width
    into = table + row * most
    mine = scores + row * most
    heads = tl.arange(0, HEADS)
    many = tl.arange(0, CHUNK)
    from_logits = logits + (row * GROUP + heads)[:, None] * most + many[None, :]
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for first in range(0, middle, CHUNK):
        there = (first + many < middle)[None, :]
        some = tl.load(from_logits + first, mask=there & (heads < GROUP)[:, None], other=0.0)
        some = tl.where(there, some, float("-inf"))
        higher = tl.maximum(top, tl.max(some, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(some - higher[:, None]), 1)
        top = higher
    for first in range(0, middle, CHUNK):
        there = (first + many < middle)[None, :] & (heads < GROUP)[:, None]
        some = tl.load(from_logits + first, mask=there, other=0.0)
        weights = tl.where(there, tl.exp(some - top[:, None]) / total[:, None], 0.0)
        score = tl.sum(weights, 0)
        score = tl.where(score > 0.0, score, 0.0)  # a NaN chooses nothing
        tl.store(mine + first + many, score, mask=first + many < middle)
    tl.debug_barrier()
    every = tl.arange(0, SEARCH)
    early = tl.load(mine + every, mask=every < middle, other=0.0).to(tl.uint32, bitcast=True)
    least = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    count = middle
    while (step > 0) & (count != chosen):
        reached = reaches(early, least, step)
        for first in range(SEARCH, middle, SEARCH):
            bits = tl.load(mine + first + every, mask=first + every < middle, other=0.0)
            reached += reaches(bits.to(tl.uint32, bitcast=True), least, step)
        least, count = raised(tl.sum(reached, 0), least, step, count, chosen)
        step = step // 4
    higher = (early > least).to(tl.int32)
    for first in range(SEARCH, middle, SEARCH):
        bits = tl.load(mine + first + every, mask=first + every < middle, other=0.0)
        higher += (bits.to(tl.uint32, bitcast=True) > least).to(tl.int32)
    above = tl.sum(higher, 0)
    done = 0
    alike = 0
    for first in range(0, middle, CHUNK):
        there = first + many < middle
        bits = tl.load(mine + first + many, mask=there, other=0.0).to(tl.uint32, bitcast=True)
        same = (there & (bits == least)).to(tl.int32)
        taken = (there & (bits > least)) | (
            (same > 0) & (alike + tl.cumsum(same, 0) <= chosen - above)
        )
        rank = done + tl.cumsum(taken.to(tl.int32), 0) - 1
        block = middle_blocks(fact, blocks, names, first + many, taken, width, most_slots, RECALLS)
        tl.store(into + init + rank, block, mask=taken)
        done += tl.sum(taken.to(tl.int32), 0)
        alike += tl.sum(same, 0)
    for first in range(0, init, CHUNK):
        there = first + many < init
        block = tl.load(named + first + many, mask=there, other=0)
        tl.store(into + first + many, block, mask=there)
    rest = tl.load(fact + BLOCKS) - init - middle
    for first in range(0, rest, CHUNK):
        there = first + many < rest
        block = tl.load(named + init + middle + first + many, mask=there, other=0)
        tl.store(into + init + chosen + first + many, block, mask=there)
    if RECALLS:
        head = row % kv_heads
        holds = state + head * state_head
        admit_blocks(
            into + init, chosen, slots + tl.load(fact + HELD).to(tl.int64) * most_slots,
            tl.load(fact + SLOTS), missed + row * (most + 1), place + head * numbers,
            holds, holds + state_part, holds + 2 * state_part, counts, CHUNK,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def admit_blocks(  # type: ignore[no-untyped-def]
    named, chosen, slots, room, missed, place, holds, used, clock, counts, CHUNK: tl.constexpr
):  # fmt: skip
    """Gives a row's chosen blocks that are off the device a slot each, of its ``room``: part of
    ``choose_row``. The longest unused slots are taken, of equal ones the first.

    Writes to ``missed`` how many blocks lie in none yet, and their numbers, and marks them in the
    table by ``LATE``. Adds to ``counts`` how
    many did, and how many did not. The others as of ``DeviceResidency``, of one KV head. A row
    with as much room as chosen blocks off the device never gives a slot away that it needs now.
    """
    many = tl.arange(0, CHUNK)
    now = tl.load(clock + tl.load(slots), mask=room > 0, other=0) + 1
    hits = tl.full([], 0, tl.int32)
    misses = tl.full([], 0, tl.int32)
    tl.debug_barrier()  # the table is written, and the clock read
    for first in range(0, tl.where(room > 0, chosen, 0), CHUNK):
        block = tl.load(named + first + many, mask=first + many < chosen, other=0)
        off = block < 0
        number = -1 - block
        slot = tl.load(place + number, mask=off, other=0)
        held = tl.load(holds + slot, mask=off & (slot > 0), other=0)
        here = off & (held == number + 1)
        tl.store(used + slot, tl.zeros([CHUNK], tl.int32) + now, mask=here)
        new = (off & (held != number + 1)).to(tl.int32)
        tl.store(missed + misses + tl.cumsum(new, 0), number, mask=new > 0)
        hits += tl.sum(here.to(tl.int32), 0)
        tl.store(named + first + many, block - LATE, mask=new > 0)
        misses += tl.sum(new, 0)
    tl.store(missed, misses)
    tl.debug_barrier()
    early_slot = tl.load(slots + many, mask=many < room, other=0)
    early = (now - tl.load(used + early_slot, mask=many < room, other=0)).to(tl.uint32)
    early = tl.where(many < room, early, 0)
    least = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    while step > now.to(tl.uint32):  # no age has these bits
        step = step // 4
    count = room
    while (step > 0) & (count != misses) & (misses > 0):
        reached = reaches(early, least, step)
        for first in range(CHUNK, room, CHUNK):
            there = first + many < room
            slot = tl.load(slots + first + many, mask=there, other=0)
            age = now - tl.load(used + slot, mask=there, other=0)
            reached += reaches(tl.where(there, age, 0).to(tl.uint32), least, step)
        least, count = raised(tl.sum(reached, 0), least, step, count, misses)
        step = step // 4
    higher = (early > least).to(tl.int32)
    for first in range(CHUNK, room, CHUNK):
        there = first + many < room
        slot = tl.load(slots + first + many, mask=there, other=0)
        age = now - tl.load(used + slot, mask=there, other=0)
        higher += (tl.where(there, age, 0).to(tl.uint32) > least).to(tl.int32)
    above = tl.sum(higher, 0)
    tl.debug_barrier()
    done = 0
    alike = 0
    for first in range(0, tl.where(misses > 0, room, 0), CHUNK):
        there = first + many < room
        slot = tl.load(slots + first + many, mask=there, other=0)
        age = (now - tl.load(used + slot, mask=there, other=0)).to(tl.uint32)
        same = (there & (age == least)).to(tl.int32)
        taken = (there & (age > least)) | (
            (same > 0) & (alike + tl.cumsum(same, 0) <= misses - above)
        )
        into = done + tl.cumsum(taken.to(tl.int32), 0)
        number = tl.load(missed + into, mask=taken, other=0)
        tl.store(holds + slot, number + 1, mask=taken)
        tl.store(place + number, slot, mask=taken)
        tl.store(used + slot, tl.zeros([CHUNK], tl.int32) + now, mask=taken)
        done += tl.sum(taken.to(tl.int32), 0)
        alike += tl.sum(same, 0)
    tl.store(clock + tl.load(slots), now, mask=room > 0)
    tl.atomic_add(counts, hits.to(tl.int64), mask=room > 0)
    tl.atomic_add(counts + 1, misses.to(tl.int64), mask=room > 0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def combine_row(  # type: ignore[no-untyped-def]
    row, used, parts, lse, sinks, output, kv_heads, splits, output_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
    CHUNK: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Adds up the ``used`` of a row's ``splits`` by their weights, with ``SINKS`` each query head's
    sink, which has no value, and writes the sums to the token's ``output``. It takes ``CHUNK``
    splits at a time, from the first to the last, of all query heads: of ``HEADS``, a power of two,
    ``GROUP`` are real."""
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, WIDE)
    many = tl.arange(0, CHUNK)
    mine = row % kv_heads * GROUP + heads
    real = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    summed = tl.zeros([HEADS, WIDE], tl.float32)
    for first in range(0, used, CHUNK):
        there = (first + many < used)[:, None]
        at = (row * splits + first + many)[:, None] * GROUP + heads[None, :]
        weighs = tl.load(lse + at, mask=there & (heads < GROUP)[None, :], other=0.0)
        weighs = tl.where(there, weighs, float("-inf"))
        higher = tl.maximum(top, tl.max(weighs, 0))
        weights = tl.exp(weighs - higher[None, :])
        kept = tl.exp(top - higher)
        some = tl.load(
            parts + at[:, :, None] * DIM + dims[None, None, :],
            mask=there[:, :, None] & real[None, :, :],
            other=0.0,
        )
        summed = summed * kept[:, None] + tl.sum(some * weights[:, :, None], 0)
        total = total * kept + tl.sum(weights, 0)
        top = higher
    if SINKS:
        sink = tl.load(sinks + mine, mask=heads < GROUP, other=0.0).to(tl.float32)
        higher = tl.maximum(top, sink)
        kept = tl.exp(top - higher)
        summed = summed * kept[:, None]
        total = total * kept + tl.exp(sink - higher)
    into = output + mine[:, None] * output_head + dims[None, :]
    tl.store(into, (summed / total[:, None]).to(output.dtype.element_ty), mask=real)


@jit  # type: ignore[untyped-decorator,unused-ignore]
def digest_blocks(  # type: ignore[no-untyped-def]
    ids, keys, coded, floats, ids_at, ids_step,
    key_block, key_token, key_head, key_dim,
    coded_head, coded_block, coded_row, float_head, float_block, float_row,
    DIM: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
    BOUNDS: tl.constexpr,
):  # fmt: skip
    """Program ``(i, head)`` codes the digests of block ``ids[ids_at + i * ids_step]``, none if
    that is negative.

    ``BOUNDS``: a row has the largest and the smallest coordinates of its tokens, else their mean.
    """
    block = tl.load(ids + ids_at + tl.program_id(0) * ids_step).to(tl.int64)
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
    query, facts, blocks, names, coded, floats, left, logits, scores, table, slots, missed,
    place, state, counts, arrived,
    factor, kv_heads, width, most, most_slots, numbers, state_part, state_head,
    query_token, query_head, coded_head, coded_block, coded_row, float_head, float_block,
    GROUP: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    BOUNDS: tl.constexpr, RECALLS: tl.constexpr, CHUNK: tl.constexpr, SEARCH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program ``(row, part)`` finds the best digest of its share of the middle blocks, at least
    ``TILES`` times ``TILE`` of them, for each of the row's query heads: a logit for each. The row's
    last one then chooses by them (``choose_row``). With ``RECALLS``, digests of blocks off the
    device are in ``left``, in the strides of ``coded``.

    Queries are coded as digests are; whole numbers are multiplied and added without rounding.
    ``TILE * ROWS``, ``WIDE`` and ``PADDED`` are powers of two, at least 32, 32 and 16; of ``WIDE``
    coordinates ``DIM`` are real, of ``PADDED`` query heads ``GROUP``.
    """
    begin_overlapped(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    fact = facts + row // kv_heads * FACTS
    middle = tl.load(fact + MIDDLE)
    share = tl.maximum(tl.cdiv(middle, tl.num_programs(1) * TILE), TILES) * TILE
    begin = tl.program_id(1) * share
    wanted = tl.maximum(tl.cdiv(middle, share), 1)
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
    many = tl.arange(0, TILE * ROWS)
    each = tl.arange(0, TILE)
    for first in range(begin, tl.minimum(begin + share, middle), TILE):
        one = first + many // ROWS
        inside = one < middle
        block = middle_blocks(fact, blocks, names, one, inside, width, most_slots, RECALLS)
        block = block.to(tl.int64)
        at = coded + head * coded_head + (many % ROWS) * coded_row
        if RECALLS:
            further = (left.to(tl.int64) - coded.to(tl.int64)) // 16
            at += tl.where(block < 0, further, 0) * 16  # so the compiler sees that it is aligned
            block = tl.where(block < 0, -1 - block, block)
        at += block * coded_block
        k_here = inside[None, :] & (dims < DIM)[:, None]
        k = tl.load(at[None, :] + dims[:, None], mask=k_here, other=0)
        sums = tl.dot(positive, k, out_dtype=tl.int32)
        if BOUNDS:
            low = tl.load(at[None, :] + (DIM + dims)[:, None], mask=k_here, other=0)
            sums += tl.dot(negative, low, out_dtype=tl.int32)
        best = tl.max(tl.reshape(sums, [PADDED, TILE, ROWS]), 2)
        tile = first + each
        real = tile < middle
        which = middle_blocks(fact, blocks, names, tile, real, width, most_slots, RECALLS)
        which = which.to(tl.int64)
        scales = floats + head * float_head + scale_at
        if RECALLS:
            scales += tl.where(which < 0, (left.to(tl.int64) - coded.to(tl.int64)) // 4, 0)
            which = tl.where(which < 0, -1 - which, which)
        of_block = tl.load(scales + which * float_block, mask=real, other=0.0)
        out = best.to(tl.float32) * ((of_query * factor)[:, None] * of_block[None, :])
        out_at = (row * GROUP + heads)[:, None] * most + tile[None, :]
        tl.store(logits + out_at, out, mask=(heads < GROUP)[:, None] & real[None, :])
    if is_last(arrived, row, programs):
        choose_row(
            row, facts, blocks, names, logits, scores, table, slots, missed, place, state, counts,
            kv_heads, width, most, most_slots, numbers, state_part, state_head,
            GROUP, HEADS, CHUNK, SEARCH, RECALLS,
        )  # fmt: skip


@jit  # type: ignore[untyped-decorator,unused-ignore]
def fetch_blocks(  # type: ignore[no-untyped-def]
    facts, missed, place, addresses, page_at, cache,
    kv_heads, most, numbers, cache_block, cache_head, words, runs, step,
    LANES: tl.constexpr, RUNS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program ``(row, lane)`` copies each ``LANES``th piece of the row's missed blocks from host
    memory into their slots. The table is not touched: attention to the others reads it meanwhile.

    ``addresses``: of each number's record in host memory, in which the layer's page begins at byte
    ``page_at[0]``; ``cache``: the address of the layer's first block. A KV head's part of a page
    lies like that of a cache's block: ``runs`` runs of ``words`` words of four bytes, ``step``
    words apart; heads are ``cache_head``, blocks ``cache_block`` words apart. A piece are ``RUNS``
    runs by ``WORDS`` words.
    """
    row = tl.program_id(0).to(tl.int64)
    fact = facts + row // kv_heads * FACTS
    if tl.load(fact + SLOTS) == 0:
        return
    head = row % kv_heads
    mine = place + head * numbers
    lost = missed + row * (most + 1)
    across = tl.cdiv(words, WORDS)
    pieces = tl.cdiv(runs, RUNS) * across
    layer_at = tl.load(page_at)
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


@jit  # type: ignore[untyped-decorator,unused-ignore]
def attend_rows(  # type: ignore[no-untyped-def]
    query, facts, keys, values, table, parts, lse, sinks, output, arrived, names, pages, place,
    scale, softcap, value_scale,
    kv_heads, most, share, splits, most_slots, numbers, page_block,
    query_token, query_head,
    key_block, key_token, key_head, key_dim,
    value_block, value_token, value_head, value_dim, output_token, output_head,
    GROUP: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    SPLITS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, WHOLE: tl.constexpr,
    TURN: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program ``(row, split)`` attends the row's query heads to its blocks ``[split * share,
    + share)``; of rows that would have more than ``SPLITS`` splits, each has a larger share. The
    row's last one then adds all of them up (``combine_row``). A row without tokens gets zeros. With
    ``WHOLE`` the row attends to all blocks: ``table`` is the batch's, and those off the device are
    in ``pages``.

    ``TURN``: 0 if the table has no block off the device. Otherwise those are read in their slots,
    which ``place`` has. 1 takes the splits whose blocks are all there, while others are fetched, 2
    the rest, and 3 all of them. What a split finds does not depend on that.

    It takes ``TILE`` tokens at a time of a block's ``SIZE``. ``SIZE``, ``TILE``, ``WIDE`` and
    ``PADDED`` are powers of two, at least 16; of ``WIDE`` coordinates ``DIM`` are real, of
    ``PADDED`` query heads ``GROUP``. Numerically stable in one pass (online softmax), in float32.
    Eight-bit floats are multiplied as numbers of the output's type.
    """
    begin_overlapped(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    fact = facts + row // kv_heads * FACTS
    length = tl.load(fact + LENGTH)
    blocks = table + row * most
    if WHOLE:
        length += (tl.load(fact + MIDDLE) - tl.load(fact + CHOSEN)) * SIZE
        blocks = table + tl.load(fact + ROW).to(tl.int64) * most
        init = tl.load(fact + INIT)
        left = tl.load(fact + LEFT)
        copies = names + tl.load(fact + HELD).to(tl.int64) * most_slots
        further = (pages.to(tl.int64) - keys.to(tl.int64)) // 16  # as aligned as both are
        further = further * (128 // keys.dtype.element_ty.primitive_bitwidth)
    share = tl.maximum(share, tl.cdiv(length, SIZE * SPLITS))
    first = tl.program_id(1) * share * SIZE
    head = row % kv_heads
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, WIDE)
    real = (heads < GROUP)[:, None] & (dims < DIM)[None, :]
    token = tl.load(fact + TOKEN).to(tl.int64)
    if first >= length:
        if tl.program_id(1) + length == 0:
            none = output + token * output_token + (head * GROUP + heads)[:, None] * output_head
            nothing = tl.zeros([PADDED, WIDE], tl.float32).to(output.dtype.element_ty)
            if TURN != 2:
                tl.store(none + dims[None, :], nothing, mask=real)
        return
    if TURN > 0:
        places = place + head * numbers
    if (TURN == 1) | (TURN == 2):
        named = blocks + first // SIZE
        here = tl.minimum(share, tl.cdiv(length - first, SIZE))
        many = tl.arange(0, SPLITS)
        least = 0
        for at in range(0, here, SPLITS):
            some = tl.load(named + at + many, mask=at + many < here, other=0)
            least = tl.minimum(least, tl.min(some, 0))
        if (least < -LATE) != (TURN == 2):
            return
    tile = tl.arange(0, TILE)
    from_query = query + token * query_token
    q_at = (head * GROUP + heads)[:, None] * query_head + dims[None, :]
    q = tl.load(from_query + q_at, mask=real, other=0.0).to(output.dtype.element_ty)
    end = tl.minimum(first + share * SIZE, length)
    top = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    summed = tl.zeros([PADDED, WIDE], tl.float32)
    for begin in range(first, end, TILE):
        block = tl.load(blocks + begin // SIZE).to(tl.int64)
        if TURN > 0:
            slot = tl.load(places + ((-1 - block) & (LATE - 1)), mask=block < 0, other=0)
            block = tl.where(block < 0, slot.to(tl.int64), block)
        key_at = block * key_block
        value_at = block * value_block
        if WHOLE:
            gone = begin // SIZE - init
            off = (gone >= 0) & (gone < left)
            copy = tl.load(copies + gone, mask=off, other=0).to(tl.int64) * page_block + further
            key_at = tl.where(off, copy, key_at)
            value_at = tl.where(off, copy, value_at)
        tokens = begin % SIZE + tile
        there = begin + tile < length
        k_at = key_at + tokens[None, :] * key_token + head * key_head
        k_there = there[None, :] & (dims < DIM)[:, None]
        k = tl.load(keys + k_at + dims[:, None] * key_dim, mask=k_there, other=0.0).to(q.dtype)
        logits = tl.dot(q, k, input_precision="ieee").to(tl.float32) * scale
        if CAPPED:
            logits = softcap * (2.0 / (1.0 + tl.exp(-2.0 * logits / softcap)) - 1.0)
        logits = tl.where(there[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp(logits - higher[:, None])
        kept = tl.exp(top - higher)
        v_at = value_at + tokens[:, None] * value_token + head * value_head
        v_there = there[:, None] & (dims < DIM)[None, :]
        v = tl.load(values + v_at + dims[None, :] * value_dim, mask=v_there, other=0.0).to(q.dtype)
        summed = summed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee").to(
            tl.float32
        )
        total = total * kept + tl.sum(weights, 1)
        top = higher
    out = (row * splits + tl.program_id(1)) * GROUP + heads
    tl.store(
        parts + out[:, None] * DIM + dims[None, :], summed / total[:, None] * value_scale, mask=real
    )
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
