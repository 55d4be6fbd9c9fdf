"""Copies blocks between the device KV cache of one rank and the arena: an order becomes a batch of
addresses, wherever its blocks are, or a few, and those of one direction complete in order.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from kvrecall.engines.vllm.connector.pages import Copy, GroupPages, runs_of
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Addresses, Batch, Device, Event
from kvrecall.errors import EngineError, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle

logger = logging.getLogger("vllm.kvrecall")


_SUSPEND_S, _POLL_S = 60.0, 0.001  # how long sleep waits for copies in flight
_ITEMS = 2048
"""Of a larger order the first are copied while the others' addresses are computed."""


class Moved(NamedTuple):
    """The cost of a batch."""

    nbytes: int
    seconds: float


class CopyQueue:
    """Batches in one direction, completed in their order, on a stream of their own. Owned by its
    worker; not thread-safe.

    A thread of the queue's own computes addresses and calls the driver, which takes half a
    microsecond of its time for each item and may wait for room in the stream.
    """

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._stream = device.stream(name)
        self._thread = device.thread(name)
        self._under_way: deque[tuple[int, Future[tuple[Event, Event]]]] = deque()

    def submit(self, nbytes: int, batches: Iterator[Batch]) -> None:
        """Copies ``batches``, of so many bytes together, after all work that the engine has queued
        on the device so far."""
        before = self._device.current().record()
        self._under_way.append((nbytes, self._thread.submit(self._send, batches, before)))

    def _send(self, batches: Iterator[Batch], before: Event) -> tuple[Event, Event]:
        """Thread: begin and end of the copy."""
        self._stream.wait(before)
        began = self._stream.record()
        for batch in batches:
            self._stream.copy(batch)
        return began, self._stream.record()

    @property
    def is_busy(self) -> bool:
        """Whether a submitted batch has not been reported as completed."""
        return bool(self._under_way)

    def completed(self) -> list[Moved]:
        """The batches that were completed since the last call. Does not wait."""
        count = 0
        for _, sent in self._under_way:
            if not (sent.done() and sent.result()[1].is_reached()):
                break
            count += 1
        return self._take(count)

    def drain(self) -> list[Moved]:
        """Waits until every submitted batch is complete; returns those since the last call."""
        if self._under_way:
            self._under_way[-1][1].result()[1].wait()
        return self._take(len(self._under_way))

    def precede(self) -> None:
        """What the engine queues on the device from now on begins after every submitted batch. The
        host does not wait for the device."""
        if self._under_way:
            self._device.current().wait(self._under_way[-1][1].result()[1])

    def close(self) -> list[Moved]:
        """As ``drain``, and ends the thread."""
        drained = self.drain()
        self._thread.shutdown(wait=False)
        return drained

    def _take(self, count: int) -> list[Moved]:
        """The first batches, which are complete."""
        moved = []
        for _ in range(count):
            nbytes, sent = self._under_way.popleft()
            began, ended = sent.result()
            moved.append(Moved(nbytes, ended.seconds_since(began)))
        return moved


