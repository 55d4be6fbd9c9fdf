"""Selection of blocks by vector indexes instead of the exact search: those of the sequences that
decode by retrieval, in one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvrecall.attention.digest import Layout, decode
from kvrecall.attention.index.base import Factory, Numbers, Vectors
from kvrecall.engines.vllm.attention.activity import Activity

_IDLE_STEPS = 64
"""An index that no sequence has used for so many sparse steps is dropped: vLLM does
not tell attention layers when a sequence on the device ends."""

Digests = Callable[[int], torch.Tensor]
"""Those of a sequence's middle blocks from a place on: int8 ``[kv_heads, blocks, rows, width]``."""


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
        """As ``selection.choose``: int64 ``[kv_heads, count]``. ``query``:
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


@dataclass(slots=True)
class _Held:
    """``ids``, ``written``: as of ``SequenceIndexes.on_device``; ``used``: in which step."""

    index: SequenceIndex
    ids: torch.Tensor
    written: torch.Tensor
    used: int = 0

    def is_of(self, ids: torch.Tensor, written: torch.Tensor) -> bool:
        """Whether it holds the leading ones of these blocks, as they are."""
        count = len(self.ids)
        if self.ids[0] != ids[0]:
            return False
        return torch.equal(self.ids, ids[:count]) and torch.equal(self.written, written[:count])


class SequenceIndexes:
    """Finds the index of a sequence, and adds what it lacks. An index of a sequence on the device
    is known by its blocks: their numbers, and how often they were digested."""

    def __init__(self, make: Callable[[], SequenceIndex], activity: Activity) -> None:
        self._make = make
        self._activity = activity
        self._held: list[_Held] = []
        self._by_key: dict[str, SequenceIndex] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Drops indexes that no sequence uses."""
        self._step += 1
        if self._step % _IDLE_STEPS:
            return
        held, self._held = self._held, []
        for one in held:
            if one.used > self._step - _IDLE_STEPS:
                self._held.append(one)
            else:
                one.index.close()

    def on_device(
        self, ids: torch.Tensor, written: torch.Tensor, digests: Digests
    ) -> SequenceIndex:
        """The index of these middle blocks, complete. ``written``: how often the digest of each was
        written: int64, as ``ids``."""
        known = (one for one in self._held if one.is_of(ids, written))
        found = max(known, key=lambda one: len(one.ids), default=None)
        if found is None:
            found = _Held(self._make(), ids[:0], written[:0])
            self._held.append(found)
        self._complete(found.index, len(ids), digests)
        found.ids, found.written, found.used = ids.clone(), written.clone(), self._step
        return found.index

    def off_device(self, key: str, blocks: int, digests: Digests) -> SequenceIndex:
        """The index of a partially offloaded sequence with so many middle blocks, complete."""
        if key not in self._by_key:
            self._by_key[key] = self._make()
        self._complete(self._by_key[key], blocks, digests)
        return self._by_key[key]

    def forget(self, key: str) -> None:
        """The offloaded sequence has ended."""
        index = self._by_key.pop(key, None)
        if index is not None:
            index.close()

    def _complete(self, index: SequenceIndex, blocks: int, digests: Digests) -> None:
        if index.blocks < blocks:
            self._activity.blocks_indexed += blocks - index.blocks
            index.add(digests(index.blocks))
