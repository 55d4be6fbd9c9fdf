"""Retrieval in vLLM's attention backends, for every platform: a metadata builder that plans each
step once for all layers of a group, and the layers' attention. Both are mixins for vLLM's classes.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.config import get_current_vllm_config

from kvrecall.attention.index import require_index
from kvrecall.attention.settings import Regime, RetrievalSettings
from kvrecall.engines.vllm.attention import checks
from kvrecall.engines.vllm.attention.activity import Activity, ActivityLog, HeatTotals, totals_of
from kvrecall.engines.vllm.attention.base import (
    AttentionKernel,
    AttentionParameters,
    RetrievalLayer,
    SparseStep,
)
from kvrecall.engines.vllm.attention.copies import KeptLayer
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence
from kvrecall.engines.vllm.attention.plugin import active_settings
from kvrecall.engines.vllm.attention.step import (
    BatchRow,
    Beside,
    DenseOffload,
    OffloadedRow,
    StepPlanner,
    StepWork,
)
from kvrecall.engines.vllm.compat import config, runner
from kvrecall.engines.vllm.device import device_of
from kvrecall.errors import EngineError

logger = logging.getLogger("vllm.kvrecall")

Places = torch.Tensor | slice
"""In tokens of the batch."""

_RESIDENCE = ("offload_boundary", "cache_share")
"""Settings that decide where blocks are, not what is computed from them."""


class RetrievalAttention:
    """One layer's attention: dense unless a sequence is decoded past the boundary. Mixed into an
    attention implementation of vLLM's, before it."""

    num_heads: int
    scale: float
    logits_soft_cap: float | None
    sinks: torch.Tensor | None
    sliding_window: Any
    supports_quant_query_input: bool
    kept_layer: KeptLayer | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        vllm_config = get_current_vllm_config()
        self._settings = active_settings()
        checks.require_engine(vllm_config, self._settings)
        checks.require_layer(self, vllm_config)
        # The builder sets these; ``sparse_layer`` is None if the layer stays dense.
        self.group: RetrievalGroup | None = None
        self.sparse_layer: RetrievalLayer | None = None
        self.dense_offload: DenseOffload | None = None
        self.measured = 0
        """``overhead_bytes`` where the gate depends on a measurement; 0: it does not."""

    @property
    def approximation(self) -> str:
        """What KV of decoded tokens depends on besides the weights: the settings that decide what
        sparse decoding computes."""
        names = [
            f"{field.name}={getattr(self._settings, field.name)}"
            for field in fields(self._settings)
            if field.name not in _RESIDENCE
        ]
        if self._settings.gate and self.measured:
            names.append(f"measured={self.measured}")
        return ", ".join(names)

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
        work: StepWork | None = getattr(attn_metadata, "retrieval", None)
        sparse: RetrievalLayer | KeptLayer | None = self.sparse_layer
        step = self._digest(kv_cache, work)
        if sparse is None and work is not None and work.is_kept:
            sparse, step = self.kept_layer, work.step
        decodes = sparse is not None and step is not None and step.attends
        if work is None or not (decodes or work.offloaded):
            return self._dense(
                layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale, output_block_scale,
            )  # fmt: skip

        def attend(places: Places, cache: torch.Tensor, metadata: Any) -> torch.Tensor:
            part = torch.empty_like(output[places])
            self._dense(layer, query[places], key[places], value[places], cache, metadata, part)
            return part

        parameters = self._parameters(layer)
        beside = work.beside_offloaded if sparse is None else work.beside_sparse
        if beside is not None:
            tokens, metadata = beside
            output[tokens] = attend(tokens, kv_cache, metadata)
        if sparse is not None and step is not None and decodes:
            sparse.attend(query, kv_cache, step, parameters, output.view(-1, *query.shape[1:]))
        for row in work.offloaded:
            if sparse is None or row.prefills:
                assert self.dense_offload is not None
                here, plainly = row.places, partial(attend, row.places)
                found = self.dense_offload(row, query[here], kv_cache, parameters, plainly)
                output[here] = found.view_as(output[here])
        return output

    def _digest(self, kv_cache: torch.Tensor, work: StepWork | None) -> SparseStep | None:
        """Computes the step's digests; returns the step if there is one for this layer."""
        if work is None or work.step is None or self.sparse_layer is None:
            return None
        self.sparse_layer.digest_step(kv_cache, work.step)
        return work.step

    def _parameters(self, layer: Any) -> AttentionParameters:
        keys, values = layer._k_scale_float, layer._v_scale_float
        return AttentionParameters(
            self.scale, self.logits_soft_cap or 0.0, self.sinks, keys, values
        )

    def _dense(self, *args: Any) -> torch.Tensor:
        """vLLM's own attention."""
        output: torch.Tensor = super().forward(*args)  # type: ignore[misc]
        return output