class _Places:
    """Where the blocks of a KV group lie: in a device block, and in a record."""

    def __init__(self, group: GroupPages) -> None:
        self.blocks = min((len(page.rows) for page in group.pages), default=0)
        runs = runs_of(group)
        self.addresses = np.array([run.address for run in runs], dtype=np.int64)
        self.strides = np.array([run.stride for run in runs], dtype=np.int64)
        self.places = np.array([run.at for run in runs], dtype=np.int64)
        self.sizes = np.array([run.nbytes for run in runs], dtype=np.int64)
        self.nbytes = int(self.sizes.sum())
        self.end = group.end

    def parts(self, blocks: int) -> list[slice]:
        """All runs of a block, in parts of not many more than ``_ITEMS`` of so many blocks."""
        most = max(1, _ITEMS // max(1, blocks))
        return [slice(first, first + most) for first in range(0, len(self.sizes), most)]

    def rows(self, copy: Copy, arena_bytes: int) -> tuple[Addresses, Addresses]:
        """The blocks, and the offsets of their records. The null block (0) holds no tokens: left
        out. Raises IndexError for others than there are."""
        blocks, offsets = np.array([copy.block_ids, copy.offsets], dtype=np.int64)
        blocks, offsets = blocks[blocks != 0], offsets[blocks != 0]
        if len(blocks) and not (
            0 <= offsets.min() <= offsets.max() + self.end <= arena_bytes
            and 0 <= blocks.min() <= blocks.max() < self.blocks
        ):
            raise IndexError(f"{copy} lies outside of the arena or of the device's blocks")
        return blocks, offsets

    def columns(
        self, blocks: Addresses, offsets: Addresses, arena: int, part: slice
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Addresses on the device and in the arena, which begins at ``arena``, and sizes, layer by
        layer: those of a layer are at even distances where blocks and records are. ``part``: of a
        block's runs."""
        return (
            (self.addresses[part, None] + self.strides[part, None] * blocks).ravel(),
            (self.places[part, None] + (arena + offsets)).ravel(),
            np.repeat(self.sizes[part], len(blocks)),
        )


class Copier:
    """Moves blocks of one rank, between its device and one arena. Owned by its worker; not
    thread-safe.

    ``arena``: uint8 ``[arena bytes]``; ``groups``: the rank's layers by KV group.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        groups: Sequence[GroupPages],
        populated: Callable[[], int] | None = None,
    ) -> None:
        """``populated``: how many of the arena's leading bytes have pages; None: all."""
        self._arena = arena
        self._groups = groups  # keeps their memory
        self._device = device_of(next(g.pages[0].rows.device for g in groups if g.pages))
        self._places = [_Places(group) for group in groups]
        self._device.lock(arena, populated or arena.numel)
        self.loads = CopyQueue(self._device, "loads")
        self.stores = CopyQueue(self._device, "stores")

    def load(self, *copies: Copy) -> int:
        """Arena -> device, in their order; returns the bytes. Device blocks must not be in use.
        Raises IndexError for a block or a place that does not exist."""
        return self._submit(self.loads, copies, lambda device, arena, n: Batch(arena, device, n))

    def store(self, *copies: Copy) -> int:
        """Device -> arena, in their order, after all work queued on the device so far; returns the
        bytes. Raises as ``load``."""
        return self._submit(self.stores, copies, Batch)

    def _submit(
        self,
        queue: CopyQueue,
        copies: Sequence[Copy],
        directed: Callable[[Addresses, Addresses, Addresses], Batch],
    ) -> int:
        """``directed`` takes addresses on the device, addresses in the arena, and sizes."""
        places = [self._places[copy.group] for copy in copies]
        rows = [
            one.rows(copy, self._arena.numel()) for one, copy in zip(places, copies, strict=True)
        ]
        begin = self._arena.data_ptr()

        items = sum(len(one.sizes) * len(row[0]) for one, row in zip(places, rows, strict=True))

        def batches() -> Iterator[Batch]:
            columns = (
                one.columns(*row, begin, part)
                for one, row in zip(places, rows, strict=True)
                for part in one.parts(len(row[0]))
            )
            if items > _ITEMS:
                yield from (directed(*each) for each in columns)
            else:
                yield directed(*(np.concatenate(each) for each in zip(*columns, strict=True)))

        nbytes = sum(one.nbytes * len(row[0]) for one, row in zip(places, rows, strict=True))
        queue.submit(nbytes, batches())
        return nbytes

    @property
    def is_busy(self) -> bool:
        """Whether a submitted copy has not been reported as completed."""
        return self.loads.is_busy or self.stores.is_busy

    def drain(self) -> tuple[list[Moved], list[Moved]]:
        """Waits until every submitted copy is complete; loads and stores since the last call."""
        return self.loads.drain(), self.stores.drain()

    def close(self) -> tuple[list[Moved], list[Moved]]:
        """As ``drain``, and unlocks the arena, which may be unmapped then."""
        drained = self.loads.close(), self.stores.close()
        self._device.unlock(self._arena)
        return drained


class ArenaMapping:
    """Copies between the device and the arena that each order names.

    The node's pool service may be restarted and have another arena. Offsets belong to the arena of
    their orders; copies to or from an arena that cannot be mapped (any more) fail, and while the
    device's memory is taken away. When the service has died its arena is unmapped once no copy is
    in flight and attention no longer reads it, so that its memory is free for the next one. Called
    from the worker's thread only.
    """

    def __init__(self, groups: Sequence[GroupPages]) -> None:
        self._groups = groups
        self._device = device_of(next(g.pages[0].rows.device for g in groups if g.pages))
        self._lock = threading.Lock()  # guards all that follows against the watching thread
        self._handle: ArenaHandle | None = None
        self._failed: ArenaHandle | None = None
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._suspended = False
        self._loaded: list[Moved] = []  # by copiers that are gone
        self._stored: list[Moved] = []
        self._read: frozenset[ArenaHandle] = frozenset()  # by attention, in place
        self._only_read: dict[ArenaHandle, tuple[Copier, Arena]] = {}  # and no longer copied
        self._last_read: Event | None = None

    def prepare(self, handle: ArenaHandle, numa_node: int | None) -> None:
        """Maps the arena before it is needed. ``numa_node``: of the device."""
        with self._lock:
            self._attach(handle)
            node = self._arena.node() if self._arena is not None else None
        if node is None or numa_node is None:
            return
        logger.info("kvrecall: device at NUMA node %d, host memory at %d", numa_node, node)
        if node != numa_node and handle.boot:
            logger.warning(
                "kvrecall: every copy crosses from NUMA node %d to %d: start the pool service with "
                "numactl --preferred=%d",
                node,
                numa_node,
                numa_node,
            )

    def load(self, handle: ArenaHandle, *copies: Copy) -> bool:
        """Arena -> device. False if the arena cannot be mapped."""
        with self._lock:
            copier = self._attach(handle)
            if copier is not None:
                copier.load(*copies)
            return copier is not None

    def store(self, handle: ArenaHandle, *copies: Copy) -> bool:
        """Device -> arena. False if the arena cannot be mapped."""
        with self._lock:
            copier = self._attach(handle)
            if copier is not None:
                copier.store(*copies)
            return copier is not None

    def memory(self, handle: ArenaHandle) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """All bytes of the arena, until it is unmapped. None if it cannot be mapped."""
        with self._lock:
            return self._arena.array() if self._attach(handle) and self._arena else None

    def completed(self) -> tuple[list[Moved], list[Moved]]:
        """The loads and the stores that were completed since the last call, each in order."""
        with self._lock:
            if self._copier is not None:
                self._loaded += self._copier.loads.completed()
                self._stored += self._copier.stores.completed()
            loaded, self._loaded = self._loaded, []
            stored, self._stored = self._stored, []
            return loaded, stored

    def stores_first(self) -> None:
        """What the engine queues on the device from now on begins after every submitted store."""
        with self._lock:
            if self._copier is not None:
                self._copier.stores.precede()

    def keep(self, read: frozenset[ArenaHandle]) -> None:
        """Attention reads these arenas in place from now on, and no others: they stay mapped and
        locked for the device, also if their owners die."""
        if read == self._read:
            return
        with self._lock:
            ended, self._read = self._read - read, read
            if ended:  # by the engine's work that is still queued
                self._last_read = self._device.current().record()
            for handle in ended & self._only_read.keys():
                self._release(*self._only_read.pop(handle))

    def suspend(self) -> None:
        """Waits for all copies. Until ``resume`` the device's memory is not there. Raises
        EngineError, and suspends nothing, if a copy does not end."""
        until = time.monotonic() + _SUSPEND_S
        with self._lock:
            while self._copier is not None and not self._suspended:
                self._loaded += self._copier.loads.completed()
                self._stored += self._copier.stores.completed()
                if not self._copier.is_busy:
                    break
                if time.monotonic() > until:
                    raise EngineError(
                        f"copies to or from the KV cache have not ended for {_SUSPEND_S:.0f} s, so "
                        "its memory cannot be given back; wait and try again, or restart the engine"
                    )
                time.sleep(_POLL_S)
            self._suspended = True

    def resume(self) -> None:
        """The device's memory is where it was."""
        with self._lock:
            self._suspended = False

    def close(self) -> None:
        self.keep(frozenset())
        with self._lock:
            self._detach()

    # -- under the lock --------------------------------------------------------------------

    def _attach(self, handle: ArenaHandle) -> Copier | None:
        if self._suspended:
            return None
        if handle in (self._handle, self._failed):
            return self._copier if handle == self._handle else None
        self._detach()
        arena = None
        try:
            arena = Arena.attach(handle)
            memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
            self._copier = Copier(memory, self._groups, arena.populated)
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

    def _detach(self) -> None:
        if self._copier is not None and self._arena is not None and self._handle is not None:
            loaded, stored = self._copier.drain()
            self._loaded += loaded
            self._stored += stored
            if self._handle in self._read:
                self._only_read[self._handle] = self._copier, self._arena
            else:
                self._release(self._copier, self._arena)
        self._copier = self._arena = self._handle = None

    def _release(self, copier: Copier, arena: Arena) -> None:
        """Unmaps an arena, whose copies are complete."""
        if self._last_read is not None:
            self._last_read.wait()
        copier.close()
        arena.close()

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
