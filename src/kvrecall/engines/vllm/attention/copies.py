"""Dense attention over partially offloaded sequences on GPUs, which takes all of their keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvrecall.attention.kernels import device as kernels
from kvrecall.attention.kernels.device import Ints
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import AttentionParameters, SparseStep
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.engines.vllm.attention.step import OffloadedRow
from kvrecall.engines.vllm.device import device_of


class KeptLayer:
    """A dense layer that keeps a copy of each block that leaves the device, in the page of its
    number, and attends by kvrecall's kernel to all blocks of a step's sequences, wherever they are.
    There may be fewer pages than numbers: a sequence with a number beyond them is not kept."""

    def __init__(self, name: str, pages: Callable[[int], int], activity: Activity) -> None:
        """``pages``: how many it has beside a cache of so many blocks."""
        self._name, self._pages_of, self._activity = name, pages, activity
        self._pages: torch.Tensor | None = None

    def open(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The pages, allocated once: captured graphs have their address."""
        if self._pages is None:
            self._pages = _like(kv_cache, self._pages_of(len(kv_cache)))
        return self._pages

    def leave(self, one: OffloadedSequence, added: int, cache: torch.Tensor, ids: Any) -> None:
        """Copies its last ``added`` blocks, of the device blocks ``ids``; None: of the arena."""
        pages, numbers = self.open(cache), one.numbers
        one.is_kept = int(numbers.max(initial=-1)) < len(pages)
        if one.is_kept and added:
            sources = one.addresses(self._name)[-added:] if ids is None else _at(cache, ids)
            _move(cache, sources, _at(pages, numbers[-added:]), self._activity)

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        step: SparseStep,
        parameters: AttentionParameters,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """As of ``RetrievalLayer``, over all blocks."""
        given = query, *kernels.halves(kv_cache, query.shape[-1]), step.plan, output
        pages, _ = kernels.halves(self.open(kv_cache), query.shape[-1])
        kernels.attend_by_triton(*given, **parameters.of_kernel, pages=pages)
        return output


def copied(name: str, activity: Activity, row: OffloadedRow, cache: torch.Tensor) -> torch.Tensor:
    """A cache of the layer of that name, of the same strides in a block, with all of a sequence's
    blocks, those in the arena and those on the device, in their order."""
    count, sequence = -(-row.tokens // cache.shape[2]), row.sequence
    copies, sources = _like(cache, count), _at(cache, row.table[:count].numpy().astype(np.int64))
    sources[sequence.init : sequence.init + sequence.count] = sequence.addresses(name)
    _move(cache, sources, _at(copies, np.arange(count)), activity)
    return copies


def _move(kv_cache: torch.Tensor, sources: Ints, targets: Ints, activity: Activity) -> None:
    nbytes = kv_cache[0].numel() * kv_cache.element_size()
    device_of(kv_cache.device).move(sources, targets, kernels.Piece(1, nbytes, 0))
    activity.bytes_staged += nbytes * len(sources)


def _at(blocks: torch.Tensor, ids: Ints) -> Ints:
    """Addresses of these blocks."""
    return blocks.data_ptr() + ids * (blocks.stride(0) * blocks.element_size())


def _like(kv_cache: torch.Tensor, blocks: int) -> torch.Tensor:
    """A cache of so many blocks, one behind the other, each like the other cache's."""
    elements = kv_cache[0].numel()
    made = torch.empty(blocks * elements, dtype=kv_cache.dtype, device=kv_cache.device)
    return made.as_strided((blocks, *kv_cache.shape[1:]), (elements, *kv_cache.stride()[1:]))
