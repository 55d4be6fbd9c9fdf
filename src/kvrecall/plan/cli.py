"""``kvrecall plan``: sizes a pool for a model, machines and sessions."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrecall.commands import Json, steps
from kvrecall.config import DEFAULT_POLICY, format_size, parse_size
from kvrecall.environment import CPU_KV_SPACE
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.modelconfig import CacheKind, find_config, hub_cache
from kvrecall.plan.model import Group, ModelShape, chain_of, hit_unit, read_shape
from kvrecall.plan.sizing import (
    BreakEven,
    CardLinks,
    Site,
    TierPlan,
    Use,
    break_even,
    groups_of_trace,
    hit_bytes,
    host_bytes_for,
    links_of,
    sequence_of,
    settings_of,
    tiers_of,
    with_trace,
)
from kvrecall.pool.eviction import make_policy
from kvrecall.simulate.cli import load_trace, print_records
from kvrecall.simulate.trace import BLOCK_TOKENS

app = typer.Typer(add_completion=False)
_GROUPS = {
    "groups": "groups", "kind": "keeps", "layers": "layers", "block_tokens": "block tokens",
    "record_bytes": "record", "device_blocks": "device blocks", "pool_records": "pool records",
    "hit_records": "a hit loads",
}  # fmt: skip
_TIERS = {
    "tier": "tier", "bytes": "size", "blocks": "blocks", "tokens": "tokens",
    "sessions": "sessions", "hit_rate_up_to_here": "hit rate so far",
}  # fmt: skip
"""Columns of tables, by the keys of the JSON."""


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, its config.json, or the id of a model in the local Hugging Face "
            "cache (Qwen/Qwen3-8B).",
        ),
    ],
    context: Annotated[str, typer.Option(help="Tokens of a session, e.g. 8192 or 32k.")] = "8192",
    sessions: Annotated[
        int, typer.Option(min=1, help="Sessions whose cache must stay resident.")
    ] = 100,
    hosts: Annotated[int, typer.Option(min=1, help="Machines with devices.")] = 1,
    devices: Annotated[int, typer.Option(min=1, help="Devices per host.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices per engine.")] = 1,
    device_memory: Annotated[str, typer.Option(help="Memory of a device, e.g. 64GB.")] = "0",
    memory_factor: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Share of device memory that the engine uses.")
    ] = 0.92,
    host_size: Annotated[str, typer.Option(help="Host tier of each host, e.g. 256GiB.")] = "0",
    disk_size: Annotated[str, typer.Option(help="Disk tier of each host, e.g. 4TB.")] = "0",
    remote_size: Annotated[str, typer.Option(help="Size of the remote store, e.g. 16TB.")] = "0",
    compressed_to: Annotated[
        float,
        typer.Option(
            min=0.1,
            max=1.0,
            help="Share of their bytes that blocks take on disk and in the remote store with "
            "compression; docs/data.md has measured ones.",
        ),
    ] = 1.0,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 128,
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp8, ...")] = "auto",
    step_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens of a step of the engine; a simulated state is kept at its end."
        ),
    ] = 8192,
    prefill_rate: Annotated[
        float, typer.Option(min=0, help="Prefill rate of an engine on short prompts, tokens/s.")
    ] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Trace in Mooncake's format, for hit rates.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Eviction policy, for the trace.")] = DEFAULT_POLICY,
    linked_cards: Annotated[
        int, typer.Option(min=0, help="Ascend: total cards (dies) that pool over direct links.")
    ] = 0,
    will_grow: Annotated[bool, typer.Option(help="Ascend: cards may join later.")] = False,
    as_json: Json = False,
) -> None:
    """Size a pool: bytes per token, blocks by tier, break-even bandwidth, settings.

    Sizes are given in binary (256GiB) or decimal (4TB) units and printed in binary ones. Tiers
    without a size are omitted. JSON is in bytes.
    """
    with errors_shown():
        config = find_config(model, hub_cache())
        shape = read_shape(config, kv_dtype, "" if Path(model).exists() else model)
        make_policy(policy, 1)
        site = Site(
            hosts, devices, tensor_parallel, parse_size(device_memory, "--device-memory"),
            memory_factor, parse_size(host_size, "--host-size"),
            parse_size(disk_size, "--disk-size"), parse_size(remote_size, "--remote-size"),
            compressed_to,
        )  # fmt: skip
        if devices * hosts < tensor_parallel:
            raise ConfigError(f"--tensor-parallel {tensor_parallel} is more than all devices")
        use = Use(_tokens(context), sessions, block_size, step_tokens)
        links = links_of(linked_cards, will_grow and linked_cards > 0)
        tiers = tiers_of(shape, site, use, links)
        if trace is not None:
            requests = load_trace(trace)
            with steps("replaying", len(requests.requests)) as advance:
                groups = groups_of_trace(shape.groups(block_size, tensor_parallel), step_tokens)
                tiers = with_trace(tiers, requests, policy, groups, advance)
    even = break_even(shape, use, prefill_rate) if prefill_rate else None
    report = summary_of(shape, site, use, links, tiers, even)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report, Console(emoji=False))


def _tokens(text: str) -> int:
    units = {"k": 1024, "m": 1024**2}
    unit = units.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) == 0:
        raise ConfigError(f"--context: {text!r} is not a number of tokens; write 8192 or 32k")
    return int(digits) * unit


def summary_of(
    shape: ModelShape,
    site: Site,
    use: Use,
    links: CardLinks,
    tiers: list[TierPlan],
    even: BreakEven | None,
) -> dict[str, Any]:
    groups = shape.groups(use.block_tokens, site.tensor_parallel)
    one = sequence_of(groups, use, site.tensor_parallel)
    below = sum(tier.sessions for tier in tiers if tier.tier != "device")
    several = site.devices // site.tensor_parallel > 1
    host_bytes = host_bytes_for(use.sessions * one.slot_bytes, site.hosts)
    chain = chain_of(groups)
    unit = hit_unit(groups)
    return {
        "plan": shape.name,
        "bytes_per_token": shape.kv_bytes_per_token,
        "block_bytes": chain.record_bytes,
        "block_tokens": chain.block_tokens,
        "trace_block_bytes": _trace_block_bytes(groups, use),
        "simulate_groups": ",".join(map(str, groups_of_trace(groups, use.step_tokens))),
        "groups": [_group(group, use) for group in groups],
        "hit_unit": unit,
        "hit_bytes": hit_bytes(groups, use.context // unit * unit),
        "device_session_bytes": one.device_bytes,
        "session_bytes": one.pool_bytes,
        "needed_bytes": use.sessions * one.pool_bytes,
        "host_bytes_for_all": host_bytes,
        "tiers": [asdict(tier) for tier in tiers],
        "sessions_fit": below >= use.sessions,
        "break_even": even
        and {
            "prefill_tokens_per_s": even.prefill_rate,
            "bytes_per_s_at_start": round(even.at_start),
            "bytes_per_s_at_end": round(even.at_end),
        },
        "links": asdict(links)
        | {"memory_factor": round(site.memory_factor - links.lower_memory_factor_by, 4)},
        "settings": settings_of(site, host_bytes, several),
        "warnings": _warnings(shape, use, links, below >= use.sessions, bool(tiers)),
    }


def _trace_block_bytes(groups: tuple[Group, ...], use: Use) -> int:
    """With a session's windows and states spread over its tokens."""
    every = some = 0
    for group in groups:
        if group.kind in (CacheKind.FULL, CacheKind.CHUNK):
            every += group.record_bytes // group.block_tokens
        else:
            some += group.record_bytes * group.pool_blocks(use.context)
    return BLOCK_TOKENS * every + round(some * BLOCK_TOKENS / use.context)


