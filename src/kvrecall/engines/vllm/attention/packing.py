"""Reads keys back out of vLLM's CPU KV cache, whose packing differs by instruction set.

The packing is found out, not written down: vLLM's own kernel packs blocks of zeros and ones that
spell every element's index in binary. What cannot be read back is refused at start.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrecall.errors import EngineError

Pack = Callable[[torch.Tensor], torch.Tensor]
"""Packs one block of one head: ``[tokens, dim]`` -> the elements of its half, flat."""


class KeyReader:
    """Unpacks the keys of blocks ``[blocks, kv_heads, tokens, 2 * dim]`` (keys, then
    values)."""

    def __init__(self, block_size: int, head_dim: int, dtype: torch.dtype, pack: Pack) -> None:
        """Raises EngineError if ``pack`` is not a mere reordering of a block's elements."""
        self._block_size = block_size
        self._head_dim = head_dim
        self._places = _places(block_size, head_dim, dtype, pack)
        self._steps = _steps(self._places.view(block_size, head_dim))

    def read(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Keys of the blocks: ``[blocks, kv_heads, tokens, dim]``, of the cache's dtype."""
        count = self._block_size * self._head_dim
        packed = kv_cache.flatten(2)[..., :count].index_select(0, block_ids)
        shape = (*packed.shape[:2], self._block_size, self._head_dim)
        if self._steps is not None:
            return packed.as_strided(shape, (packed.shape[1] * count, count, *self._steps))
        return packed.index_select(-1, self._places).view(shape)


def _places(block_size: int, head_dim: int, dtype: torch.dtype, pack: Pack) -> torch.Tensor:
    """Where each element of a block lies among the packed ones: int64 ``[tokens * dim]``."""
    count = block_size * head_dim
    index = torch.arange(count)
    element_at = torch.zeros(count, dtype=torch.int64)
    for bit in range((count - 1).bit_length()):
        ones = (index >> bit & 1).to(dtype).view(block_size, head_dim)
        element_at |= (pack(ones) != 0).to(torch.int64) << bit
    places = torch.empty_like(element_at)
    if not torch.equal(element_at.sort().values, index):
        raise EngineError(
            f"the CPU kernel's packing of {block_size} keys of {head_dim} cannot be read back, "
            "which retrieval attention needs; take `retrieval` out of VLLM_PLUGINS"
        )
    places[element_at] = index
    return places


def _steps(places: torch.Tensor) -> tuple[int, int] | None:
    """The steps from token to token and from coordinate to coordinate, if they are even: then
    keys are read as a view."""
    token = int(places[1, 0] - places[0, 0]) if places.shape[0] > 1 else 1
    coordinate = int(places[0, 1] - places[0, 0])
    tokens = torch.arange(places.shape[0])[:, None] * token
    even = tokens + torch.arange(places.shape[1]) * coordinate
    return (token, coordinate) if torch.equal(places, even) else None
