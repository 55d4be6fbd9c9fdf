"""The plan of a step, the gate, packing, and refusals at start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.vllm.attention.sequences import shape_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention import checks
from kvrecall.engines.vllm.attention.activity import Activity, ActivityLog
from kvrecall.engines.vllm.attention.backend import RetrievalBuilder
from kvrecall.engines.vllm.attention.base import KernelShape
from kvrecall.engines.vllm.attention.checks import (
    require_block_size,
    require_engine,
    require_layer,
    require_retrieval,
    tell_limits,
)
from kvrecall.engines.vllm.attention.cpu import CpuKernel, KeyReader, RetrievalBackend
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.step import BatchRow, Freshness, StepPlanner
from kvrecall.errors import EngineError

LARGE = shape_of(heads=16, kv_heads=4, dim=128, dtype=torch.bfloat16)


FEW = RetrievalSettings(dense_boundary=0, gate=False, least_blocks=1)


def planner(settings: RetrievalSettings, activity: Activity, shape: Any = LARGE) -> StepPlanner:
    return StepPlanner(settings, CpuKernel(shape), Freshness(), activity)


def table(*lengths: int) -> torch.Tensor:
    return torch.arange(len(lengths) * 1100, dtype=torch.int32).view(len(lengths), -1)


def test_prefill_digests_blocks_as_they_fill() -> None:
    planned = planner(RetrievalSettings(), Activity())
    first = planned.plan([BatchRow(2048, 40_000, True)], table(1))
    assert first is not None
    assert not first.sequences
    assert len(first.stale) == 40_000 // 128 - 1
    second = planned.plan([BatchRow(2048, 42_048, True)], table(1))
    assert second is not None
    assert len(second.stale) == 42_048 // 128 - 40_000 // 128


@pytest.mark.parametrize(("tokens", "sparse"), [(6_000, False), (8_400, False), (40_000, True)])
def test_the_gate_keeps_short_sequences_dense(tokens: int, sparse: bool) -> None:
    activity = Activity()
    step = planner(RetrievalSettings(dense_boundary=0), activity).plan(
        [BatchRow(1, tokens, False)], table(1)
    )
    assert (step is not None) is sparse
    assert activity.sequences_gated == (not sparse)


def test_the_log_says_once_that_all_sequences_are_gated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.kvrecall")
    settings = RetrievalSettings(dense_boundary=100)
    planned = planner(settings, Activity())
    planned.plan([BatchRow(1, 40_000, False), BatchRow(1, 8_000, False)], table(1, 2))
    planned.plan([BatchRow(1, 50, False), BatchRow(8, 8_000, True)], table(1, 2))
    assert not caplog.records
    for _ in range(2):
        planned.plan([BatchRow(1, 8_000, False), BatchRow(1, 7_000, False)], table(1, 2))
    (said,) = (record.getMessage() for record in caplog.records)
    assert "all sequences past VLLM_RETRIEVAL_DENSE_BOUNDARY=100 that decode now (2) are" in said
    planner(replace(settings, gate=False), Activity()).plan([BatchRow(1, 999, False)], table(1))
    assert len(caplog.records) == 1, "too short to select from"


@pytest.mark.parametrize(
    ("settings", "longest", "said"),
    [
        (RetrievalSettings(), 100_000, "decode sparsely from 32768 tokens on"),
        (RetrievalSettings(dense_boundary=0), 100_000, "decode sparsely from 8448 tokens on"),
        (RetrievalSettings(dense_boundary=0), 8_000, "RETRIEVAL CAN NEVER ACT: dense attention"),
        (RetrievalSettings(dense_boundary=0), 3_000, "than a step selects of them, at least 16;"),
        (replace(FEW, init_tokens=10**400), 100_000, "lower VLLM_RETRIEVAL_INIT_TOKENS_NUM"),
        (replace(FEW, dense_boundary=9_000), 9_080, "decode sparsely from 9000 tokens on"),
        (replace(FEW, dense_boundary=9_079), 9_080, "decode sparsely from 9079 tokens on"),
        (RetrievalSettings(), 30_000, ""),
    ],
)
def test_the_log_says_at_start_from_which_length_on_it_acts(
    settings: RetrievalSettings, longest: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit within the boundary is told by the checks."""
    caplog.set_level("INFO", "vllm.kvrecall")
    model = SimpleNamespace(max_model_len=longest)
    builder: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(model_config=model),
        block_size=128,
        _planner=planner(settings, Activity()),
    )
    RetrievalBuilder._tell_boundary(builder, settings)
    assert said in caplog.text
    assert len(caplog.records) == bool(said)


@pytest.mark.parametrize(
    "settings",
    [
        RetrievalSettings(topk_share=1.0),
        RetrievalSettings(topk_share=0.02, least_blocks=1000, gate=False),
    ],
    ids=["share", "least"],
)
def test_choosing_everything_is_left_to_dense_attention(settings: RetrievalSettings) -> None:
    activity = Activity()
    assert planner(settings, activity).plan([BatchRow(1, 60_000, False)], table(1)) is None
    assert activity.sequences_gated == 1


