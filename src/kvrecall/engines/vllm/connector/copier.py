"""Copies blocks between the device KV cache of one rank and the arena.

A block of a layer is a run of bytes, or several, whatever the backend packs into it (K and V, of
all heads of the rank, fp8 or bf16): the pool moves bytes and never interprets them. An order is
turned into addresses at once and is one batch of a copy queue.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvrecall.engines.vllm.compat.config import LayerPlacement
from kvrecall.engines.vllm.connector import queues
from kvrecall.engines.vllm.connector.queues import Batch, Moved
from kvrecall.engines.vllm.connector.wire import Copy
from kvrecall.errors import EngineError, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle

logger = logging.getLogger("vllm.kvrecall")


@dataclass(frozen=True, slots=True)
class Pages:
    """Rows of one layer: uint8 ``[num_blocks, page_bytes]``, row stride ``block_stride`` bytes.

    Rows that are not one run of bytes have more dimensions, which are copied in their order.
    ``dtype``: of the values in them, as far as it is known; uint8 stands for bytes of any format.
    """

    name: str
    rows: torch.Tensor
    layout: str
    dtype: torch.dtype = torch.uint8

    @property
    def page_bytes(self) -> int:
        return int(self.rows[0].numel())


def pages_of(
    kv_caches: Mapping[str, torch.Tensor],
    placements: Mapping[str, LayerPlacement],
    num_blocks: int,
    fp8: torch.dtype | None = None,
) -> tuple[Pages, ...]:
    """Pages of every layer that owns memory, in the order of ``placements``.

    Layers that share another layer's memory are left out. Raises EngineError for a layout in
    which a block of a layer is not one run of bytes. ``fp8``: what caches of bytes hold.
    """
    pages: list[Pages] = []
    seen: set[int] = set()
    for name, place in placements.items():
        tensor = kv_caches.get(name)
        if tensor is None or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        pages.append(_layer_pages(name, tensor, place, num_blocks, fp8))
    if not pages:
        raise EngineError("the engine registered no KV cache memory; nothing to pool")
    return tuple(pages)


def _layer_pages(
    name: str,
    tensor: torch.Tensor,
    place: LayerPlacement,
    num_blocks: int,
    fp8: torch.dtype | None,
) -> Pages:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.element_size()
    last = start + (num_blocks - 1) * place.block_stride + place.page_bytes
    if last > whole.numel() or not _is_one_run(tensor, place, num_blocks):
        raise EngineError(
            f"layer {name}: this KV cache layout (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}, {tensor.dtype}) does not keep a block's bytes together, which "
            "the pool needs; choose another attention backend or KV cache layout"
        )
    rows = whole.as_strided((num_blocks, place.page_bytes), (place.block_stride, 1), start)
    layout = f"{_inner(tensor, place)} {tensor.dtype} {place.page_bytes}"
    values = fp8 if fp8 is not None and tensor.dtype is torch.uint8 else tensor.dtype
    return Pages(name, rows, layout, values)


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Extent and step in bytes of every dimension that has more than one element."""
    size = tensor.element_size()
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return [(extent, step * size) for extent, step in shape if extent > 1]


def _inner(tensor: torch.Tensor, place: LayerPlacement) -> list[tuple[int, int]]:
    """Dimensions within a block, outermost first."""
    return [(extent, step) for extent, step in _dims(tensor) if extent * step <= place.block_stride]


def _is_one_run(tensor: torch.Tensor, place: LayerPlacement, num_blocks: int) -> bool:
    """Whether the first page_bytes at each block stride are exactly one block's elements.

    A kernel may split a block into several of its own, so the dimensions within a (kernel) block
    must fill it without gaps, a whole number of kernel blocks must fill the page, and the one
    dimension left must step from (kernel) block to (kernel) block.
    """
    inner = _inner(tensor, place)
    reach = filled = tensor.element_size()
    for extent, step in inner:
        reach += (extent - 1) * step
        filled *= extent
    outer = [step for extent, step in _dims(tensor) if (extent, step) not in inner]
    splits = tensor.numel() * tensor.element_size() // (num_blocks * filled)
    blocks_in_order = len(outer) <= 1 and all(s in (filled, place.block_stride) for s in outer)
    return reach == filled and splits * filled == place.page_bytes and blocks_in_order


