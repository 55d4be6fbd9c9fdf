"""The search for the blocks most similar to a query, on a CPU: one compiled call, in which
PyTorch's own OpenMP threads share the digests.

It finds what a ``selection.Selector`` does. PyTorch runs some thirty small operations for it, each
of which waits for memory after attention has emptied the caches, and none of which has work for two
threads; and a thread of our own must first get a core from OpenMP's threads, which wait busily for
the next operation (docs/log.md). NumKong computes the products, called at its C symbols; numba,
which vLLM requires, compiles the rest.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.attention.digest import DIGESTS, SCALE_BYTES, Layout, encode
from kvrecall.attention.selection import selector_of
from kvrecall.attention.settings import RetrievalSettings

Numbers = npt.NDArray[np.int64]

_LOG = logging.getLogger(__name__)

_CHUNK_BYTES = 128 << 10
"""Digests that a thread takes at a time."""

_LINE = 64
"""Bytes of a cache line: what two threads write lies on different ones."""


class Placed:
    """Where the digests of a layer lie, as a search reads them. Made once for as long as they lie
    there; it keeps them in memory."""

    def __init__(
        self, layout: Layout, parts: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    ) -> None:
        """``parts``: of each, int8 ``[kv_heads, any number, rows, width + 4]``, and a copy of their
        coarse rows, side by side, if there are any."""
        self._parts = tuple(parts)
        rows = [part for part, _ in parts]
        read = [part if coarse is None else coarse for part, coarse in parts]
        coarse_bytes = layout.coarse * rows[0].shape[-1]
        self._layer = np.zeros((4, 1 + len(rows)), np.int64)
        self._layer[0, 1:] = [part.data_ptr() for part in read]
        self._layer[1, 1:] = [part.stride(0) for part in read]
        self._layer[2] = read[0].stride(1), *(part.data_ptr() + coarse_bytes for part in rows)
        self._layer[3] = rows[0].stride(1), *(part.stride(0) for part in rows)
        self.address = self._layer.ctypes.data
        """Of a search's ``layer``."""


