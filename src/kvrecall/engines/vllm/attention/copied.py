"""Dense layers' attention to partially offloaded sequences on a device whose kernels read one
cache: copies of a sequence's blocks, most of which stay on the device from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import AttentionParameters
from kvrecall.engines.vllm.attention.step import KeptCopy, OffloadedRow
from kvrecall.engines.vllm.device import device_of


class KeptCopies:
    """Which of the dense layers' own pages the sequences of a KV group have: a page is room for a
    block in each of these layers. Owned by the worker's thread."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages))
        self._kept: dict[str, KeptCopy] = {}

    def of(self, key: str, blocks: int) -> KeptCopy | None:
        """A page for each of the sequence's blocks; None if too few are free, and the sequence then
        gives up those it had."""
        kept = self._kept.setdefault(key, KeptCopy())
        more = max(0, blocks - len(kept.pages))
        if more > len(self._free):
            self.forget(key)
            return None
        if more:
            kept.pages = np.append(kept.pages, self._free[-more:])
            del self._free[-more:]
        return kept

    def forget(self, key: str) -> None:
        """The sequence has ended. It may have no pages."""
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._free.extend(kept.pages.tolist())


class CopiedDense:
    """One layer's dense attention over partially offloaded sequences. Owned by the worker's thread.

    It needs all of a sequence's keys, and vLLM's kernels for GPUs read one cache. So the sequence's
    blocks of this layer, those in the arena and those on the device, are copied into one. A dense
    layer has as many pages for them as its KV cache has blocks, allocated when they are first
    needed: a block that is full is copied once. Where a sequence has no pages all of its blocks are
    copied in each step, side by side, for the time of the call.
    """

    def __init__(self, name: str, activity: Activity) -> None:
        self._name = name
        self._activity = activity
        self._pages: torch.Tensor | None = None

    def attend(
        self,
        row: OffloadedRow,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        parameters: AttentionParameters,
        plainly: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> torch.Tensor:
        return plainly(self.copy(kv_cache, row, len(query)), row.metadata)

    def copy(self, kv_cache: torch.Tensor, row: OffloadedRow, new_tokens: int) -> torch.Tensor:
        """A cache, of the same strides in a block, with the sequence's blocks: in its pages, or in
        their order. ``new_tokens``: its last, which this step computes, and might yet again."""
        count, kept, sequence = -(-row.tokens // kv_cache.shape[2]), row.kept, row.sequence
        if kept is None:
            copies, first, into = _like(kv_cache, count), 0, np.arange(count, dtype=np.int64)
        else:
            if self._pages is None or len(self._pages) != len(kv_cache):
                self._pages = _like(kv_cache, len(kv_cache))
            copies, first = self._pages, kept.copied.get(self._name, 0)
            into = kept.pages[first:count]
        ids, size = row.table[:count].numpy().astype(np.int64), kv_cache.element_size()
        sources = kv_cache.data_ptr() + ids * (kv_cache.stride(0) * size)
        middle = slice(sequence.init, sequence.init + sequence.count)
        sources[middle] = sequence.addresses(self._name)
        nbytes = kv_cache[0].numel() * size
        targets = copies.data_ptr() + into * nbytes
        device_of(kv_cache.device).move(sources[first:], targets, Piece(1, nbytes, 0))
        self._activity.bytes_staged += nbytes * len(into)
        if kept is not None:
            kept.copied[self._name] = (row.tokens - new_tokens) // kv_cache.shape[2]
        return copies


def _like(kv_cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A cache of so many blocks, one behind the other, each like the other cache's."""
    elements = kv_cache[0].numel()
    made = torch.empty(blocks * elements, dtype=kv_cache.dtype, device=kv_cache.device)
    return made.as_strided((blocks, *kv_cache.shape[1:]), (elements, *kv_cache.stride()[1:]))
