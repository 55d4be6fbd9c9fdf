"""The compiled part of ``search.py``: what every thread of a search runs. Needs numba.

Sums of products are whole numbers, and every other operation on a block's score is one that
``selection.best_products`` does in the same order, so scores are equal to those to the bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_SEARCH = (
    "sequences", "heads", "group", "dim", "parts", "first", "fine", "row_bytes", "scratch_bytes",
    "point_at", "sums_at", "packed_at", "scales_at", "weights_at", "near_at", "fine_at", "counters",
    "scratch", "threads", "pack", "dots", "fork", "share", "sought", "block_bytes", "head_bytes",
    "unit", "query", "query_row", "halved", "layers", "layer_step",
)  # fmt: skip

_SOUGHT = (
    "token", "blocks", "count", "few", "at_once", "chunks", "segments", "found", "logits", "ids",
    "ends", "table", "table_row", "left", "nears",
)  # fmt: skip


def _record(*names: str) -> Any:
    return np.dtype([(name, np.int64) for name in names])


SEARCH = np.dtype([*_record(*_SEARCH).descr, ("scale", np.float32)], align=True)
"""A search of ``sequences``, each of which has ``heads`` of its own to search, with ``sought``
records of them. ``first``, ``fine``: rows of a block that are read first, and those that are then
read of the best blocks only. ``counters``, on lines of their own: the next thread, the next head of
all sequences', and of each of those the chunks that are not done, and behind them the next one.
``scratch_bytes``: of ``scratch``, for a thread; ``.._at``: in it. ``pack``, ``dots``: NumKong's
functions; ``fork``: OpenMP's, ``share``: what it calls in each of ``threads``. ``block_bytes``,
``head_bytes``: of the KV cache, from block to block and from head to head; ``unit``: bytes.

What differs from layer to layer: ``query``: its address; ``query_row``: bytes from token to token;
``halved``: whether it is of 16 bits (bfloat16); ``layers``: addresses of each sequence's ``layer``,
``layer_step`` bytes apart (0: the same for all)."""

SOUGHT = _record(*_SOUGHT)
"""What is sought in a sequence. ``token``: which of the batch asks; ``blocks``: of the sequence, in
``segments`` of digests that end at ``ends``; ``ids``: their numbers there. ``few``: the best ones,
whose fine rows are read; 0: all rows are read first. ``at_once``: blocks of a chunk. ``table``:
where a head's blocks are written, int32, in rows that are ``table_row`` bytes apart; 0: nowhere.
They are named by their distance from the start of the KV cache, in units. ``left``: blocks that are
off the device, the first ones; ``nears``: where each head's number of such blocks among the chosen
ones is written.