@dataclass(frozen=True, slots=True)
class _Run:
    """Bytes of a block that lie together on the device: in block 0 at ``address``, ``stride`` bytes
    further in each next block; in a block's record at ``at``."""

    address: int
    stride: int
    at: int
    nbytes: int


def _runs_of(pages: Sequence[Pages], shard_offset: int) -> list[_Run]:
    """The runs of all layers, in their order in a record; those that follow each other on the
    device, too (layouts with all layers of a block together), are one."""
    runs: list[_Run] = []
    at = shard_offset
    for page in pages:
        dims = list(zip(page.rows.shape[1:], page.rows.stride()[1:], strict=True))
        nbytes = 1
        while dims and (dims[-1][0] == 1 or dims[-1][1] == nbytes):
            nbytes *= dims.pop()[0]
        places = [0]
        for extent, step in dims:
            places = [place + index * step for place in places for index in range(extent)]
        stride = page.rows.stride(0)
        for place in places:
            run = _Run(page.rows.data_ptr() + place, stride, at, nbytes)
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.stride == stride
                and last.address + last.nbytes == run.address
            ):
                runs[-1] = _Run(last.address, stride, last.at, last.nbytes + nbytes)
            else:
                runs.append(run)
            at += nbytes
    return runs


class Copier:
    """Moves blocks of one rank, between its device and one arena. Owned by its worker; not
    thread-safe.

    ``arena``: uint8 ``[arena bytes]``; ``pages``: the rank's layers; ``shard_offset``: where this
    rank's bytes start within a block's record.
    """

    def __init__(self, arena: torch.Tensor, pages: Sequence[Pages], shard_offset: int) -> None:
        """Raises TierError if the device cannot reach the arena."""
        self._arena = arena
        self._pages = pages  # keeps their memory
        self._device = pages[0].rows.device
        self._blocks = min(len(page.rows) for page in pages)
        runs = _runs_of(pages, shard_offset)
        self._addresses = np.array([run.address for run in runs])
        self._strides = np.array([run.stride for run in runs])
        self._places = np.array([run.at for run in runs])
        self._sizes = np.array([run.nbytes for run in runs])
        self._end = shard_offset + int(self._sizes.sum())
        queues.page_lock(arena, self._device)
        self.loads = queues.make_queue(self._device)
        self.stores = queues.make_queue(self._device)

    def load(self, copy: Copy) -> int:
        """Arena -> device; returns the bytes. Device blocks must not be in use."""
        on_device, in_arena, sizes = self._columns(copy)
        self.loads.submit(Batch(in_arena, on_device, sizes))
        return int(sizes.sum())

    def store(self, copy: Copy) -> int:
        """Device -> arena, after all work queued on the device so far; returns the bytes."""
        on_device, in_arena, sizes = self._columns(copy)
        self.stores.submit(Batch(on_device, in_arena, sizes))
        return int(sizes.sum())

    def _columns(self, copy: Copy) -> tuple[queues.Addresses, queues.Addresses, queues.Addresses]:
        """Addresses on the device and in the arena, and sizes, block by block. The null block (0)
        holds no tokens: left out."""
        blocks, offsets = np.array([copy.block_ids, copy.offsets], dtype=np.int64)
        blocks, offsets = blocks[blocks != 0, None], offsets[blocks != 0, None]
        if len(blocks) and not (
            0 <= offsets.min() <= offsets.max() + self._end <= self._arena.numel()
            and 0 <= blocks.min() <= blocks.max() < self._blocks
        ):
            raise IndexError(f"{copy} lies outside of the arena or of the device's blocks")
        sizes = np.broadcast_to(self._sizes, (len(blocks), len(self._sizes)))
        return (
            (self._addresses + blocks * self._strides).ravel(),
            (self._arena.data_ptr() + offsets + self._places).ravel(),
            sizes.ravel(),
        )

    def drain(self) -> None:
        """Waits until every submitted copy is complete."""
        self.loads.drain()
        self.stores.drain()

    def close(self) -> None:
        """Drains, and gives the arena back to the driver."""
        self.drain()
        queues.page_unlock(self._arena, self._device)


