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

_FIELDS = (
    "heads", "group", "dim", "parts", "blocks", "count", "few", "first", "fine", "at_once",
    "chunks", "segments", "row_bytes", "room", "sums_at", "packed_at", "found", "logits",
    "counters", "scratch", "ids", "ends", "layer", "table", "table_row", "pack", "dots", "query",
    "halved",
)  # fmt: skip

WORK = np.dtype([*((name, np.int64) for name in _FIELDS), ("scale", np.float32)], align=True)
"""A search. ``blocks``: of the sequence, in ``segments`` of digests that end at ``ends``;
``ids``: their numbers there. ``first``, ``fine``: rows of a block that are read first, and those
that are then read of the ``few`` best blocks only. ``counters``, on lines of their own: the next
thread, the next head, and of each head the chunks of ``at_once`` blocks that are not done, and
behind them the next one.
``room``: bytes of ``scratch`` for a thread; ``sums_at``, ``packed_at``: in it. ``table``: where the
names of a head's blocks are written, ``number * heads + head``, int32, in rows that are
``table_row`` bytes apart; 0: nowhere. ``pack``, ``dots``: NumKong's functions. ``query``: its
address; ``halved``: whether it is of 16 bits (bfloat16). ``layer``, int64 ``[4, 1 + segments]``:
bytes from block to block, of rows that are read first and of fine ones (first column of the last
two rows); then of each segment where the former begin, bytes from head to head, and the same of the
latter."""

_AHEAD = 1
"""Blocks that are asked of memory in advance."""

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


_call5, _call8 = _calls(5), _calls(8)


