"""The arena as a worker maps it: whichever the orders name, and let go when its owner has died."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrecall.engines.vllm.connector.copier import Copier, Moved
from kvrecall.engines.vllm.connector.wire import Copy
from kvrecall.errors import TierError
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import ArenaHandle

logger = logging.getLogger("vllm.kvrecall")


class ArenaMapping:
    """Copies between the device and the arena that each order names.

    The node's pool service may be started again and have another arena. Offsets belong to the
    arena of their orders; one that cannot be mapped (any more) takes and gives nothing, which is
    a failed copy. When the service has died its arena is unmapped once no copy is under way, so
    that its memory is free for the next one. Called from the worker's thread only.
    """

    def __init__(self, make_copier: Callable[[torch.Tensor], Copier]) -> None:
        self._make_copier = make_copier
        self._lock = threading.Lock()  # guards all that follows against the watching thread
        self._handle: ArenaHandle | None = None
        self._failed: ArenaHandle | None = None
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._loads_before = 0  # of copiers that are gone
        self._stores_before = 0

    def load(self, handle: ArenaHandle, copy: Copy) -> Moved | None:
        """Arena -> device. None if the arena cannot be mapped."""
        with self._lock:
            return self._copier.load(copy) if self._attach(handle) and self._copier else None

    def store(self, handle: ArenaHandle, copy: Copy) -> Moved | None:
        """Device -> arena. None if the arena cannot be mapped."""
        with self._lock:
            return self._copier.store(copy) if self._attach(handle) and self._copier else None

    def memory(self, handle: ArenaHandle) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """All its bytes, until it is unmapped. None if it cannot be mapped."""
        with self._lock:
            return self._arena.array() if self._attach(handle) and self._arena else None

    def loads_done(self) -> int:
        """How many of the loads submitted so far, in order, are complete."""
        with self._lock:
            return self._loads_before + (self._copier.loads_done() if self._copier else 0)

    def stores_done(self) -> int:
        """How many of the stores submitted so far, in order, are complete."""
        with self._lock:
            return self._stores_before + (self._copier.stores_done() if self._copier else 0)

    def drain(self) -> None:
        """Waits until every submitted copy is complete."""
        with self._lock:
            if self._copier is not None:
                self._copier.drain()

    def close(self) -> None:
        with self._lock:
            self._detach()

    # -- under the lock --------------------------------------------------------------------

    def _attach(self, handle: ArenaHandle) -> bool:
        if handle == self._handle:
            return True
        if handle == self._failed:
            return False
        self._detach()
        try:
            arena = Arena.attach(handle)
        except TierError as error:
            self._failed = handle
            logger.error("kvrecall: %s; its blocks are recomputed", error)
            return False
        self._arena, self._handle = arena, handle
        self._copier = self._make_copier(torch.frombuffer(arena.memory, dtype=torch.uint8))
        if handle.boot:  # its owner is a service, which may end before this process
            threading.Thread(
                target=self._watch, args=(handle,), name="kvrecall-arena-watch", daemon=True
            ).start()
        return True

    def _detach(self) -> None:
        if self._copier is not None:
            self._copier.drain()
            self._loads_before += self._copier.loads_done()
            self._stores_before += self._copier.stores_done()
            self._copier = None
        if self._arena is not None:
            _unpin(self._arena)
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


def _unpin(arena: Arena) -> None:
    """Undoes the page-locking of a copier for CUDA, which must not outlive the mapping."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
    runtime.cudaHostUnregister(address)
