"""A connector by which the KV of every prompt is there at once, as random numbers: decoding behind
long prompts is timed without computing them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

from kvrecall.engines.vllm import RecallConnector as Ours
from kvrecall.engines.vllm.attention.activity import totals_of
from kvrecall.engines.vllm.attention.backend import retrieval_groups
from kvrecall.engines.vllm.connector.metrics import RecallStats


class RecallConnector(KVConnectorBase_V1):
    """Fills the device's cache once, and counts what retrieval does. Has the name that retrieval
    asks for, and no pool: nothing may be off the device."""

    build_kv_connector_stats = Ours.build_kv_connector_stats
    build_prom_metrics = Ours.build_prom_metrics
    _did: Mapping[str, int] = MappingProxyType({})

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for cache in kv_caches.values():
            cache.normal_()

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        size = self._vllm_config.cache_config.block_size
        return max(0, (request.num_tokens - 1) // size * size - computed), False

    def get_kv_connector_stats(self) -> RecallStats | None:
        did = totals_of(one.counted() for one in retrieval_groups(self._vllm_config))
        before, self._did = self._did, did
        new = {f"retrieval_{name}": did[name] - before.get(name, 0) for name in did}
        return RecallStats.of(new) if any(new.values()) else None

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def update_state_after_alloc(self, *_: Any) -> None: ...

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None: ...