def _group(group: Group, use: Use) -> dict[str, Any]:
    return {
        "kind": group.kind.value,
        "reach": group.reach,
        "layers": group.layers,
        "block_tokens": group.block_tokens,
        "record_bytes": group.record_bytes,
        "device_block_bytes": group.device_bytes,
        "device_blocks": group.device_blocks(use.context),
        "pool_records": group.pool_blocks(use.context),
        "hit_records": group.needed(use.context // group.block_tokens * group.block_tokens),
    }


def _warnings(
    shape: ModelShape, use: Use, links: CardLinks, fits: bool, any_tier: bool
) -> list[str]:
    warnings = []
    if shape.max_context and use.context > shape.max_context:
        warnings.append(f"the context is longer than the model's {shape.max_context} tokens")
    if not any_tier:
        warnings.append("no size is given: add --host-size, --disk-size, --device-memory")
    elif not fits:
        warnings.append("not all sessions fit below the devices; the coldest are evicted")
    if links.too_many:
        warnings.append("more than 512 links: some are dropped and re-established; use fewer cards")
    return warnings


def _print(report: dict[str, Any], console: Console) -> None:
    facts = Table(title=Text(report["plan"]), show_header=False)
    sizes = {
        "KV of a token": "bytes_per_token",
        f"of a block of {report['block_tokens']} tokens": "block_bytes",
        f"of a trace's block ({BLOCK_TOKENS} tokens)": "trace_block_bytes",
        "of a session in the pool": "session_bytes",
        "on the devices while it runs": "device_session_bytes",
        "loaded by a hit of all of it": "hit_bytes",
        "of all sessions": "needed_bytes",
        "host_size of each host to hold them": "host_bytes_for_all",
    }
    for title, name in sizes.items():
        facts.add_row(title, format_size(report[name]))
    if even := report["break_even"]:
        facts.add_row("loading wins above", f"{format_size(even['bytes_per_s_at_start'])}/s")
        facts.add_row("... at the context's end", f"{format_size(even['bytes_per_s_at_end'])}/s")
    else:
        facts.add_row("loading wins above", "not known without --prefill-rate")
    links = report["links"]
    if links["cards"]:
        facts.add_row("links of a card", f"{links['links']}, {format_size(links['bytes'])}")
        factor = links["memory_factor"]
        facts.add_row(
            "memory factor",
            f"{factor}: kvrecall serve ... -- --gpu-memory-utilization {factor}\n"
            f"(on a CPU, {CPU_KV_SPACE}=GIB sets the device cache itself)",
        )
    console.print(facts)
    alike: dict[str, dict[str, Any]] = {}  # groups that are alike are one row
    for group in report["groups"]:
        reach = f" of {group['reach']:,} tokens" if group["reach"] else ""
        row = {"groups": 0, **group, "kind": group["kind"] + reach}
        alike.setdefault(json.dumps(group), row)["groups"] += 1
    print_records("KV groups", [*alike.values()], _GROUPS, "blocks and records are of one session")
    if len(report["groups"]) > 1 or report["groups"][0]["reach"]:
        command = f"kvrecall simulate TRACE --groups {report['simulate_groups']} --capacity SIZE"
        console.print(command, soft_wrap=True, highlight=False)
    print_records("", report["tiers"], _TIERS, "of all hosts; 1 GiB = 1.074 GB, 1 TiB = 1.100 TB")
    settings = json.dumps(report["settings"])
    line = f"pool.json of each host: {settings}"
    console.print(line, soft_wrap=True, highlight=False, markup=False)
    for warning in report["warnings"]:
        console.print(f"note: {warning}", markup=False)
