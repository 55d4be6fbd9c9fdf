"""Copies blocks between the device KV cache of one rank and the arena: an order becomes one batch
of addresses, wherever its blocks are, and batches of one direction complete in order.

``CopyQueue`` has a form for each kind of device: in place on the CPU, on a stream elsewhere. Tests
have a third, which copies as late as it may (tests/engine/late_copies.py). Nothing outside this
module names CUDA.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.engines.vllm.connector.pages import GroupPages, runs_of
from kvrecall.engines.vllm.connector.wire import Copy
from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle

logger = logging.getLogger("vllm.kvrecall")

Addresses = npt.NDArray[np.int64]

_WORTH_SHARING = 4 << 20
"""One thread copies batches of fewer bytes."""

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister's flags


@dataclass(frozen=True, slots=True)
class Batch:
    """Item i: ``sizes[i]`` bytes from address ``sources[i]`` to address ``targets[i]``. Targets do
    not overlap each other or a source."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def copy_here(self, first: int = 0, last: int | None = None) -> None:
        """Copies items ``[first, last)`` in host memory, by this thread, without the GIL."""
        items = slice(first, last)
        columns = self.targets[items].tolist(), self.sources[items].tolist()
        for target, source, nbytes in zip(*columns, self.sizes[items].tolist(), strict=True):
            memmove(target, source, nbytes)


class Moved(NamedTuple):
    """The cost of a batch."""

    nbytes: int
    seconds: float


class CopyQueue(ABC):
    """Batches in one direction, completed in their order. Owned by its worker; not thread-safe."""

    in_step: bool
    """Whether batches are complete when ``submit`` returns."""

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Copies ``batch`` after all work queued on the device so far."""

    @abstractmethod
    def completed(self) -> list[Moved]:
        """The batches that were completed since the last call. Does not wait."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until every submitted batch is complete."""


class InlineQueue(CopyQueue):
    """The CPU form: device memory is host memory, a batch is complete when it is submitted.

    Large batches are shared among as many threads as torch computes with in this process.
    """

    in_step = True

    def __init__(self) -> None:
        self._helpers = torch.get_num_threads() - 1
        self._team = ThreadPoolExecutor(max(1, self._helpers), "kvrecall-copy")
        self._completed: list[Moved] = []

    def submit(self, batch: Batch) -> None:
        began = time.perf_counter()
        nbytes = batch.nbytes
        shares = 1 + self._helpers if nbytes >= _WORTH_SHARING else 1
        bounds = [len(batch.sizes) * share // shares for share in range(shares + 1)]
        mine, *others = pairwise(bounds)
        helping = [self._team.submit(batch.copy_here, *part) for part in others]
        batch.copy_here(*mine)
        for helper in helping:
            helper.result()
        self._completed.append(Moved(nbytes, time.perf_counter() - began))

    def completed(self) -> list[Moved]:
        completed, self._completed = self._completed, []
        return completed

    def drain(self) -> None:
        return


class StreamQueue(CopyQueue):
    """The accelerator form: a separate stream, and two events per batch. A batch is one call of the
    driver (``cuMemcpyBatchAsync`` where CUDA has it), as in vLLM's own offloading. Run on CUDA only
    by ``kvrecall gpu-check``."""

    in_step = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)
        self._under_way: deque[tuple[torch.Event, torch.Event, Batch]] = deque()

    def submit(self, batch: Batch) -> None:
        from vllm import _custom_ops as ops

        began = torch.Event(self._device, enable_timing=True)
        ended = torch.Event(self._device, enable_timing=True)
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            began.record(self._stream)
            if len(batch.sizes):
                columns = batch.sources, batch.targets, batch.sizes
                ops.swap_blocks_batch(*(torch.from_numpy(column) for column in columns))
            ended.record(self._stream)
        self._under_way.append((began, ended, batch))

    def completed(self) -> list[Moved]:
        completed = []
        while self._under_way and self._under_way[0][1].query():
            began, ended, batch = self._under_way.popleft()
            completed.append(Moved(batch.nbytes, began.elapsed_time(ended) / 1000))
        return completed

    def drain(self) -> None:
        self._stream.synchronize()


def make_queue(device: torch.device) -> CopyQueue:
    """A queue of the form for this device."""
    return InlineQueue() if device.type == "cpu" else StreamQueue(device)


def page_lock(memory: torch.Tensor, device: torch.device) -> None:
    """Page-locks host memory for a CUDA device, so that copies run at full speed and in the
    background, and kernels may read it by its address. No effect for other devices. Raises
    TierError."""
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        flags = _PORTABLE | _MAPPED
        status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), flags))
        if status != 0:
            raise TierError(
                f"the driver cannot page-lock the arena of {memory.numel()} bytes (CUDA "
                f"error {status}); make host_size smaller or raise the limit of locked "
                "memory"
            )


