"""Launches the Triton kernels: digests, the choice of blocks and sparse attention over them, and
copies of many pieces; and what a step and a layer keep on the device for them. Each function says
how many launches it makes; none waits for the device.

They run in Triton's interpreter (test_kernels.py), and have run on an H200:
docs/gpu-check.md. Triton is imported on the first call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.errors import EngineError

Ints = npt.NDArray[np.int64]

_TOKENS_A_PROGRAM = 256
"""At 32K tokens faster on an H200 than 512, and as fast from 128K on (archive/log.md)."""
_MOST_SPLITS = 64
"""Programs of a row that attend. One of them adds up what all have found, a few at a time."""
_TOKENS_AT_ONCE = 64
ROWS_AT_ONCE = 32
"""64 were slower on an H200, and more than these do not fit a multiprocessor's registers
(archive/log.md)."""
_TILES_A_PROGRAM = 4
"""One after the other: faster on an H200 than a program for each (archive/log.md)."""
_PROGRAMS = 1024
_FEWEST_PARTS = 8
"""Programs that score a step's blocks, and of a row at least. Where they are few they take more
tiles each; of a graph most have nothing to do, and each takes time to end."""
_BLOCKS_AT_ONCE = 1024
_LOGITS_AT_ONCE = 8192
"""Of a row's blocks and query heads. More do not fit a program's registers."""
SEARCHED = 1
"""Times as many blocks have their scores in registers while the least chosen one is found: more
were slower on an H200 (archive/log.md)."""
_PARTS_AT_ONCE = 64
"""Splits of query heads that a program adds up at once. More take registers from attention."""
_WORD = 4
_WORDS_AT_ONCE = 1024
_LANES = 16
"""Programs that fetch a row's blocks: eight rows of pieces of 4 KiB are half a MiB on their way,
five times what a bus of 55 GB/s has under way in 2 microseconds."""

LATE = 1 << 30
"""Greater than every number of a block off the device. A table adds it to the numbers of those that
are in no slot yet."""

OVERLAPS = False
"""Whether programs of the next kernel begin while the last ones of a kernel end (programmatic
dependent launch, of NVIDIA's GPUs from capability 9.0 on). Not yet timed."""

_ALIGNED = 16
_MOST_COMPILED = 4096
_compiled: dict[tuple[Any, ...] | None, tuple[Any, tuple[Any, ...]]] = {}
"""Compiled kernels and their constants, by ``alike_of``."""


class SequenceFacts(NamedTuple):
    """One sequence of a step. ``token``: its place in the batch. Of its ``blocks`` it attends to
    the first ``init``, to ``chosen`` of the ``middle`` ones after these, and to the rest: to
    ``length`` tokens. Without blocks it is padding, and its token's attention is zeros. ``slots``:
    into how many it recalls; 0: into none. ``fills``: the block that its token fills, if its
    digests follow from that; -1: none. ``row``: of the block table. The leading ``left`` of its
    middle blocks are off the device, and ``held`` is its place in ``LeftTables``."""

    token: int
    init: int
    middle: int
    chosen: int
    blocks: int
    length: int
    slots: int = 0
    fills: int = -1
    row: int = 0
    left: int = 0
    held: int = 0

    @property
    def attended(self) -> int:
        """Blocks that it attends to."""
        return self.blocks - self.middle + self.chosen


FACTS = len(SequenceFacts._fields)
"""Numbers a sequence."""

_FILLS = SequenceFacts._fields.index("fills")


class LeftTables:
    """Block tables of sequences with blocks off the device, int32 on it, by the place that each has
    until it ends: ``names`` ``[places, blocks]``, the numbers of these blocks in their order, and
    ``slots``, the device blocks into which it recalls them. Written when blocks leave."""

    def __init__(self, device: torch.device, places: int, blocks: int) -> None:
        """``blocks``: of a sequence, at most."""
        self.names = torch.zeros(places, blocks, dtype=torch.int32, device=device)
        self.slots = torch.zeros_like(self.names)
        self._free = list(range(places - 1, -1, -1))

    @property
    def room(self) -> int:
        """How many more sequences can have a place."""
        return len(self._free)

    def take(self) -> int:
        """A place; there is ``room``."""
        return self._free.pop()

    def give(self, place: int) -> None:
        """The sequence has ended."""
        self._free.append(place)

    def write(self, place: int, first: int, names: torch.Tensor, slots: torch.Tensor) -> None:
        """``names``: int32 on the device, of its blocks from number ``first`` on; ``slots``: all
        of its slots."""
        self.names[place, first : first + len(names)].copy_(names)
        self.slots[place, : len(slots)].copy_(slots)


class StepBuffers:
    """What a step's kernels read and tell each other, at fixed addresses: made once for up to so
    many sequences. A step has the leading parts of it, and all layers use them in turn."""

    def __init__(
        self, sequences: int, blocks: int, kv_heads: int, group: int, device: torch.device
    ) -> None:
        """``blocks``: of a sequence, at most; ``group``: query heads to a KV head."""
        rows, ints = sequences * kv_heads, torch.int32
        self.sequences, self.blocks = sequences, blocks
        self.kv_heads, self.group = kv_heads, group
        self.facts = torch.zeros(sequences, FACTS, dtype=ints, device=device)
        self.arrived = torch.zeros(rows, dtype=ints, device=device)
        self.logits = torch.empty(rows, group, blocks, device=device)
        self.scores = torch.empty(rows, blocks, device=device)
        self.table = torch.empty(rows, blocks, dtype=ints, device=device)
        self.missed = torch.empty(rows, blocks + 1, dtype=ints, device=device)
        self._partials = torch.empty(0, device=device)

    def has_room(self, sequences: int, blocks: int) -> bool:
        return sequences <= self.sequences and blocks <= self.blocks

    def nbytes(self, splits: int, dim: int) -> int:
        """Of all, with ``partials``."""
        parts = self.partials(splits, dim)
        kept = self.facts, self.arrived, self.logits, self.scores, self.table, self.missed, *parts
        return sum(one.nbytes for one in kept)

    def partials(self, splits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What the splits of each row find: sums ``[rows, splits, group, dim]``, and the logarithms
        of their weights ``[rows, splits, group]``."""
        size = len(self.arrived), splits, self.group
        heads = math.prod(size)
        if len(self._partials) < heads * (dim + 1):
            self._partials = self._partials.new_empty(heads * (dim + 1))
        sums, weights = self._partials[: heads * dim], self._partials[heads * dim :][:heads]
        return sums.view(*size, dim), weights.view(size)


class DeviceStep:
    """A step's sequences on the device. Its grids and tensors follow from the number of sequences
    alone, so a captured step is replayed for every other of as many, whose facts are written."""

    def __init__(
        self,
        buffers: StepBuffers,
        sequences: int,
        blocks: torch.Tensor,
        left: LeftTables | None = None,
    ) -> None:
        """``sequences``: how many there are facts of. ``blocks``: int32 ``[requests, blocks]``, the
        batch's block table. ``left``: if blocks are recalled."""
        self.kv_heads, self.group = buffers.kv_heads, buffers.group
        self.rows = sequences * buffers.kv_heads
        self.facts, self.blocks = buffers.facts[:sequences], blocks
        rows = slice(0, self.rows)
        self.arrived, self.missed = buffers.arrived[rows], buffers.missed[rows]
        self.logits, self.scores = buffers.logits[rows], buffers.scores[rows]
        self.table = buffers.table[rows]
        self.recalls = left is not None
        self.names, self.slots = (left.names, left.slots) if left else (self.missed, self.missed)
        self.partials = buffers.partials
        self.place: torch.Tensor | None = None
        """Of the layer whose blocks were chosen last, if the step recalls: see ``place`` of its
        ``DeviceResidency``."""
        self.fetched: Any = None
        """The event at which they are all in their slots; None: they are, on the same stream."""

    @classmethod
    def of(
        cls,
        facts: Sequence[SequenceFacts],
        blocks: torch.Tensor,
        kv_heads: int,
        group: int,
        most: int = 0,
        left: LeftTables | None = None,
    ) -> DeviceStep:
        """A step with buffers of its own, for up to ``most`` blocks of a sequence, or as many as
        there are. Row i of ``blocks``, on the device, has those of sequence i."""
        most = max(most, *(one.blocks for one in facts))
        buffers = StepBuffers(len(facts), most, kv_heads, group, blocks.device)
        rows = [one._replace(row=at) for at, one in enumerate(facts)]
        buffers.facts.copy_(torch.tensor(rows, dtype=torch.int32))
        return cls(buffers, len(facts), blocks, left)


class DeviceResidency:
    """The slots of all sequences in one layer, as a device's kernels keep them: those of a sequence
    are an LRU cache of its blocks, for each KV head.

    An offloaded block has a number, and a slot is a device block; block 0, vLLM's null block, is
    none. ``place``: int32 ``[kv_heads, numbers]``, the slot that a block was last recalled into.
    ``state``: int32 ``[3, kv_heads, blocks]``, of slots: the number they hold plus one, 0 for none;
    when they were last used; and, of a sequence's first slot, how often blocks were admitted. A
    block is in its place if that holds it. ``counts``: int64 ``[2]``, totals of blocks that were in
    their place, and of those that were not; layers may share it. ``page_at``: int64 ``[1]``, at
    which byte of a record the layer's page begins.
    """

    def __init__(self, kv_heads: int, blocks: int, most: int, counts: torch.Tensor) -> None:
        """``blocks``: of the cache; ``most``: exceeds every number."""
        device = counts.device
        self.place = torch.zeros(kv_heads, most, dtype=torch.int32, device=device)
        self.state = torch.zeros(3, kv_heads, blocks, dtype=torch.int32, device=device)
        self.counts = counts
        self.page_at = torch.zeros(1, dtype=torch.int64, device=device)

    def begin(self, numbers: torch.Tensor, slots: torch.Tensor) -> None:
        """These numbers and slots, int64 on the device, have a new sequence; it keeps them until it
        ends."""
        self.place.index_fill_(1, numbers, 0)
        self.state.index_fill_(2, slots, 0)


class BlockNumbers:
    """Numbers of the blocks of a KV group that are off the device, the same in all layers, below
    ``most``. ``addresses``: int64 ``[most]``, on the device, of each one's record in host
    memory."""

    def __init__(self, device: torch.device, most: int) -> None:
        self.addresses = torch.zeros(most, dtype=torch.int64, device=device)
        self._free = list(range(most))  # a heap

    @property
    def room(self) -> int:
        """How many more blocks can have a number."""
        return len(self._free)

    def take(self, count: int) -> Ints:
        """The least numbers for so many blocks, at most ``room``, whose addresses the caller
        writes."""
        return np.array([heappop(self._free) for _ in range(count)], dtype=np.int64)

    def give(self, numbers: Ints) -> None:
        """The blocks have no sequence any more."""
        for one in numbers.tolist():
            heappush(self._free, one)


@dataclass(frozen=True, slots=True)
class Piece:
    """An item is ``count`` runs of ``nbytes`` each, ``step`` bytes apart; all of whole words of
    four bytes."""

    count: int
    nbytes: int
    step: int


def digest_by_triton(
    keys: torch.Tensor, coded: torch.Tensor, ids: torch.Tensor, bounds: bool
) -> None:
    """Codes the digests of blocks: one launch, none without ``ids``.

    ``keys``: ``[blocks, tokens, kv_heads, dim]``, of any strides; ``coded``: int8 ``[kv_heads,
    blocks, rows, width + 4]``, as ``digest.encode`` gives them; ``ids``: int32, negative ones are
    passed over, or the facts of a step: the blocks that it fills; ``bounds``: the kind of the
    digests, else means.
    """
    if not len(ids):
        return
    size, dim = keys.shape[1], keys.shape[3]
    first, step = (_FILLS, FACTS) if ids.dim() == 2 else (0, 1)
    floats = coded.view(torch.float32)
    _launch(
        "digest_blocks", (len(ids), keys.shape[2]),
        ids, keys, coded, floats, first, step, *keys.stride(), *coded.stride()[:3],
        *floats.stride()[:3],
        DIM=dim, WIDE=max(16, next_power(dim)), SIZE=size, ROWS=coded.shape[2], BOUNDS=bounds,
        num_warps=8,
    )  # fmt: skip


def choose_by_triton(
    query: torch.Tensor,
    coded: torch.Tensor,
    step: DeviceStep,
    scale: float,
    bounds: bool,
    left: torch.Tensor | None = None,
    residency: DeviceResidency | None = None,
) -> None:
    """Writes the logits of all middle blocks, and by them the table of the blocks attended to: one
    launch. The logits are to the bit those of ``selection.best_products``; of blocks whose scores
    are equal the first ones are chosen.

    ``query``: ``[tokens, heads, dim]``, a head in one piece; ``coded``: int8 ``[kv_heads, blocks,
    rows, width + 4]``, rows a power of two. Where blocks are recalled, ``left``: the same of blocks
    off the device, by their numbers, in the same strides, and ``residency``, the layer's: chosen
    blocks that are off the device are admitted to their sequence's slots. Those to copy are in
    ``step.missed``, and the table names them by their numbers, with ``LATE``.
    """
    rows, dim, most = coded.shape[2], query.shape[2], step.table.shape[1]
    tile, chunk = max(1, ROWS_AT_ONCE // rows), blocks_at_once(step.group)
    parts = min(-(-most // (tile * _TILES_A_PROGRAM)), max(_FEWEST_PARTS, _PROGRAMS // step.rows))
    floats = coded.view(torch.float32)
    off = coded if left is None else left
    if off.stride() != coded.stride():
        raise ValueError(f"digests have the strides {off.stride()} and {coded.stride()}")
    step.place = None if residency is None else residency.place
    if residency is None:
        none = step.missed
        kept: tuple[torch.Tensor, ...] = none, none, none
        numbers, strides = 0, (0, 0)
    else:
        kept = residency.place, residency.state, residency.counts
        part, head, _ = residency.state.stride()
        numbers, strides = residency.place.stride(0), (part, head)
    _launch(
        "choose_blocks", (step.rows, parts),
        query, step.facts, step.blocks, step.names, coded, floats, off, step.logits, step.scores,
        step.table, step.slots, step.missed, *kept, step.arrived,
        scale, step.kv_heads, step.blocks.stride(0), most, step.slots.shape[1], numbers, *strides,
        *query.stride()[:2], *coded.stride()[:3], *floats.stride()[:2],
        GROUP=step.group, PADDED=max(16, next_power(step.group)), HEADS=next_power(step.group),
        DIM=dim, WIDE=max(32, next_power(dim)), ROWS=rows, TILE=tile, TILES=_TILES_A_PROGRAM,
        BOUNDS=bounds, RECALLS=residency is not None, CHUNK=chunk, SEARCH=SEARCHED * chunk,
        **_overlapping(),
    )  # fmt: skip


def blocks_at_once(group: int) -> int:
    """Middle blocks of which a program takes the logits of all query heads at once."""
    return max(1, min(_BLOCKS_AT_ONCE, _LOGITS_AT_ONCE // next_power(group)))


def fetch_by_triton(
    step: DeviceStep,
    residency: DeviceResidency,
    addresses: torch.Tensor,
    kv_cache: torch.Tensor,
) -> None:
    """Copies the blocks that ``choose_by_triton`` missed from host memory into their slots: one
    launch, which may run beside the first turn of attention.

    ``addresses``: int64, of each number's record in host memory that the device can read;
    ``kv_cache``: ``[blocks, kv_heads, tokens, width]``, a token of a head in one piece, of whole
    words of four bytes. A page lies like one of its blocks.
    """
    block, head, piece = pieces_of(kv_cache)
    words, runs = piece.nbytes // _WORD, piece.count
    at_once = min(_WORDS_AT_ONCE, next_power(words))
    _launch(
        "fetch_blocks", (step.rows, _LANES),
        step.facts, step.missed, residency.place, addresses, residency.page_at,
        kv_cache.data_ptr(), step.kv_heads, step.table.shape[1], residency.place.stride(0),
        block // _WORD, head // _WORD, words, runs, piece.step // _WORD,
        LANES=_LANES, RUNS=_WORDS_AT_ONCE // at_once, WORDS=at_once,
    )  # fmt: skip


def pieces_of(kv_cache: torch.Tensor) -> tuple[int, int, Piece]:
    """How a KV head's part of a block lies in a cache ``[blocks, kv_heads, tokens, width]``, and in
    a page: bytes from block to block, from head to head, and the part's runs."""
    size = kv_cache.element_size()
    block, head, token, _ = (step * size for step in kv_cache.stride())
    tokens, width = kv_cache.shape[2], kv_cache.shape[3] * size
    whole = token == width
    return block, head, Piece(1, tokens * width, 0) if whole else Piece(tokens, width, token)


def attend_by_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: DeviceStep,
    output: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    share: int = 0,
    pages: torch.Tensor | None = None,
    turn: int = 0,
    value_scale: float = 1.0,
) -> None:
    """Attention of the step's tokens over the blocks of its table, zeros for padding: one launch.
    If the step recalls blocks it takes ``turn`` 1 and, when they are there, ``turn`` 2; or then 3.
    With ``pages`` over all blocks: keys of those off the device by their numbers, each like one of
    ``keys`` in memory, with its values as far from them.

    ``query``, ``output``: ``[tokens, heads, dim]``, a head in one piece; ``keys``, ``values``:
    ``[blocks, tokens, kv_heads, dim]``, of any strides, blocks of a power of two of tokens, at
    least 16. A program takes ``share`` of a row's blocks; 0: as many as have 256 tokens; more if a
    row would have more than 64 programs. A row's result therefore does not depend on other rows.
    ``softcap``: bounds logits by a hyperbolic tangent; 0: they are not bounded. ``sinks``:
    ``[heads]`` in one piece, logits without a value. ``value_scale``: what a stored 1 is; that of
    keys, and of a query in eight bits, is in ``scale``.
    """
    size, dim, group = keys.shape[1], query.shape[2], step.group
    share = share or max(1, _TOKENS_A_PROGRAM // size)
    splits = min(-(-step.table.shape[1] // share), _MOST_SPLITS)
    parts, lse = step.partials(splits, dim)
    wide, heads = max(16, next_power(dim)), next_power(group)
    away = keys if pages is None else pages
    table = step.table if pages is None else step.blocks
    place = step.missed if step.place is None else step.place
    _launch(
        "attend_rows", (step.rows, splits),
        query, step.facts, keys, values, table, parts, lse, lse if sinks is None else sinks,
        output, step.arrived, step.names, away, place,
        scale, softcap, value_scale, step.kv_heads, table.stride(0), share, splits,
        step.names.stride(0), place.stride(0), away.stride(0), *query.stride()[:2], *keys.stride(),
        *values.stride(), *output.stride()[:2],
        GROUP=group, PADDED=max(16, heads), HEADS=heads, DIM=dim, WIDE=wide,
        SIZE=size, TILE=min(size, _TOKENS_AT_ONCE), CHUNK=max(1, _PARTS_AT_ONCE // heads),
        SPLITS=_MOST_SPLITS, CAPPED=softcap > 0, SINKS=sinks is not None, WHOLE=pages is not None,
        TURN=turn, **_overlapping(turn),
        num_warps=warps_of(wide, keys.element_size()),
    )  # fmt: skip


def halves(kv_cache: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a cache: ``[blocks, tokens, kv_heads, dim]``. Bytes are eight-bit floats,
    e4m3."""
    if kv_cache.dtype is torch.uint8:
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    keys, values = torch.split(kv_cache.transpose(1, 2), dim, -1)
    return keys, values


def _overlapping(turn: int = 0) -> dict[str, bool]:
    """Not of what waits for another stream, too."""
    return {"OVERLAPS": True, "launch_pdl": True} if OVERLAPS and turn < 2 else {"OVERLAPS": False}


def warps_of(wide: int, element_size: int) -> int:
    """Of a program that attends, by the padded width of a head and the bytes of a value: on an H200
    two were faster than four and eight with 128 coordinates of 16 bits (archive/log.md)."""
    return 2 if wide * element_size <= 256 else 4


def move(addresses: torch.Tensor, piece: Piece) -> None:
    """Copies items between addresses, on the device's current stream: one launch. ``addresses``:
    int64 ``[2, items]`` on the device, sources and targets.

    A GPU reads page-locked host memory by the address it has in the process (CUDA's unified
    addressing), so blocks are fetched from the arena without a call for each. The device can read
    all sources, and write all targets, until it has copied them.
    """
    words = piece.nbytes // _WORD
    parts = -(-words // _WORDS_AT_ONCE)
    _launch(
        "move_words", (addresses.shape[1], piece.count, parts),
        addresses[0], addresses[1], words, piece.step // _WORD, AT_ONCE=_WORDS_AT_ONCE,
    )  # fmt: skip


def _launch(name: str, grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
    """Raises EngineError without Triton.

    Triton takes most of a launch's time to find out by its arguments which compiled kernel is to
    run. So those of launches are kept whose arguments are alike, as far as Triton looks at them.
    """
    if args[0].is_meta:
        return
    key = alike_of(name, args, sizes)
    compiled = _compiled.get(key)
    if compiled is not None:
        kernel, constants = compiled
        # of a tensor Triton asks the driver whether it lies on the device, of an address nothing
        known = (one.data_ptr() if isinstance(one, torch.Tensor) else one for one in args)
        kernel[(*grid, 1, 1)[:3]](*known, *constants)
        return
    try:
        from kvrecall.attention.kernels import triton_kernels
    except ImportError as error:
        raise EngineError(
            "retrieval attention on a GPU needs triton, which vLLM for CUDA brings; install it"
        ) from error
    function = getattr(triton_kernels, name)
    kernel = function[grid](*args, **sizes)
    if key is not None and kernel is not None:  # Triton's interpreter compiles nothing
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        constants = tuple(sizes[each] for each in function.arg_names[len(args) :])
        _compiled[key] = kernel, constants


def alike_of(name: str, args: Sequence[Any], sizes: dict[str, Any]) -> tuple[Any, ...] | None:
    """Equal for launches of one compiled kernel, and not only where it has to be. None for tensors
    that are not aligned as torch aligns its own: these are rare, and Triton tells them apart."""
    places = 0
    known: list[Any] = [name, args[0].device, *sizes.values()]
    for each in args:
        if isinstance(each, torch.Tensor):
            places |= each.data_ptr()
            known.append(each.dtype)
        else:
            known.append(float if isinstance(each, float) else each)
    return None if places % _ALIGNED else tuple(known)


def next_power(count: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (count - 1).bit_length()
