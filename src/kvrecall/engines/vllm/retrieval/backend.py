"""vLLM's CPU attention backend with retrieval: dense unless a sequence is decoded past the
boundary."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from kvrecall.engines.vllm.retrieval.checks import offload_hindrance
from kvrecall.engines.vllm.retrieval.dense import DenseLayer
from kvrecall.engines.vllm.retrieval.freshness import Freshness
from kvrecall.engines.vllm.retrieval.kernel import KernelShape, reader_of
from kvrecall.engines.vllm.retrieval.layer import RetrievalLayer
from kvrecall.engines.vllm.retrieval.offload import Offload
from kvrecall.engines.vllm.retrieval.plugin import active_settings
from kvrecall.engines.vllm.retrieval.recalled import OffloadedSequence, Records
from kvrecall.engines.vllm.retrieval.steps import BatchRow, SparseStep, StepPlanner
from kvrecall.engines.vllm.wire import OffloadOrders
from kvrecall.errors import EngineError
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
    """The requests of a mixed batch that are attended to densely on the device: ``tokens`` are
    their places in it."""

    tokens: torch.Tensor
    metadata: CPUAttentionMetadata


@dataclass
class RetrievalMetadata(CPUAttentionMetadata):
    """vLLM's metadata of the whole batch, which dense layers use, and the sparse layers' step.

    ``sparse_tokens``: places of the sparse sequences' tokens in the batch. ``rest``: what sparse
    layers attend to densely on the device; None if nothing. ``away``: None if all blocks are on
    the device.
    """

    step: SparseStep | None = None
    sparse_tokens: torch.Tensor | None = None
    rest: DenseRest | None = None
    away: AwayRows | None = None


@dataclass(frozen=True, slots=True)
class AwayRow:
    """A sequence off the device in part. ``places``: of its tokens in the batch; ``table``: its
    device blocks; ``tokens``: its length; ``prefills``: it is attended to densely in all layers."""

    sequence: OffloadedSequence
    places: slice
    table: torch.Tensor
    tokens: int
    prefills: bool


@dataclass(frozen=True, slots=True)
class AwayRows:
    """What a dense layer does in a step with sequences that are off the device in part.

    ``rest``: the other sequences.
    """

    rows: tuple[AwayRow, ...]
    rest: DenseRest | None


class RetrievalMetadataBuilder(CPUAttentionMetadataBuilder):
    """Plans every step once for all layers of the group."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._shape = KernelShape(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.block_size,
            self.dtype,
            self.isa,
        )
        self._told = False
        self._log = ActivityLog(ACTIVITY)
        self._reader = reader_of(self._shape)
        self._layers = _impls(vllm_config, layer_names)
        self._pooled = vllm_config.kv_transfer_config is not None
        self._offloads = offload_hindrance(vllm_config) is None
        self._bind(active_settings(vllm_config))

    def use(self, settings: RetrievalSettings) -> None:
        """Serves by these settings from the next step on; digests are computed anew.

        Refused beside a connector: what it saves is named after the settings of the start.
        """
        if self._pooled:
            raise EngineError("retrieval settings cannot change while a KV connector is in use")
        self._bind(settings)

    def _bind(self, settings: RetrievalSettings) -> None:
        checks.require_block_size(self.block_size, settings)
        self._settings = settings
        self._freshness = Freshness(self.block_size)
        self._planner = StepPlanner(settings, self._shape, self._freshness, ACTIVITY)
        most = compat.most_blocks_of_sequences(self.vllm_config, self.block_size)
        self._offload = Offload(self._freshness, ACTIVITY, (settings.dense_layers + 1) * most)
        for name, impl in self._layers.items():
            number = compat.layer_index(name)
            whole, layer = DenseLayer(self._shape), None
            self._offload.add_whole(name, whole)
            if number >= settings.dense_layers:
                layer = RetrievalLayer(settings, self._shape, self._reader, ACTIVITY, number)
                self._offload.add_sparse(name, layer)
            impl.bind(self._freshness, self._offload, layer, whole)

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
        table = common.block_table_tensor
        offloaded = self._offloaded(rows, table)
        metadata.step = self._planner.plan(rows, table, offloaded)
        sparse = [] if metadata.step is None else [one.row for one in metadata.step.sequences]
        if sparse or offloaded:
            starts = common.query_start_loc_cpu
            apart = {*sparse, *offloaded}
            metadata.sparse_tokens = starts[sparse].to(torch.int64)
            metadata.rest = self._without(apart, common, rows)
            if offloaded:
                rest = self._without(offloaded, common, rows)
                metadata.away = AwayRows(_away_rows(offloaded, rows, starts, table), rest)
        if sparse:
            self._tell(rows)
            self._log.sparse_step()
        return metadata

    def _offloaded(
        self, rows: Sequence[BatchRow], table: torch.Tensor
    ) -> dict[int, OffloadedSequence]:
        """The rows of sequences that are off the device in part."""
        if self._offload.is_idle:
            return {}
        found = {}
        for at, row in enumerate(rows):
            last = int(table[at, (row.tokens - 1) // self.block_size])
            sequence = self._offload.sequence(last)
            if sequence is not None:
                found[at] = sequence
        return found

    def _without(
        self, taken: Collection[int], common: Any, rows: Sequence[BatchRow]
    ) -> DenseRest | None:
        """Describes the other requests of the batch by themselves."""
        starts = common.query_start_loc_cpu
        others = sorted(set(range(len(rows))) - set(taken))
        if not others:
            return None
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
        return DenseRest(torch.cat(places), super().build(0, part))

    def _tell(self, rows: Sequence[BatchRow]) -> None:
        """Says once in the log that a sequence is served without the offload it was to have."""
        if self._told or self._offloads:
            return
        if any(self._settings.regime(row.tokens) is Regime.OFFLOAD for row in rows):
            self._told = True
            logger.warning(
                "kvrecall: sequences past VLLM_RETRIEVAL_OFFLOAD_BOUNDARY=%d are attended to "
                "sparsely but stay on the device: this engine does not offload their blocks, as %s",
                self._settings.offload_boundary,
                offload_hindrance(self.vllm_config),
            )


class RetrievalImpl(CPUAttentionBackendImpl):
    """One layer's attention."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self._settings = active_settings(vllm_config)
        checks.require_engine(vllm_config, self._settings)
        checks.require_layer(self)
        self._freshness: Freshness | None = None
        self._offload: Offload | None = None
        self._retrieval: RetrievalLayer | None = None
        self._whole: DenseLayer | None = None

    @property
    def approximation(self) -> str:
        """What KV computed while decoding depends on beside the weights; see compat.kernel_of."""
        return approximation_of(self._settings)

    def bind(
        self,
        freshness: Freshness,
        offload: Offload,
        layer: RetrievalLayer | None,
        whole: DenseLayer,
    ) -> None:
        """Takes what the group shares, and this layer's parts; ``layer`` is None if it is to stay
        dense."""
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
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        step = getattr(attn_metadata, "step", None)
        away = getattr(attn_metadata, "away", None)
        if away is None and (step is None or self._retrieval is None):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip
        assert isinstance(attn_metadata, RetrievalMetadata)
        if self._retrieval is None:
            assert away is not None
            self._attend_rest(layer, query, key, value, kv_cache, away.rest, output)
            self._attend_away(query, kv_cache, away.rows, output)
            return output
        if step is not None:
            self._retrieval.digest(kv_cache, step.stale)
        if attn_metadata.sparse_tokens is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        self._attend_rest(layer, query, key, value, kv_cache, attn_metadata.rest, output)
        if step is not None and step.sequences:
            tokens = attn_metadata.sparse_tokens
            sparse = self._retrieval.attend(
                query[tokens], kv_cache, step, self.scale, self.logits_soft_cap
            )
            output[tokens] = sparse.view_as(output[tokens])
        if away is not None:
            prefills = [row for row in away.rows if row.prefills]
            self._attend_away(query, kv_cache, prefills, output)
            for row in prefills:
                assert self._whole is not None
                self._whole.forget(row.sequence.key, memory=False)
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
        super().forward(
            layer, query[rest.tokens], key[rest.tokens], value[rest.tokens], kv_cache,
            rest.metadata, part,
        )  # fmt: skip
        output[rest.tokens] = part

    def _attend_away(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        rows: Sequence[AwayRow],
        output: torch.Tensor,
    ) -> None:
        """Dense attention of sequences that are off the device in part."""
        assert self._whole is not None
        for row in rows:
            part = query[row.places]
            attended = self._whole.attend(
                part.reshape(-1, self.num_heads, self.head_size).contiguous(),
                kv_cache, row.sequence, row.table, row.tokens, self.scale, self.logits_soft_cap,
            )  # fmt: skip
            output[row.places] = attended.view_as(output[row.places])


_RESIDENCE = ("offload_boundary", "cache_share", "prefetch_share")
"""Settings that decide where blocks lie, not what is computed from them."""


def approximation_of(settings: RetrievalSettings) -> str:
    """Names the settings that decide what sparse decoding computes."""
    return ", ".join(
        f"{field.name}={getattr(settings, field.name)}"
        for field in fields(settings)
        if field.name not in _RESIDENCE
    )


def _impls(vllm_config: Any, layer_names: list[str]) -> dict[str, RetrievalImpl]:
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layers[name].impl
        for name in layer_names
        if isinstance(layers[name].impl, RetrievalImpl)
    }


def _away_rows(
    offloaded: Mapping[int, OffloadedSequence],
    rows: Sequence[BatchRow],
    starts: torch.Tensor,
    table: torch.Tensor,
) -> tuple[AwayRow, ...]:
    return tuple(
        AwayRow(
            sequence,
            slice(int(starts[at]), int(starts[at + 1])),
            table[at],
            rows[at].tokens,
            not rows[at].decodes,
        )
        for at, sequence in offloaded.items()
    )


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
