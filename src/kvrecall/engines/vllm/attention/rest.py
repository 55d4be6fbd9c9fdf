"""What was not chosen, estimated: the attention that a block would have had, were all its keys its
mean key and all its values its mean value.

vLLM's CPU kernel does not tell the normaliser of what it attended to, so the logits of the attended
keys are computed once more there: this costs about as much as the attention itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrecall.attention.kernels.paged import Part, merged
from kvrecall.attention.layout import Layout
from kvrecall.attention.split import Split
from kvrecall.engines.vllm.attention.rows import Attended, RowKernel


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a layer chose of a sequence: int64 ``places`` ``[kv_heads, chosen]`` among the middle
    blocks, and which of them are ``taken``; None: all. ``digests``: the rows of all middle blocks,
    ``[kv_heads, middle, rows, width]``, where the rest is to be estimated."""

    places: torch.Tensor
    taken: torch.Tensor | None
    split: Split
    digests: torch.Tensor | None

    def untaken(self, heads: int) -> torch.Tensor:
        """Blocks of each KV head that are not taken: int64 ``[kv_heads]``."""
        if self.taken is None:
            return torch.zeros(heads, dtype=torch.int64, device=self.places.device)
        return (~self.taken).sum(-1)

    @property
    def left_out(self) -> torch.Tensor:
        """Middle blocks that do not take part: bool ``[kv_heads, middle]``."""
        heads = len(self.places)
        device = self.places.device
        out = torch.ones(heads, self.split.middle, dtype=torch.bool, device=device)
        return out.scatter_(1, self.places, False)


class RestEstimator:
    """Adds the estimate in one layer."""

    def __init__(self, kernel: RowKernel, layout: Layout) -> None:
        self._shape = kernel.shape
        self._keys = kernel.keys
        self._layout = layout

    def added(
        self,
        attended: Attended,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        found: Sequence[Chosen],
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """Attention ``[sequences * kv_heads, group, dim]`` over what the table names, which is
        ``attended``, and the estimate of what it does not. ``query``: of that shape."""
        heads = self._shape.kv_heads
        lse = attended.lse
        if lse is None:
            lse = self._normalisers(query, kv_cache, table, seq_lens, scale, softcap)
        results = torch.empty_like(attended.output)
        for row in range(len(query)):
            chosen = found[row // heads]
            assert chosen.digests is not None
            left = chosen.left_out[row % heads]
            result = attended.output[row].float()
            if left.any():
                coded = chosen.digests[row % heads, left]
                rest = self._rest(query[row].float(), coded, scale, softcap)
                both = Part(
                    torch.stack([result, rest.output])[None],
                    torch.stack([lse[row], rest.lse])[None],
                )
                result = merged(both).output[0]
            results[row] = result.to(results.dtype)
        return results

    def _normalisers(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """Of what the table names: float32 ``[rows, group]``."""
        size = self._shape.block_size
        cache = kv_cache.view(-1, 1, *kv_cache.shape[2:])
        found = []
        for row, length in enumerate(seq_lens.tolist()):
            ids = table[row, : -(-length // size)].to(torch.int64)
            keys = self._keys.read(cache, ids).flatten(0, 2)[:length].float()
            logits = _capped(query[row].float() @ keys.T * scale, softcap)
            found.append(logits.logsumexp(-1))
        return torch.stack(found)

    def _rest(self, query: torch.Tensor, rows: torch.Tensor, scale: float, softcap: float) -> Part:
        """``query``: ``[group, dim]``; ``rows``: ``[blocks, rows, width]`` of the blocks left
        out, coded."""
        keys, values = self._layout.rest_of(rows)
        logits = _capped(query @ keys.T * scale, softcap) + math.log(self._shape.block_size)
        return Part(logits.softmax(-1) @ values, logits.logsumexp(-1))


def _capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits
