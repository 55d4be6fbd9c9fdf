"""The host never waits for a device while it plans a step: nothing is read back, and all that is
copied there is sent by way of locked memory. The metadata builder on PyTorch's meta device, whose
tensors have no contents."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from engines.vllm.attention.sequences import shape_of
from kvrecall.attention.selection import DeviceSpeed
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention import cuda
from kvrecall.engines.vllm.attention.activity import Activity, ActivityLog, HeatTotals
from kvrecall.engines.vllm.attention.backend import RetrievalBuilder
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.attention.step import StepPlanner
from kvrecall.engines.vllm.compat import runner
from kvrecall.errors import EngineError
from kvrecall_lab.engines.counting import META, counting

BLOCK = 128
SETTINGS = RetrievalSettings(gate=False)


class Dense:
    """In place of vLLM's builder."""

    def build(self, prefix: int, common: Any, fast_build: bool = False) -> Any:
        return SimpleNamespace(common=common)


class Builder(RetrievalBuilder, Dense):
    block_size = BLOCK
    make_kernel = make_dense = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self._kernel = TritonKernel(shape_of(16, 4, 128, torch.bfloat16), META)
        self._activity = Activity()
        self._log = ActivityLog(self._activity)
        self._settings = SETTINGS
        self._decoded = 1
        self._layer_names = ["layer"]
        self._plain = self._captures = False
        self._group = RetrievalGroup(self._activity, HeatTotals(), self._kernel)
        self._planner = StepPlanner(SETTINGS, self._kernel, self._group.freshness, self._activity)


def common_of(
    lengths: list[int], queries: list[int], prefills: bool = True
) -> CommonAttentionMetadata:
    """``prefills``: requests with several tokens are in prefill."""
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts.to(META),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=META),
        num_reqs=len(lengths),
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_table_tensor=torch.zeros(len(lengths), 1024, dtype=torch.int32, device=META),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=META),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        is_prefilling=torch.tensor([prefills and query > 1 for query in queries]),
    )


@pytest.fixture
def builder() -> Builder:
    return Builder()


def build(
    builder: Builder,
    lengths: list[int],
    queries: list[int],
    prefills: bool = True,
    graph: bool = False,
) -> Any:
    """The batch's requests are rows 7, 6, 5 ... of the runner's, which have blocks of their own."""
    ids = np.arange(8 * 1024, dtype=np.int32).reshape(8, 1024)
    rows = np.arange(7, 7 - len(lengths), -1, dtype=np.int32)
    runner.step_blocks["layer"] = runner.BatchBlocks(ids, rows, np.zeros(8, np.int32), graph)
    common = common_of(lengths, queries, prefills)
    with counting() as operations:
        metadata = builder.build(0, common)
    assert not operations.waits
    return metadata


def test_a_step_is_planned_without_the_device(builder: Builder) -> None:
    """Sparse, dense, prefilling past the boundary, short, and padding. What decodes densely is
    attended to beside what is sparse, by the same kernels."""
    metadata = build(builder, [70_000, 500, 40_000, 70_000, 0], [1, 1, 512, 1, 0])
    step = metadata.retrieval.step
    assert [one.row for one in step.sequences if one.split.middle] == [0, 3]
    assert [one.row for one in step.sequences] == [0, 1, 3]
    assert metadata.retrieval.beside_sparse[1].common.num_actual_tokens == 512


def test_the_number_that_all_ranks_agree_on_decides(builder: Builder) -> None:
    context = SimpleNamespace(static_forward_context={})
    model = SimpleNamespace(max_model_len=131_072)
    builder.vllm_config = SimpleNamespace(compilation_config=context, model_config=model)
    gated = replace(SETTINGS, gate=True)
    builder._planner.gate = replace(builder._planner.gate, settings=gated)
    assert build(builder, [70_000], [1]).retrieval.step is not None
    builder._settle_gate(1 << 50)
    assert build(builder, [70_000], [1]).retrieval.step is None
    assert builder._kernel.overhead_bytes == 1 << 50, "for layers that are bound again"


def test_drafts_are_planned_beside_each_other(builder: Builder) -> None:
    """One request decodes with three drafts; another computes again what a preemption has cost."""
    builder._decoded = 4
    step = build(builder, [70_000, 70_000, 40_000], [4, 5, 1], prefills=False).retrieval.step
    assert [(one.row, one.token) for one in step.sequences] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (2, 9)
    ]  # fmt: skip
    assert [one.split.last_tokens for one in step.sequences[:4]] == [109, 110, 111, 112]


