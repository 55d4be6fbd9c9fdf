"""Memory of a GPU that retrieval takes beside the KV cache. Workers leave it when vLLM plans the
cache, and what grows with the cache is allocated with it, once: nothing is enlarged in traffic."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvrecall.attention.digest import LOADED_BYTES, coded_width
from kvrecall.attention.kernels.device import StepBuffers
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.attention.base import CHECKSUM_BYTES
from kvrecall.engines.vllm.attention.checks import offload_hindrance
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.compat.config import (
    layer_index,
    most_decoded_at_once,
    padded_requests,
)

logger = logging.getLogger("vllm.kvrecall")

MEASURED_BYTES = 1 << 28
"""Copied to measure the device's bandwidth, before the cache is allocated."""
GRAPH_ROWS = 64
"""Requests of a step for which a graph is replayed, at most."""
_PAGES_A_BLOCK = 4  # of the cache: eight long sequences in a cache for two
_MOST_SPLITS = 64  # of a row's attention, as of ``attend_by_triton``

Specs = Mapping[str, Any]
"""vLLM's KV cache specs of the layers with retrieval, by name."""


@dataclass(frozen=True, slots=True)
class Most:
    """What an engine can have at one time. ``rows``: tokens of a step that kvrecall's kernels
    attend to, padding among them; ``tokens``: of a sequence. Blocks off the device: not more than
    there are slots for, of which a sequence has at least ``share`` times as many, and not more than
    ``left``: all that the sequences can have, or the pool."""

    rows: int = 64
    tokens: int = 1 << 17
    share: float = 1 / 8
    left: int = 1 << 20

    def left_of(self, blocks: int) -> int:
        """Blocks off the device. ``blocks``: of the KV cache."""
        return min(int(blocks / self.share), self.left)

    def pages_of(self, blocks: int) -> int:
        """Of which a dense layer has room for a copy."""
        return min(_PAGES_A_BLOCK * blocks, self.left_of(blocks))


def most_of(vllm_config: Any, settings: RetrievalSettings, specs: Specs) -> Most:
    """Of this engine."""
    requests = vllm_config.scheduler_config.max_num_seqs
    padded = min(GRAPH_ROWS, padded_requests(vllm_config, requests))
    rows = max(requests * most_decoded_at_once(vllm_config), padded)
    longest = vllm_config.model_config.max_model_len
    return Most(rows, longest, settings.topk_share, _most_left(vllm_config, settings, specs))


def _most_left(vllm_config: Any, settings: RetrievalSettings, specs: Specs) -> int:
    model, size = vllm_config.model_config, _block_size(specs)
    if not offloads(vllm_config, settings):
        return 0
    most: int = vllm_config.scheduler_config.max_num_seqs * (model.max_model_len // size)
    raw = vllm_config.kv_transfer_config.kv_connector_extra_config
    pool = RecallSettings.from_mapping(raw, "kv_connector_extra_config")
    if pool.service is None:  # a service's size is not known yet
        heads = next(iter(specs.values())).num_kv_heads
        parts = max(1, model.get_total_num_kv_heads() // heads)
        record = parts * sum(int(spec.page_size_bytes) for spec in specs.values())
        most = min(most, pool.pool.host_most_bytes // record)
    return most


def offloads(vllm_config: Any, settings: RetrievalSettings) -> bool:
    """Whether sequences are to leave the device."""
    is_long = settings.offload_boundary < vllm_config.model_config.max_model_len
    return is_long and offload_hindrance(vllm_config) is None


def cache_bytes(vllm_config: Any, specs: Specs, found: int) -> int:
    """The part of ``found`` bytes that is for the KV cache. The rest is for the digests of its
    blocks and of those off the device, with their slots and their copies in dense layers; where
    sequences leave the device, for one's copy in one layer; and for the greatest step's buffers."""
    settings, size = active_settings(), _block_size(specs)
    most = most_of(vllm_config, settings, specs)
    copies = offloads(vllm_config, settings)
    kv = here = left = kept = fixed = 0
    for name, spec in specs.items():
        kv += spec.page_size_bytes
        if layer_index(name) >= settings.dense_layers:
            layout = settings.layout(size, narrows=False)
            width = coded_width(layout.kind.parts * spec.head_size, LOADED_BYTES)
            digests = spec.num_kv_heads * layout.rows * width
            here += digests + CHECKSUM_BYTES + 3 * 4 * spec.num_kv_heads
            left += digests + 4 * spec.num_kv_heads
        elif copies:
            kept += spec.page_size_bytes
        fixed = max(fixed, _step_bytes(vllm_config, most, spec))
    if copies:
        longest = -(-vllm_config.model_config.max_model_len // size)
        fixed += longest * max(spec.page_size_bytes for spec in specs.values())
    fixed += MEASURED_BYTES * settings.gate
    room = max(0, found - fixed)

    def needed(blocks: int) -> int:
        away = most.left_of(blocks) * left + most.pages_of(blocks) * kept
        return blocks * (kv + here) + away

    blocks = bisect_right(range(room // kv + 1), room, key=needed) - 1
    logger.info(
        "kvrecall: retrieval: of %.2f GiB of device memory beside the model %.2f GiB are for the "
        "KV cache, the others for digests of its blocks and of up to %d off the device, copies for "
        "dense layers, and buffers",
        found / 2**30,
        max(0, blocks) * kv / 2**30,
        most.left_of(blocks),
    )
    return max(0, blocks) * kv


def _block_size(specs: Specs) -> int:
    return int(next(iter(specs.values())).block_size)


def _step_bytes(vllm_config: Any, most: Most, spec: Any) -> int:
    """Of the buffers of steps, and the tables of sequences with blocks off the device."""
    heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    blocks, group = -(-most.tokens // spec.block_size), heads // spec.num_kv_heads
    buffers = StepBuffers(most.rows, blocks, spec.num_kv_heads, group, torch.device("meta"))
    tables = 2 * 4 * most.rows * blocks * bool(most.left)
    return tables + buffers.nbytes(_MOST_SPLITS, spec.head_size)
