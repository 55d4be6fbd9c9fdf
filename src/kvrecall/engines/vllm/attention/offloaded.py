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

from kvrecall.attention.kernels.device import Ints
from kvrecall.errors import EngineError, TierError
from kvrecall.pool.arena import open_arena
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.slots import ALIGNMENT

Bytes = npt.NDArray[np.uint8]

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value

_GAPS = range(4 << 30, 128 << 30, 4 << 30)
"""Bytes to leave between a cache and an arena mapped near it, where the heap may grow."""


@dataclass(frozen=True, slots=True)
class Records:
    """The arena as a worker reads it: uint8 ``memory``, the offsets (bytes) of each layer's pages
    in a block's record, and what it is; None: its owner keeps it mapped."""

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
    device blocks that it recalls into, where every layer and KV head has its own blocks; none if
    blocks are read in place, in ``near``. ``numbers``: of those blocks on a device whose kernels
    recall them (``device.BlockNumbers``), which they do as long as it ``is_readable``, and its
    ``place`` in ``device.LeftTables``, -1: none yet, where ``placed`` of its slots are.
    ``decodes``: it did in its last step, and so will in its next: a preemption ends it here;
    ``is_kept``: dense layers keep copies of these blocks."""

    key: str
    init: int
    offsets: Ints
    slots: torch.Tensor
    records: Records
    near: NearArena | None = None
    numbers: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    is_readable: bool = True
    place: int = -1
    placed: int = 0
    decodes: bool = False
    is_kept: bool = False

    @property
    def count(self) -> int:
        return len(self.offsets)

    def addresses(self, layer: str) -> Ints:
        """Addresses of the layer's pages of the offloaded blocks."""
        near, records = self.near, self.records
        base = records.memory.ctypes.data if near is None else near.bases[layer]
        return self.offsets + (base + self.records.layers[layer])

    def require_inside(self, layer: str, kv_cache: torch.Tensor) -> None:
        """Raises IndexError if a page of the layer lies outside the arena, or between units, or a
        slot outside its cache: all are read and written by address."""
        begins = self.offsets + self.records.layers[layer]
        last, slots = len(self.records.memory) - kv_cache[0].nbytes, self.slots.tolist()
        inside = begins.min(initial=0) >= 0 and begins.max(initial=0) <= last
        inside &= self.near is None or not (self.offsets % self.near.unit).any()
        if not (inside and all(0 <= slot < len(kv_cache) for slot in slots)):
            raise IndexError(f"blocks of {self.key} lie outside of the arena or of the cache")

    @property
    def unit(self) -> int:
        """See ``NearArena``."""
        assert self.near is not None
        return self.near.unit

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


class NearArena:
    """An arena in this worker's addresses so near to every layer's cache that one block table names
    the blocks of both. Where it is mapped already, if that will do, else mapped once more."""

    def __init__(self, records: Records, caches: Mapping[str, torch.Tensor]) -> None:
        """``caches``: the layers'. Raises EngineError if it cannot be mapped near one of them."""
        self._nbytes = len(records.memory)
        self._mapped: list[int] = []
        strides = [ALIGNMENT]
        for name, cache in caches.items():
            first = records.memory.ctypes.data + records.layers[name] - cache.data_ptr()
            strides += first, cache[0].nbytes // cache.shape[1]
        bits = int(np.bitwise_or.reduce(strides))
        self.unit = bits & -bits
        """Bytes, a power of two of at most ``ALIGNMENT``: in every layer, the part of a KV head in
        any block of arena and cache begins at a multiple of it from the cache's start."""
        self.bases: dict[str, int] = {}
        """Its address for each layer."""
        known = [records.memory.ctypes.data]
        try:
            for name, cache in caches.items():
                at = records.layers[name]
                base = next((one for one in known if self._serves(one, at, cache)), 0)
                if not base:
                    base = self._map(records, at, cache)
                    known.append(base)
                self.bases[name] = base
        except EngineError:
            self.close()
            raise

    def _serves(self, base: int, layer_at: int, cache: torch.Tensor) -> bool:
        """Whether a table names that layer's pages in an arena at ``base``, and its cache's."""
        first = base + layer_at - cache.data_ptr()
        ends = abs(first), abs(first + _aligned(self._nbytes)), cache.nbytes
        return max(ends) < 2**31 * self.unit

    def _map(self, records: Records, layer_at: int, cache: torch.Tensor) -> int:
        """The address of another mapping, which serves this layer."""
        if records.arena is not None:
            end = _aligned(cache.data_ptr() + cache.nbytes)
            hints = [end + gap for gap in _GAPS]
            hints += [end - _aligned(cache.nbytes + self._nbytes) - gap for gap in _GAPS]
            for hint in hints:
                base = _mapped(records.arena, self._nbytes, max(0, hint))
                self._mapped.append(base)
                if self._serves(base, layer_at, cache):
                    return base
                _LIBC.munmap(self._mapped.pop(), self._nbytes)
        raise EngineError(
            "the pool's memory cannot be mapped so near to the KV cache that attention reads both; "
            "preload an allocator that begins large tensors at whole pages (tcmalloc), make "
            "host_size smaller, or set VLLM_RETRIEVAL_OFFLOAD_BOUNDARY above max_model_len"
        )

    def close(self) -> None:
        """Unmaps what it mapped; no address in it may be read after that."""
        while self._mapped:
            _LIBC.munmap(self._mapped.pop(), self._nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _mapped(arena: ArenaHandle, nbytes: int, hint: int) -> int:
    """Address of the arena, mapped once more, read-only, at ``hint`` if that is free. Raises
    EngineError."""
    try:
        fd = open_arena(arena)
        try:
            address = _LIBC.mmap(hint, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if address in (None, _FAILED):
            raise OSError(os.strerror(ctypes.get_errno()))
    except (TierError, OSError) as error:
        raise EngineError(
            f"cannot map the arena for attention in place ({error}); set "
            "VLLM_RETRIEVAL_OFFLOAD_BOUNDARY above max_model_len to keep blocks on the device"
        ) from error
    return int(address)
