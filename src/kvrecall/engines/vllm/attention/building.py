"""Plans every step once for all layers of a group, beside one of vLLM's metadata builders."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.engines.vllm.attention import checks
from kvrecall.engines.vllm.attention.activity import ACTIVITY, ActivityLog
from kvrecall.engines.vllm.attention.attending import RetrievalAttention
from kvrecall.engines.vllm.attention.checks import offload_hindrance
from kvrecall.engines.vllm.attention.freshness import Freshness
from kvrecall.engines.vllm.attention.layer import RetrievalLayer
from kvrecall.engines.vllm.attention.offload import Offload, WholeLayer
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.attention.recalled import OffloadedSequence
from kvrecall.engines.vllm.attention.rows import RowKernel
from kvrecall.engines.vllm.attention.steps import BatchRow, StepPlanner
from kvrecall.engines.vllm.attention.work import AwayRow, AwayRows, DenseRest, Work
from kvrecall.engines.vllm.compat import config
from kvrecall.errors import EngineError

logger = logging.getLogger("vllm.kvrecall")


class RetrievalBuilding(ABC):
    """To be mixed into a builder of vLLM's, before it. The builder's metadata, of the whole batch,
    is that of dense layers; its ``retrieval`` is the step's ``Work``."""

    vllm_config: Any
    block_size: int

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self._kernel = self.make_kernel(kv_cache_spec)
        self._told = False
        self._log = ActivityLog(ACTIVITY)
        self._layers = _impls(vllm_config, layer_names)
        self._pooled = vllm_config.kv_transfer_config is not None
        self._offloads = offload_hindrance(vllm_config) is None
        self._bind(active_settings(vllm_config))

    @abstractmethod
    def make_kernel(self, kv_cache_spec: Any) -> RowKernel:
        """What attends to chosen blocks on this platform."""

    def make_whole(self) -> WholeLayer | None:
        """What attends to everything in a layer, be it off the device; None if nothing can."""
        return None

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
        self._planner = StepPlanner(settings, self._kernel, self._freshness, ACTIVITY)
        most = config.most_blocks_of_sequences(self.vllm_config, self.block_size)
        in_step = self._kernel.device.type == "cpu"
        pages = (settings.dense_layers + 1) * most
        self._offload = Offload(self._freshness, ACTIVITY, pages, in_step)
        for name, impl in self._layers.items():
            number = config.layer_index(name)
            whole, layer = self.make_whole(), None
            if whole is not None:
                self._offload.add_whole(name, whole)
            if number >= settings.dense_layers:
                layer = RetrievalLayer(settings, self._kernel, ACTIVITY, number)
                self._offload.add_sparse(name, layer)
            impl.bind(self._freshness, self._offload, layer, whole)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """vLLM's metadata with the step's work, if there is any beside dense attention."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        self._freshness.wrote_slots(common.slot_mapping[: common.num_actual_tokens])
        rows = _rows_of(common)
        if not any(row.tokens >= self._settings.dense_boundary for row in rows):
            ACTIVITY.steps += 1
            return metadata
        longest = -(-max(row.tokens for row in rows) // self.block_size)
        table = common.block_table_tensor[:, :longest].cpu()
        metadata.retrieval = self._work(common, rows, table)
        return metadata

    def _work(self, common: Any, rows: Sequence[BatchRow], table: torch.Tensor) -> Work:
        """``table``: the batch's block table, on the host."""
        offloaded = self._offloaded(rows, table)
        step = self._planner.plan(rows, table, offloaded)
        sparse = [] if step is None else [one.row for one in step.sequences]
        if sparse:
            self._tell(rows)
            self._log.sparse_step()
        if not sparse and not offloaded:
            return Work(step)
        starts = common.query_start_loc_cpu
        places = starts[sparse].to(torch.int64).to(self._kernel.device)
        rest = self._without({*sparse, *offloaded}, common, rows)
        if not offloaded:
            return Work(step, places, rest)
        here = self._without(offloaded, common, rows)
        away = AwayRows(self._away_rows(offloaded, rows, common, table), here)
        return Work(step, places, rest, away)

    def _offloaded(
        self, rows: Sequence[BatchRow], table: torch.Tensor
    ) -> dict[int, OffloadedSequence]:
        """The rows of sequences that are off the device in part."""
        if self._offload.is_idle:
            return {}
        found = {}
        for at, row in enumerate(rows):
            if not row.query_tokens:  # padding
                continue
            last = int(table[at, (row.tokens - 1) // self.block_size])
            sequence = self._offload.sequence(last)
            if sequence is not None:
                found[at] = sequence
        return found

    def _without(
        self, taken: Collection[int], common: Any, rows: Sequence[BatchRow]
    ) -> DenseRest | None:
        """Describes the other requests of the batch by themselves."""
        others = [at for at, row in enumerate(rows) if row.query_tokens and at not in taken]
        return self.part(common, rows, others) if others else None

    def part(
        self,
        common: Any,
        rows: Sequence[BatchRow],
        some: Sequence[int],
        table: torch.Tensor | None = None,
    ) -> DenseRest:
        """Describes some requests of the batch by themselves. ``table``: their blocks, if they are
        not where the batch has them."""
        starts = common.query_start_loc_cpu
        lengths = [rows[at].query_tokens for at in some]
        places = torch.cat([torch.arange(int(starts[at]), int(starts[at + 1])) for at in some])
        device = self._kernel.device
        there, tokens = torch.tensor(some, device=device), places.to(device)
        bounds, flags = common.seq_lens_cpu_upper_bound, common.is_prefilling
        part = common.replace(
            query_start_loc=_starts_of(lengths).to(device),
            query_start_loc_cpu=_starts_of(lengths),
            seq_lens=common.seq_lens[there],
            seq_lens_cpu_upper_bound=None if bounds is None else bounds[some],
            is_prefilling=None if flags is None else flags[some],
            num_reqs=len(some),
            num_actual_tokens=sum(lengths),
            max_query_len=max(lengths),
            max_seq_len=max(rows[at].tokens for at in some),
            block_table_tensor=common.block_table_tensor[there] if table is None else table,
            slot_mapping=common.slot_mapping[tokens],
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        return DenseRest(tokens, super().build(0, part))  # type: ignore[misc]

    def alone(self, common: Any, rows: Sequence[BatchRow], at: int) -> Any:
        """vLLM's metadata of a request whose blocks are to lie in their order, in a cache of their
        own; None if that is not needed."""
        return None

    def _away_rows(
        self,
        offloaded: Mapping[int, OffloadedSequence],
        rows: Sequence[BatchRow],
        common: Any,
        table: torch.Tensor,
    ) -> tuple[AwayRow, ...]:
        starts = common.query_start_loc_cpu
        return tuple(
            AwayRow(
                sequence,
                slice(int(starts[at]), int(starts[at + 1])),
                table[at],
                rows[at].tokens,
                not rows[at].decodes,
                self.alone(common, rows, at),
            )
            for at, sequence in offloaded.items()
        )

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


def _impls(vllm_config: Any, layer_names: list[str]) -> dict[str, RetrievalAttention[Any]]:
    layers = vllm_config.compilation_config.static_forward_context
    return {
        name: layers[name].impl
        for name in layer_names
        if isinstance(layers[name].impl, RetrievalAttention)
    }


def _rows_of(common: Any) -> list[BatchRow]:
    starts = common.query_start_loc_cpu.tolist()
    # Without speculation, which is refused, the upper bounds are the lengths.
    lengths = common.seq_lens_cpu_upper_bound
    tokens = (common.seq_lens if lengths is None else lengths).tolist()
    flags = common.is_prefilling
    prefilling = [False] * common.num_reqs if flags is None else flags.tolist()
    return [
        BatchRow(starts[at + 1] - starts[at], tokens[at], bool(prefilling[at]))
        for at in range(common.num_reqs)
    ]


def _starts_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