def page_unlock(memory: torch.Tensor, device: torch.device) -> None:
    """Undoes ``page_lock``, which must not outlive the mapping."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


class _Places:
    """Where the blocks of a KV group lie: in a device block, and in a record."""

    def __init__(self, group: GroupPages) -> None:
        self.blocks = min((len(page.rows) for page in group.pages), default=0)
        runs = runs_of(group)
        self.addresses = np.array([run.address for run in runs], dtype=np.int64)
        self.strides = np.array([run.stride for run in runs], dtype=np.int64)
        self.places = np.array([run.at for run in runs], dtype=np.int64)
        self.sizes = np.array([run.nbytes for run in runs], dtype=np.int64)
        self.end = group.end

    def columns(self, copy: Copy, arena: torch.Tensor) -> tuple[Addresses, Addresses, Addresses]:
        """Addresses on the device and in the arena, and sizes, block by block. The null block (0)
        holds no tokens: left out."""
        blocks, offsets = np.array([copy.block_ids, copy.offsets], dtype=np.int64)
        blocks, offsets = blocks[blocks != 0, None], offsets[blocks != 0, None]
        if len(blocks) and not (
            0 <= offsets.min() <= offsets.max() + self.end <= arena.numel()
            and 0 <= blocks.min() <= blocks.max() < self.blocks
        ):
            raise IndexError(f"{copy} lies outside of the arena or of the device's blocks")
        sizes = np.broadcast_to(self.sizes, (len(blocks), len(self.sizes)))
        return (
            (self.addresses + blocks * self.strides).ravel(),
            (arena.data_ptr() + offsets + self.places).ravel(),
            sizes.ravel(),
        )


class Copier:
    """Moves blocks of one rank, between its device and one arena. Owned by its worker; not
    thread-safe.

    ``arena``: uint8 ``[arena bytes]``; ``groups``: the rank's layers by KV group.
    """

    def __init__(self, arena: torch.Tensor, groups: Sequence[GroupPages]) -> None:
        """Raises TierError if the device cannot reach the arena."""
        self._arena = arena
        self._groups = groups  # keeps their memory
        self._device = next(group.pages[0].rows.device for group in groups if group.pages)
        self._places = [_Places(group) for group in groups]
        page_lock(arena, self._device)
        self.loads = make_queue(self._device)
        self.stores = make_queue(self._device)

    def load(self, *copies: Copy) -> int:
        """Arena -> device, in one batch; returns the bytes. Device blocks must not be in use."""
        on_device, in_arena, sizes = self._columns(copies)
        self.loads.submit(Batch(in_arena, on_device, sizes))
        return int(sizes.sum())

    def store(self, copy: Copy) -> int:
        """Device -> arena, after all work queued on the device so far; returns the bytes."""
        on_device, in_arena, sizes = self._columns((copy,))
        self.stores.submit(Batch(on_device, in_arena, sizes))
        return int(sizes.sum())

    def _columns(self, copies: Sequence[Copy]) -> tuple[Addresses, Addresses, Addresses]:
        parts = [self._places[copy.group].columns(copy, self._arena) for copy in copies]
        if len(parts) == 1:
            return parts[0]
        on_device, in_arena, sizes = (np.concatenate(column) for column in zip(*parts, strict=True))
        return on_device, in_arena, sizes

    def drain(self) -> None:
        """Waits until every submitted copy is complete."""
        self.loads.drain()
        self.stores.drain()

    def close(self) -> None:
        """Drains, and unregisters the arena from the driver."""
        self.drain()
        page_unlock(self._arena, self._device)


class ArenaMapping:
    """Copies between the device and the arena that each order names.

    The node's pool service may be restarted and have another arena. Offsets belong to the arena of
    their orders; copies to or from an arena that cannot be mapped (any more) fail. When the service
    has died its arena is unmapped once no copy is in flight, so that its memory is free for the
    next one. Called from the worker's thread only.
    """

    def __init__(self, groups: Sequence[GroupPages]) -> None:
        self._groups = groups
        self._lock = threading.Lock()  # guards all that follows against the watching thread
        self._handle: ArenaHandle | None = None
        self._failed: ArenaHandle | None = None
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._loaded: list[Moved] = []  # by copiers that are gone
        self._stored: list[Moved] = []

    def load(self, handle: ArenaHandle, *copies: Copy) -> bool:
        """Arena -> device. False if the arena cannot be mapped."""
        with self._lock:
            copier = self._attach(handle)
            if copier is not None:
                copier.load(*copies)
            return copier is not None

    def store(self, handle: ArenaHandle, copy: Copy) -> bool:
        """Device -> arena. False if the arena cannot be mapped."""
        with self._lock:
            copier = self._attach(handle)
            if copier is not None:
                copier.store(copy)
            return copier is not None

    def memory(self, handle: ArenaHandle) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """All bytes of the arena, until it is unmapped. None if it cannot be mapped."""
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
            self._copier = Copier(memory, self._groups)
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
