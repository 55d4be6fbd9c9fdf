"""Vector indexes of the sequences that decode by retrieval, in one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvrecall.attention.index.search import SequenceIndex
from kvrecall.engines.vllm.attention.activity import Activity

_IDLE_STEPS = 64
"""An index that no sequence has used for so many sparse steps is dropped: vLLM does
not tell attention layers when a sequence on the device ends."""

Digests = Callable[[int], torch.Tensor]
"""Those of a sequence's middle blocks from a place on: int8 ``[kv_heads, blocks, rows, width]``."""


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
        index = self._by_key.get(key)
        if index is None:
            index = self._by_key[key] = self._make()
        self._complete(index, blocks, digests)
        return index

    def forget(self, key: str) -> None:
        """The offloaded sequence has ended."""
        index = self._by_key.pop(key, None)
        if index is not None:
            index.close()

    def _complete(self, index: SequenceIndex, blocks: int, digests: Digests) -> None:
        if index.blocks < blocks:
            self._activity.blocks_indexed += blocks - index.blocks
            index.add(digests(index.blocks))
