"""Loads and stores at once, while the device computes: every block that comes back is what it was.

Steps as an engine makes them, without an engine: a forward pass writes blocks, which are stored
behind it; blocks are taken from it before they are stored (preemption) and at once written by
another; loads fill blocks that were just read, from slots that are used again. The device itself
sums each block before its store and after its load, so that nothing waits in between.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import torch

from kvrecall.engines.vllm.connector.copier import Copier
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.gpu_check import CheckError
from kvrecall.gpu_check.copies import NUMBERS, Cache, Size, arena

_BUSY = 2048
"""Rows of the products that keep the device busy, so that copies are queued behind work."""


class Traffic:
    """Steps over one KV cache and an arena. ``memory``: uint8 ``[arena bytes]``."""

    def __init__(self, cache: Cache, memory: torch.Tensor, seed: int) -> None:
        self._cache = cache
        self._memory = memory
        self._chance = random.Random(seed)
        self._copier = Copier(memory, [cache.group])
        blocks = min(len(page.rows) for page in cache.group.pages)
        self._free = deque(range(1, blocks))
        slots = memory.numel() // cache.record_bytes
        self._slots = deque(slot * cache.record_bytes for slot in range(slots))
        self._known: dict[int, int] = {}  # slot: the number of the block stored there
        self._storing: deque[tuple[list[int], list[int]]] = deque()
        self._loading: deque[tuple[list[int], list[int], list[int]]] = deque()
        self._number = 0
        self._at_most = max(1, blocks // 8)
        on = cache.device
        self._sums = torch.zeros(NUMBERS, dtype=torch.int64, device=on)  # by a block's number
        self._wrong = torch.zeros((), dtype=torch.int64, device=on)
        rows = _BUSY if on.type != "cpu" else 64
        self._work = torch.randn(rows, rows, device=on)
        self.loaded = self.stored = self.preempted = 0  # blocks

    def run(self, steps: int) -> None:
        """Makes these steps, loads what is still stored, then checks. Raises CheckError."""
        for _ in range(steps):
            self._step()
        self._take_note(wait=True)
        while self._known:
            self._load()
            self._take_note(wait=True)
        device_of(self._cache.device).current().record().wait()
        wrong = int(self._wrong)
        self._copier.close()
        if wrong:
            raise CheckError(f"{wrong} of {self.loaded} blocks came back with other bytes")
        if not (self.loaded and self.preempted):
            raise CheckError(f"{self.loaded} blocks were loaded and {self.preempted} preempted")

    def compute(
        self, work: Callable[[], None], reads: Sequence[int], writes: Sequence[int]
    ) -> None:
        """Queues work of a forward pass, which reads and writes these blocks."""
        work()

    def _step(self) -> None:
        self._take_note()
        if self._chance.random() < 0.8:
            self._load()
        while not self._free:
            self._take_note(wait=True)
        blocks = self._take(self._free)
        slots = [self._slots.popleft() for _ in blocks if self._slots]
        numbers = [(self._number + n) % len(self._sums) for n in range(len(blocks))]
        self._number += len(blocks)
        self.compute(lambda: self._forward(blocks, numbers), (), blocks)
        stored = list(zip(blocks, slots, numbers, strict=False))
        if stored:
            self._copier.store(Copy(tuple(blocks[: len(slots)]), tuple(slots)))
            self._storing.append((blocks[: len(slots)], slots))
            self._known |= {slot: -1 - number for _, slot, number in stored}  # until it is complete
        self._free.extend(blocks[len(slots) :])
        if self._chance.random() < 0.2:  # blocks are taken from requests that still store them
            self.preempted += sum(len(blocks) for blocks, _ in self._storing)
            self._take_note(self._copier.stores.drain())

    def _forward(self, blocks: Sequence[int], numbers: Sequence[int]) -> None:
        for _ in range(4):
            self._work = torch.tanh(self._work @ self._work)
        self._cache.write(blocks, numbers)
        self._sums[self._cache.on_device(numbers)] = self._cache.sums(blocks)

    def _load(self) -> None:
        """Loads some stored blocks, and gives up their slots once they are here."""
        slots = [slot for slot, number in self._known.items() if number >= 0]
        slots = self._chance.sample(slots, min(len(slots), self._at_most, len(self._free)))
        if not slots:
            return
        blocks = [self._free.popleft() for _ in slots]
        numbers = [self._known.pop(slot) for slot in slots]
        self._copier.load(Copy(tuple(blocks), tuple(slots)))
        self._loading.append((blocks, slots, numbers))

    def _take_note(self, stores: Sequence[object] = (), wait: bool = False) -> None:
        """Of copies that are complete: of these ``stores``, and of all that are; ``wait``: until
        all are."""
        queues = self._copier.loads, self._copier.stores
        loads, more = (queue.drain() if wait else queue.completed() for queue in queues)
        for _ in loads:
            blocks, slots, numbers = self._loading.popleft()
            self.compute(lambda b=blocks, n=numbers: self._compare(b, n), blocks, ())  # type: ignore[misc]
            self.loaded += len(blocks)
            self._free.extendleft(blocks)  # the next to be written: while they are read, or before
            self._slots.extendleft(slots)
        for _ in (*stores, *more):
            blocks, slots = self._storing.popleft()
            self.stored += len(blocks)
            self._free.extendleft(blocks)
            self._known |= {slot: -1 - self._known[slot] for slot in slots}

    def _compare(self, blocks: Sequence[int], numbers: Sequence[int]) -> None:
        stored = self._sums[self._cache.on_device(numbers)]
        self._wrong += (self._cache.sums(blocks) != stored).sum()

    def _take(self, some: deque[int]) -> list[int]:
        count = min(len(some), self._chance.randint(1, self._at_most))
        return [some.popleft() for _ in range(count)]


def check_traffic(layout: str, size: Size, device: torch.device, steps: int) -> dict[str, int]:
    """Runs ``steps`` over a cache of this layout, with an arena of as many blocks. Returns the
    blocks loaded, stored, and taken while they were stored. Raises CheckError."""
    cache = Cache(layout, size, device)
    memory = arena(cache.record_bytes * size.blocks)
    traffic = Traffic(cache, memory, steps)
    traffic.run(steps)
    return {name: getattr(traffic, name) for name in ("loaded", "stored", "preempted")}
