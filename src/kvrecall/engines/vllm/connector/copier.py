"""Copies blocks between the device KV cache of one rank and the arena: an order becomes a batch of
addresses, wherever its blocks are, or a few, and those of one direction complete in order.

A copy that the driver refuses has failed, and is over when what was queued of it is. One that never
ends is *stuck*: what it may still write is given to no other request, no other copy is begun, and
nothing waits for it any longer.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvrecall.engines.vllm.connector.pages import GroupPages, runs_of
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Addresses, Batch, Copy, Device, Event
from kvrecall.errors import EngineError, KvrecallError, TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle

logger = logging.getLogger("vllm.kvrecall")

_ITEMS = 2048
"""Of a larger order the first are copied while the others' addresses are computed."""

LONGEST_S = 30.0
"""Without progress, after which copies of a direction are stuck. They take milliseconds."""

_POLL_S = 0.001
_ERRORS = RuntimeError, MemoryError, IndexError, KvrecallError
"""Of torch, a driver or numpy. torch's for a device are RuntimeErrors."""


class Moved(NamedTuple):
    """The cost of a batch; ``failed``: not all of it was copied, or it was stuck before."""

    nbytes: int
    seconds: float
    failed: bool


class _Sent(NamedTuple):
    """Begin and end on the device of what was queued of a batch, and whether that is all."""

    began: Event
    ended: Event
    is_whole: bool


@dataclass(slots=True)
class _Order:
    """A batch under way."""

    nbytes: int
    sent: Future[_Sent]
    failed: bool = False


