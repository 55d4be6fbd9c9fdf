"""What every form of a device has: streams, events, copies by address, and page-locking."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from ctypes import memmove
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.attention.kernels.device import Piece

Addresses = npt.NDArray[np.int64]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, one after the other: uint8, the same memory. One of at most
    one element, as numpy gives it where a mask chose nothing, may have any strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks of one KV group to copy between the device and the arena; row i of both lists belongs
    together. ``offsets`` are bytes into the arena where a block's record starts; a rank adds its
    shard's offset within the record."""

    block_ids: tuple[int, ...]
    offsets: tuple[int, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Item i: ``sizes[i]`` bytes from address ``sources[i]`` to address ``targets[i]``. Targets do
    not overlap each other or a source."""

    sources: Addresses
    targets: Addresses
    sizes: Addresses

    @classmethod
    def of_pieces(cls, sources: Addresses, targets: Addresses, piece: Piece) -> Batch:
        """Each run of each of these items is an item."""
        steps = np.arange(piece.count, dtype=np.int64) * piece.step
        begins, ends = ((column[:, None] + steps).ravel() for column in (sources, targets))
        return cls(begins, ends, np.full(len(begins), piece.nbytes, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return int(self.sizes.sum())

    def in_order(self) -> Batch:
        """The items by ascending target or source, whichever has more at even distances: layer by
        layer, as a rule."""
        orders = map(np.argsort, (self.targets, self.sources))
        batches = [Batch(self.sources[o], self.targets[o], self.sizes[o]) for o in orders]
        return max(batches, key=lambda one: _are_even(one.sources, one.targets, one.sizes).sum())

    def copy_here(self) -> None:
        """Copies all items in host memory, by this thread, without the GIL."""
        for run in self.runs(max(1, len(self.sizes))):
            self.copy_run(run)

    def runs(self, most: int) -> list[ItemRun]:
        """All items, in runs of up to ``most``."""
        is_even = _are_even(self.sources, self.targets, self.sizes)
        edges = np.flatnonzero(np.diff(is_even, prepend=False, append=False)).tolist()
        count = len(self.sizes)
        whole: list[ItemRun] = []
        done = 0
        for first, last in [*zip(edges[::2], edges[1::2], strict=True), (count, count)]:
            begin, end = max(first, done), min(last + 2, count)
            if done < begin:
                whole.append(ItemRun(done, begin, False))
            if begin < end:
                whole.append(ItemRun(begin, end, True))
            done = end
        return [
            ItemRun(begin, min(begin + most, run.end), run.is_even)
            for run in whole
            for begin in range(run.begin, run.end, most)
        ]

    def copy_run(self, run: ItemRun) -> None:
        """Copies one of ``runs`` in host memory, by this thread. Items at even distances are one
        call: taking the GIL back after each costs two threads a fifth of their bandwidth."""
        items = slice(run.begin, run.end)
        sources, targets = self.sources[items].tolist(), self.targets[items].tolist()
        if run.is_even and len(sources) > 1:
            nbytes = int(self.sizes[run.begin])
            np.copyto(_rows(targets, nbytes), _rows(sources, nbytes))
            return
        for target, source, nbytes in zip(
            targets, sources, self.sizes[items].tolist(), strict=True
        ):
            memmove(target, source, nbytes)


class ItemRun(NamedTuple):
    """Items ``[begin, end)`` of a batch; ``is_even``: of one size and at even distances, at both
    ends."""

    begin: int
    end: int
    is_even: bool


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory at an address, for numpy."""

    __array_interface__: dict[str, object]


def _rows(addresses: Sequence[int], nbytes: int) -> npt.NDArray[np.uint8]:
    """The memory at these addresses, which are at even distances [addresses, nbytes]."""
    interface = {
        "version": 3,
        "typestr": "|u1",
        "data": (addresses[0], False),
        "shape": (len(addresses), nbytes),
        "strides": (addresses[1] - addresses[0], 1),
    }
    return np.asarray(_Memory(interface))


def _are_even(sources: Addresses, targets: Addresses, sizes: Addresses) -> npt.NDArray[np.bool_]:
    """Whether each item but the first and the last is as large as its neighbours, and as far behind
    the one before as the next is behind it, at both ends."""
    is_even: npt.NDArray[np.bool_] = (sizes[2:] == sizes[1:-1]) & (sizes[1:-1] == sizes[:-2])
    for step in (np.diff(sources), np.diff(targets)):
        is_even &= (step[1:] == step[:-1]) & (step[1:] >= sizes[1:-1])
    return is_even


FETCHED_BYTES = 256 << 10
"""Of the largest tensor that is fetched without a wait."""


class Event(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def is_reached(self) -> bool:
        """Whether all work before it is complete. Does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks this thread until all work before it is complete."""

    @abstractmethod
    def seconds_since(self, earlier: Event) -> float:
        """The device's time between two events that are reached, of one stream."""


class Stream(ABC):
    """Work of a device that is done in its order. Owned by one thread."""

    @abstractmethod
    def record(self) -> Event:
        """The end of the work queued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Work queued from now on begins after the event, which may be another stream's. Does not
        block this thread."""

    @abstractmethod
    def run(self, work: Callable[[], None]) -> None:
        """Queues the kernels that the work launches."""

    @abstractmethod
    def copy(self, batch: Batch) -> None:
        """Queues the copies, in one call of the driver; between page-locked host memory and the
        device, either way."""


class Device(ABC):
    """A device as kvrecall uses it. All methods but ``lock`` and ``unlock`` are for the worker's
    thread."""

    in_step: bool
    """Whether work is complete when the call that queues it returns."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """A new stream. ``name`` is for tests."""

    @abstractmethod
    def thread(self, name: str) -> Executor:
        """A thread that does what is submitted to it in order: it sends work to a stream, which
        takes the driver's time. Where work is done ``in_step``, the caller's own."""

    @abstractmethod
    def current(self) -> Stream:
        """The stream on which the engine computes in this thread."""

    @abstractmethod
    def move(self, sources: Addresses, targets: Addresses, piece: Piece) -> None:
        """Queues copies of small items from locked host memory, or the device's, to the device, on
        the engine's stream. Addresses as of ``Batch``."""

    @abstractmethod
    def can_read(self, addresses: Addresses, nbytes: int) -> bool:
        """Whether kernels can read so many bytes of host memory from each of these on."""

    def numa_node(self) -> int | None:
        """The NUMA node of this host that the device is attached to. None where that cannot be
        known, or memory is the device's."""
        return None

    @abstractmethod
    def send(self, values: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of host values on the device, queued on the engine's stream: a new tensor, or
        ``into`` one of the same size, in one piece. Does not wait for what is queued, and the
        values may change at once."""

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """Does the work, which sends nothing, and returns what does it again: on a device with
        graphs as one launch."""
        work()
        return work

    @abstractmethod
    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A copy of a device tensor on the host, queued on the engine's stream; complete once the
        event is reached. Its memory is used anew once the tensor is gone. Waits for the device
        unless it ``can_fetch``."""

    def can_fetch(self, nbytes: int) -> bool:
        """Whether a tensor of that size can be fetched now without a wait."""
        return nbytes <= FETCHED_BYTES

    @abstractmethod
    def lock(self, memory: torch.Tensor, populated: Callable[[], int]) -> None:
        """Page-locks host memory, uint8 ``[bytes]``, for the device, as far as it is populated.
        ``populated``: how many of the leading bytes have pages, which may grow.

        Returns at once; until it is locked, and where it cannot be, copies are slower. Never
        raises.
        """

    @abstractmethod
    def unlock(self, memory: torch.Tensor) -> None:
        """Undoes ``lock``, before the memory is unmapped. No work on it may be queued."""

    @abstractmethod
    def wait_locked(self, seconds: float = math.inf) -> None:
        """Waits until all that is populated is locked, or refused; at most so long: the rest is
        locked while the engine serves."""
