"""The search for the blocks most similar to a query, on a CPU: one compiled call for all sequences
of a step, in which PyTorch's own OpenMP threads share the digests.

It finds what ``selection.choose`` does. PyTorch runs some thirty small operations for it, each
of which waits for memory after attention has emptied the caches, and none of which has work for two
threads; and a thread of our own must first get a core from OpenMP's threads, which wait busily for
the next operation (archive/log.md). NumKong computes the products, called at its C symbols; numba,
which vLLM requires, compiles the rest.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.attention.digest import DIGESTS, SCALE_BYTES, Layout, encode
from kvrecall.attention.selection import choose
from kvrecall.attention.settings import RetrievalSettings

Numbers = npt.NDArray[np.int64]

_LOG = logging.getLogger(__name__)

_CHUNK_BYTES = 32 << 10
"""Digests that a thread takes at a time."""

_READABLE = (torch.bfloat16, torch.float32)
"""Queries that compiled code reads."""

_LINE = 64
"""Bytes of a cache line: what two threads write lies on different ones."""


class Placed:
    """Where the digests of a layer lie, as a search reads them. Made once for as long as they lie
    there; it keeps them in memory."""

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        away: Numbers | None = None,
    ) -> None:
        """``parts``: of each, int8 ``[kv_heads, any number, rows, width + 4]``, and a copy of their
        coarse rows, side by side, if there are any. ``away``: int64, how far from the layer's cache
        the blocks begin that are off the device, in bytes."""
        self._kept = tuple(parts), away
        rows = [part for part, _ in parts]
        read = [part if coarse is None else coarse for part, coarse in parts]
        coarse_bytes = layout.coarse * rows[0].shape[-1]
        self._layer = np.zeros((4, 1 + len(rows)), np.int64)
        self._layer[0, 0] = 0 if away is None else away.ctypes.data
        self._layer[0, 1:] = [part.data_ptr() for part in read]
        self._layer[1, 1:] = [part.stride(0) for part in read]
        self._layer[2] = read[0].stride(1), *(part.data_ptr() + coarse_bytes for part in rows)
        self._layer[3] = rows[0].stride(1), *(part.stride(0) for part in rows)
        self._addresses = np.array([self._layer.ctypes.data])
        self.address = self._layer.ctypes.data
        """Of a sequence's ``layer``."""
        self.pointer = self._addresses.ctypes.data
        """Where that address lies."""


@dataclass(frozen=True, slots=True)
class Sought:
    """What a search finds in a sequence: ``count`` blocks, for the batch's ``token``. ``parts``:
    int64, the numbers of the sequence's blocks, in its order, in one tensor of digests after
    another. ``table``: int32 ``[kv_heads, at least count]``, into whose leading columns every run
    writes the blocks found, as ``Search`` names them. ``left``: blocks that are off the device, the
    first ones, which begin at the distances of ``Placed``."""

    parts: Sequence[Numbers]
    count: int
    token: int = 0
    table: npt.NDArray[np.int32] | None = None
    left: int = 0


