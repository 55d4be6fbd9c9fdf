"""How many long sequences decode at once in a fixed device cache, and how fast: dense, and by
retrieval with their middle blocks off the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvrecall.attention.settings import PREFIX
from kvrecall.lab.bench import concurrency
from kvrecall.lab.bench.concurrency import Load
from kvrecall.lab.engines.server import Progress
from kvrecall.lab.gpu_check.models import Shape, model_folder
from kvrecall.lab.gpu_check.outcome import CheckError

ENGINES = ("dense", "retrieval")

_LIMIT_S = 1800.0


def measure_sequences(
    load: Load, shape: Shape, device: str, progress: Progress, engines: tuple[str, ...] = ENGINES
) -> dict[str, dict[str, Any]]:
    """Figures by engine. Both compute all prompts and have the same pool. Settings of retrieval are
    those of 65,536 tokens scaled to the context, without the gate.

    Raises CheckError if a sequence was not decoded to its end, or nothing left the device; and
    EngineError, with what it said, for an engine that fails.
    """
    told = {}
    with model_folder(shape, load.context + load.decoded, weights=False) as (_, path):
        asked = replace(load, options={**options_on(device), **load.options})
        sparse = {**concurrency.scaled(load.context), PREFIX + "GATE": "0"}
        for name in engines:
            progress(f"  {name}: {load.sequences} sequences of {load.context} tokens")
            variables = {} if name == "dense" else sparse
            figures = concurrency.run(asked, path, shape.token_bytes, variables, _LIMIT_S)
            require_whole(name, load, figures)
            told[name] = _told(figures)
            progress(f"  {told[name]}")
    return told


def options_on(device: str) -> dict[str, object]:
    """Options of the engine: prompts are computed with weights made in place, a step at a time."""
    options: dict[str, object] = {"load_format": "dummy", "async_scheduling": False}
    if device != "cpu":
        options["attention_backend"] = "FLASH_ATTN"
    return options


def require_whole(name: str, load: Load, figures: Mapping[str, Any]) -> None:
    """Raises CheckError if these figures do not mean anything."""
    want = load.sequences * load.decoded
    if figures["tokens"] != want:
        raise CheckError(f"{name}: {figures['tokens']} of {want} tokens were decoded")
    did = figures["activity"]
    if name == "dense" and did["steps_sparse"]:
        raise CheckError("dense: retrieval acted")
    if name != "dense" and not (did["blocks_offloaded"] and did["blocks_loaded"]):
        raise CheckError(
            f"offload did not act: {did['blocks_offloaded']} blocks left the device and "
            f"{did['blocks_loaded']} were recalled"
        )


def _told(figures: Mapping[str, Any]) -> dict[str, Any]:
    did = figures["activity"]
    chosen = did["blocks_hit"] + did["blocks_loaded"]
    return {
        "at_once": figures["at_once"],
        "decode_tokens_per_s": round(
            figures["decode_tokens"] / max(figures["decode_seconds"], 1e-9), 3
        ),
        "tokens_per_s": round(figures["tokens"] / figures["seconds"], 3),
        "preemptions": figures["preemptions"],
        "found_in_slots": round(did["blocks_hit"] / chosen, 4) if chosen else None,
    }
