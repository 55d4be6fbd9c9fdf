"""The real connector in an engine whose KV cache holds large values wherever nothing was computed,
as blocks do that had other requests' KV. No NaN: vLLM's CPU kernel multiplies what is behind a
sequence by a weight of zero, and its own cache begins with zeros."""

from __future__ import annotations

import torch

from kvrecall.engines.vllm.connector.connector import RecallConnector


class TaintedConnector(RecallConnector):
    """A value that counts with any weight changes every answer."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for cache in kv_caches.values():
            cache.fill_(1e4)
        super().register_kv_caches(kv_caches)