class CopyQueue:
    """Batches in one direction, completed in order, on a stream of their own. Not thread-safe.

    A thread of the queue's own computes addresses and calls the driver, which takes half a
    microsecond of its time for each item and may wait for room in the stream.
    """

    def __init__(self, device: Device, name: str) -> None:
        self._device = device
        self._name = name
        self._clock = time.monotonic
        self._stream = device.stream(name)
        self._thread = device.thread(name)
        self._under_way: deque[_Order] = deque()
        self._progress_at = 0.0  # when a batch ended, or the first of those under way began
        self.is_stuck = False

    @property
    def is_busy(self) -> bool:
        """Whether batches are under way, as of the last call."""
        return bool(self._under_way)

    def submit(self, nbytes: int, batches: Iterator[Batch]) -> None:
        """Copies ``batches``, of so many bytes, after all work queued on the device so far."""
        before = self._device.current().record()
        if not self._under_way:
            self._progress_at = self._clock()
        self._under_way.append(_Order(nbytes, self._thread.submit(self._send, batches, before)))

    def _send(self, batches: Iterator[Batch], before: Event) -> _Sent:
        """Thread: queues the copy."""
        self._stream.wait(before)
        began, is_whole = self._stream.record(), True
        try:
            for batch in batches:
                self._stream.copy(batch)
        except _ERRORS as error:
            is_whole = False
            logger.error(
                "kvrecall: a copy of blocks (%s) failed: %s; they are recomputed, or not saved",
                self._name,
                error,
            )
        return _Sent(began, self._stream.record(), is_whole)

    def completed(self) -> list[Moved]:
        """The batches that were completed since the last call. Does not wait. Raises EngineError if
        the device does not know whether they are."""
        moved = []
        try:
            while self._under_way:
                order = self._under_way[0]
                if not order.sent.done():
                    break
                began, ended, is_whole = order.sent.result()
                if not ended.is_reached():
                    break
                self._under_way.popleft()
                failed = order.failed or not is_whole
                moved.append(Moved(order.nbytes, ended.seconds_since(began), failed))
        except _ERRORS as error:
            raise EngineError(
                f"the device's copies of blocks ({self._name}) can no longer be tracked: "
                f"{error}; the engine cannot know which blocks they still write, so restart it"
            ) from error
        if moved or not self._under_way:
            self._progress_at, self.is_stuck = self._clock(), False
        elif self._clock() - self._progress_at > LONGEST_S and not self.is_stuck:
            self._give_up()
        return moved

    def _give_up(self) -> None:
        self.is_stuck = True
        for order in self._under_way:
            order.failed = True
        logger.error(
            "kvrecall: a copy of blocks (%s) has not ended for %d s: until it does, blocks are "
            "recomputed and not saved; if it never does, the device or its driver needs a restart",
            self._name,
            LONGEST_S,
        )

    def drain(self) -> list[Moved]:
        """Waits until every submitted batch is complete, or stuck; those since the last call."""
        moved = self.completed()
        while self._under_way and not self.is_stuck:
            time.sleep(_POLL_S)
            moved += self.completed()
        return moved

    def precede(self) -> None:
        """What the engine queues on the device from now on begins after every submitted batch,
        unless they are stuck. The host does not wait for the device."""
        if not self._under_way or self.is_stuck:
            return
        try:
            _, ended, _ = self._under_way[-1].sent.result(LONGEST_S)
        except TimeoutError:
            self._give_up()
        else:
            self._device.current().wait(ended)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False)


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

    def rows(self, copy: Copy, arena_bytes: int, is_store: bool) -> tuple[Addresses, Addresses]:
        """The blocks, and the offsets of their records. The null block (0) holds no tokens: a load
        leaves it out. Raises IndexError for others than there are, and two copies to one place."""
        if len(copy.block_ids) != len(copy.offsets):
            raise IndexError(f"{copy} does not have an offset for each block")
        blocks, offsets = np.array([copy.block_ids, copy.offsets], dtype=np.int64)
        if not is_store:
            blocks, offsets = blocks[blocks != 0], offsets[blocks != 0]
        targets, room = (offsets, self.end) if is_store else (blocks, 1)
        if len(blocks) and not (
            0 <= offsets.min() <= offsets.max() + self.end <= arena_bytes
            and 0 < blocks.min() <= blocks.max() < self.blocks
            and bool((np.diff(np.sort(targets)) >= room).all())
        ):
            raise IndexError(
                f"{copy} lies outside of the arena or of the device's blocks, or overlaps itself"
            )
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
        return self._submit(copies, is_store=False)

    def store(self, *copies: Copy) -> int:
        """Device -> arena, in their order, after all work queued on the device so far; returns the
        bytes. Raises as ``load``."""
        return self._submit(copies, is_store=True)

    def _submit(self, copies: Sequence[Copy], is_store: bool) -> int:
        if not all(0 <= copy.group < len(self._places) for copy in copies):
            raise IndexError(f"{copies} are of KV groups that this engine does not have")
        of = [self._places[copy.group] for copy in copies]
        room, begin = self._arena.numel(), self._arena.data_ptr()
        work = [(at, *at.rows(copy, room, is_store)) for at, copy in zip(of, copies, strict=True)]

        def batches() -> Iterator[Batch]:
            columns: Iterable[Sequence[Addresses]] = (
                at.columns(blocks, offsets, begin, part)
                for at, blocks, offsets in work
                for part in at.parts(len(blocks))
            )
            if sum(len(at.sizes) * len(blocks) for at, blocks, _ in work) <= _ITEMS:
                columns = [[np.concatenate(each) for each in zip(*columns, strict=True)]]
            for device, arena, nbytes in columns:
                yield Batch(device, arena, nbytes) if is_store else Batch(arena, device, nbytes)

        nbytes = sum(at.nbytes * len(blocks) for at, blocks, _ in work)
        (self.stores if is_store else self.loads).submit(nbytes, batches())
        return nbytes

    @property
    def is_stuck(self) -> bool:
        """Whether copies are under way that may never end."""
        return self.loads.is_stuck or self.stores.is_stuck

    @property
    def is_busy(self) -> bool:
        """Whether copies are under way, as of the last call that looked."""
        return self.loads.is_busy or self.stores.is_busy

    def completed(self) -> tuple[list[Moved], list[Moved]]:
        """The loads and the stores that were completed since the last call."""
        return self.loads.completed(), self.stores.completed()

    def drain(self) -> tuple[list[Moved], list[Moved]]:
        """Waits until every copy is complete, or stuck; loads and stores since the last call."""
        return self.loads.drain(), self.stores.drain()

    def close(self) -> tuple[list[Moved], list[Moved]]:
        """As ``drain``, and unlocks the arena, which may be unmapped then: no copy is stuck."""
        drained = self.drain()
        self.loads.close()
        self.stores.close()
        self._device.unlock(self._arena)
        return drained


