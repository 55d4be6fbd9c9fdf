"""What the last program of a row does for it, when it has seen that the others are done.

Parts of the kernels of ``triton_kernels.py``, which says what a row and its facts are.
"""

from __future__ import annotations

import triton
import triton.language as tl

FACTS = tl.constexpr(8)
TOKEN = tl.constexpr(0)
INIT = tl.constexpr(1)
MIDDLE = tl.constexpr(2)
CHOSEN = tl.constexpr(3)
BLOCKS = tl.constexpr(4)
LENGTH = tl.constexpr(5)
SLOTS = tl.constexpr(6)


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
def choose_row(  # type: ignore[no-untyped-def]
    row, facts, blocks, logits, scores, table, slots, missed, place, state, counts,
    kv_heads, width, candidates, attended, most_slots, numbers, state_part, state_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, SEARCH: tl.constexpr,
    RECALLS: tl.constexpr,
):  # fmt: skip
    """Writes a row's table by its logits: the ids of its first blocks, of the best of its middle
    ones, and of its last ones, all in the sequence's order. With ``RECALLS`` it then admits those
    that are off the device to the sequence's slots. Of ``HEADS`` query heads, a power of two,
    ``GROUP`` are real.

    Each query head's logits are made a distribution, and those of the group are added up. The
    bits of positive numbers of single precision are in their order, so the least score that is
    chosen is found bit by bit. Of blocks of that very score the first ones are chosen. The bits of
    the first ``SEARCH`` blocks are kept in registers meanwhile.
    """
    fact = facts + row // kv_heads * FACTS
    init = tl.load(fact + INIT)
    middle = tl.load(fact + MIDDLE)
    chosen = tl.load(fact + CHOSEN)
    named = blocks + row // kv_heads * width
    into = table + row * attended
    mine = scores + row * candidates
    heads = tl.arange(0, HEADS)
    many = tl.arange(0, CHUNK)
    from_logits = logits + (row * GROUP + heads)[:, None] * candidates + many[None, :]
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
    early = tl.load(mine + every, mask=every < middle, other=0.0).to(tl.int32, bitcast=True)
    early = tl.where(every < middle, early, -1)
    least = 0
    half = 1 << 30
    for _ in range(31):
        higher = least | half
        half = half // 2
        count = tl.sum((early >= higher).to(tl.int32), 0)
        for first in range(SEARCH, middle, SEARCH):
            there = first + every < middle
            bits = tl.load(mine + first + every, mask=there, other=0.0).to(tl.int32, bitcast=True)
            count += tl.sum((there & (bits >= higher)).to(tl.int32), 0)
        least = tl.where(count >= chosen, higher, least)
    above = tl.sum((early > least).to(tl.int32), 0)
    for first in range(SEARCH, middle, SEARCH):
        there = first + every < middle
        bits = tl.load(mine + first + every, mask=there, other=0.0).to(tl.int32, bitcast=True)
        above += tl.sum((there & (bits > least)).to(tl.int32), 0)
    done = 0
    alike = 0
    for first in range(0, middle, CHUNK):
        there = first + many < middle
        bits = tl.load(mine + first + many, mask=there, other=0.0).to(tl.int32, bitcast=True)
        same = (there & (bits == least)).to(tl.int32)
        taken = (there & (bits > least)) | (
            (same > 0) & (alike + tl.cumsum(same, 0) <= chosen - above)
        )
        rank = done + tl.cumsum(taken.to(tl.int32), 0) - 1
        block = tl.load(named + init + first + many, mask=taken, other=0)
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
        sequence, head = row // kv_heads, row % kv_heads
        holds = state + head * state_head
        admit_blocks(
            into + init, chosen, slots + sequence * most_slots, tl.load(fact + SLOTS),
            missed + row * (most_slots + 1), place + head * numbers,
            holds, holds + state_part, holds + 2 * state_part, counts, CHUNK,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def admit_blocks(  # type: ignore[no-untyped-def]
    named, chosen, slots, room, missed, place, holds, used, clock, counts, CHUNK: tl.constexpr
):  # fmt: skip
    """Gives a row's chosen blocks that are off the device a slot each, of its ``room``: part of
    ``choose_row``. The longest unused slots are taken, of equal ones the first.

    Writes to ``missed`` how many blocks lie in none yet, and their numbers. Adds to ``counts`` how
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
        misses += tl.sum(new, 0)
    tl.store(missed, misses)
    tl.debug_barrier()
    early_slot = tl.load(slots + many, mask=many < room, other=0)
    early = now - tl.load(used + early_slot, mask=many < room, other=0)
    early = tl.where(many < room, early, -1)
    least = 0
    half = 1 << 30
    for _ in range(tl.where(misses > 0, 31, 0)):
        higher = least | half
        half = half // 2
        count = tl.sum((early >= higher).to(tl.int32), 0)
        for first in range(CHUNK, room, CHUNK):
            there = first + many < room
            slot = tl.load(slots + first + many, mask=there, other=0)
            age = now - tl.load(used + slot, mask=there, other=0)
            count += tl.sum((there & (age >= higher)).to(tl.int32), 0)
        least = tl.where(count >= misses, higher, least)
    above = tl.sum((early > least).to(tl.int32), 0)
    for first in range(CHUNK, room, CHUNK):
        there = first + many < room
        slot = tl.load(slots + first + many, mask=there, other=0)
        age = now - tl.load(used + slot, mask=there, other=0)
        above += tl.sum((there & (age > least)).to(tl.int32), 0)
    tl.debug_barrier()
    done = 0
    alike = 0
    for first in range(0, tl.where(misses > 0, room, 0), CHUNK):
        there = first + many < room
        slot = tl.load(slots + first + many, mask=there, other=0)
        age = now - tl.load(used + slot, mask=there, other=0)
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
