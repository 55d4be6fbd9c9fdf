"""Selection of blocks by a vector index instead of the exact search of ``selection.py``."""

from __future__ import annotations

import numpy as np
import torch

from kvrecall.attention.digest import Layout, decode
from kvrecall.attention.index.base import Factory, Numbers, Vectors


class SequenceIndex:
    """The middle blocks of one sequence in one layer: a vector index for each KV head, which holds
    the fine digests of every block."""

    def __init__(self, factory: Factory, layout: Layout, kv_heads: int, head_dim: int) -> None:
        self._layout = layout
        self._indexes = [factory(layout.kind.parts * head_dim) for _ in range(kv_heads)]
        self.blocks = 0

    def add(self, rows: torch.Tensor) -> None:
        """Appends the next blocks' digests: int8 ``[kv_heads, blocks, rows, width + 4]``."""
        fine = decode(rows[:, :, self._layout.fine_rows]).nan_to_num_(0, 0, 0)
        for index, vectors in zip(self._indexes, fine.flatten(1, 2).numpy(), strict=True):
            index.add(vectors)
        self.blocks += rows.shape[1]

    def choose(self, query: torch.Tensor, count: int, scale: float) -> torch.Tensor:
        """As of ``Selector.choose``: int64 ``[kv_heads, count]``. ``query``:
        ``[kv_heads, group, dim]``.

        An index is asked for as many vectors as ``count`` blocks have, which are those of at least
        that many blocks. A block that no query head of a group has found weighs nothing; where too
        few are found the last blocks are taken.
        """
        # A model that overflows has infinite keys and queries, at which libraries raise.
        points = self._layout.kind.of_query(query).float().nan_to_num(0, 0, 0).contiguous().numpy()
        asked = count * self._layout.fine
        found = (
            index.search(point, asked) for index, point in zip(self._indexes, points, strict=True)
        )
        logits = np.stack([self._logits(*one) for one in found])
        weights = torch.from_numpy(logits).mul_(scale).softmax(-1).nan_to_num_(0).mean(1)
        later = torch.arange(self.blocks, dtype=torch.float32) * torch.finfo(torch.float32).tiny
        return (weights + later).topk(count, dim=-1, sorted=False).indices

    @property
    def nbytes(self) -> int:
        """Memory of all heads' indexes."""
        return sum(index.nbytes for index in self._indexes)

    def close(self) -> None:
        """The sequence has ended."""
        for index in self._indexes:
            index.close()

    def _logits(self, products: Vectors, numbers: Numbers) -> Vectors:
        """The best product of each block: float32 ``[group, blocks]``, -inf where none is found."""
        best = np.full((len(products), self.blocks), -np.inf, dtype=np.float32)
        group = np.broadcast_to(np.arange(len(products))[:, None], numbers.shape)
        there = numbers >= 0
        blocks = numbers[there] // self._layout.fine
        if blocks.max(initial=0) >= self.blocks:
            raise IndexError(
                f"the vector index of VLLM_RETRIEVAL_INDEX found vector {numbers.max()} of "
                f"{self.blocks * self._layout.fine}; numbers begin at 0, in the order of `add`"
            )
        np.maximum.at(best, (group[there], blocks), products[there])
        return best
