"""Which models are refused before an engine is started, by serve, config check and the doctor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import configs
from support.commands import KVRECALL, ran

from kvrecall.engines.base import ServeSpec
from kvrecall.modelconfig import Fields
from kvrecall.server.servable import Asked, Machine, refusals

GPU = Machine(is_cpu=False)
CPU = Machine(is_cpu=True, features=frozenset({"avx2"}))
AVX512 = Machine(is_cpu=True, features=frozenset({"avx2", "avx512f"}))
AMX = Machine(is_cpu=True, features=frozenset({"avx512f", "amx_tile"}))
OTHERS = ("WHISPER", "DEEPSEEK_V3", "DEEPSEEK_V32", "KIMI_LINEAR_48B", "JAMBA", "MLLAMA_11B")
SERVED = {
    name: value for name, value in vars(configs).items() if name.isupper() and name not in OTHERS
}


def reasons(config: dict[str, Any], machine: Machine, **options: Any) -> list[str]:
    return [str(each) for each in refusals(Fields(config, "config.json"), machine, **options)]


@pytest.mark.parametrize("machine", [GPU, CPU, AMX])
@pytest.mark.parametrize("name", SERVED)
def test_decoders_are_served_whatever_their_layers_cache(name: str, machine: Machine) -> None:
    assert reasons(SERVED[name], machine, asked=Asked(step_tokens=128)) == []


def test_weights_of_modelslim_are_recognised(tmp_path: Path) -> None:
    config = SERVED["QWEN3_8B"]
    (said,) = reasons(config | {"quantize": "w8a8"}, GPU)
    assert all(word in said for word in ("msModelSlim", "compressed-tensors"))
    (tmp_path / "quant_model_description_w8a8.json").touch()
    (said,) = map(str, refusals(Fields(config, str(tmp_path / "config.json")), GPU))
    assert "quant_model_description_w8a8.json" in said


MAMBA2 = ("BAMBA_9B", "GRANITE_4_SMALL", "NEMOTRON_H_8B")


@pytest.mark.parametrize(("name", "block"), [*zip(MAMBA2, (640, 640, 1152), strict=True)])
def test_mamba2_on_a_cpu_runs_in_steps_of_a_block(name: str, block: int) -> None:
    """Seen with vLLM 0.32: a longer step that has to keep a state from within it ends in an
    IndexError in mamba_mixer2.py."""
    config = vars(configs)[name]
    (said,) = reasons(config, CPU)
    assert said.endswith(f"; add -- --max-num-batched-tokens {block} (one block)")
    assert reasons(config, CPU, asked=Asked(step_tokens=block + 1)) == [said]
    assert reasons(config, CPU, asked=Asked(step_tokens=block)) == []
    assert reasons(config, CPU, pooled=False) == reasons(config, GPU) == []


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("GEMMA_3_4B", ""),
        ("GPT_OSS_20B", ""),
        ("LLAMA_4_SCOUT", "layers of kind chunk,"),
        ("QWEN3_NEXT_80B", "layers of kind state,"),
        ("MISTRAL_7B", "sliding windows in every layer,"),
        ("QWEN3_8B", ""),
    ],
)
def test_retrieval_is_for_models_with_full_attention(name: str, kinds: str) -> None:
    for machine in (CPU, GPU):
        said = reasons(vars(configs)[name], machine, pooled=False, asked=Asked(retrieval=True))
        assert len(said) == bool(kinds)
        assert all(kinds in each and "turn retrieval off" in each for each in said)


def test_what_is_asked_of_the_engine() -> None:
    options = {"block-size": 64, "kv-cache-dtype": None, "max-num-batched-tokens": 512}
    spec = ServeSpec("m", "127.0.0.1", 0, options)
    assert Asked.of(spec) == Asked("auto", 64, 512)
    words = ("--max-num-batched-tokens=256", "--kv-cache-dtype", "fp8", "--enforce-eager")
    assert Asked.of(replace(spec, extra_args=words)) == Asked("fp8", 64, 256)
    assert Asked.of(replace(spec, retrieval=True)).retrieval


@pytest.mark.parametrize(
    "words",
    [
        ("--decode-context-parallel-size", "2"),
        ("--decode_context_parallel_size=2",),
        ("-dcp", "2"),
        ("--prefill-context-parallel-size", "2"),
        ("-pcp=2",),
    ],
)
def test_context_parallelism_is_refused(words: tuple[str, ...]) -> None:
    """Also of a model whose configuration is not known."""
    asked = Asked.of(ServeSpec("m", "127.0.0.1", 0, {}, (*words, "--enforce-eager")))
    kind = "prefill" if "p" in words[0][:3] else "decode"
    for config in (configs.QWEN3_8B, configs.DEEPSEEK_V3):
        (said,) = reasons(config, GPU, asked=asked)
        assert said.startswith(f"--{kind}-context-parallel-size 2: with context parallelism a rank")
        assert said.endswith("; leave it out, or add --no-pool")
        assert reasons(config, GPU, asked=asked, pooled=False) == []
    for pooled in (True, False):
        (unknown,) = refusals(None, CPU, pooled, asked)
        assert ("softmax sums" if kind == "decode" else "model runner") in str(unknown)
    ones = (words[0].partition("=")[0], "1")
    assert Asked.of(ServeSpec("m", "127.0.0.1", 0, {}, ones)) == Asked()


MLA = "has latent attention (MLA), for which vLLM turns prefix caching off on a CPU without AMX"
REFUSED: list[tuple[str, set[Machine], bool, str, str]] = [
    # The model, where it is refused, whether it is served without a pool, the reason, the cure.
    # Mamba-1, seen with vLLM 0.32: the first prompt ends the engine in mamba_mixer.py.
    ("WHISPER", {GPU, CPU, AMX}, True, "is an encoder-decoder model", "serve it with --no-pool"),
    ("JAMBA", {CPU, AMX}, False, "has Mamba-1 layers", "serve it on a GPU"),
    ("MLLAMA_11B", {GPU, CPU, AMX}, False, "(cross-attention), and vLLM", "or Gemma 3"),
    ("DEEPSEEK_V32", {CPU, AMX}, False, "chooses tokens by an indexer", "serve it on a GPU"),
    ("DEEPSEEK_V3", {CPU}, True, MLA, "or with --no-pool"),
    ("KIMI_LINEAR_48B", {CPU}, True, MLA, "or with --no-pool"),
]


@pytest.mark.parametrize(("name", "where", "alone", "why", "cure"), REFUSED)
def test_refused(name: str, where: set[Machine], alone: bool, why: str, cure: str) -> None:
    config = vars(configs)[name]
    for machine in (GPU, CPU, AMX):
        said = reasons(config, machine)
        assert len(said) == (machine in where)
        for each in said:
            assert each.startswith(f"{config['architectures'][0]} ")
            assert why in each
            assert each.endswith(cure)
            assert "\n" not in each
        assert reasons(config, machine, pooled=False) == ([] if alone else said)


@pytest.mark.parametrize(
    ("dtype", "machine", "words"),
    [
        ("int8_per_token_head", AMX, "only in the model's dtype or in fp8"),
        ("fp8_per_token_head", AVX512, "only in the model's dtype or in fp8"),
        ("nvfp4", CPU, "only in the model's dtype or in fp8"),
        ("fp8", CPU, "only on processors with AVX-512 or AMX"),
        ("fp8", AVX512, ""),
        ("fp8_e5m2", AMX, ""),
        ("auto", CPU, ""),
        ("int8_per_token_head", GPU, ""),
    ],
)
def test_quantised_kv(dtype: str, machine: Machine, words: str) -> None:
    said = reasons(configs.QWEN3_8B, machine, asked=Asked(dtype))
    assert len(said) == bool(words)
    assert all(words in each for each in said)


# -- the commands -------------------------------------------------------------------------------


@pytest.fixture
def whisper(tmp_path: Path) -> Path:
    folder = tmp_path / "whisper"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configs.WHISPER))
    return folder


def test_serve_refuses_in_one_line(whisper: Path) -> None:
    """Before anything is imported or allocated: status 2."""
    done = ran(KVRECALL, "serve", str(whisper), "--host-size", "1MiB")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"model {whisper}: WhisperForConditionalGeneration is an encoder-decoder" in done.stderr
    assert done.stderr.endswith("serve it with --no-pool\n")


def test_serve_refuses_context_parallelism(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(configs.QWEN3_8B))
    words = "--host-size 1MiB -- -tp 2 -dcp 2".split()
    done = ran(KVRECALL, "serve", tmp_path, *words)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "--decode-context-parallel-size 2: " in done.stderr


def test_config_check_refuses_it_too(whisper: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(ran(KVRECALL, "config", "example", str(whisper)).stdout)
    done = ran(KVRECALL, "config", "check", str(config))
    assert done.returncode == 2
    assert "is an encoder-decoder model" in done.stdout + done.stderr


def test_the_doctor_says_it_with_its_cure(whisper: Path) -> None:
    done = ran(KVRECALL, "doctor", str(whisper), "--host-size", "1MiB", "--quick", "--json")
    assert done.returncode == 1
    findings = json.loads(done.stdout)["findings"]
    (served,) = (f for f in findings if (f["area"], f["check"]) == ("model", "served"))
    assert served["state"] == "broken"
    assert "no KV connector" in served["found"]
    assert served["cure"] == "serve it with --no-pool"
    assert served["figures"]["architecture"] == "WhisperForConditionalGeneration"
    assert not any(f["area"] == "model" and f["check"] != "served" for f in findings)
