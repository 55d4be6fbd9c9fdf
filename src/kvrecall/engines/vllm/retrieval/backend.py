"""vLLM's CPU attention backend with retrieval: dense unless a sequence is decoded past the
boundary."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from kvrecall.engines.vllm import compat
from kvrecall.engines.vllm.retrieval import checks
from kvrecall.engines.vllm.retrieval.activity import ACTIVITY, ActivityLog
from kvrecall.engines.vllm.retrieval.freshness import Freshness
from kvrecall.engines.vllm.retrieval.kernel import KernelShape, reader_of
from kvrecall.engines.vllm.retrieval.layer import RetrievalLayer
from kvrecall.engines.vllm.retrieval.plugin import active_settings
from kvrecall.engines.vllm.retrieval.steps import BatchRow, SparseStep, StepPlanner
from kvrecall.retrieval.settings import Regime, RetrievalSettings

logger = logging.getLogger("vllm.kvrecall")


class RetrievalBackend(CPUAttentionBackend):
    """Registered in place of CPU_ATTN, and goes by its name: the KV bytes are the same."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return RetrievalImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return RetrievalMetadataBuilder


@dataclass(frozen=True, slots=True)
class DenseRest:
    """The requests of a mixed batch that stay dense: ``tokens`` are their places in it."""

    tokens: torch.Tensor
    metadata: CPUAttentionMetadata


@dataclass
class RetrievalMetadata(CPUAttentionMetadata):
    """vLLM's metadata of the whole batch, which dense layers use, and the sparse layers' step.

    ``sparse_tokens``: places of the sparse sequences' tokens in the batch. ``rest``: None if there
    are no others.
    """

    step: SparseStep | None = None
    sparse_tokens: torch.Tensor | None = None
    rest: DenseRest | None = None


class RetrievalMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans every step once for all layers of the group."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        settings = active_settings()
        checks.require_block_size(self.block_size, settings)
        shape = KernelShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.dtype,
            self.isa,
        )
        self._settings = settings
        self._told = False
        self._log = ActivityLog(ACTIVITY)
        self._freshness = Freshness(self.block_size)
        self._planner = StepPlanner(settings, shape, self._freshness, ACTIVITY)
        reader = reader_of(shape)
        for name, impl in _impls(vllm_config, layer_names).items():
            layer = RetrievalLayer(settings, shape, reader, ACTIVITY)
            dense = compat.layer_index(name) < settings.dense_layers
            impl.bind(self._freshness, None if dense else layer)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> RetrievalMetadata:
        common = common_attn_metadata
        dense = super().build(common_prefix_len, common, fast_build)
        values = {field.name: getattr(dense, field.name) for field in fields(dense)}
        metadata = RetrievalMetadata(**values)
        self._freshness.wrote_slots(common.slot_mapping[: common.num_actual_tokens])
        rows = _rows_of(common)
        if not any(row.tokens >= self._settings.dense_boundary for row in rows):
            ACTIVITY.steps += 1
            return metadata
        metadata.step = self._planner.plan(rows, common.block_table_tensor)
        if metadata.step is not None and metadata.step.sequences:
            self._divide(metadata, common, rows)
            self._tell(rows)
            self._log.sparse_step()
        return metadata

    def _divide(self, metadata: RetrievalMetadata, common: Any, rows: Sequence[BatchRow]) -> None:
        """Names the sparse tokens' places, and describes the other requests by themselves."""
        assert metadata.step is not None
        starts = common.query_start_loc_cpu
        sparse = [sequence.row for sequence in metadata.step.sequences]
        metadata.sparse_tokens = starts[sparse].to(torch.int64)
        others = sorted(set(range(len(rows))) - set(sparse))
        if not others:
            return
        places = [torch.arange(int(starts[row]), int(starts[row + 1])) for row in others]
        lengths = [rows[row].query_tokens for row in others]
        part = common.replace(
            query_start_loc=_starts_of(lengths),
            query_start_loc_cpu=_starts_of(lengths),
            seq_lens=common.seq_lens[others],
            num_reqs=len(others),
            num_actual_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=max(rows[row].tokens for row in others),
            block_table_tensor=common.block_table_tensor[others],
            slot_mapping=common.slot_mapping[torch.cat(places)],
        )
        metadata.rest = DenseRest(torch.cat(places), super().build(0, part))

    def _tell(self, rows: Sequence[BatchRow]) -> None:
        """Says once in the log that a sequence is served without the offload it was to have."""
        if self._told:
            return
        if any(self._settings.regime(row.tokens) is Regime.OFFLOAD for row in rows):
            self._told = True
            logger.warning(
                "kvrecall: sequences past VLLM_RETRIEVAL_OFFLOAD_BOUNDARY=%d are attended to "
                "sparsely but stay on the device: this version does not offload their blocks",
                self._settings.offload_boundary,
            )


class RetrievalImpl(CPUAttentionBackendImpl):
    """One layer's attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = active_settings()
        checks.require_engine(get_current_vllm_config(), self._settings)
        checks.require_layer(self)
        self._freshness: Freshness | None = None
        self._retrieval: RetrievalLayer | None = None

    @property
    def approximation(self) -> str:
        """What KV computed while decoding depends on beside the weights; see compat.kernel_of."""
        return approximation_of(self._settings)

    def bind(self, freshness: Freshness, layer: RetrievalLayer | None) -> None:
        """Takes the group's flags and the layer's digests, None for a layer that stays dense."""
        self._freshness = freshness
        self._retrieval = layer

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
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, "step", None)
        if step is None or self._retrieval is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        assert isinstance(attn_metadata, RetrievalMetadata)
        self._retrieval.digest(kv_cache, step.stale)
        if attn_metadata.sparse_tokens is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        rest = attn_metadata.rest
        if rest is not None:
            part = torch.empty_like(output[rest.tokens])
            super().forward(
                layer, query[rest.tokens], key[rest.tokens], value[rest.tokens], kv_cache,
                rest.metadata, part,
            )  # fmt: skip
            output[rest.tokens] = part
        tokens = attn_metadata.sparse_tokens
        sparse = self._retrieval.attend(
            query[tokens], kv_cache, step, self.scale, self.logits_soft_cap
        )
        output[tokens] = sparse.view_as(output[tokens])
        return output


def approximation_of(settings: RetrievalSettings) -> str:
    """Names the settings that decide what sparse decoding computes."""
    return ", ".join(
        f"{field.name}={getattr(settings, field.name)}"
        for field in fields(settings)
        if field.name != "offload_boundary"
    )


def _impls(vllm_config: Any, layer_names: list[str]) -> dict[str, RetrievalImpl]:
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layers[name].impl
        for name in layer_names
        if isinstance(layers[name].impl, RetrievalImpl)
    }


def _rows_of(common: Any) -> list[BatchRow]:
    starts = common.query_start_loc_cpu.tolist()
    tokens = common.seq_lens.tolist()
    flags = common.is_prefilling
    prefilling = [False] * common.num_reqs if flags is None else flags.tolist()
    return [
        BatchRow(starts[at + 1] - starts[at], tokens[at], bool(prefilling[at]))
        for at in range(common.num_reqs)
    ]


def _starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