class Search:
    """A search of the blocks of a step's sequences, prepared once for all layers."""

    def __init__(
        self,
        size: tuple[int, int, int],
        layout: Layout,
        sequences: Sequence[Sought],
        cache_bytes: tuple[int, int, int],
    ) -> None:
        """``size``: of queries, ``kv_heads, group, dim``. ``sequences``: at least one, each with at
        least one block. ``cache_bytes``: from block to block and from head to head of the cache,
        and of the unit by which tables name blocks, counting from its start. Where
        ``is_compiled``."""
        native = _native()
        assert native is not None
        self._start = native.start
        heads, group, dim = size
        first = layout.coarse or layout.rows
        row_bytes = layout.kind.parts * dim + SCALE_BYTES
        self._sequences = sequences
        self._ids = [np.concatenate(one.parts) for one in sequences]
        self._ends = [np.cumsum([len(part) for part in one.parts]) for one in sequences]
        counts = np.array([len(ids) for ids in self._ids])
        at_once = np.minimum(counts, max(1, _CHUNK_BYTES // (first * row_bytes)))
        chunks = -(-counts // at_once)
        threads = min(torch.get_num_threads(), heads * int(chunks.sum()))
        few = [
            layout.narrowed(len(ids), one.count) if layout.coarse else 0
            for ids, one in zip(self._ids, sequences, strict=True)
        ]
        rows_at_once = max(first * int(at_once.max()), layout.fine, dim)
        scratch = {  # bytes of a thread
            "point_at": group * row_bytes,
            "sums_at": rows_at_once * group * 4,
            "packed_at": native.packed_bytes(group, row_bytes - SCALE_BYTES),
            "scales_at": group * 4,
            "weights_at": int(counts.max()) * 4,
            "near_at": max(few) * 8,
            "fine_at": group * max(few) * 4,
        }
        *places, scratch_bytes = itertools.accumulate(map(_aligned, scratch.values()), initial=0)
        self._scratch = np.empty(threads * scratch_bytes + _LINE, np.int8)
        self._logits = np.empty(heads * group * int(counts.sum()), np.float32)
        self._counters = np.empty(((2 + len(sequences) * heads) * _LINE + _LINE), np.int8)
        self._layers = np.zeros(len(sequences), np.int64)
        self._nears = np.zeros((len(sequences), heads), np.int64)
        self.found = tuple(torch.empty(heads, one.count, dtype=torch.int64) for one in sequences)
        """Of each sequence the most similar blocks, in its order: int64 ``[kv_heads, count]``, as
        of the last ``run``. Of equally similar ones the first."""
        self._sought = np.zeros(len(sequences), native.sought)
        logits = self._logits.ctypes.data
        for at, one in enumerate(sequences):
            row = self._sought[at]
            row["count"], row["few"] = one.count, few[at]
            row["blocks"], row["at_once"], row["chunks"] = counts[at], at_once[at], chunks[at]
            row["segments"], row["found"] = len(one.parts), self.found[at].data_ptr()
            row["ids"], row["ends"] = self._ids[at].ctypes.data, self._ends[at].ctypes.data
            row["logits"] = logits
            logits += heads * group * int(counts[at]) * 4
            if one.table is not None:
                row["table"], row["table_row"] = one.table.ctypes.data, one.table.strides[0]
                row["left"], row["nears"] = one.left, self._nears[at].ctypes.data
        self._work = np.zeros(1, native.search)
        facts: dict[str, Any] = {
            "sequences": len(sequences),
            "heads": heads,
            "group": group,
            "dim": dim,
            "parts": layout.kind.parts,
            "first": first,
            "fine": layout.fine,
            "row_bytes": row_bytes,
            "scratch_bytes": scratch_bytes,
            **dict(zip(scratch, places, strict=True)),
            "counters": _aligned(self._counters.ctypes.data),
            "scratch": _aligned(self._scratch.ctypes.data),
            "threads": threads,
            "sought": self._sought.ctypes.data,
            **dict(zip(("block_bytes", "head_bytes", "unit"), cache_bytes, strict=True)),
            **native.functions,
        }
        for name, value in facts.items():
            self._work[name] = value
        self._address = self._work.ctypes.data
        self._dtype: torch.dtype | None = None
        self._stride: tuple[int, ...] = ()

    @property
    def left(self) -> int:
        """How many of the blocks that the last run wrote into tables are off the device."""
        return int(self._nears.sum())

    def run(self, query: torch.Tensor, placed: Sequence[Placed], scale: float) -> None:
        """Finds the blocks. ``query``: ``[tokens, heads, dim]``; ``placed``: the digests of each
        sequence's parts, or one for all sequences; ``scale``: that of the attention."""
        if query.stride() != self._stride or query.dtype is not self._dtype:
            query = self._readable(query)
        if len(placed) == 1:
            layers, step = placed[0].pointer, 0
        else:
            self._layers[:] = [one.address for one in placed]
            layers, step = self._layers.ctypes.data, 8
        self._start(self._address, query.data_ptr(), layers, step, scale)

    def _readable(self, query: torch.Tensor) -> torch.Tensor:
        """The query as compiled code can read it, in place if possible, and records how it lies.
        Of a view of a token an operation of PyTorch's would be made, in every layer."""
        tokens = [one.token for one in self._sequences]
        self._dtype, self._stride = query.dtype, query.stride()
        if query.dtype not in _READABLE or self._stride[1:] != (query.shape[-1], 1):
            query = query[tokens].contiguous()
            query = query if query.dtype in _READABLE else query.float()
            tokens, self._dtype = list(range(len(tokens))), None
        self._sought["token"] = tokens
        self._work["halved"] = query.dtype is torch.bfloat16
        self._work["query_row"] = query.stride(0) * query.element_size()
        return query


class _Native:
    """The compiled code, and the functions that it calls."""

    def __init__(self) -> None:
        """Raises ImportError, AttributeError or OSError if something is missing."""
        from kvrecall.attention.kernels import search_loops

        library = importlib.import_module("numkong")
        if not library.__version__.startswith("7."):
            raise ImportError(f"NumKong {library.__version__} has other C functions than 7")
        products = ctypes.CDLL(importlib.import_module("numkong._numkong").__file__)
        self.search, self.sought = search_loops.SEARCH, search_loops.SOUGHT
        self.start = search_loops.start
        # The OpenMP that PyTorch has loaded, whichever it is: another one would have other threads.
        fork = ctypes.CDLL(None).GOMP_parallel
        pack, dots = products.nk_dots_pack_i8, products.nk_dots_packed_i8
        named = zip(("pack", "dots", "fork"), (pack, dots, fork), strict=True)
        self.functions = {name: ctypes.cast(one, ctypes.c_void_p).value for name, one in named}
        self.functions["share"] = search_loops.share.address
        self.packed_bytes = products.nk_dots_packed_size_i8
        self.packed_bytes.restype = ctypes.c_size_t
        self.packed_bytes.argtypes = [ctypes.c_size_t, ctypes.c_size_t]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


@functools.cache
def _native() -> _Native | None:
    """None if something is missing."""
    try:
        return _Native()
    except (ImportError, AttributeError, OSError) as error:
        _LOG.warning(
            "kvrecall: retrieval searches without compiled kernels, which is slower, because %s; "
            "pip install 'kvrecall[retrieval]'",
            error,
        )
        return None


@functools.cache
def is_compiled() -> bool:
    """Whether there can be a ``Search`` here: whether all it calls is there, and it finds what
    PyTorch does. The first call compiles it: for seconds, if no other process has left the result
    in numba's cache."""
    if _native() is None:
        return False
    for share, kind in itertools.product((0.2, 0.02), DIGESTS):
        layout = RetrievalSettings(topk_share=share, digest=kind).layout(128)
        drawn = torch.Generator().manual_seed(0)
        keys = torch.randn(2, 61, 128, 32, generator=drawn)
        query = torch.randn(2, 3, 32, generator=drawn)
        rows, ids = encode(layout.rows_of(keys)), torch.arange(60, 3, -1)
        coarse = rows[:, :, layout.coarse_rows].contiguous() if layout.coarse else None
        search = Search((2, 3, 32), layout, [Sought([ids.numpy()], 7)], (2, 1, 1))
        search.run(query.view(1, 6, 32), [Placed(layout, [(rows, coarse)])], 0.2)
        want = choose(layout, query, rows[:, ids], 7, 0.2)
        if not torch.equal(search.found[0], want.sort(-1).values):
            _LOG.warning(
                "kvrecall: the search for blocks is not compiled, so it is slower: on this "
                "processor its result is not PyTorch's"
            )
            return False
    return True
