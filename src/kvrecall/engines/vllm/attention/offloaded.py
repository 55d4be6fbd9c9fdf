"""Partially offloaded sequences in a worker, and the arena as attention reads it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.attention.residency import Ints
from kvrecall.errors import EngineError, TierError
from kvrecall.pool.arena import open_arena
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.slots import ALIGNMENT

Bytes = npt.NDArray[np.uint8]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Records:
    """The arena as a worker reads it: uint8 ``memory``, the offsets (bytes) of each layer's pages
    in a block's record, and its mapping; None: no layer attends to it in place."""

    memory: Bytes
    layers: Mapping[str, int]
    arena: ArenaHandle | None = None

    def pages(self, offsets: Ints, layer: str, nbytes: int) -> Bytes:
        """Copies of a layer's pages of these records: ``[records, nbytes]``."""
        at = self.layers[layer]
        pages = np.empty((len(offsets), nbytes), dtype=np.uint8)
        for row, begin in zip(pages, (offsets + at).tolist(), strict=True):
            row[:] = self.memory[begin : begin + nbytes]
        return pages


def digests_of_layer(name: str) -> str:
    """Name of the pages with a layer's digests."""
    return f"{name}.digests"


def checksums_of_layer(name: str) -> str:
    """Name of the pages with the checksums of a layer's digests."""
    return f"{name}.checksums"


@dataclass(slots=True)
class OffloadedSequence:
    """A partially offloaded sequence: its middle blocks ``[0, count)``, counted from block
    ``init``, are off the device, in the arena of ``records`` at ``offsets``. ``slots``: int32
    device blocks that it recalls into; every layer and KV head has its own blocks there.
    ``extent``: where layers attend to that arena in place; None: nowhere. ``numbers``: of those
    blocks on a device whose kernels recall them (``residency.BlockNumbers``), which they do as long
    as it ``is_readable``."""

    key: str
    init: int
    offsets: Ints
    slots: torch.Tensor
    records: Records
    extent: Extent | None = None
    numbers: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    is_readable: bool = True

    @property
    def count(self) -> int:
        return len(self.offsets)

    def addresses(self, layer: str) -> Ints:
        """Addresses of the layer's pages of the offloaded blocks."""
        return self.begins + self.records.layers[layer]

    @property
    def begins(self) -> Ints:
        """Addresses of the offloaded blocks' records."""
        return self.records.memory.ctypes.data + self.offsets

    def named(self, table: torch.Tensor) -> torch.Tensor:
        """A block table of the sequence, int32 ``[blocks]``, in which offloaded blocks with a
        number are named ``-1 - number``."""
        if not len(self.numbers):
            return table
        table = table.clone()
        names = torch.from_numpy(-1 - self.numbers).to(table.dtype)
        table[self.init : self.init + len(names)] = names
        return table


class Extent:
    """The arena, and pages of our own behind it, in one range of addresses.

    A kernel call takes one base address and reads blocks at multiples of one stride. Here the arena
    is mapped once more, read-only, with room behind it, and the stride is the least step between
    the arena's slots: so one call reads blocks where they lie in the arena, beside others that are
    not in it. A layer's block has a page of ``page_bytes``, at a place that counts steps of
    ``ALIGNMENT`` bytes from the arena's start. Own pages are numbered; they take memory from when
    they are first written until they are given back. Owned by the worker's thread.
    """

    def __init__(self, arena: ArenaHandle, page_bytes: int, pages: int) -> None:
        """``pages``: most of our own at a time. Raises EngineError if it cannot be mapped."""
        self.page_bytes = page_bytes
        self._behind = _aligned(arena.nbytes)
        self._step = _aligned(page_bytes) + ALIGNMENT  # a layer's page may begin between two steps
        self._pages = min(pages, (2**31 * ALIGNMENT - self._behind) // self._step - 1)
        self._nbytes = self._behind + self._pages * self._step
        self._free: list[int] = []
        self._used = 0
        self._address = _map(arena, self._nbytes, self._behind)
        buffer = (ctypes.c_uint8 * self._nbytes).from_address(self._address)
        self._bytes = torch.from_numpy(np.ctypeslib.as_array(buffer))

    def take(self, count: int) -> list[int]:
        """Own pages that are free. Raises EngineError if there are not so many."""
        kept = max(0, len(self._free) - count)
        taken = self._free[kept:]
        del self._free[kept:]
        new = count - len(taken)
        if self._used + new > self._pages:
            raise EngineError(f"more than {self._pages} pages of blocks beside the arena")
        taken.extend(range(self._used, self._used + new))
        self._used += new
        return taken

    def give(self, pages: list[int], memory: bool = True) -> None:
        """Gives own pages back. ``memory``: theirs, too, as others will not be taken soon."""
        for page in pages if memory else ():
            start = self._address + self._behind + page * self._step
            _LIBC.madvise(start, self._step, mmap.MADV_DONTNEED)
        self._free.extend(pages)

    def places_of(self, pages: Ints, layer_at: int) -> Ints:
        """Places of own pages for the layer whose pages begin at byte ``layer_at`` of a record."""
        steps = (self._behind + pages * self._step) // ALIGNMENT
        return steps - layer_at // ALIGNMENT

    def page(self, page: int, layer_at: int) -> torch.Tensor:
        """An own page's bytes, as that layer sees it: uint8 ``[page_bytes]``."""
        start = self._behind + page * self._step + layer_at % ALIGNMENT
        return self._bytes[start : start + self.page_bytes]

    def blocks(self, layer_at: int, like: torch.Tensor) -> torch.Tensor:
        """All places of a layer as blocks of a KV cache that is shaped like ``like`` and
        contiguous within a block: ``[places, kv_heads, tokens, 2 * dim]``, overlapping."""
        size = like.element_size()
        _, heads, tokens, width = like.shape
        count = (self._nbytes - layer_at - self.page_bytes) // ALIGNMENT + 1
        shape = (count, heads, tokens, width)
        steps = (ALIGNMENT // size, tokens * width, width, 1)
        return self._bytes.view(like.dtype).as_strided(shape, steps, layer_at // size)

    def close(self) -> None:
        """Unmaps everything; no tensor of it may be used after that."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        _LIBC.munmap(self._address, self._nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _map(arena: ArenaHandle, nbytes: int, behind: int) -> int:
    """Address of ``nbytes`` of private memory, yet untouched, the arena in place of its start."""
    room = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        fd = open_arena(arena)
    except TierError as error:
        raise _unmappable(str(error)) from error
    try:
        address = _LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, room, -1, 0)
        if address in (None, _FAILED):
            raise _unmappable(os.strerror(ctypes.get_errno()))
        shared = mmap.MAP_SHARED | _MAP_FIXED
        if _LIBC.mmap(address, behind, mmap.PROT_READ, shared, fd, 0) == _FAILED:
            code = ctypes.get_errno()
            _LIBC.munmap(address, nbytes)
            raise _unmappable(os.strerror(code))
    finally:
        os.close(fd)
    return int(address)


def _unmappable(cause: str) -> EngineError:
    return EngineError(
        f"cannot map the arena for attention in place ({cause}); set "
        "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY above max_model_len to keep blocks on the device"
    )
