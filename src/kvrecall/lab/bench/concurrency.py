"""``kvrecall bench crowd``: how many long sequences decode at once in a fixed device cache.

Two engines in turn run the same prompts with the same pool: vLLM's dense attention, which
preempts when the cache is full, and retrieval attention with offload.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.attention.settings import PREFIX, RetrievalSettings
from kvrecall.errors import EngineError
from kvrecall.lab.bench.model import BLOCK, BenchModel
from kvrecall.lab.bench.report import Report, progress
from kvrecall.lab.engines.child import server_environment
from kvrecall.lab.engines.engine import START_S, EngineProcess

MODEL = BenchModel(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=64, dtype="bfloat16")
DENSE_LAYERS = 1
"""Of four; RetrievalSettings' two are meant for models of dozens."""

_EXTENSION = "kvrecall.engines.vllm.attention.activity.ActivityExtension"


@dataclass(frozen=True, slots=True)
class Load:
    """``sequences`` prompts of ``context`` tokens that decode ``decoded`` tokens each, on a device
    cache that holds ``dense_fits`` whole sequences and nearly one more. ``pooled``: the prompts
    are in the pool, with random KV. ``options``: further options of vLLM."""

    context: int
    sequences: int
    decoded: int
    dense_fits: int
    pooled: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def sequence_blocks(self) -> int:
        return -(-(self.context + self.decoded) // BLOCK)

    @property
    def device_blocks(self) -> int:
        return self.sequence_blocks * (self.dense_fits + 1) - 1

    def host_bytes(self, token_bytes: int) -> int:
        """Host memory that holds all sequences."""
        return self.sequences * self.sequence_blocks * BLOCK * token_bytes * 5 // 4


def measure_crowd(
    context: Annotated[int, typer.Option(min=2048, help="Tokens of each prompt.")] = 16384,
    sequences: Annotated[int, typer.Option(min=1, help="Prompts.")] = 8,
    decoded: Annotated[int, typer.Option(min=2, help="Tokens that each sequence decodes.")] = 128,
    dense_fits: Annotated[
        int, typer.Option(min=1, help="Whole sequences the device cache holds.")
    ] = 2,
    pooled: Annotated[
        bool,
        typer.Option(
            help="Put the prompts into the pool with random KV instead of computing them."
        ),
    ] = False,
) -> Report:
    """Long sequences that decode at once in a fixed device cache, dense and by retrieval.

    RetrievalKV's lengths are scaled from 65,536 tokens to the context. Fails if retrieval
    offloaded nothing.
    """
    load = Load(context, sequences, decoded, dense_fits, pooled)
    figures = {}
    with tempfile.TemporaryDirectory(prefix="kvrecall-crowd-") as folder:
        model = MODEL.write(Path(folder) / "model", load.context + load.decoded)
        for name, environment in (("dense", {}), ("offload", scaled(load.context))):
            progress(f"{name}: {load.sequences} sequences of {load.context} tokens")
            figures[name] = run(load, model, MODEL.token_bytes, environment)
            progress(f"  {figures[name]}")
    did = figures["offload"]["activity"]
    if not did["blocks_loaded"] or (load.pooled and not did["blocks_left"]):
        raise EngineError("offload did not act: no block was recalled; the figures are meaningless")
    return _report(load, figures)


def scaled(context: int) -> dict[str, str]:
    """RetrievalKV's settings scaled from 65,536 tokens to the context, as variables."""
    plain = RetrievalSettings()
    lengths = {
        "INIT_TOKENS_NUM": plain.init_tokens,
        "LOCAL_TOKENS_NUM": plain.local_tokens,
        "DENSE_BOUNDARY": plain.dense_boundary,
        "OFFLOAD_BOUNDARY": plain.offload_boundary,
        "LEAST_BLOCKS": plain.fewest_blocks,
    }
    share = context / plain.offload_boundary
    shares = {PREFIX + name: str(max(1, int(of * share))) for name, of in lengths.items()}
    return {**shares, PREFIX + "DENSE_LAYERS": str(DENSE_LAYERS), "VLLM_PLUGINS": "retrieval,waits"}


def run(
    load: Load,
    model: Path,
    token_bytes: int,
    environment: Mapping[str, str],
    limit_s: float = 24 * 3600.0,
) -> dict[str, Any]:
    """One engine's figures; see ``kvrecall.lab.engines.concurrency.decode_together``. Raises
    EngineError, with the end of its output, if it fails or takes longer than ``limit_s``."""
    kept = {k: v for k, v in server_environment().items() if not k.startswith(PREFIX)}
    kept.pop("VLLM_PLUGINS", None)
    setup = {
        "model": str(model),
        "block_size": BLOCK,
        "max_model_len": load.context + load.decoded,
        "max_num_seqs": load.sequences,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": load.device_blocks + 1,
        "enable_prefix_caching": True,
        "worker_extension_cls": _EXTENSION,
        "pool": {
            "host_size": load.host_bytes(token_bytes),
            "load_or_compute": "load",
            "audit": "off",
        },
        **load.options,
    }
    with tempfile.TemporaryDirectory(prefix="kvrecall-crowd-") as folder:
        log = Path(folder) / "engine.log"
        variables = {"VLLM_CPU_KVCACHE_SPACE": "1", **kept, **environment}
        engine = EngineProcess("the engine", setup, log, environment=variables)
        try:
            engine.wait_ready(min(START_S, limit_s))
            names = ("sequences", "context", "decoded", "pooled")
            wanted = {name: value for name, value in asdict(load).items() if name in names}
            engine.send({"do": "decode_together", **wanted})
            figures: dict[str, Any] = engine.await_reply("decode_together", limit_s)
        finally:
            engine.end()
    return figures


def _report(load: Load, figures: Mapping[str, Any]) -> Report:
    at_hit = {
        # blocks loaded when prefixes were found in the pool, and digests of those left there
        name: int(one["loaded_bytes"] + one["activity"]["bytes_digests"])
        for name, one in figures.items()
    }
    decoding = {
        n: one["decode_tokens"] / max(one["decode_seconds"], 1e-9) for n, one in figures.items()
    }
    overall = {name: one["tokens"] / one["seconds"] for name, one in figures.items()}
    dense, offload = figures["dense"], figures["offload"]
    did = offload["activity"]
    results = {
        "context": load.context,
        "decoded": load.decoded,
        "sequences": load.sequences,
        "device_blocks": load.device_blocks + 1,
        "host_bytes": load.host_bytes(MODEL.token_bytes),
        "pooled": load.pooled,
        "at_once": {name: one["at_once"] for name, one in figures.items()},
        "at_once_ratio": round(offload["at_once"] / max(1, dense["at_once"]), 3),
        "decode_tokens_per_s": {name: round(rate, 3) for name, rate in decoding.items()},
        "tokens_per_s": {name: round(rate, 3) for name, rate in overall.items()},
        "preemptions": {name: one["preemptions"] for name, one in figures.items()},
        "bytes_at_hit": at_hit,
        "prefix_bytes": {name: one["prefix_bytes"] for name, one in figures.items()},
        "cache_hit_rate": round(did["blocks_hit"] / (did["blocks_hit"] + did["blocks_loaded"]), 4),
        "active": True,
        "activity": did,
    }
    rows = tuple(
        (name, str(one["at_once"]), f"{decoding[name]:.2f}", f"{overall[name]:.2f}",
         str(one["preemptions"]))
        for name, one in figures.items()
    )  # fmt: skip
    columns = ("engine", "decode at once", "tokens/s decoding", "tokens/s in all", "preempted")
    notes = [
        f"{load.sequences} prompts of {load.context} random tokens, {load.decoded} "
        f"decoded each, {load.device_blocks} device blocks of {BLOCK} tokens",
        f"a small Qwen3 shape with random weights: {MODEL.layers} layers, {MODEL.heads} query "
        f"heads, {MODEL.kv_heads} KV heads of {MODEL.head_dim}, bf16; RetrievalKV's lengths scaled "
        "to the context",
        f"{results['cache_hit_rate']:.0%} of chosen blocks found in the slots",
    ]
    if load.pooled:
        shares = (f"{n} {at_hit[n] / one['prefix_bytes']:.0%}" for n, one in figures.items())
        notes.append(
            f"of the prefixes found in the pool were loaded at the hit: {', '.join(shares)}"
        )
    return Report("crowd", columns, rows, results, tuple(notes))
