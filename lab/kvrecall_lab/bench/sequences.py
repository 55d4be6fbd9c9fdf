"""``bench sequences``: many long sequences on a GPU at once, dense and with offloaded blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from kvrecall.attention.settings import PREFIX
from kvrecall.bench.report import Report, progress
from kvrecall.environment import PLUGINS
from kvrecall.gpu_check.outcome import CheckError, Finding
from kvrecall.gpu_check.servers import ENGINES, SHALLOW, SMALL, Shape, model_folder
from kvrecall.processes.server import Progress
from kvrecall_lab.bench import generate
from kvrecall_lab.bench.generate import Load

_LIMIT_S = 1800.0


def measure_sequences(
    small: Annotated[bool, typer.Option(help="Fewer and shorter sequences.")] = False,
) -> Report:
    """Long sequences that decode at once in a fixed device cache, and how fast: dense, and by
    retrieval. On a CPU a trial of it."""
    accelerator = torch.accelerator.current_accelerator()
    device = "cpu" if accelerator is None else accelerator.type
    load = Load(16384, 4, 32, 1, 128) if small else Load(65536, 8, 128, 2, 512)
    shape = SHALLOW
    if device == "cpu":
        load, shape = Load(2048, 3, 6, 1, 16), SMALL
    note, figures = sequences_of(load, shape, device, progress)
    rows = tuple(
        (name, str(figures[name]["at_once"]), str(figures[name]["decode_tokens_per_s"]))
        for name in ENGINES
    )
    return Report("sequences", ("attention", "at once", "tokens/s"), rows, dict(figures), (note,))


def sequences_of(
    load: Load, shape: Shape, device: str, progress: Progress, engines: Sequence[str] = ENGINES
) -> Finding:
    """How many long sequences decode at once in a fixed device cache, and how fast: dense, and by
    retrieval with their middle blocks offloaded. Both compute all prompts and have the same pool.
    Retrieval's settings are scaled from 65,536 tokens to the context, without the gate.
    """
    found: dict[str, Any] = {}
    with model_folder(shape, load.context + load.decoded, weights=False) as (_, path):
        scaled_load = replace(load, options={**sequence_options(device), **load.options})
        sparse = {**generate.scaled(load.context), PREFIX + "GATE": "0", PLUGINS: "retrieval,waits"}
        for name in engines:
            progress(f"  {name}: {load.sequences} sequences of {load.context} tokens")
            variables = {} if name == "dense" else sparse
            figures = generate.run(scaled_load, path, shape.token_bytes, variables, _LIMIT_S)
            found[name] = _sequence_figures(name, load, figures)
            progress(f"  {found[name]}")
    note = "; ".join(
        f"{name}: {one['at_once']} at once, {one['decode_tokens_per_s']} tokens/s decoding"
        for name, one in found.items()
    )
    where = f"{load.context} tokens each, {load.device_blocks} blocks on the device"
    wanted = {"device_blocks": load.device_blocks, "asked": load.sequences}
    return f"{note} ({where})", {**found, "context": load.context, **wanted}


def sequence_options(device: str) -> dict[str, object]:
    """Options of the engine: weights generated in place."""
    options: dict[str, object] = {"load_format": "dummy"}
    if device != "cpu":
        options["attention_backend"] = "FLASH_ATTN"
    return options


def _sequence_figures(name: str, load: Load, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Raises CheckError if these figures are meaningless."""
    want = load.sequences * load.decoded
    if figures["tokens"] != want:
        raise CheckError(f"{name}: {figures['tokens']} of {want} tokens were decoded")
    did = figures["activity"]
    if name == "dense" and did["steps_sparse"]:
        raise CheckError("dense: retrieval acted")
    read = did["blocks_loaded"] + did["blocks_in_place"]  # on a CPU, where they lie
    if name != "dense" and not (did["blocks_offloaded"] and read):
        raise CheckError(
            f"offload did not act: {did['blocks_offloaded']} blocks left the device and "
            f"{read} were recalled"
        )
    chosen = did["blocks_hit"] + did["blocks_loaded"]
    decode_s = max(figures["decode_seconds"], 1e-9)
    return {
        "at_once": figures["at_once"],
        "decode_tokens_per_s": round(figures["decode_tokens"] / decode_s, 3),
        "tokens_per_s": round(figures["tokens"] / figures["seconds"], 3),
        "preemptions": figures["preemptions"],
        "found_in_slots": round(did["blocks_hit"] / chosen, 4) if chosen else None,
    }