class ArenaMapping:
    """Copies between the device and the arena that each order names.

    The node's pool service may be started again and have another arena. Offsets belong to the
    arena of their orders; one that cannot be mapped (any more) takes and gives nothing, which is
    a failed copy. When the service has died its arena is unmapped once no copy is under way, so
    that its memory is free for the next one. Called from the worker's thread only.
    """

    def __init__(self, pages: Sequence[Pages], shard_offset: int) -> None:
        self._pages = pages
        self._shard_offset = shard_offset
        self._lock = threading.Lock()  # guards all that follows against the watching thread
        self._handle: ArenaHandle | None = None
        self._failed: ArenaHandle | None = None
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._loaded: list[Moved] = []  # by copiers that are gone
        self._stored: list[Moved] = []

    def load(self, handle: ArenaHandle, copy: Copy) -> bool:
        """Arena -> device. False if the arena cannot be mapped."""
        with self._lock:
            copier = self._attach(handle)
            if copier is not None:
                copier.load(copy)
            return copier is not None

    def store(self, handle: ArenaHandle, copy: Copy) -> bool:
        """Device -> arena. False if the arena cannot be mapped."""
        with self._lock:
            copier = self._attach(handle)
            if copier is not None:
                copier.store(copy)
            return copier is not None

    def memory(self, handle: ArenaHandle) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """All its bytes, until it is unmapped. None if it cannot be mapped."""
        with self._lock:
            return self._arena.array() if self._attach(handle) and self._arena else None

    def completed(self) -> tuple[list[Moved], list[Moved]]:
        """The loads and the stores that were completed since the last call, each in order."""
        with self._lock:
            self._collect()
            loaded, self._loaded = self._loaded, []
            stored, self._stored = self._stored, []
            return loaded, stored

    def drain(self) -> None:
        """Waits until every submitted copy is complete."""
        with self._lock:
            if self._copier is not None:
                self._copier.drain()

    def close(self) -> None:
        with self._lock:
            self._detach()

    # -- under the lock --------------------------------------------------------------------

    def _attach(self, handle: ArenaHandle) -> Copier | None:
        if handle in (self._handle, self._failed):
            return self._copier if handle == self._handle else None
        self._detach()
        arena = None
        try:
            arena = Arena.attach(handle)
            memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
            self._copier = Copier(memory, self._pages, self._shard_offset)
        except TierError as error:
            self._failed = handle
            logger.error("kvrecall: %s; its blocks are recomputed", error)
            if arena is not None:
                arena.close()
            return None
        self._arena, self._handle = arena, handle
        if handle.boot:  # its owner is a service, which may end before this process
            threading.Thread(
                target=self._watch, args=(handle,), name="kvrecall-arena-watch", daemon=True
            ).start()
        return self._copier

    def _collect(self) -> None:
        if self._copier is not None:
            self._loaded += self._copier.loads.completed()
            self._stored += self._copier.stores.completed()

    def _detach(self) -> None:
        if self._copier is not None:
            self._copier.close()
            self._collect()
            self._copier = None
        if self._arena is not None:
            self._arena.close()
        self._arena = self._handle = None

    def _watch(self, handle: ArenaHandle) -> None:
        """Thread: unmaps the arena when the process that owns it has ended."""
        try:
            process = os.pidfd_open(handle.pid)
        except ProcessLookupError:
            process = -1
        if process >= 0:
            waiting = select.poll()
            waiting.register(process, select.POLLIN)
            waiting.poll()
            os.close(process)
        with self._lock:
            if self._handle == handle:
                self._detach()