class _Mapped(NamedTuple):
    """An arena in this process, and the copies between it and the device."""

    handle: ArenaHandle
    arena: Arena
    copier: Copier


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
        self._mapped: _Mapped | None = None
        self._failed: ArenaHandle | None = None
        self._suspended = False
        self._left: _Mapped | None = None  # whose copies are stuck
        self._loaded: list[Moved] = []  # by copiers that are gone
        self._stored: list[Moved] = []
        self._read: frozenset[ArenaHandle] = frozenset()  # by attention, in place
        self._only_read: dict[ArenaHandle, _Mapped] = {}  # and no longer copied
        self._last_read: Event | None = None

    def prepare(self, handle: ArenaHandle, numa_node: int | None) -> None:
        """Maps the arena before it is needed. ``numa_node``: of the device."""
        with self._lock:
            mapped = self._attach(handle)
            node = None if mapped is None else mapped.arena.node()
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
        """Arena -> device. False, and nothing is copied, if the arena cannot be mapped, copies are
        stuck, or the order names what is not there."""
        return self._copy(handle, Copier.load, copies)

    def store(self, handle: ArenaHandle, *copies: Copy) -> bool:
        """Device -> arena. False as of ``load``."""
        return self._copy(handle, Copier.store, copies)

    def _copy(self, handle: ArenaHandle, copy: Callable[..., int], copies: Sequence[Copy]) -> bool:
        with self._lock:
            mapped = self._attach(handle)
            if mapped is None or mapped.copier.is_stuck:
                return False
            try:
                copy(mapped.copier, *copies)
            except _ERRORS as error:
                logger.error("kvrecall: %s; its blocks are recomputed, or not saved", error)
                return False
            return True

    @property
    def is_stuck(self) -> tuple[bool, bool]:
        """Whether loads, and stores, are under way that may never end."""
        with self._lock:
            mapped = self._left or self._mapped
            if mapped is None:
                return False, False
            return mapped.copier.loads.is_stuck, mapped.copier.stores.is_stuck

    def memory(self, handle: ArenaHandle) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """All bytes of the arena, until it is unmapped. None if it cannot be mapped."""
        with self._lock:
            mapped = self._attach(handle)
            return None if mapped is None else mapped.arena.array()

    def completed(self) -> tuple[list[Moved], list[Moved]]:
        """The loads and the stores that were completed since the last call, each in order."""
        with self._lock:
            if self._left is not None:
                self._note(self._left.copier.completed())
                if not self._left.copier.is_busy:
                    left, self._left = self._left, None
                    self._end(left)
            if self._mapped is not None:
                self._note(self._mapped.copier.completed())
            loaded, self._loaded = self._loaded, []
            stored, self._stored = self._stored, []
            return loaded, stored

    def stores_first(self) -> None:
        """What the engine queues on the device from now on begins after every submitted store."""
        with self._lock:
            if self._mapped is not None:
                self._mapped.copier.stores.precede()

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
                self._release(self._only_read.pop(handle))

    def suspend(self) -> None:
        """Waits for all copies. Until ``resume`` the device's memory is not there. Raises
        EngineError if copies are stuck: they may still write it."""
        with self._lock:
            if self._mapped is not None:
                self._note(self._mapped.copier.drain())
            if self._left or (self._mapped is not None and self._mapped.copier.is_busy):
                raise EngineError(
                    f"a copy of blocks has not ended for {LONGEST_S:.0f} s, so the KV cache's "
                    "memory cannot be given back: restart the engine"
                )
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

    def _attach(self, handle: ArenaHandle) -> _Mapped | None:
        if self._suspended or self._left is not None or handle == self._failed:
            return None
        if self._mapped is not None and self._mapped.handle == handle:
            return self._mapped
        self._detach()
        arena = None
        try:
            arena = Arena.attach(handle)
            memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
            copier = Copier(memory, self._groups, arena.populated)
        except TierError as error:
            self._failed = handle
            logger.error("kvrecall: %s; its blocks are recomputed", error)
            if arena is not None:
                arena.close()
            return None
        self._mapped = _Mapped(handle, arena, copier)
        if handle.boot:  # its owner is a service, which may end before this process
            threading.Thread(
                target=self._watch, args=(handle,), name="kvrecall-arena-watch", daemon=True
            ).start()
        return self._mapped

    def _note(self, moved: tuple[list[Moved], list[Moved]]) -> None:
        self._loaded += moved[0]
        self._stored += moved[1]

    def _detach(self) -> None:
        if self._mapped is not None:
            self._note(self._mapped.copier.drain())
            mapped, self._mapped = self._mapped, None
            if mapped.copier.is_busy:
                self._left = mapped
            else:
                self._end(mapped)

    def _end(self, mapped: _Mapped) -> None:
        """Unmaps an arena, whose copies are complete, once nothing reads it."""
        if mapped.handle in self._read:
            self._only_read[mapped.handle] = mapped
        else:
            self._release(mapped)

    def _release(self, mapped: _Mapped) -> None:
        """Unmaps an arena, whose copies are complete."""
        if self._last_read is not None:
            self._last_read.wait()
        mapped.copier.close()
        mapped.arena.close()

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
            if self._mapped is not None and self._mapped.handle == handle:
                self._detach()