class Search:
    """A search of one sequence's blocks, prepared once for all layers of a step."""

    def __init__(
        self,
        size: tuple[int, int, int],
        layout: Layout,
        parts: Sequence[Numbers],
        count: int,
    ) -> None:
        """``size``: of queries, ``kv_heads, group, dim``. ``parts``: int64, the numbers of the
        sequence's blocks, in its order, in one tensor of digests after another. ``count``: blocks
        to find. Where ``is_compiled``."""
        native = _native()
        assert native is not None
        self._native = native
        heads, group, dim = size
        self._ids = np.concatenate(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        blocks = len(self._ids)
        first = layout.coarse or layout.rows
        self._row_bytes = layout.kind.parts * dim + SCALE_BYTES
        at_once = min(blocks, max(1, _CHUNK_BYTES // (first * self._row_bytes)))
        chunks = -(-blocks // at_once)
        self._threads = min(torch.get_num_threads(), heads * chunks)
        sums_at = _aligned(group * self._row_bytes)
        packed_at = sums_at + _aligned(max(first * at_once, layout.fine) * group * 4)
        room = packed_at + _aligned(native.packed_bytes(group, self._row_bytes - SCALE_BYTES))
        self._scratch = np.empty(self._threads * room + _LINE, np.int8)
        self._logits = np.empty((heads, group, blocks), np.float32)
        self._found = torch.empty(heads, count, dtype=torch.int64)
        self._counters = np.zeros((2 + heads, _LINE // 8), np.int64)
        self._counted = np.array([[0, 0], [0, 0], *heads * [[chunks, 0]]])
        self._work = np.zeros(1, native.work)
        facts = {
            "heads": heads,
            "group": group,
            "dim": dim,
            "parts": layout.kind.parts,
            "blocks": blocks,
            "count": count,
            "few": layout.narrowed(blocks, count) if layout.coarse else 0,
            "first": first,
            "fine": layout.fine,
            "at_once": at_once,
            "chunks": chunks,
            "segments": len(parts),
            "row_bytes": self._row_bytes,
            "room": room,
            "sums_at": sums_at,
            "packed_at": packed_at,
            "found": self._found.data_ptr(),
            "logits": self._logits.ctypes.data,
            "counters": self._counters.ctypes.data,
            "scratch": _aligned(self._scratch.ctypes.data),
            "ids": self._ids.ctypes.data,
            "ends": self._ends.ctypes.data,
            "pack": native.pack,
            "dots": native.dots,
        }
        for name, value in facts.items():
            self._work[name] = value
        self._address = self._work.ctypes.data
        self._told = tuple(self._work[name] for name in ("query", "halved", "layer", "scale"))
        self._left = self._counters[:, :2]
        self._steps = [dim, 1]
        self._table: torch.Tensor | None = None

    def enter_into(self, table: torch.Tensor) -> None:
        """Has every run write the found blocks, named ``number * kv_heads + head``, into the
        leading columns of a table, int32 ``[kv_heads, at least count]``."""
        self._table = table
        self._work["table"], self._work["table_row"] = table.data_ptr(), 4 * table.stride(0)

    @property
    def enters(self) -> bool:
        """Whether it writes into a table."""
        return self._table is not None

    def run(
        self,
        query: torch.Tensor,
        token: int,
        placed: Placed,
        scale: float,
    ) -> torch.Tensor:
        """The most similar blocks, in the sequence's order: int64 ``[kv_heads, count]``, valid
        until the next call. Of equally similar ones the first.

        ``query``: ``[tokens, heads, dim]``, of which ``token`` asks; ``placed``: the digests of
        each part; ``scale``: that of the attention.
        """
        halved = query.dtype is torch.bfloat16
        step, *steps = query.stride()
        if steps != self._steps or not (halved or query.dtype is torch.float32):
            query = query[token].contiguous() if halved else query[token].float().contiguous()
            token = 0
        # Of a view an operation of PyTorch's would be made, in every layer.
        at = query.data_ptr() + token * step * (2 if halved else 4)
        address, of_halves, layer, scaled = self._told
        address[0], of_halves[0] = at, halved
        layer[0], scaled[0] = placed.address, scale
        self._left[:] = self._counted
        self._native.run(self._address, self._threads)
        return self._found


class _Native:
    """The compiled code, and the functions that it calls."""

    def __init__(self) -> None:
        """Raises ImportError, AttributeError or OSError if something is missing."""
        from kvrecall.attention.kernels import search_loops

        library = importlib.import_module("numkong")
        if not library.__version__.startswith("7."):
            raise ImportError(f"NumKong {library.__version__}'s C functions are not known, 7's are")
        products = ctypes.CDLL(importlib.import_module("numkong._numkong").__file__)
        self.work = search_loops.WORK
        self.pack, self.dots = (
            ctypes.cast(function, ctypes.c_void_p).value
            for function in (products.nk_dots_pack_i8, products.nk_dots_packed_i8)
        )
        self.packed_bytes = products.nk_dots_packed_size_i8
        self.packed_bytes.restype = ctypes.c_size_t
        self.packed_bytes.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
        self._share = search_loops.share.address
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_int64)(self._share)
        # The OpenMP that PyTorch has loaded, whichever it is: another one would have other threads.
        self._parallel = ctypes.CDLL(None).GOMP_parallel
        self._parallel.restype = None
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

    def run(self, work: int, threads: int) -> None:
        """Searches, until that is done."""
        if threads == 1:
            self._alone(work)
        else:
            self._parallel(self._share, work, threads, 0)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _LINE) * _LINE


@functools.cache
def _native() -> _Native | None:
    """None if something is missing."""
    try:
        return _Native()
    except (ImportError, AttributeError, OSError) as error:
        _LOG.warning("kvrecall: the search for blocks is not compiled, so it is slower: %s", error)
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
        told = rows[:, :, layout.coarse_rows].contiguous() if layout.coarse else None
        found = Search((2, 3, 32), layout, [ids.numpy()], 7).run(
            query.view(1, 6, 32), 0, Placed(layout, [(rows, told)]), 0.2
        )
        want = selector_of(layout).choose(query, [rows[:, ids]], 7, 0.2)
        if not torch.equal(found, want.sort(-1).values):
            _LOG.warning(
                "kvrecall: the search for blocks is not compiled, so it is slower: on this "
                "processor its result is not PyTorch's"
            )
            return False
    return True
