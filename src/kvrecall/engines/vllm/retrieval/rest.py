"""What was not chosen, estimated: the attention that a block would have had, were all its keys its
mean key and all its values its mean value.

vLLM's kernel does not tell the normaliser of what it attended to, so the logits of the attended
keys are computed once more: this costs about as much as the attention itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvrecall.engines.vllm.retrieval.kernel import KernelShape, reader_of
from kvrecall.engines.vllm.retrieval.packing import KeyReader
from kvrecall.retrieval.layout import Layout
from kvrecall.retrieval.paged import Part, merged
from kvrecall.retrieval.split import Split


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
            return torch.zeros(heads, dtype=torch.int64)
        return (~self.taken).sum(-1)

    @property
    def left_out(self) -> torch.Tensor:
        """Middle blocks that do not take part: bool ``[kv_heads, middle]``."""
        heads = len(self.places)
        out = torch.ones(heads, self.split.middle, dtype=torch.bool)
        return out.scatter_(1, self.places, False)


class RestEstimator:
    """Adds the estimate in one layer. ``values``: reads values back."""

    def __init__(self, shape: KernelShape, keys: KeyReader, layout: Layout) -> None:
        self._shape = shape
        self._keys = keys
        self._layout = layout
        self.values = reader_of(shape, values=True)

    def added(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_lens: torch.Tensor,
        found: Sequence[Chosen],
        scale: float,
        softcap: float,
    ) -> torch.Tensor:
        """Attention ``[sequences * kv_heads, group, dim]`` over what the table names and the
        estimate of what it does not. ``query``: of the output's shape."""
        heads = self._shape.kv_heads
        size = self._shape.block_size
        rows = kv_cache.view(-1, 1, *kv_cache.shape[2:])
        results = torch.empty_like(output)
        for row, length in enumerate(seq_lens.tolist()):
            ids = table[row, : -(-length // size)].to(torch.int64)
            keys = self._keys.read(rows, ids).flatten(0, 2)[:length].float()
            one = query[row].float()
            lse = _capped(one @ keys.T * scale, softcap).logsumexp(-1)
            chosen = found[row // heads]
            assert chosen.digests is not None
            left = chosen.left_out[row % heads]
            attended = Part(output[row].float(), lse)
            if left.any():
                rest = self._rest(one, chosen.digests[row % heads, left], scale, softcap)
                both = Part(
                    torch.stack([attended.output, rest.output])[None],
                    torch.stack([attended.lse, rest.lse])[None],
                )
                attended = Part(merged(both).output[0], lse)
            results[row] = attended.output.to(results.dtype)
        return results

    def _rest(self, query: torch.Tensor, rows: torch.Tensor, scale: float, softcap: float) -> Part:
        """``query``: ``[group, dim]``; ``rows``: ``[blocks, rows, width]`` of the blocks left
        out, coded."""
        keys, values = self._layout.rest_of(rows)
        logits = _capped(query @ keys.T * scale, softcap) + math.log(self._shape.block_size)
        return Part(logits.softmax(-1) @ values, logits.logsumexp(-1))


def _capped(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(logits / softcap) if softcap else logits