class RetrievalBuilder(ABC):
    """Mixed into a metadata builder of vLLM's, before it. The builder's metadata, of the whole
    batch, is that of dense layers; its ``retrieval`` is the step's ``StepWork``. Layers with a
    window have a KV group of their own, whose builder only builds vLLM's metadata."""

    vllm_config: Any
    block_size: int

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.block_size = kv_cache_spec.block_size
        self._layer_names = layer_names
        self._plain = any(checks.has_window(impl) for impl in self._impls().values())
        if self._plain:
            return
        self._kernel = self.make_kernel(kv_cache_spec)
        self._activity = Activity()
        self._was_sparse = False
        self._captures = False
        self._heat = HeatTotals()
        self._log = ActivityLog(self._activity)
        self._decoded = config.most_decoded_at_once(vllm_config)
        runner.follow_blocks(vllm_config)
        checks.tell_limits(vllm_config, active_settings())
        self.bind(active_settings())

    @abstractmethod
    def make_kernel(self, kv_cache_spec: Any) -> AttentionKernel:
        """What attends to selected blocks on this platform."""

    @abstractmethod
    def make_dense(self, name: str) -> DenseOffload | None:
        """That layer's; None: no sequence leaves the device."""

    def make_kept(self, name: str) -> KeptLayer | None:
        """Of a dense layer; None: it keeps no copies of what leaves the device."""
        return None

    def bind(self, settings: RetrievalSettings) -> None:
        """Makes the group's layers by these settings: without digests, and with no sequence
        offloaded. Not while a connector holds the group that was bound before."""
        if self._plain:
            return
        checks.require_block_size(self.block_size, settings)
        self._settings = settings
        kernel, activity, heat = self._kernel, self._activity, self._heat
        parts = settings.layout(self.block_size).kind.parts
        require_index(settings.index, parts * kernel.shape.head_dim)
        self._group = group = RetrievalGroup(activity, heat, kernel, self._settle_gate)
        token_bytes = self._token_bytes()
        self._planner = StepPlanner(settings, kernel, group.freshness, activity, token_bytes)
        self._tell_boundary(settings)
        for name, impl in self._impls().items():
            number, sparse = config.layer_index(name), None
            if number >= settings.dense_layers:
                sparse = kernel.layer(name, settings, activity, partial(heat.note, number))
            impl.kept_layer = None if sparse else self.make_kept(name)
            group.add(name, sparse, impl.kept_layer)
            impl.group, impl.sparse_layer = group, sparse
            impl.dense_offload = self.make_dense(name)
        self._settle_gate(kernel.overhead_bytes)

    def _settle_gate(self, overhead_bytes: int) -> None:
        """The gate decides by this number: also as sequences do that leave the device, and on other
        ranks, whose KV is in one namespace."""
        if overhead_bytes != self._planner.gate.overhead_bytes:
            self._kernel.overhead_bytes = overhead_bytes
            self._planner.gate = replace(self._planner.gate, overhead_bytes=overhead_bytes)
            self._tell_boundary(self._settings)
        on_host = self._kernel.device.type == "cpu"
        for impl in self._impls().values():
            impl.measured = 0 if on_host else overhead_bytes

    def _token_bytes(self) -> int:
        """Keys and values of a token in the model's first layer with full attention, by which the
        scheduler side's gate decides, too: where layers differ in it, all are sparse or none is."""
        impls, specs = _attention_layers(self.vllm_config).items(), self.specs()
        spec = next(specs[name] for name, impl in impls if not checks.has_window(impl))
        return int(spec.page_size_bytes) // int(spec.block_size)

    def specs(self) -> dict[str, Any]:
        """vLLM's KV cache specs of all retrieval layers of the model, by name."""
        layers = self.vllm_config.compilation_config.static_forward_context
        names = _attention_layers(self.vllm_config)
        return {name: layers[name].get_kv_cache_spec(self.vllm_config) for name in names}

    def _impls(self) -> Mapping[str, RetrievalAttention]:
        """Its layers, by name."""
        layers = _attention_layers(self.vllm_config)
        return {name: impl for name, impl in layers.items() if name in self._layer_names}

    def _tell_boundary(self, settings: RetrievalSettings) -> None:
        """Logs from which length on sequences decode sparsely."""
        most = self.vllm_config.model_config.max_model_len
        if most <= settings.dense_boundary:  # the checks say so
            return
        gate = self._planner.gate
        longest = most - 1  # the last token of a sequence of max_model_len is not decoded further
        least = gate.sparse_from(self.block_size, longest)
        if least is not None:
            logger.info(
                "kvrecall: retrieval: with this model sequences decode sparsely from %d tokens on, "
                "and densely below (VLLM_RETRIEVAL_DENSE_BOUNDARY=%d; a layer's launches cost as "
                "much as reading %d MiB of KV)",
                least,
                settings.dense_boundary,
                gate.overhead_bytes >> 20,
            )
            return
        why = (
            "dense attention is expected to be faster at every length up to "
            f"max_model_len={most}; VLLM_RETRIEVAL_GATE=0 decodes sparsely from "
            f"VLLM_RETRIEVAL_DENSE_BOUNDARY={settings.dense_boundary} on anyway"
        )
        ungated = replace(gate, settings=replace(settings, gate=False))
        if ungated.sparse_from(self.block_size, longest) is None:
            why = (
                f"a sequence of max_model_len={most} has no more blocks between its first "
                f"{settings.init_tokens} and last {settings.local_tokens} tokens than a step "
                f"selects of them, at least {settings.fewest_blocks}; lower "
                "VLLM_RETRIEVAL_INIT_TOKENS_NUM, VLLM_RETRIEVAL_LOCAL_TOKENS_NUM or "
                "VLLM_RETRIEVAL_LEAST_BLOCKS"
            )
        logger.warning("kvrecall: RETRIEVAL CAN NEVER ACT: %s", why)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """vLLM's metadata with the step's work, if there is any beside dense attention."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)  # type: ignore[misc]
        if self._plain or self._captures:
            return metadata
        blocks = runner.take_batch_blocks(self._layer_names[0]) or _read_back(common)
        rows = _rows_of(common, blocks, self._decoded)
        self._note_written(rows, blocks)
        self._was_sparse = False
        if all(row.regime(self._settings) is Regime.DENSE for row in rows) and not blocks.is_graph:
            self._activity.steps += 1
            return metadata
        longest = -(-max(row.tokens for row in rows) // self.block_size)
        table = torch.from_numpy(blocks.leading(len(rows), longest))
        offloaded = self._offloaded(rows, table)
        if blocks.is_graph:
            if self._group.needs_host or not all(rows[at].decodes for at in offloaded):
                raise EngineError(
                    "vLLM replays a graph for a step with a sequence whose blocks are off the "
                    "device, which the host must read for it. Please report this; pass "
                    "--enforce-eager meanwhile"
                )
            step = self._plan(common, rows, table, offloaded, True)
            assert step is not None
            self._group.replay(step)
        else:
            metadata.retrieval = self._work(common, rows, table, offloaded)
        for at, sequence in offloaded.items():
            sequence.decodes = rows[at].decodes
        return metadata

    def _offloaded(
        self, rows: Sequence[BatchRow], table: torch.Tensor
    ) -> dict[int, OffloadedSequence]:
        """Those of the batch, by row. ``table``: the batch's block table, on the host."""
        found: dict[int, OffloadedSequence] = {}
        for at, row in enumerate(() if self._group.is_idle else rows):
            if row.query_tokens:  # no padding
                last = int(table[at, (row.tokens - 1) // self.block_size])
                sequence = self._group.sequence(last)
                if sequence is not None:
                    found[at] = sequence
        return found

    def _plan(
        self,
        common: Any,
        rows: Sequence[BatchRow],
        table: torch.Tensor,
        offloaded: Mapping[int, OffloadedSequence],
        is_graph: bool = False,
    ) -> SparseStep | None:
        there, before = common.block_table_tensor, self._activity.steps_sparse
        step = self._planner.plan(rows, table, offloaded, there, is_graph)
        self._was_sparse = self._activity.steps_sparse > before
        if self._was_sparse:
            self._log.sparse_step()
        return step

    def _note_written(self, rows: Sequence[BatchRow], blocks: runner.BatchBlocks) -> None:
        """The step writes tokens into these blocks."""
        size, freshness = self.block_size, self._group.freshness
        written = [
            (blocks.rows[at], place)
            for at, row in enumerate(() if freshness.is_empty else rows)
            if row.query_tokens
            for place in range((row.tokens - row.query_tokens) // size, -(-row.tokens // size))
        ]
        if written:
            freshness.wrote_blocks(blocks.ids[tuple(zip(*written, strict=True))])

    def _work(
        self,
        common: Any,
        rows: Sequence[BatchRow],
        table: torch.Tensor,
        offloaded: Mapping[int, OffloadedSequence],
    ) -> StepWork:
        """The step's work. ``table``: the batch's block table, on the host."""
        step = self._plan(common, rows, table, offloaded)
        sparse = [] if step is None else [one.row for one in step.sequences]
        if not sparse and not offloaded:
            return StepWork(step)
        starts = common.query_start_loc_cpu
        beside_sparse = self._without({*sparse, *offloaded}, common, rows)
        is_kept = self._group.keeps(offloaded[at] for at in offloaded if rows[at].decodes)
        offloaded_rows = []
        for at, sequence in offloaded.items():
            row, here = rows[at], slice(int(starts[at]), int(starts[at + 1]))
            if not (is_kept and row.decodes):
                alone = self.alone(common, rows, at)
                offloaded_rows.append(
                    OffloadedRow(sequence, here, table[at], row.tokens, not row.decodes, alone)
                )
        beside_offloaded = None if is_kept else self._without(offloaded, common, rows)
        return StepWork(step, beside_sparse, tuple(offloaded_rows), beside_offloaded, is_kept)

    def _without(
        self, taken: Collection[int], common: Any, rows: Sequence[BatchRow]
    ) -> Beside | None:
        """Of the other requests of the batch."""
        others = [at for at, row in enumerate(rows) if row.query_tokens and at not in taken]
        return self.part(common, rows, others) if others else None

    def part(
        self,
        common: Any,
        rows: Sequence[BatchRow],
        some: Sequence[int],
        table: torch.Tensor | None = None,
    ) -> Beside:
        """Of some requests of the batch. ``table``: their blocks, if they differ from the
        batch's."""
        starts = common.query_start_loc_cpu
        lengths = [rows[at].query_tokens for at in some]
        places = torch.cat([torch.arange(int(starts[at]), int(starts[at + 1])) for at in some])
        send = device_of(self._kernel.device).send
        there, tokens = send(torch.tensor(some)), send(places)
        bounds, flags = common.seq_lens_cpu_upper_bound, common.is_prefilling
        first = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        part = common.replace(
            query_start_loc=send(first),
            query_start_loc_cpu=first,
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
        return tokens, super().build(0, part)  # type: ignore[misc]

    def alone(self, common: Any, rows: Sequence[BatchRow], at: int) -> Any:
        """The ``metadata`` of an ``OffloadedRow``."""
        return None


class ActivityExtension:
    """A vLLM ``worker_extension_cls``: ``llm.collective_rpc("retrieval_activity")``."""

    vllm_config: Any

    def retrieval_activity(self) -> dict[str, int]:
        """Totals of this worker."""
        return totals_of(group.counted(wait=True) for group in retrieval_groups(self.vllm_config))


def retrieval_groups(vllm_config: Any) -> tuple[RetrievalGroup, ...]:
    """The groups of this worker's retrieval layers; none before its metadata builders are made, and
    where retrieval is off."""
    groups = {
        id(impl.group): impl.group
        for impl in _attention_layers(vllm_config).values()
        if impl.group is not None
    }
    return tuple(groups.values())


def _attention_layers(vllm_config: Any) -> Mapping[str, RetrievalAttention]:
    """The retrieval layers among those that vLLM knows by name. Mamba layers have no ``impl``."""
    layers = vllm_config.compilation_config.static_forward_context
    impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {name: impl for name, impl in impls.items() if isinstance(impl, RetrievalAttention)}


def _read_back(common: Any) -> runner.BatchBlocks:
    table = common.block_table_tensor.cpu().numpy()
    rows = np.arange(len(table), dtype=np.int32)
    return runner.BatchBlocks(table, rows, np.zeros_like(rows))


def _rows_of(common: Any, blocks: runner.BatchBlocks, decoded: int) -> list[BatchRow]:
    """``decoded``: the most tokens of a request in a step in which it decodes; with more, it
    computes again what a preemption has cost."""
    starts = common.query_start_loc_cpu.tolist()
    # Without speculation while a step is under way, which is refused, the upper bounds are the
    # lengths. A graph's batch is padded with requests without tokens, of which V2 tells no more.
    lengths = common.seq_lens_cpu_upper_bound
    tokens = (common.seq_lens if lengths is None else lengths).tolist()
    flags = common.is_prefilling
    prefilling = [False] * common.num_reqs if flags is None else flags.tolist()
    prompts = blocks.prompts[blocks.rows[: common.num_reqs]].tolist()
    counts = [end - first for first, end in pairwise(starts[: common.num_reqs + 1])]
    return [
        BatchRow(count, tokens[at], bool(prefilling[at]) or count > decoded, prompts[at])
        if count
        else BatchRow(0, 0, False)
        for at, count in enumerate(counts)
    ]
