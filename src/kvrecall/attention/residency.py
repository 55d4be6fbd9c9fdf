"""Offloaded blocks on a device: the slots that its kernels recall them into, and their numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


class DeviceResidency:
    """The slots of all sequences in one layer, as a device's kernels keep them: those of a sequence
    are an LRU cache of its blocks, for each KV head.

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
