"""Dense attention of a layer over sequences that are off the device in part.

It needs all of a sequence's keys. On a CPU the kernel reads those that are off the device where
they lie, in the arena. The others must lie in the same range of addresses for that: they are
copied into pages behind the arena, a full block once.
"""

from __future__ import annotations

import numpy as np
import torch

from kvrecall.attention.residency import Ints
from kvrecall.engines.vllm.attention.extent import Extent
from kvrecall.engines.vllm.attention.kernel import attend, halves, schedule
from kvrecall.engines.vllm.attention.recalled import OffloadedSequence
from kvrecall.engines.vllm.attention.rows import KernelShape
from kvrecall.pool.slots import ALIGNMENT


class _Pages:
    """Pages of one sequence's blocks in an extent. ``of``: each block's page, -1: none; ``done``:
    which hold full blocks."""

    def __init__(self, extent: Extent) -> None:
        self.extent = extent
        self.of = np.zeros(0, dtype=np.int64)
        self.done = np.zeros(0, dtype=np.bool_)

    def grow(self, count: int) -> None:
        """There are now at least ``count`` blocks."""
        more = count - len(self.of)
        if more > 0:
            self.of = np.pad(self.of, (0, more + 16), constant_values=-1)
            self.done = np.pad(self.done, (0, more + 16))

    def drop(self, first: int, end: int) -> list[int]:
        """Pages of these blocks, which have none from now on."""
        part = self.of[first:end]
        had = part[part >= 0].tolist()
        part[:] = -1
        self.done[first:end] = False
        return list(had)


class DenseLayer:
    """One layer's dense attention. Owned by the worker's thread."""

    in_place = True

    def __init__(self, shape: KernelShape) -> None:
        self._shape = shape
        self._at = 0
        self._pages: dict[str, _Pages] = {}

    def place(self, layer_at: int) -> None:
        """Where in a block's record this layer's page is."""
        self._at = layer_at

    def forget(self, key: str, memory: bool = True) -> None:
        """Gives the sequence's pages back, and their ``memory`` if it is not needed again soon."""
        pages = self._pages.pop(key, None)
        if pages is not None:
            pages.extent.give(pages.drop(0, len(pages.of)), memory)

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
        """Attention of the sequence's last tokens, contiguous ``[tokens, heads, dim]``, over all
        of its ``tokens`` before them and they themselves.

        ``table``: its device blocks, those that are in the arena meaningless.
        """
        extent = sequence.extent
        assert extent is not None
        places = self._places(extent, kv_cache, sequence, table, tokens)
        seq_lens = torch.tensor([tokens], dtype=torch.int32)
        starts = torch.tensor([0, len(query)], dtype=torch.int32)
        order = torch.from_numpy(places.astype(np.int32))[None]
        plan = schedule(self._shape, seq_lens, starts, whole=True)
        caches = halves(extent.blocks(self._at, kv_cache), whole=True)
        return attend(query, caches, order, seq_lens, starts, plan, scale, softcap)

    def _places(
        self,
        extent: Extent,
        kv_cache: torch.Tensor,
        sequence: OffloadedSequence,
        table: torch.Tensor,
        tokens: int,
    ) -> Ints:
        """Where the sequence's blocks lie in the extent, after copying those not in the arena."""
        size = self._shape.block_size
        blocks = -(-tokens // size)
        first, end = sequence.init, sequence.init + sequence.count
        pages = self._pages.setdefault(sequence.key, _Pages(extent))
        pages.grow(blocks)
        extent.give(pages.drop(first, end))
        own = np.r_[0:first, end:blocks]
        new = own[pages.of[own] < 0]
        pages.of[new] = extent.take(len(new))
        ids = table.numpy()
        for block in own[~pages.done[own]].tolist():
            page = extent.page(int(pages.of[block]), self._at)
            page.copy_(kv_cache[int(ids[block])].view(-1).view(torch.uint8))
        pages.done[own] = own < tokens // size
        places = np.empty(blocks, dtype=np.int64)
        places[first:end] = sequence.offsets // ALIGNMENT
        places[own] = extent.places_of(pages.of[own], self._at)
        return places
