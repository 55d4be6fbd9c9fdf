"""A tier in memory, for simulations and tests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from kvrecall.block import BlockKey, Namespace, TierName
from kvrecall.pool.base import TierStats
from kvrecall.pool.changes import Cause
from kvrecall.pool.tier import Buckets, Done, Get, Outcome, Put, PutVerdict, Tier


class MemoryTier(Tier):
    """A tier in a dictionary. Everything submitted is done at the next ``poll``."""

    name = TierName.REMOTE

    def __init__(self, capacity_blocks: int = 1 << 30) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity_blocks
        self._blocks: dict[BlockKey, tuple[bytes, int]] = {}
        self._puts: dict[BlockKey, tuple[Put, bool]] = {}
        self._gets: deque[Get] = deque()
        self._closed = False

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        pass

    def contains(self, key: BlockKey) -> bool:
        return key in self._blocks

    def depth_of(self, key: BlockKey) -> int | None:
        block = self._blocks.get(key)
        return None if block is None else block[1]

    def submit_put(self, puts: Sequence[Put]) -> list[PutVerdict]:
        verdicts = []
        with self._lock:
            for put in puts:
                if put.key in self._blocks or put.key in self._puts:
                    verdicts.append(PutVerdict.PRESENT)
                elif self._closed or len(self._blocks) + len(self._puts) >= self._capacity:
                    verdicts.append(PutVerdict.SHED)
                else:
                    self._puts[put.key] = put, True
                    verdicts.append(PutVerdict.QUEUED)
        return verdicts

    def submit_get(self, gets: Sequence[Get]) -> None:
        with self._lock:
            self._gets.extend(gets)

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        until = time.monotonic() + timeout_s
        while not (done := self._work()) and time.monotonic() < until:
            time.sleep(0.001)
        return done

    def _work(self) -> list[Done]:
        done: list[Done] = []
        with self._lock:
            for key, (put, wanted) in self._puts.items():
                if wanted:
                    self._blocks[key] = bytes(put.data[: put.nbytes]), put.depth
                done.append(Done(key, Outcome.STORED if wanted else Outcome.SHED))
            self._puts.clear()
            while self._gets:
                get = self._gets.popleft()
                block = None if self._closed else self._blocks.get(get.key)
                if block is not None:
                    get.into[: len(block[0])] = block[0]
                done.append(Done(get.key, Outcome.MISS if block is None else Outcome.LOADED))
        return done

    def drop(self, keys: Sequence[BlockKey], cause: Cause = Cause.DROPPED) -> None:
        with self._lock:
            for key in keys:
                self._blocks.pop(key, None)
                if key in self._puts:
                    self._puts[key] = self._puts[key][0], False

    def clear(self) -> None:
        self.drop([*self._blocks, *self._puts])

    def stats(self) -> TierStats:
        used = sum(len(data) for data, _ in self._blocks.values())
        return TierStats(str(self.name), self._capacity, used, len(self._blocks))

    def histograms(self) -> dict[str, Buckets]:
        return {}

    def queued(self) -> tuple[int, int]:
        return len(self._puts), len(self._gets)

    def close(self, deadline_s: float = 10.0) -> None:
        self._closed = True
