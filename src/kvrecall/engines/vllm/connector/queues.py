"""Batched copies between host memory and a device, in queues: a queue for each direction.

A batch names addresses, so one call copies all blocks of an order, however they lie. ``CopyQueue``
has a form a kind of device: in place on the CPU, on a stream elsewhere. Tests have a third, which
copies as late as it may (tests/engine/late_copies.py). Nothing outside this module names CUDA.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from ctypes import memmove
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.errors import TierError

Addresses = npt.NDArray[np.int64]

_WORTH_SHARING = 4 << 20
"""Batches of fewer bytes are copied by one thread."""

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
    """What a batch cost."""

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
    """The accelerator form: a stream of its own, and two events a batch.

    A batch is one call of the driver (``cuMemcpyBatchAsync`` where CUDA has it), as of vLLM's own
    offloading. Run on CUDA only by ``kvrecall gpu-check``.
    """

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
    """Page-locks host memory for a CUDA device, so that copies run at full speed and in background,
    and kernels may read it by its address. Nothing for other devices. Raises TierError."""
    if device.type == "cuda":
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        flags = _PORTABLE | _MAPPED
        status = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), flags))
        if status != 0:
            raise TierError(
                f"the driver does not page-lock the arena of {memory.numel()} bytes (CUDA error "
                f"{status}); make host_size smaller or raise the limit of locked memory"
            )


def page_unlock(memory: torch.Tensor, device: torch.device) -> None:
    """Undoes ``page_lock``, which must not outlive the mapping."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
