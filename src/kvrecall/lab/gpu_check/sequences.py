"""How many long sequences decode at once in a fixed device cache, and how fast: dense, and by
retrieval with their middle blocks off the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvrecall.attention.settings import PREFIX
from kvrecall.lab.bench import crowd
from kvrecall.lab.engines.server import Progress
from kvrecall.lab.gpu_check.models import Shape, model_folder
from kvrecall.lab.gpu_check.outcome import CheckError

BLOCK = 128
ENGINES = ("dense", "retrieval")

_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Load:
    """``sequences`` prompts of ``context`` tokens, of which each decodes ``decoded``, on a device
    cache that holds ``dense_fits`` whole sequences, and nearly one more."""

    context: int
    sequences: int
    decoded: int
    dense_fits: int
    options: Mapping[str, object] = field(default_factory=dict)
    """Of the engine, beside those that the check itself gives it."""

    @property
    def blocks(self) -> int:
        """Of the device cache."""
        return self.whole * (self.dense_fits + 1) - 1

    @property
    def whole(self) -> int:
        """Blocks of one sequence."""
        return -(-(self.context + self.decoded) // BLOCK)


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
        asked = crowd_of(load, shape, str(path), device)
        sparse = {**crowd.scaled(load.context), PREFIX + "GATE": "0"}
        for name in engines:
            progress(f"  {name}: {load.sequences} sequences of {load.context} tokens")
            figures = crowd.run(asked, {} if name == "dense" else sparse, _LIMIT_S)
            require_whole(name, load, figures)
            told[name] = _told(figures)
            progress(f"  {told[name]}")
    return told


def crowd_of(load: Load, shape: Shape, model: str, device: str) -> dict[str, object]:
    """What the engine's process is told; see ``kvrecall.lab.engines.crowd.Crowd``."""
    options = {"load_format": "dummy", "async_scheduling": False}
    if device != "cpu":
        options["attention_backend"] = "FLASH_ATTN"
    return {
        "model": model,
        "context": load.context,
        "decoded": load.decoded,
        "sequences": load.sequences,
        "device_blocks": load.blocks + 1,
        "host_bytes": load.sequences * load.whole * BLOCK * shape.token_bytes * 5 // 4,
        "options": {**options, **load.options},
    }


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