def test_short_steps_are_planned_without_the_device(builder: Builder) -> None:
    """What they write is noted: a block of one, and five of a prefill."""
    fresh = builder._group.freshness
    ids = torch.arange(8 * 1024)
    fresh.take_stale(ids)
    metadata = build(builder, [500, 1000], [1, 513])
    assert not hasattr(metadata, "retrieval")
    want = [*range(6 * 1024 + 3, 6 * 1024 + 8), 7 * 1024 + 3]
    assert fresh.take_stale(ids).tolist() == want


def test_what_a_replayed_step_writes_is_noted(builder: Builder) -> None:
    """Of a sparse and of a dense sequence, in blocks whose digests were another's."""
    fresh = builder._group.freshness
    ids = torch.arange(8 * 1024)
    fresh.take_stale(ids)
    assert not hasattr(build(builder, [70_000, 500], [1, 1], graph=True), "retrieval")
    assert fresh.take_stale(ids).tolist() == [6 * 1024 + 3, 7 * 1024 + 546]


def test_read_back_where_the_runner_does_not_tell(builder: Builder) -> None:
    """In a dummy run."""
    runner.step_blocks.clear()
    with pytest.raises(NotImplementedError, match="no data"):
        builder.build(0, common_of([500], [1]))


def test_builders_of_a_pipeline_stage_agree_among_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each when it is made; another stage may have fewer, and would never answer."""
    asked: list[str] = []

    def reduce(most: torch.Tensor, _: Any, group: str) -> None:
        asked.append(group)
        most += 2

    for name in ("tp", "pp"):
        group = SimpleNamespace(world_size=2, cpu_group=name)
        monkeypatch.setattr(f"vllm.distributed.get_{name}_group", lambda group=group: group)
    monkeypatch.setattr("torch.distributed.all_reduce", reduce)
    kernel = SimpleNamespace(
        warm=lambda *_: None,
        measure=lambda *_: DeviceSpeed(),
        overhead_bytes=5,
        most=SimpleNamespace(left=0),
    )
    for name in ("TritonKernel", "most_of", "replays_graphs"):
        monkeypatch.setattr(cuda, name, lambda *_: kernel)
    monkeypatch.setattr(cuda, "active_settings", RetrievalSettings)
    layer = SimpleNamespace(num_heads=4, logits_soft_cap=None, sinks=None, scale=1.0)
    made: Any = object.__new__(cuda.TritonBuilder)
    made.device, made.vllm_config, made.block_size = META, None, BLOCK
    made._impls, made.specs = lambda: {"layer": layer}, dict
    made.get_cudagraph_support = lambda *_: AttentionCGSupport.NEVER
    spec = SimpleNamespace(num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert made.make_kernel(spec).overhead_bytes == 7
    assert asked == ["tp"]


@pytest.mark.parametrize("codes", [False, True])
def test_a_cache_of_eight_bits_has_a_scale_a_layer(
    codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``codes``: vLLM gives queries in eight bits, too."""
    monkeypatch.setattr(cuda, "TritonKernel", lambda shape, *_: shape)
    monkeypatch.setattr(cuda, "most_of", lambda *_: None)
    monkeypatch.setattr(cuda, "active_settings", lambda: RetrievalSettings(gate=False))
    layer: Any = SimpleNamespace(_k_scale=torch.ones(()))
    made: Any = object.__new__(cuda.TritonBuilder)
    impl: Any = SimpleNamespace(num_heads=4, supports_quant_query_input=codes)
    made.device, made.block_size, made._layer_names = torch.device("cpu"), BLOCK, ["layer"]
    made._impls, made.specs = lambda: {"layer": impl}, dict
    made.vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="fp8"),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )
    spec = SimpleNamespace(num_kv_heads=2, head_size=64, dtype=torch.uint8)
    shape: Any = made.make_kernel(spec)
    fp8 = torch.float8_e4m3fn
    assert (shape.dtype, shape.fp8, shape.query) == (torch.bfloat16, fp8, fp8 if codes else None)
    layer._k_scale = torch.ones(2)
    with pytest.raises(EngineError, match="takes one scale of keys a layer"):
        made.make_kernel(spec)


def test_steps_of_a_token_each_are_one_graph_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where drafts may be, or no step's graph can be hindered, none is."""
    for builder in (cuda.FlashBuilder, cuda.TritonBuilder):
        for speculative, decides in ((None, True), ("ngram", True), (None, False)):
            monkeypatch.setattr(runner, "decides_graphs", lambda _, decides=decides: decides)
            config = SimpleNamespace(speculative_config=speculative)
            found = builder.get_cudagraph_support(config, None)
            graphs = decides and speculative is None
            single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
            assert found is (single if graphs else AttentionCGSupport.NEVER)