def test_freshness() -> None:
    fresh = Freshness()
    ids = torch.tensor([5, 3, 900], dtype=torch.int32)
    assert fresh.take_stale(ids).tolist() == [5, 3, 900]
    assert fresh.take_stale(ids).tolist() == []
    fresh.wrote_blocks([3, 4])
    fresh.wrote_blocks([900, 100_000])
    assert fresh.take_stale(ids).tolist() == [3, 900]


INDEX = torch.arange(32 * 8)


@pytest.mark.parametrize(
    ("order", "evenly"),
    [
        (INDEX, True),
        (INDEX.view(32, 8).T.flatten(), True),
        (INDEX.view(2, 16, 4, 2).transpose(1, 2).flatten(), True),  # AMX
        (INDEX.flip(0), False),
    ],
)
def test_keys_are_read_back_from_any_reordering(order: torch.Tensor, evenly: bool) -> None:
    torch.manual_seed(1)
    reader = KeyReader(32, 8, torch.bfloat16, lambda ones: ones.flatten()[order])
    keys = torch.randn(4, 3, 32, 8).to(torch.bfloat16)
    cache = torch.cat([keys.flatten(2)[..., order], torch.zeros(4, 3, 32 * 8)], -1)
    got = reader.read(cache.to(torch.bfloat16).view(4, 3, 32, 16), torch.tensor([2, 0]))
    assert torch.equal(got, keys[[2, 0]])
    assert (reader._tiles is not None) is evenly


def test_packing_that_loses_elements_is_refused() -> None:
    with pytest.raises(EngineError, match="cannot be read back"):
        KeyReader(32, 8, torch.float32, lambda ones: ones.flatten().clone().fill_(1))


def test_the_log_says_what_was_done_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    activity = Activity()
    log = ActivityLog(activity, 60.0, lambda: now[0])
    caplog.set_level("INFO", "vllm.kvrecall")
    for second in (0.0, 0.1, 30.0, 59.0, 61.0):
        now[0] = second
        activity.steps_sparse += 1
        log.sparse_step()
        activity.layers_sparse += 3
        activity.blocks_selected += 10
    assert [record.getMessage().split(":")[2].split()[0] for record in caplog.records] == ["2", "3"]
    assert "10 of 0 considered blocks selected" in caplog.text, "of the first step, in the second"
    assert "30 of 0 considered blocks selected" in caplog.text


def engine(layers: Sequence[str] = (), **changed: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "scheduler_config": SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "model_config": SimpleNamespace(
            max_model_len=100_000,
            is_hybrid=False,
            is_encoder_decoder=False,
            get_total_num_hidden_layers=lambda: 4,
            hf_text_config=SimpleNamespace(**({"layer_types": layers} if layers else {})),
        ),
    }
    return SimpleNamespace(**{**values, **changed})


FULL, WINDOW = "full_attention", "sliding_attention"


def speculating(method: str = "ngram", ahead: bool = False, **changed: Any) -> Any:
    made = engine(speculative_config=SimpleNamespace(method=method), **changed)
    made.scheduler_config = SimpleNamespace(async_scheduling=ahead)
    return made


def pooled(extra: dict[str, Any] | None = None, stages: int = 1, layers: Sequence[str] = ()) -> Any:
    transfer = SimpleNamespace(kv_connector="RecallConnector", kv_connector_extra_config=extra)
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    return engine(layers, kv_transfer_config=transfer, parallel_config=parallel)


def latent() -> Any:
    made = speculating()
    made.model_config.use_mla = True
    return made


SEED = RetrievalSettings()
ONE_GROUP = SimpleNamespace(disable_hybrid_kv_cache_manager=True)
OTHERS = (
    "serve a model with full attention or sliding windows in every layer, or remove `retrieval` "
    "from VLLM_PLUGINS"
)
REFUSED = [
    (engine(cache_config=SimpleNamespace(cache_dtype="int8_per_token_head")), "dtype=int8_per_"),
    (engine(parallel_config=SimpleNamespace(decode_context_parallel_size=2)), "context_parallel"),
    (engine(parallel_config=SimpleNamespace(enable_dbo=True)), "remove --enable-dbo"),
    (engine(attention_config=SimpleNamespace(hisparse_config=1)), "HiSparse; leave hisparse_conf"),
    (engine(kv_transfer_config=SimpleNamespace(kv_connector="Other")), "the connector Other"),
    (speculating("eagle"), "by eagle, whose draft has layers of its own; draft by"),
    (speculating(ahead=True), "asynchronous scheduling; pass --no-async-scheduling"),
    (latent(), "latent attention"),
    # Llama 4's chunks would be attended to by retrieval: their layers have no window of their own
    # that would tell them from full attention.
    (engine(("chunked_attention", FULL)), f"work with layers of kind chunked_attention; {OTHERS}"),
    (engine(("linear_attention", FULL)), f"work with layers of kind linear_attention; {OTHERS}"),
    (engine((WINDOW, WINDOW)), "windows in every layer"),
    (engine((WINDOW, FULL, WINDOW)), "leaves none of this model's 2 layers"),
    (
        engine((WINDOW, WINDOW, FULL), scheduler_config=ONE_GROUP),
        "remove --disable-hybrid-kv-cache-manager",
    ),
]


