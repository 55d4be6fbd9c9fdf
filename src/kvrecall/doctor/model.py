"""Whether a model's blocks fit a pool: their size, and how many each tier holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvrecall.config import RecallSettings, format_size
from kvrecall.doctor.finding import Finding, State
from kvrecall.errors import ConfigError
from kvrecall.plan.model import ModelShape, read_shape
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.server.plan import BLOCK_SIZE
from kvrecall.server.preflight import check_model

_AREA = "model"


def check_layout(model: str, settings: RecallSettings | None) -> Iterator[Finding]:
    """Checks the layout of a model in a local folder; of a hub id only its form. ``settings``: of
    the pool, None if unknown."""
    try:
        check_model(model)
    except ConfigError as error:
        cure = "name a model folder, or a hub id such as Qwen/Qwen3-0.6B"
        yield Finding(_AREA, "folder", State.BROKEN, str(error), cure)
        return
    folder = Path(model).expanduser()
    if not folder.is_dir():
        found = f"{model} is not in a local folder, so its layout is unknown"
        cure = "vLLM downloads it from the hub when it starts"
        yield Finding(_AREA, "folder", State.NOTE, found, cure)
        return
    try:
        shape = read_shape(folder)
    except ConfigError as error:
        found = f"{error}; block sizes are unknown until vLLM starts"
        yield Finding(_AREA, "layout", State.NOTE, found)
        return
    yield _layout(shape)
    if settings is not None and settings.service is None:
        yield from _room(shape, settings)


def _layout(shape: ModelShape) -> Finding:
    block = shape.block_bytes(BLOCK_SIZE)
    figures = {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "latent": shape.is_latent,
        "token_bytes": shape.kv_bytes_per_token,
        "block_tokens": BLOCK_SIZE,
        "block_bytes": block,
        "slot_bytes": slot_bytes_of(block),
    }
    heads = "one latent vector (MLA)" if shape.is_latent else f"{shape.kv_heads} KV heads"
    found = f"{shape.layers} layers, {heads}: {format_size(shape.kv_bytes_per_token)} per token, "
    found += f"{format_size(block)} per block of {BLOCK_SIZE} tokens"
    return Finding(_AREA, "layout", State.OK, found, figures=figures)


def _room(shape: ModelShape, settings: RecallSettings) -> Iterator[Finding]:
    slot = slot_bytes_of(shape.block_bytes(BLOCK_SIZE))
    tiers = {"host": settings.pool.host_bytes}
    if settings.pool.disk is not None:
        tiers["disk"] = settings.pool.disk.capacity_bytes
    for tier, nbytes in tiers.items():
        blocks = nbytes // slot
        tokens = blocks * BLOCK_SIZE
        figures = {"tier": tier, "bytes": nbytes, "blocks": blocks, "tokens": tokens}
        found = f"{tier} of {format_size(nbytes)}: {blocks:,} blocks, {tokens:,} tokens"
        state, cure = State.OK, ""
        if blocks == 0:
            state = State.BROKEN
            cure = f"set {tier}_size to at least a few hundred times {format_size(slot)}"
        elif tier == "host" and tokens < shape.max_context:
            state = State.WARNING
            found += f", less than one sequence of {shape.max_context:,}"
            cure = "set a larger host_size; otherwise longer prefixes are recalled in part"
        yield Finding(_AREA, f"{tier} blocks", state, found, cure, figures)
