"""Which blocks' digests are those of the keys the blocks now hold."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch


class Freshness:
    """One flag a device block, for all layers of a KV group. Owned by the worker's thread.

    A digest is a function of a block's keys alone: whoever writes a block, be it the engine's
    forward pass or a load from the pool, makes its digest stale, and a stale digest is computed
    anew from the keys before it is next used.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._fresh = np.zeros(0, dtype=np.bool_)

    def wrote_slots(self, slots: torch.Tensor) -> None:
        """Tokens are being written at these slots; negative ones are padding."""
        if len(self._fresh):
            places = slots.cpu().numpy()
            self._wrote(places[places >= 0] // self._block_size)

    def wrote_blocks(self, block_ids: Iterable[int]) -> None:
        """These blocks are being written."""
        self._wrote(np.fromiter(block_ids, dtype=np.int64))

    def restored_blocks(self, block_ids: Iterable[int]) -> None:
        """These blocks were written, and their digests with them, in all layers."""
        ids = np.fromiter(block_ids, dtype=np.int64)
        self._reach(int(ids.max(initial=-1)))
        self._fresh[ids] = True

    def take_stale(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Those of the blocks that are stale, which the caller digests at once, in all layers.
        int64, in the order given."""
        ids = block_ids.numpy().astype(np.int64)
        self._reach(int(ids.max(initial=-1)))
        stale = ids[~self._fresh[ids]]
        self._fresh[stale] = True
        return torch.from_numpy(stale)

    def _reach(self, most: int) -> None:
        if most >= len(self._fresh):
            self._fresh = np.pad(self._fresh, (0, 2 * most + 2 - len(self._fresh)))

    def _wrote(self, ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        self._fresh[ids[ids < len(self._fresh)]] = False
