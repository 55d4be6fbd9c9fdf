"""One layer's attention: dense unless a sequence is decoded past the boundary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Generic, TypeVar

import torch
from vllm.config import get_current_vllm_config

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention import checks
from kvrecall.engines.vllm.attention.activity import ACTIVITY
from kvrecall.engines.vllm.attention.freshness import Freshness
from kvrecall.engines.vllm.attention.layer import RetrievalLayer
from kvrecall.engines.vllm.attention.offload import Offload, WholeLayer
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.attention.recalled import Records
from kvrecall.engines.vllm.attention.work import AwayRow, DenseRest, work_of
from kvrecall.engines.vllm.connector.wire import OffloadOrders

Whole = TypeVar("Whole", bound=WholeLayer)


class RetrievalAttention(ABC, Generic[Whole]):
    """To be mixed into an attention implementation of vLLM's, before it."""

    num_heads: int
    head_size: int
    scale: float
    logits_soft_cap: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self._settings = active_settings(vllm_config)
        checks.require_engine(vllm_config, self._settings)
        checks.require_layer(self)
        self._freshness: Freshness | None = None
        self._offload: Offload | None = None
        self._retrieval: RetrievalLayer | None = None
        self._whole: Whole | None = None

    @property
    def approximation(self) -> str:
        """What KV computed while decoding depends on beside the weights."""
        return approximation_of(self._settings)

    def bind(
        self,
        freshness: Freshness,
        offload: Offload,
        layer: RetrievalLayer | None,
        whole: Whole | None,
    ) -> None:
        """Takes what the group shares, and this layer's parts; ``layer`` is None if it is to stay
        dense, ``whole`` if nothing leaves the device."""
        self._freshness = freshness
        self._offload = offload
        self._retrieval = layer
        self._whole = whole

    def take_offload(
        self,
        orders: OffloadOrders | None,
        caches: Mapping[str, torch.Tensor],
        records: Records | None,
    ) -> set[str]:
        """Carries out a step's orders for all layers of the group; see compat.take_offload."""
        return set() if self._offload is None else self._offload.take(orders, caches, records)

    def digest_pages(self, caches: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the pool is to keep beside the KV of the group; see compat.digest_pages."""
        return {} if self._offload is None else self._offload.digest_pages(caches)

    def before_store(self, block_ids: Sequence[int], caches: Mapping[str, torch.Tensor]) -> None:
        """These blocks go to the pool, with their digests."""
        if self._offload is not None:
            self._offload.refresh(block_ids, caches)

    def note_restored(self, block_ids: Iterable[int]) -> None:
        """These blocks were loaded from the pool, with their digests."""
        if self._offload is not None:
            self._offload.restored(block_ids)

    def activity(self) -> dict[str, int]:
        """Totals of this process, over all layers; see compat.attention_activity."""
        return ACTIVITY.totals()

    def note_overwritten(self, block_ids: Iterable[int]) -> None:
        """These blocks are written by something other than the engine's forward pass."""
        if self._freshness is not None:
            self._freshness.wrote_blocks(block_ids)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM has it; tensors ``[tokens, heads, dim]``."""
        work = work_of(attn_metadata)
        if work is None or (work.away is None and (work.step is None or self._retrieval is None)):
            return self._dense(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        step, away = work.step, work.away
        if self._retrieval is None:
            assert away is not None
            self._attend_rest(layer, query, key, value, kv_cache, away.rest, output)
            for row in away.rows:
                self._attend_away(layer, query, key, value, kv_cache, row, output)
            return output
        if step is not None:
            self._retrieval.digest(kv_cache, step.stale)
        if work.sparse_tokens is None:
            return self._dense(layer, query, key, value, kv_cache, attn_metadata, output)
        self._attend_rest(layer, query, key, value, kv_cache, work.rest, output)
        if step is not None and step.sequences:
            tokens = work.sparse_tokens
            sparse = self._retrieval.attend(
                query[tokens], kv_cache, step, self.scale, self.logits_soft_cap
            )
            output[tokens] = sparse.view_as(output[tokens])
        if away is not None:
            for row in (row for row in away.rows if row.prefills):
                self._attend_away(layer, query, key, value, kv_cache, row, output)
                assert self._whole is not None
                self._whole.forget(row.sequence.key, memory=False)
        return output

    def _dense(self, *args: Any) -> torch.Tensor:
        """vLLM's own attention."""
        output: torch.Tensor = super().forward(*args)  # type: ignore[misc]
        return output

    def _attend_rest(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        rest: DenseRest | None,
        output: torch.Tensor,
    ) -> None:
        """Dense attention of some requests of the batch."""
        if rest is None:
            return
        part = torch.empty_like(output[rest.tokens])
        self._dense(
            layer, query[rest.tokens], key[rest.tokens], value[rest.tokens], kv_cache,
            rest.metadata, part,
        )  # fmt: skip
        output[rest.tokens] = part

    @abstractmethod
    def _attend_away(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        row: AwayRow,
        output: torch.Tensor,
    ) -> None:
        """Dense attention of a sequence that is off the device in part."""


_RESIDENCE = ("offload_boundary", "cache_share")
"""Settings that decide where blocks lie, not what is computed from them."""


def approximation_of(settings: RetrievalSettings) -> str:
    """Names the settings that decide what sparse decoding computes."""
    return ", ".join(
        f"{field.name}={getattr(settings, field.name)}"
        for field in fields(settings)
        if field.name not in _RESIDENCE
    )
