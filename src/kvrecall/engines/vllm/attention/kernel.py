"""What attends to chosen blocks of a paged cache, whatever the machine.

The cache is ``[blocks, kv_heads, tokens, 2 * dim]``, keys and values in whatever order. Every
(sequence, KV head) is a row of its own, so that each may have its own blocks; a row names a block
of a head by ``block * kv_heads + head``. Keys are stored after rotary embedding, so the order of
blocks means nothing; only the last one, which may be partial, must stay last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KernelShape:
    """What a kernel is told about a group of layers. ``isa``: the CPU's instruction set."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    isa: str

    @property
    def group(self) -> int:
        """Query heads to a KV head."""
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token, in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class BlockReader(Protocol):
    """Reads keys back out of a cache."""

    def read(self, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """Of these blocks: ``[blocks, kv_heads, tokens, dim]``, of the cache's dtype."""


class SlotWriter(Protocol):
    """Copies blocks of single KV heads from the arena into a layer's cache."""

    nbytes: int
    """Of one head's block."""

    def write(self, memory: Bytes, pages: Ints, heads: Ints, slots: Ints) -> None:
        """``memory``: the arena; ``pages``: where in it the layer's pages of the blocks begin;
        ``slots``: the cache's blocks to write. One of each for every copy."""


class RowKernel(ABC):
    """Attention of one token a row over the blocks the row names. ``device``: where the cache is,
    and all tensors that are given and returned."""

    shape: KernelShape
    device: torch.device
    overhead_bytes: int
    """See ``Gate``."""

    @property
    @abstractmethod
    def keys(self) -> BlockReader:
        """Reads keys."""

    @abstractmethod
    def check(self, kv_cache: torch.Tensor) -> None:
        """Raises EngineError for a cache it cannot attend to."""

    @abstractmethod
    def writer(self, kv_cache: torch.Tensor) -> SlotWriter:
        """Writes into that cache."""

    @abstractmethod
    def digests(self, blocks: int, rows: int, width: int) -> torch.Tensor:
        """Room for those of so many blocks: int8 ``[kv_heads, blocks, rows, width]``."""

    @abstractmethod
    def plan(self, seq_lens: torch.Tensor, starts: torch.Tensor) -> Any:
        """What the kernel wants to know before, once for all layers. ``seq_lens``: int32, tokens
        in each row's blocks; ``starts``: int32, 0, 1, 2 ... to the number of rows. On the host."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        starts: torch.Tensor,
        plan: Any,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """``query``: contiguous ``[rows, group, dim]``; ``table``: int32 ``[rows, width]``;
        ``softcap``: 0: none. Returns the query's shape and dtype."""