@pytest.mark.parametrize(("config", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_what_cannot_work_is_refused(config: Any, said: str) -> None:
    with pytest.raises(EngineError) as refused:
        require_engine(config, SEED)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (speculating(), {"index": "faiss-flat"}, "INDEX=faiss-flat; leave the index at exact"),
        (engine(), {"dense_layers": 4}, "DENSE_LAYERS=4"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: Any, changed: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        require_engine(config, replace(SEED, **changed))


def test_a_gpu_reads_one_kind_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_on_cpu", lambda: False)
    for name in ("fp8", "fp8_e4m3"):
        require_engine(engine(cache_config=SimpleNamespace(cache_dtype=name)), SEED)
    with pytest.raises(EngineError, match="kv_cache_dtype=fp8_e5m2 on a GPU; leave kv_cache_dtype"):
        require_engine(engine(cache_config=SimpleNamespace(cache_dtype="fp8_e5m2")), SEED)


def test_what_works_is_not_refused() -> None:
    windows = engine((WINDOW, WINDOW, FULL))
    for config in (engine(), speculating(), windows, pooled({"backend": "service"})):
        require_engine(config, SEED)


def test_offload_that_cannot_be_is_said_at_start_unless_no_sequence_gets_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such sequences decode sparsely on the device."""
    transfer = pooled().kv_transfer_config
    for config, why in (
        (engine(), "use RecallConnector"),
        (pooled(stages=2), "use tensor parallelism"),
        (pooled(layers=(WINDOW, WINDOW, FULL)), "KV groups of their own"),
        (
            speculating(
                kv_transfer_config=transfer,
                parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            ),
            "disable speculation",
        ),
    ):
        caplog.clear()
        tell_limits(config, replace(SEED, offload_boundary=100_001))
        assert not caplog.messages
        tell_limits(config, SEED)
        (said,) = caplog.messages
        assert said.startswith("kvrecall: NO SEQUENCE LEAVES THE DEVICE")
        assert why in said


def test_blocks_that_digests_do_not_divide_are_refused() -> None:
    with pytest.raises(EngineError, match="block_size=32"):
        require_block_size(32, replace(RetrievalSettings(), digest_tokens=64))


@pytest.mark.parametrize(
    "changed",
    [{"sliding_window": 512}, {"alibi_slopes": torch.zeros(2)}, {"attn_type": "encoder_only"}],
)
def test_layers_that_cannot_choose_are_refused(changed: dict[str, Any]) -> None:
    plain = {"attn_type": "decoder", "alibi_slopes": None}
    whole = {"sliding_window": -1, "sinks": None}
    window = {"sliding_window": 512, "sinks": torch.zeros(2)}
    require_layer(SimpleNamespace(**plain, **whole), engine())
    require_layer(SimpleNamespace(**plain, **window), engine((WINDOW, FULL)))
    with pytest.raises(EngineError):
        require_layer(SimpleNamespace(**{**plain, **whole, **changed}), engine())


def test_blocks_that_the_device_kernel_cannot_read_are_refused() -> None:
    for size in (8, 48):
        shape = KernelShape(4, 2, 64, size, torch.float32, "")
        with pytest.raises(EngineError, match="power of two"):
            TritonKernel(shape, torch.device("cuda"))
    kernel = TritonKernel(KernelShape(4, 2, 64, 32, torch.float32, ""), torch.device("cpu"))
    layer = kernel.layer("layer", FEW, Activity())
    with pytest.raises(EngineError, match=r"torch.float32 and shape \[blocks, 2, 32, 128\]"):
        layer.digest_rows(torch.zeros(3, 2, 32, 128, dtype=torch.float16))
    layer.digest_rows(torch.zeros(3, 2, 32, 128))


class Flex:
    @staticmethod
    def get_name() -> str:
        return "FLEX"


class MLAAttention:
    attn_backend = Flex


def test_layers_of_other_backends_are_refused() -> None:
    """They would be served densely without notice."""
    with pytest.raises(EngineError, match="backend FLEX; pass --attention-backend CPU_MLA"):
        require_retrieval(MLAAttention())
    layer = SimpleNamespace(attn_backend=Flex)
    with pytest.raises(EngineError, match="backend FLEX; pass --attention-backend CPU_ATTN"):
        require_retrieval(layer)
    require_retrieval(SimpleNamespace(attn_backend=RetrievalBackend))