Its ``layer``, int64 ``[4, 1 + segments]``: bytes from block to block, of rows that are read first
and of fine ones (first column of the last two rows); then of each segment where the former begin,
bytes from head to head, and the same of the latter. The first number is the address of the
distances of the ``left`` blocks from the start of the KV cache, in bytes."""

_LEAST_SCORE = np.float32(-1e38)

_AT_ONCE = 16
"""Blocks side by side that one call multiplies, while as many are asked of memory in advance."""

LINE = 8
"""Numbers of 64 bits in a cache line."""


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _add(typing: Any, address: Any, value: Any) -> Any:
    """Adds to the number at the address, as one step for all threads; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", place, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Has the line at the address read into the caches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        name = "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _calls(count: int) -> Any:
    """A call of the C function at an address with so many numbers of 64 bits, without a result."""

    @intrinsic
    def call(typing: Any, address: Any, numbers: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = ir.IntType(64)
            kind = ir.FunctionType(ir.VoidType(), [word] * count)
            given = cgutils.unpack_tuple(builder, args[1], count)
            builder.call(builder.inttoptr(args[0], kind.as_pointer()), given)
            return context.get_dummy_value()

        return types.void(types.int64, types.UniTuple(types.int64, count)), generate

    return call


_call1, _call4, _call5, _call8 = map(_calls, (1, 4, 5, 8))


@intrinsic
def _float_of(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@njit
def _code(work: Any, sought: Any, head: int, scratch: int) -> None:
    """Codes a head's queries, as ``selection.code_query`` does, and packs them."""
    dim, width, size = work.dim, work.row_bytes - 4, (work.group, work.dim)
    point = carray(_pointer(scratch + work.point_at), (work.group, width), np.int8)
    scales = carray(_pointer(scratch + work.scales_at), work.group, np.float32)
    query = carray(_pointer(scratch + work.sums_at), size, np.float32)
    begin = work.query + sought.token * work.query_row
    first = head * work.group * dim
    if work.halved:
        halves = carray(_pointer(begin + first * 2), size, np.uint16)
        for row in range(work.group):
            for at in range(dim):
                query[row, at] = _float_of(np.int64(halves[row, at]) << 16)
    else:
        query[:] = carray(_pointer(begin + first * 4), size, np.float32)
    for row in range(work.group):
        most = np.float32(0)
        for at in range(dim):
            most = max(most, abs(query[row, at]))
        scale = max(most / np.float32(127), np.float32(1.1754943508222875e-38))
        if not scale < np.float32(np.inf):
            query[row] = 0  # of a model that has overflowed: there is nothing to compare
        scales[row] = scale * np.float32(work.scale)
        for at in range(dim):
            code = np.int8(np.rint(query[row, at] / scale))
            if work.parts == 1:
                point[row, at] = code
            else:  # of maxima and minima: the positive coordinates, and the negative ones
                point[row, at] = max(code, np.int8(0))
                point[row, dim + at] = min(code, np.int8(0))
    _call5(work.pack, (point.ctypes.data, work.group, width, width, scratch + work.packed_at))


@njit
def _score(
    work: Any, place: tuple[int, int, int], blocks: int, scratch: int, logits: Any, at: int
) -> None:
    """Writes the scores of blocks that lie side by side to ``logits`` ``[group, blocks]`` from
    ``at`` on. ``place``: where they begin, the bytes from one to the next, and the rows of each."""
    begin, block_bytes, rows = place
    group, row_bytes = work.group, work.row_bytes
    sums = carray(_pointer(scratch + work.sums_at), blocks * rows * group, np.int32)
    scales = carray(_pointer(scratch + work.scales_at), group, np.float32)
    at_once = _AT_ONCE if block_bytes == rows * row_bytes else 1
    for block in range(0, blocks, at_once):
        at_rows, some = begin + block * block_bytes, min(at_once, blocks - block)
        ahead = min(at_once, blocks - block - some) * block_bytes
        for line in range(some * block_bytes, some * block_bytes + ahead, 8 * LINE):
            _prefetch(at_rows + line)
        args = at_rows, scratch + work.packed_at, sums.ctypes.data + block * rows * group * 4
        _call8(work.dots, (*args, some * rows, group, row_bytes - 4, row_bytes, group * 4))
    for block in range(blocks):
        scale = carray(_pointer(begin + block * block_bytes + row_bytes - 4), 1, np.float32)[0]
        best, left = sums[block * rows * group :], rows
        while left > 1:  # the larger ones of two halves
            half = (left + 1) // 2
            for one in range((left - half) * group):
                best[one] = max(best[one], best[one + half * group])
            left = half
        for one in range(group):
            score = np.float32(best[one]) * (scales[one] * scale)
            # A model that overflows has infinite scores, and none (NaN), which `_weigh` cannot
            # compare: no block may be named that is none of the sequence's.
            score = score if score > _LEAST_SCORE else _LEAST_SCORE
            logits[one, at + block] = score if score < -_LEAST_SCORE else -_LEAST_SCORE


@njit
def _score_first(work: Any, sought: Any, layer: Any, head: int, chunk: int, scratch: int) -> None:
    """Scores a chunk of a head's blocks by the rows that are read first."""
    ids = carray(_pointer(sought.ids), sought.blocks, np.int64)
    ends = carray(_pointer(sought.ends), sought.segments, np.int64)
    logits = _logits(work, sought, head)
    at, end = chunk * sought.at_once, min(sought.blocks, (chunk + 1) * sought.at_once)
    while at < end:
        segment = 1
        while ends[segment - 1] <= at:
            segment += 1
        until, most = at + 1, min(end, ends[segment - 1])
        while until < most and ids[until] == ids[until - 1] + 1:
            until += 1
        begin = layer[0, segment] + head * layer[1, segment] + ids[at] * layer[2, 0]
        place = begin, layer[2, 0], work.first
        _score(work, place, until - at, scratch, logits, at)
        at = until


@njit
def _score_fine(
    work: Any, sought: Any, layer: Any, head: int, near: Any, fine: Any, scratch: int
) -> None:
    """Scores the blocks ``near`` by their fine rows: ``fine`` ``[group, few]``."""
    ids = carray(_pointer(sought.ids), sought.blocks, np.int64)
    ends = carray(_pointer(sought.ends), sought.segments, np.int64)
    segment = 1
    for at in range(len(near)):
        while ends[segment - 1] <= near[at]:
            segment += 1
        begin = layer[2, segment] + head * layer[3, segment] + ids[near[at]] * layer[3, 0]
        _score(work, (begin, 0, work.fine), 1, scratch, fine, at)


@njit
def _logits(work: Any, sought: Any, head: int) -> Any:
    size = work.group * sought.blocks
    address = sought.logits + head * size * 4
    return carray(_pointer(address), (work.group, sought.blocks), np.float32)


@njit(fastmath={"reassoc", "contract", "nnan", "nsz"})
def _weigh(logits: Any, weights: Any) -> None:
    """The mean of the rows' distributions: ``[group, blocks]`` -> ``[blocks]``. Overwrites
    ``logits``."""
    group, blocks = logits.shape
    for at in range(blocks):
        weights[at] = 0
    for one in range(group):
        row = logits[one]
        most, total = row[0], np.float32(0)
        for at in range(blocks):
            most = max(most, row[at])
        for at in range(blocks):
            row[at] = _exp(row[at] - most)
            total += row[at]
        share = np.float32(1) / total
        for at in range(blocks):
            weights[at] += row[at] * share


_LEAST_EXP, _LOG2E = np.float32(-87), np.float32(1.44269504088896341)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_P0, _P1, _P2, _P3, _P4, _P5 = map(
    np.float32,
    (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5),
)


@njit
def _exp(x: Any) -> Any:
    """Of a number of -87 to 0, or of less -87's, to two units in the last place (Cephes' expf), in
    operations of which a processor does many at once."""
    x = max(x, _LEAST_EXP)
    whole = np.rint(x * _LOG2E)
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    power = ((((_P0 * rest + _P1) * rest + _P2) * rest + _P3) * rest + _P4) * rest + _P5
    near = power * (rest * rest) + (rest + np.float32(1))
    return near * _float_of((np.int32(whole) + np.int32(127)) << np.int32(23))


@njit
def _take_best(weights: Any, count: int, taken: Any) -> None:
    """Writes the places of the ``count`` largest weights, none of which is negative, in their
    order; of equal ones the first. Finds the least of them by its bits, eight at a time."""
    bits = weights.view(np.uint32)
    least, known, wanted = np.uint32(0), np.uint32(0), count
    counts = np.empty(256, np.int64)
    for shift in (24, 16, 8, 0):
        counts[:] = 0
        for value in bits:
            if value & known == least:
                counts[(value >> np.uint32(shift)) & np.uint32(255)] += 1
        digit = 255
        while counts[digit] < wanted:
            wanted -= counts[digit]
            digit -= 1
        least |= np.uint32(digit) << np.uint32(shift)
        known |= np.uint32(255) << np.uint32(shift)
    at = 0
    for place in range(len(bits)):
        if bits[place] > least or (bits[place] == least and wanted > 0):
            wanted -= bits[place] == least
            taken[at] = place
            at += 1


@njit
def _choose(work: Any, sought: Any, layer: Any, head: int, scratch: int) -> None:
    """Chooses a head's blocks, all of which have been scored."""
    found = carray(_pointer(sought.found + head * sought.count * 8), sought.count, np.int64)
    weights = carray(_pointer(scratch + work.weights_at), sought.blocks, np.float32)
    _weigh(_logits(work, sought, head), weights)
    if not sought.few:
        _take_best(weights, sought.count, found)
    else:
        near = carray(_pointer(scratch + work.near_at), sought.few, np.int64)
        fine = carray(_pointer(scratch + work.fine_at), (work.group, sought.few), np.float32)
        _take_best(weights, sought.few, near)
        _score_fine(work, sought, layer, head, near, fine, scratch)
        _weigh(fine, weights[: sought.few])
        _take_best(weights[: sought.few], sought.count, found)
        for at in range(sought.count):
            found[at] = near[found[at]]
    if not sought.table:
        return
    ids = carray(_pointer(sought.ids), sought.blocks, np.int64)
    names = carray(_pointer(sought.table + head * sought.table_row), sought.count, np.int32)
    away, nears = carray(_pointer(layer[0, 0]), sought.left, np.int64), 0
    for at in range(sought.count):
        place = found[at]
        begin = away[place] if place < sought.left else ids[place] * work.block_bytes
        names[at] = (begin + head * work.head_bytes) // work.unit
        nears += place < sought.left
    carray(_pointer(sought.nears), work.heads, np.int64)[head] = nears


@njit
def _search(work: Any, unit: int, scratch: int) -> None:
    """Scores chunks of a head's blocks, while there are any; the thread that does the last one
    chooses among the blocks. ``unit``: the head, counted over all sequences."""
    sequence, head = unit // work.heads, unit % work.heads
    sought = carray(_pointer(work.sought), work.sequences, SOUGHT)[sequence]
    counters = work.counters + 8 * LINE * (2 + unit)
    chunk = _add(counters + 8, 1)
    if chunk >= sought.chunks:
        return
    at = work.layers + sequence * work.layer_step
    layer = carray(_pointer(at), 1, np.int64)[0]
    rows = carray(_pointer(layer), (4, 1 + sought.segments), np.int64)
    _code(work, sought, head, scratch)
    while chunk < sought.chunks:
        _score_first(work, sought, rows, head, chunk, scratch)
        if _add(counters, -1) == 1:
            _choose(work, sought, rows, head, scratch)
        chunk = _add(counters + 8, 1)


@njit
def _share(address: int) -> None:
    """What one thread does: heads that no other has begun, so that threads choose at the same time,
    and each head is coded by one of them; then what is left of the others."""
    work = carray(_pointer(address), 1, SEARCH)[0]
    thread = _add(work.counters, 1)
    scratch, units = work.scratch + thread * work.scratch_bytes, work.sequences * work.heads
    unit = _add(work.counters + 8 * LINE, 1)
    while unit < units:
        _search(work, unit, scratch)
        unit = _add(work.counters + 8 * LINE, 1)
    for other in range(units):
        _search(work, units - 1 - (thread + other) % units, scratch)


def _start(address: int, query: int, layers: int, layer_step: int, scale: float) -> None:
    """Searches, on OpenMP's threads, until that is done."""
    work = carray(_pointer(address), 1, SEARCH)[0]
    work.query, work.layers, work.layer_step, work.scale = query, layers, layer_step, scale
    sought = carray(_pointer(work.sought), work.sequences, SOUGHT)
    units = work.sequences * work.heads
    counters = carray(_pointer(work.counters), (2 + units, LINE), np.int64)
    counters[0, 0] = counters[1, 0] = 0
    for unit in range(units):
        counters[2 + unit, 0], counters[2 + unit, 1] = sought[unit // work.heads].chunks, 0
    if work.threads == 1:
        _call1(work.share, (address,))
    else:
        _call4(work.fork, (work.share, address, work.threads, 0))


_SHARE = types.void(types.int64)
_START = types.void(types.int64, types.int64, types.int64, types.int64, types.float64)


def _compiled(cache: bool) -> tuple[Any, Any]:
    shared = cfunc(_SHARE, cache=cache)(_share.py_func)
    return shared, njit(cache=cache, nogil=True)(_start).compile(_START)


try:
    share, start = _compiled(cache=True)
except RuntimeError:  # no folder for numba's cache can be written
    share, start = _compiled(cache=False)
"""``share``: ``_share``, for OpenMP to call in each of its threads. ``start``: ``_start`` for
Python's numbers, without numba's choice by their types, which takes 6 us where caches are empty."""
