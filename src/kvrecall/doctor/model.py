"""What kvrecall does with a model: whether it serves it, its KV groups and the size of their
blocks, and how many each tier of a pool holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kvrecall.config import DEFAULT_MATCH_UNIT, MatchUnit, RecallSettings, format_size
from kvrecall.errors import ConfigError
from kvrecall.modelconfig import Fields, find_config, hub_cache
from kvrecall.plan.model import Group, ModelShape, chain_of, hit_unit, read_shape
from kvrecall.plan.sizing import Use, sequence_of
from kvrecall.pool.slots import slot_bytes_of
from kvrecall.server.checks import Finding, Health, check_model
from kvrecall.server.plan import BLOCK_SIZE
from kvrecall.server.servable import Machine, fields_of, refusals

_AREA = "model"
_USUAL_CONTEXT = 8192  # of a model whose config.json names no longest sequence


def check_layout(model: str, settings: RecallSettings | None) -> Iterator[Finding]:
    """Checks a model in a local folder or the hub's cache; of others only the name. ``settings``:
    of the pool, None if unknown."""
    try:
        check_model(model)
    except ConfigError as error:
        cure = "name a model folder, or a hub id such as Qwen/Qwen3-0.6B"
        yield Finding(_AREA, "folder", Health.BROKEN, str(error), cure)
        return
    fields = fields_of(model)
    if fields is None:
        found = f"{model} is neither a local folder nor in the hub's cache: its layout is unknown"
        cure = "vLLM downloads it from the hub when it starts"
        yield Finding(_AREA, "folder", Health.NOTE, found, cure)
        return
    served = _served(fields)
    yield served
    try:
        shape = read_shape(find_config(model, hub_cache()))
    except ConfigError as error:
        if served.state is Health.BROKEN:
            return
        found = f"{error}; block sizes are unknown until vLLM starts"
        yield Finding(_AREA, "layout", Health.NOTE, found)
        return
    groups = shape.groups(BLOCK_SIZE)
    yield _layout(shape, groups)
    if len(groups) > 1 or groups[0].reach:
        yield _hits(groups, "auto" if settings is None else settings.match_unit)
    if settings is not None and settings.service is None:
        yield from _room(shape, groups, settings)


def _served(fields: Fields) -> Finding:
    refused = list(refusals(fields, Machine.this()))
    figures = {"architecture": fields.architecture, "refused": [each.reason for each in refused]}
    if not refused:
        found = f"kvrecall serves {fields.architecture} with a pool, judging by its config.json"
        return Finding(_AREA, "served", Health.OK, found, figures=figures)
    found = "; ".join(each.reason for each in refused)
    return Finding(_AREA, "served", Health.BROKEN, found, refused[0].cure, figures)


def _layout(shape: ModelShape, groups: tuple[Group, ...]) -> Finding:
    chain = chain_of(groups)
    figures = {
        "layers": shape.layers,
        "kv_heads": shape.kv_heads,
        "latent": shape.is_latent,
        "token_bytes": shape.kv_bytes_per_token,
        "block_tokens": chain.block_tokens,
        "block_bytes": chain.record_bytes,
        "slot_bytes": slot_bytes_of(chain.record_bytes),
        "groups": [
            {
                "kind": group.kind.value,
                "reach": group.reach,
                "layers": group.layers,
                "block_tokens": group.block_tokens,
                "record_bytes": group.record_bytes,
            }
            for group in groups
        ],
    }
    heads = "one latent vector (MLA)" if shape.is_latent else f"{shape.kv_heads} KV heads"
    found = f"{shape.layers} layers, {heads}: {format_size(shape.kv_bytes_per_token)} per token, "
    if len(groups) == 1:
        found += f"{format_size(chain.record_bytes)} per block of {chain.block_tokens} tokens"
        found += f", {_keeps(chain)}" if chain.reach else ""
        return Finding(_AREA, "layout", Health.OK, found, figures=figures)
    parts = [
        f"{count} of {group.layers} layers ({_keeps(group)}; {format_size(group.record_bytes)} per "
        f"block of {group.block_tokens} tokens)"
        for group, count in Counter(groups).items()
    ]
    found += f"{len(groups)} KV groups: {', '.join(parts)}"
    return Finding(_AREA, "layout", Health.OK, found, figures=figures)


def _keeps(group: Group) -> str:
    return f"{group.kind} of {group.reach:,} tokens" if group.reach else str(group.kind)


def _hits(groups: tuple[Group, ...], match_unit: MatchUnit) -> Finding:
    """What a hit needs of a model whose layers do not all keep all tokens."""
    unit = hit_unit(groups)
    wanted = DEFAULT_MATCH_UNIT if match_unit == "auto" else match_unit
    if wanted != "off" and {group.kind.value for group in groups} == {"full", "state"}:
        unit = wanted if unit % wanted == 0 else unit
    needs = {
        "full": "all blocks of full layers",
        "window": "the last blocks of windows",
        "chunk": "the blocks of the last local chunk",
        "state": "the one state that ends there",
    }
    present = list(dict.fromkeys(group.kind.value for group in groups))
    found = f"a hit ends at a multiple of {unit} tokens and needs "
    found += ", ".join(needs[kind] for kind in sorted(present, key=list(needs).index))
    if "state" in present:
        found += "; states exist where a block or a prompt ended a step of the engine"
    figures = {"unit_tokens": unit, "kinds": present}
    return Finding(_AREA, "hits", Health.OK, found, figures=figures)


def _room(
    shape: ModelShape, groups: tuple[Group, ...], settings: RecallSettings
) -> Iterator[Finding]:
    context = shape.max_context or _USUAL_CONTEXT
    one = sequence_of(groups, Use(context, 1, BLOCK_SIZE), 1)
    slot = one.slot_bytes // one.records
    tiers = {"host": settings.pool.host_bytes}
    if settings.pool.disk is not None:
        tiers["disk"] = settings.pool.disk.capacity_bytes
    for tier, nbytes in tiers.items():
        blocks = nbytes * one.records // one.slot_bytes
        tokens = blocks * context // one.records
        figures = {"tier": tier, "bytes": nbytes, "blocks": blocks, "tokens": tokens}
        found = f"{tier} of {format_size(nbytes)}: {blocks:,} blocks, {tokens:,} tokens"
        state, cure = Health.OK, ""
        if blocks == 0:
            state = Health.BROKEN
            cure = f"set {tier}_size to at least a few hundred times {format_size(slot)}"
        elif tier == "host" and tokens < shape.max_context:
            state = Health.WARNING
            found += f", less than one sequence of {shape.max_context:,}"
            cure = "set a larger host_size; otherwise longer prefixes are recalled in part"
        yield Finding(_AREA, f"{tier} blocks", state, found, cure, figures)