@intrinsic
def _float_of(typing: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@njit
def _code(work: Any, head: int, point: Any, scales: Any) -> None:
    """Codes a head's queries, as ``selection.CodedQuery`` does, and packs them."""
    dim = work.dim
    query = np.empty((work.group, dim), np.float32)
    first = head * work.group * dim
    if work.halved:
        halves = carray(_pointer(work.query + first * 2), (work.group, dim), np.uint16)
        for row in range(work.group):
            for at in range(dim):
                query[row, at] = _float_of(np.int64(halves[row, at]) << 16)
    else:
        query[:] = carray(_pointer(work.query + first * 4), (work.group, dim), np.float32)
    for row in range(work.group):
        most = np.float32(0)
        for at in range(dim):
            most = max(most, abs(query[row, at]))
        scale = max(most / np.float32(127), np.float32(1.1754943508222875e-38))
        scales[row] = scale * np.float32(work.scale)
        for at in range(dim):
            code = np.int8(np.rint(query[row, at] / scale))
            if work.parts == 1:
                point[row, at] = code
            else:  # of maxima and minima: the positive coordinates, and the negative ones
                point[row, at] = max(code, np.int8(0))
                point[row, dim + at] = min(code, np.int8(0))


@njit
def _score(
    work: Any, place: tuple[int, int, int], blocks: int, packed: int, sums: Any, scales: Any,
    logits: Any, at: int,
) -> None:  # fmt: skip
    """Writes the scores of blocks that lie side by side to ``logits`` ``[group, blocks]`` from
    ``at`` on. ``place``: where they begin, the bytes from one to the next, and the rows of each."""
    begin, block_bytes, rows = place
    group, row_bytes = work.group, work.row_bytes
    for block in range(blocks):
        at_rows, nbytes = begin + block * block_bytes, rows * row_bytes
        if block + _AHEAD < blocks:
            for line in range(_AHEAD * block_bytes, _AHEAD * block_bytes + nbytes, 8 * LINE):
                _prefetch(at_rows + line)
        told = at_rows, packed, sums.ctypes.data + block * rows * group * 4
        _call8(work.dots, (*told, rows, group, row_bytes - 4, row_bytes, group * 4))
    for block in range(blocks):
        scale = carray(_pointer(begin + block * block_bytes + row_bytes - 4), 1, np.float32)[0]
        best, left = sums[block * rows * group :], rows
        while left > 1:  # the larger ones of two halves
            half = (left + 1) // 2
            for one in range((left - half) * group):
                best[one] = max(best[one], best[one + half * group])
            left = half
        for one in range(group):
            logits[one, at + block] = np.float32(best[one]) * (scales[one] * scale)


@njit
def _score_first(work: Any, head: int, chunk: int, room: Any) -> None:
    """Scores a chunk of a head's blocks by the rows that are read first."""
    packed, sums, scales = room
    ids = carray(_pointer(work.ids), work.blocks, np.int64)
    ends = carray(_pointer(work.ends), work.segments, np.int64)
    layer = _layer(work)
    logits = _logits(work, head)
    at, end = chunk * work.at_once, min(work.blocks, (chunk + 1) * work.at_once)
    while at < end:
        segment = 1
        while ends[segment - 1] <= at:
            segment += 1
        until, most = at + 1, min(end, ends[segment - 1])
        while until < most and ids[until] == ids[until - 1] + 1:
            until += 1
        begin = layer[0, segment] + head * layer[1, segment] + ids[at] * layer[2, 0]
        place = begin, layer[2, 0], work.first
        _score(work, place, until - at, packed, sums, scales, logits, at)
        at = until


@njit
def _score_fine(work: Any, head: int, near: Any, fine: Any, room: Any) -> None:
    """Scores the blocks ``near`` by their fine rows: ``fine`` ``[group, few]``."""
    packed, sums, scales = room
    ids = carray(_pointer(work.ids), work.blocks, np.int64)
    ends = carray(_pointer(work.ends), work.segments, np.int64)
    layer = _layer(work)
    segment = 1
    for at in range(len(near)):
        while ends[segment - 1] <= near[at]:
            segment += 1
        begin = layer[2, segment] + head * layer[3, segment] + ids[near[at]] * layer[3, 0]
        _score(work, (begin, 0, work.fine), 1, packed, sums, scales, fine, at)


@njit
def _layer(work: Any) -> Any:
    return carray(_pointer(work.layer), (4, 1 + work.segments), np.int64)


@njit
def _logits(work: Any, head: int) -> Any:
    size = work.group * work.blocks
    address = work.logits + head * size * 4
    return carray(_pointer(address), (work.group, work.blocks), np.float32)


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
def _choose(work: Any, head: int, room: Any) -> None:
    """Chooses a head's blocks, all of which have been scored."""
    found = carray(_pointer(work.found + head * work.count * 8), work.count, np.int64)
    logits = _logits(work, head)
    weights = np.empty(work.blocks, np.float32)
    _weigh(logits, weights)
    if not work.few:
        _take_best(weights, work.count, found)
    else:
        near, fine = np.empty(work.few, np.int64), np.empty((work.group, work.few), np.float32)
        _take_best(weights, work.few, near)
        _score_fine(work, head, near, fine, room)
        _weigh(fine, weights[: work.few])
        _take_best(weights[: work.few], work.count, found)
        for at in range(work.count):
            found[at] = near[found[at]]
    if work.table:
        ids = carray(_pointer(work.ids), work.blocks, np.int64)
        row = carray(_pointer(work.table + head * work.table_row), work.count, np.int32)
        for at in range(work.count):
            row[at] = ids[found[at]] * work.heads + head


@njit
def _search(work: Any, head: int, point: Any, room: Any) -> None:
    """Scores chunks of a head's blocks, while there are any; whoever does the last one chooses
    among the blocks."""
    packed, _, scales = room
    counters, width = work.counters + 8 * LINE * (2 + head), work.row_bytes - 4
    chunk = _add(counters + 8, 1)
    if chunk < work.chunks:
        _code(work, head, point, scales)
        _call5(work.pack, (point.ctypes.data, work.group, width, width, packed))
    while chunk < work.chunks:
        _score_first(work, head, chunk, room)
        if _add(counters, -1) == 1:
            _choose(work, head, room)
        chunk = _add(counters + 8, 1)


@njit
def _share(address: int) -> None:
    """What one thread does: heads that no other has begun, so that threads choose at the same time,
    and each head is coded by one of them; then what is left of the others."""
    work = carray(_pointer(address), 1, WORK)[0]
    thread = _add(work.counters, 1)
    scratch = work.scratch + thread * work.room
    point = carray(_pointer(scratch), (work.group, work.row_bytes - 4), np.int8)
    scales = np.empty(work.group, np.float32)
    sums = carray(_pointer(scratch + work.sums_at), work.packed_at - work.sums_at, np.int32)
    room = scratch + work.packed_at, sums, scales
    head = _add(work.counters + 8 * LINE, 1)
    while head < work.heads:
        _search(work, head, point, room)
        head = _add(work.counters + 8 * LINE, 1)
    for other in range(work.heads):
        _search(work, (thread + other) % work.heads, point, room)


def _compiled() -> Any:
    """``_share``, for OpenMP to call in each of its threads."""
    kind = types.void(types.int64)
    try:
        return cfunc(kind, cache=True)(_share.py_func)
    except RuntimeError:  # no folder for numba's cache can be written
        return cfunc(kind)(_share.py_func)


share = _compiled()
