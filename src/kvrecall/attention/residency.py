"""Tracks offloaded blocks on the device: an LRU cache of slots for each sequence and KV head.

Bookkeeping only: the caller copies missing blocks into the slots it is given. ``Residency`` is kept
by the host, ``DeviceResidency`` by a device's kernels, which take the same slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admission:
    """Slots of blocks, and the copies to make first. ``slots``: int64, with the shape of the
    requested blocks; meaningless where not wanted. ``heads``, ``blocks``, ``into``: the copies to
    make, one per place. ``hits``: wanted blocks that were present."""

    slots: Ints
    heads: Ints
    blocks: Ints
    into: Ints
    hits: int


class Residency:
    """The slots of one sequence in one layer. Every head has its own blocks in the same slots."""

    def __init__(self, heads: int) -> None:
        self._holds = np.full((heads, 0), -1, dtype=np.int64)
        self._used = np.zeros((heads, 0), dtype=np.int64)
        self._place = np.full((heads, 0), -1, dtype=np.int64)
        self._now = 0

    def grow(self, slots: int, blocks: int) -> None:
        """Grows to that many slots and blocks; neither ever shrinks."""
        more = ((0, 0), (0, slots - self._holds.shape[1]))
        self._holds = np.pad(self._holds, more, constant_values=-1)
        self._used = np.pad(self._used, more)
        wider = ((0, 0), (0, blocks - self._place.shape[1]))
        self._place = np.pad(self._place, wider, constant_values=-1)

    def admit(self, blocks: Ints, wanted: Flags) -> Admission:
        """Returns slots for a step's blocks; evicts the least recently used ones to make room.

        ``blocks``: ``[heads, count]``, distinct within a head; only those ``wanted`` are admitted,
        per head at most as many as there are slots. The result is valid until the next call.
        """
        self._now += 1
        heads = np.arange(len(blocks))[:, None]
        slots = np.where(wanted, self._place[heads, np.where(wanted, blocks, 0)], 0)
        head, _ = np.nonzero(there := wanted & (slots >= 0))
        self._used[head, slots[there]] = self._now
        missing = wanted & (slots < 0)
        for one in np.flatnonzero(missing.any(1)):
            new = blocks[one, missing[one]]
            into = np.sort(np.argsort(self._used[one], kind="stable")[: len(new)])
            gone = self._holds[one, into]
            self._place[one, gone[gone >= 0]] = -1
            self._holds[one, into] = new
            self._place[one, new] = into
            self._used[one, into] = self._now
            slots[one, missing[one]] = into
        return Admission(slots, np.nonzero(missing)[0], blocks[missing], slots[missing], len(head))


class DeviceResidency:
    """The slots of all sequences in one layer, as a device's kernels keep them.

    An offloaded block has a number, and a slot is a device block; block 0, vLLM's null block, is
    none. ``place``: int32 ``[kv_heads, numbers]``, the slot that a block was last recalled into.
    ``state``: int32 ``[3, kv_heads, blocks]``, of slots: the number they hold plus one, 0 for none;
    when they were last used; and, of a sequence's first slot, how often blocks were admitted. A
    block is in its place if that holds it. ``counts``: int64 ``[2]``, totals of blocks that were in
    their place, and of those that were not; layers may share it.
    """

    def __init__(self, kv_heads: int, blocks: int, counts: torch.Tensor) -> None:
        """``blocks``: of the cache."""
        device = counts.device
        self.place = torch.zeros(kv_heads, 0, dtype=torch.int32, device=device)
        self.state = torch.zeros(3, kv_heads, blocks, dtype=torch.int32, device=device)
        self.counts = counts

    def begin(self, numbers: torch.Tensor, slots: torch.Tensor, most: int) -> None:
        """These numbers and slots, int64 on the device, have a new sequence; it keeps them until it
        ends. ``most``: exceeds every number in use."""
        known = self.place.shape[1]
        if known < most:
            place = self.place.new_zeros((len(self.place), 2 * most))
            place[:, :known] = self.place
            self.place = place
        self.place.index_fill_(1, numbers, 0)
        self.state.index_fill_(2, slots, 0)


class BlockNumbers:
    """Numbers of the blocks of a KV group that are off the device, the same in all layers.
    ``addresses``: int64, on the device, of each one's record in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.addresses = torch.zeros(0, dtype=torch.int64, device=device)
        self.most = 0
        """Exceeds every number in use."""
        self._free: list[int] = []

    def take(self, count: int) -> Ints:
        """Numbers for so many blocks, whose addresses the caller writes."""
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        taken += range(self.most, self.most + count - len(taken))
        self.most = max(self.most, max(taken, default=-1) + 1)
        known = len(self.addresses)
        if known < self.most:
            grown = self.addresses.new_zeros((2 * self.most,))
            grown[:known] = self.addresses
            self.addresses = grown
        return np.array(taken, dtype=np.int64)

    def give(self, numbers: Ints) -> None:
        """The blocks have no sequence any more."""
        self._free.extend(numbers.tolist())
        if len(self._free) == self.most:
            self.most, self._free = 0, []
