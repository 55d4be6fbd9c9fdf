"""Dense attention of a layer over sequences whose blocks have left the device in part.

A layer that attends to everything needs all of a sequence's keys in every step. It keeps a copy of
its own of each offloaded sequence, in host memory, which on a CPU the kernel reads as it reads the
device's. A model has few such layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from kvrecall.engines.vllm.retrieval.kernel import KernelShape, attend, halves, schedule
from kvrecall.engines.vllm.retrieval.recalled import OffloadedSequence
from kvrecall.engines.vllm.wire import Departure


class _Copy:
    """All blocks of one sequence, in its order. ``done``: which of them are full and copied."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self.blocks = kv_cache.new_empty((0, *kv_cache.shape[1:]))
        self.done = np.zeros(0, dtype=np.bool_)

    def take(self, kv_cache: torch.Tensor, places: Iterable[int], ids: Iterable[int]) -> None:
        """Copies device blocks ``ids`` to ``places``."""
        for place, block in zip(places, ids, strict=True):
            self.blocks[place] = kv_cache[block]

    def grow(self, count: int) -> None:
        """There are now at least ``count`` blocks."""
        if count > len(self.blocks):
            grown = self.blocks.new_empty((count + 16, *self.blocks.shape[1:]))
            grown[: len(self.blocks)] = self.blocks
            self.done = np.pad(self.done, (0, len(grown) - len(self.blocks)))
            self.blocks = grown


class DenseLayer:
    """One layer that attends to everything. Owned by the worker's thread."""

    def __init__(self, shape: KernelShape) -> None:
        self._shape = shape
        self._copies: dict[str, _Copy] = {}

    def depart(
        self, sequence: OffloadedSequence, departure: Departure, kv_cache: torch.Tensor
    ) -> None:
        """Copies blocks that are about to leave. The sequence counts them by now."""
        copy = self._copies.setdefault(sequence.key, _Copy(kv_cache))
        end = sequence.init + sequence.count
        first = end - len(departure.block_ids)
        copy.grow(end)
        copy.take(kv_cache, range(first, end), departure.block_ids)
        copy.done[first:end] = True

    def forget(self, key: str) -> None:
        """The sequence is no more."""
        self._copies.pop(key, None)

    def settle(self) -> None:
        """Nothing is done in the background."""

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        sequence: OffloadedSequence,
        table: torch.Tensor,
        tokens: int,
        scale: float,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attention of one token, ``[1, heads, dim]``, over all ``tokens`` of the sequence.

        ``table``: its device blocks, those that left meaningless.
        """
        copy = self._copies[sequence.key]
        size = self._shape.block_size
        blocks = -(-tokens // size)
        copy.grow(blocks)
        lacking = np.flatnonzero(~copy.done[:blocks])
        copy.take(kv_cache, lacking.tolist(), table[torch.from_numpy(lacking)].tolist())
        copy.done[: tokens // size] = True
        seq_lens = torch.tensor([tokens], dtype=torch.int32)
        starts = torch.tensor([0, 1], dtype=torch.int32)
        order = torch.arange(blocks, dtype=torch.int32)[None]
        plan = schedule(self._shape, seq_lens, starts, whole=True)
        caches = halves(copy.blocks, whole=True)
        return attend(query, caches, order, seq_lens, starts, plan, scale, softcap)
