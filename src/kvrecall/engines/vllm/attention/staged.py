"""Dense attention of a layer on a GPU over sequences that are off the device in part.

It needs all of a sequence's keys, and vLLM's kernels for GPUs read one cache. So the sequence's
blocks of this layer, those in the arena and those on the device, are copied side by side for the
call. The copy takes as much device memory as the sequence has in one layer, for as long as it
lasts, and reads what is in the arena over the bus.
"""

from __future__ import annotations

import numpy as np
import torch

from kvrecall.attention.kernels.device import Piece, move
from kvrecall.engines.vllm.attention.recalled import OffloadedSequence


class StagedLayer:
    """One layer's. Owned by the worker's thread."""

    in_place = False

    def __init__(self) -> None:
        self._at = 0

    def place(self, layer_at: int) -> None:
        """Where in a block's record this layer's page is."""
        self._at = layer_at

    def forget(self, key: str, memory: bool = True) -> None:
        """Nothing is kept."""

    def stage(
        self,
        kv_cache: torch.Tensor,
        sequence: OffloadedSequence,
        table: torch.Tensor,
        tokens: int,
    ) -> torch.Tensor:
        """The sequence's blocks in its order, as a cache: ``[blocks, kv_heads, tokens, 2 * dim]``.

        ``table``: int32, its device blocks, those that are in the arena meaningless; on the host.
        """
        size = kv_cache.element_size()
        count = -(-tokens // kv_cache.shape[2])
        elements = kv_cache[0].numel()
        room = torch.empty(count * elements, dtype=kv_cache.dtype, device=kv_cache.device)
        ids = table[:count].numpy().astype(np.int64)
        sources = kv_cache.data_ptr() + ids * (kv_cache.stride(0) * size)
        middle = slice(sequence.init, sequence.init + sequence.count)
        sources[middle] = sequence.records.memory.ctypes.data + sequence.offsets + self._at
        nbytes = elements * size
        targets = room.data_ptr() + np.arange(count, dtype=np.int64) * nbytes
        move(sources, targets, Piece(1, nbytes, 0), kv_cache.device)
        return room.as_strided((count, *kv_cache.shape[1:]), (elements, *kv_cache.stride()[1:]))
