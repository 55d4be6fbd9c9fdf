"""A tier below the host whose threads are late: what is queued is done in any order, some time."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from kvrecall.pool.tier import Done
from kvrecall_lab.memory_tier import MemoryTier

from .device import Cells, Machine

CellsOf = Callable[[int], Cells]
"""Of a slot's address in the pool's mapping of the arena: its cells in every worker's."""


class LateTier(MemoryTier):
    """Works only when the engine's thread polls it, so that a schedule follows from its seed."""

    def __init__(self, machine: Machine, chance: random.Random) -> None:
        super().__init__()
        self.loaded = 0
        self.cells_of: CellsOf = lambda _: set()
        self._machine = machine
        self._chance = chance
        self._share = chance.choice((0.1, 0.5, 1.0))

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(timeout_s)
            return []
        return self._work()

    def _work(self) -> list[Done]:
        with self._lock:
            puts, gets = dict(self._puts), list(self._gets)
            self._chance.shuffle(gets)
            now = {key: put for key, put in puts.items() if self._is_due()}
            due = [get for get in gets if self._is_due()]
            self._puts, self._gets = dict(now), deque(due)
        for put, _ in now.values():
            self._machine.host(self._cells(put.data), set(), "the tier's writer")
        for get in due:
            self._machine.host(set(), self._cells(get.into), "the tier's reader")
        self.loaded += len(due)
        done = super()._work()
        with self._lock:
            self._puts |= {key: put for key, put in puts.items() if key not in now}
            self._gets.extend(get for get in gets if get not in due)
        return done

    def _is_due(self) -> bool:
        return self._closed or self._chance.random() < self._share

    def _cells(self, data: memoryview) -> Cells:
        return self.cells_of(np.frombuffer(data, np.uint8).ctypes.data)
