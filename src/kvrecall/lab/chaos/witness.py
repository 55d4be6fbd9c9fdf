"""Notes which blocks the service called durable, and looks for them after its death."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from pathlib import Path

from kvrecall.block import BlockKey, TierName
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.service.client import ServiceClient

_FLUSH_S = 5.0
_JOIN_S = 20.0


class Witness:
    """A client of its own on the service. Its thread asks ``flush`` for what engines saved; what
    is acknowledged must be found after a kill, unless it was damaged or evicted since."""

    def __init__(self, socket: Path) -> None:
        self._client = ServiceClient(socket, call_timeout_s=2.0)
        self._chains: queue.SimpleQueue[tuple[BlockKey, ...] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while the ledger must not change
        self._durable: set[BlockKey] = set()
        self._excused: set[BlockKey] = set()
        self.arenas: set[ArenaHandle] = set()  # of all lives of the service
        self.evictions = 0  # from disk, in all lives of the service
        self._thread = threading.Thread(target=self._run, name="chaos-witness", daemon=True)
        self._thread.start()

    @property
    def durable(self) -> int:
        return len(self._durable)

    def saw(self, keys: Iterable[BlockKey]) -> None:
        """An engine saved these."""
        self._chains.put(tuple(keys))

    def excuse(self, keys: Iterable[BlockKey]) -> None:
        """These were damaged by us."""
        with self._lock:
            self._excused.update(keys)

    def forgive(self, keys: Iterable[BlockKey]) -> None:
        """These were evicted: nobody promised to keep them."""
        with self._lock:
            self._durable.difference_update(keys)

    def look(self) -> None:
        """Notes what only a living service can tell. Blocks for a moment."""
        self.arenas.add(self._client.arena_handle())
        for tier in self._client.stats().tiers:
            if tier.name == TierName.DISK:
                self.evictions = tier.evictions

    def wait_joined(self, seconds: float = _JOIN_S) -> bool:
        """Waits until the service is there."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.05)):
            if self._client.is_connected:
                self.look()
                return True
            pause.wait(0.05)
        return False

    def missing(self) -> list[BlockKey]:
        """Durable blocks that the service does not find. Call it when it was started again."""
        with self._lock:
            expected = self._durable - self._excused
            return [key for key in expected if not self._is_there(key)]

    def unexcused(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Those of ``keys`` that nobody damaged."""
        with self._lock:
            return set(keys) - self._excused

    def _is_there(self, key: BlockKey) -> bool:
        """Asks thrice: no answer in time is no answer."""
        return any(self._client.find([key]).blocks for _ in range(3))

    def settle(self) -> None:
        """Waits until everything it was told of is dealt with, and ends."""
        if self._thread.is_alive():
            self._chains.put(None)
            self._thread.join(60)
            self._client.close()

    def _run(self) -> None:
        while (keys := self._chains.get()) is not None:
            new = [key for key in keys if key not in self._durable]
            if new and self._client.flush(new, _FLUSH_S):
                with self._lock:
                    self._durable.update(new)
