"""``kvrecall bench crowd``: long sequences that decode at once in a fixed device cache.

Two engines in turn over the same prompts and with the same pool: vLLM's dense attention, which
preempts when the cache is full, and retrieval attention with offload.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrecall.attention.settings import PREFIX, RetrievalSettings
from kvrecall.errors import EngineError
from kvrecall.lab.bench.report import Report
from kvrecall.lab.engines.server import server_environment
from kvrecall.lab.models import write_model
from kvrecall.lab.processes import as_child

BLOCK = 128
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 8, 4, 64
SHAPE = f"{LAYERS} layers, {HEADS} query heads, {KV_HEADS} KV heads of {HEAD_DIM}, bf16"
TOKEN_BYTES = 2 * 2 * LAYERS * KV_HEADS * HEAD_DIM
DENSE_LAYERS = 1
"""Of four; RetrievalSettings' two are meant for models of dozens."""

_CHILD = "kvrecall.lab.engines.crowd"


@dataclass(frozen=True, slots=True)
class Gathering:
    """``sequences`` prompts of ``context`` tokens, of which each decodes ``decoded``, on a device
    cache that holds ``dense_fits`` whole sequences, and nearly one more. ``pooled``: the prompts
    are in the pool, with random KV."""

    context: int
    sequences: int
    decoded: int
    dense_fits: int
    pooled: bool = False


def measure_crowd(gathering: Gathering, progress: Callable[[str], None]) -> Report:
    """Runs both engines.

    RetrievalKV's lengths are scaled to the context, of which they are the same shares as of
    65,536 tokens. Raises EngineError if an engine fails, or retrieval took nothing off the device.
    """
    context, sequences = gathering.context, gathering.sequences
    longest = context + gathering.decoded
    whole = -(-longest // BLOCK)
    blocks = whole * (gathering.dense_fits + 1) - 1
    with tempfile.TemporaryDirectory(prefix="kvrecall-crowd-") as folder:
        model = write_model(
            Path(folder) / "model",
            layers=LAYERS,
            heads=HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position=longest,
        )
        crowd = {
            "model": str(model),
            "context": context,
            "decoded": gathering.decoded,
            "sequences": sequences,
            "device_blocks": blocks + 1,
            "host_bytes": sequences * whole * BLOCK * TOKEN_BYTES * 5 // 4,
            "pooled": gathering.pooled,
        }
        figures = {}
        for name, environ in (("dense", {}), ("offload", scaled(context))):
            progress(f"{name}: {sequences} sequences of {context} tokens")
            figures[name] = run(crowd, environ)
            progress(f"  {figures[name]}")
    did = figures["offload"]["activity"]
    if not did["blocks_loaded"] or (gathering.pooled and not did["blocks_left"]):
        raise EngineError("offload did not act: no block was recalled; the figures mean nothing")
    return _report(crowd, figures)


def scaled(context: int) -> dict[str, str]:
    """RetrievalKV's settings for the context instead of 65,536 tokens, as variables."""
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
    crowd: Mapping[str, object], environ: Mapping[str, str], limit_s: float | None = None
) -> dict[str, Any]:
    """One engine's figures; see ``Gathering``. Raises EngineError, with the end of what it said,
    if it fails or takes longer than ``limit_s``."""
    kept = server_environment()
    plain = {name: text for name, text in kept.items() if not name.startswith(PREFIX)}
    plain.pop("VLLM_PLUGINS", None)
    try:
        done = subprocess.run(
            as_child(sys.executable, "-m", _CHILD),
            input=json.dumps(crowd),
            env={**plain, **environ},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"the engine is not done after {limit_s:.0f} s") from None
    if done.returncode != 0:
        raise EngineError(f"the engine failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout))


def _report(crowd: Mapping[str, Any], figures: Mapping[str, Any]) -> Report:
    speed = {
        name: {
            "all": one["tokens"] / one["seconds"],
            "decode": one["decode_tokens"] / max(one["decode_seconds"], 1e-9),
        }
        for name, one in figures.items()
    }
    rows = tuple(
        (
            name,
            str(one["at_once"]),
            f"{speed[name]['decode']:.2f}",
            f"{speed[name]['all']:.2f}",
            str(one["preemptions"]),
        )
        for name, one in figures.items()
    )
    dense, offload = figures["dense"], figures["offload"]
    did = offload["activity"]
    chosen = did["blocks_hit"] + did["blocks_loaded"]
    results = {
        **{key: value for key, value in crowd.items() if key != "model"},
        "at_once": {name: one["at_once"] for name, one in figures.items()},
        "at_once_ratio": round(offload["at_once"] / max(1, dense["at_once"]), 3),
        "decode_tokens_per_s": {n: round(s["decode"], 3) for n, s in speed.items()},
        "tokens_per_s": {n: round(s["all"], 3) for n, s in speed.items()},
        "preemptions": {name: one["preemptions"] for name, one in figures.items()},
        "bytes_at_hit": {name: _at_hit(one) for name, one in figures.items()},
        "prefix_bytes": {name: one["prefix_bytes"] for name, one in figures.items()},
        "cache_hit_rate": round(did["blocks_hit"] / chosen, 4),
        "active": True,
        "activity": did,
    }
    columns = ("engine", "decode at once", "tokens/s decoding", "tokens/s in all", "preempted")
    notes: tuple[str, ...] = (
        f"{crowd['sequences']} prompts of {crowd['context']} random tokens, {crowd['decoded']} "
        f"decoded each, {crowd['device_blocks'] - 1} device blocks of {BLOCK} tokens",
        f"a small Qwen3 shape with random weights: {SHAPE}; RetrievalKV's lengths scaled to the "
        "context",
        f"{results['cache_hit_rate']:.0%} of chosen blocks found in the slots",
    )
    if crowd["pooled"]:
        shares = (
            f"{name} {_at_hit(one) / one['prefix_bytes']:.0%}" for name, one in figures.items()
        )
        notes += (f"of the prefixes found in the pool were loaded at the hit: {', '.join(shares)}",)
    return Report("crowd", columns, rows, results, notes)


def _at_hit(figures: Mapping[str, Any]) -> int:
    """Bytes loaded when prefixes were found in the pool: blocks, and digests of those left."""
    return int(figures["loaded_bytes"] + figures["activity"]["bytes_digests"])
