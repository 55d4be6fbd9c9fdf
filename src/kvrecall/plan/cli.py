"""``kvrecall plan``: sizes a pool for a model, machines and sessions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvrecall.config import DEFAULT_POLICY, parse_size
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.plan.model import ModelShape, read_shape
from kvrecall.plan.sizing import (
    BreakEven,
    Links,
    Site,
    TierPlan,
    Use,
    break_even,
    links_of,
    settings_of,
    tiers_of,
    with_trace,
)
from kvrecall.pool.eviction import make_policy
from kvrecall.simulate.cli import format_bytes
from kvrecall.simulate.trace import read_trace

app = typer.Typer(add_completion=False)
_BANDWIDTHS = ("host", "disk", "remote")


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(help="Model folder, or its config.json.")],
    context: Annotated[str, typer.Option(help="Tokens of a session: 8192 or 32k.")] = "8192",
    sessions: Annotated[int, typer.Option(min=1, help="That shall find theirs again.")] = 100,
    hosts: Annotated[int, typer.Option(min=1)] = 1,
    devices: Annotated[int, typer.Option(min=1, help="Of a host.")] = 1,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices of an engine.")] = 1,
    device_memory: Annotated[str, typer.Option(help="Of a device: 64GB.")] = "0",
    memory_factor: Annotated[float, typer.Option(min=0.1, max=1.0)] = 0.92,
    host_size: Annotated[str, typer.Option(help="Of a host's pool: 256GiB.")] = "0",
    disk_size: Annotated[str, typer.Option(help="Of a host's disk tier: 4TB.")] = "0",
    remote_size: Annotated[str, typer.Option(help="Of the remote store in all.")] = "0",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block.")] = 128,
    kv_dtype: Annotated[str, typer.Option(help="auto, bf16, fp8, ...")] = "auto",
    prefill_rate: Annotated[
        float, typer.Option(min=0, help="Tokens a second an engine prefills, short prompts.")
    ] = 0,
    host_bandwidth: Annotated[str, typer.Option(help="To an engine, a second: 20GB.")] = "0",
    disk_bandwidth: Annotated[str, typer.Option(help="Alike: 3GB.")] = "0",
    remote_bandwidth: Annotated[str, typer.Option(help="Alike: 1GB.")] = "0",
    trace: Annotated[Path | None, typer.Option(help="In Mooncake's format: hit rates.")] = None,
    policy: Annotated[str, typer.Option(help="Eviction policy, for the trace.")] = DEFAULT_POLICY,
    linked_cards: Annotated[
        int, typer.Option(min=0, help="Ascend: cards (dies) that pool by direct links, in all.")
    ] = 0,
    will_grow: Annotated[bool, typer.Option(help="Ascend: cards may join while it runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON.")] = False,
) -> None:
    """Size a pool: bytes per token, blocks by tier, break-even bandwidth, settings.

    Sizes of tiers that are not given are left out; the last line is JSON.
    """
    with errors_shown():
        shape = read_shape(model, kv_dtype)
        make_policy(policy, 1)
        site = Site(
            hosts, devices, tensor_parallel, parse_size(device_memory, "--device-memory"),
            memory_factor, parse_size(host_size, "--host-size"),
            parse_size(disk_size, "--disk-size"), parse_size(remote_size, "--remote-size"),
        )  # fmt: skip
        if devices * hosts < tensor_parallel:
            raise ConfigError(f"--tensor-parallel {tensor_parallel} is more than all devices")
        use = Use(_tokens(context), sessions, block_size)
        links = links_of(linked_cards, will_grow and linked_cards > 0)
        tiers = tiers_of(shape, site, use, links)
        if trace is not None:
            tiers = with_trace(tiers, read_trace(trace), policy)
        speeds = (host_bandwidth, disk_bandwidth, remote_bandwidth)
        bandwidths = {
            name: parse_size(text, f"--{name}-bandwidth")
            for name, text in zip(_BANDWIDTHS, speeds, strict=True)
        }
    even = break_even(shape, use, prefill_rate or 1000.0)
    report = _summary(shape, site, use, links, tiers, even, bandwidths)
    if not as_json:
        _print(report, Console(width=max(100, Console().width)), bool(prefill_rate))
    typer.echo(json.dumps(report))


def _tokens(text: str) -> int:
    units = {"k": 1024, "m": 1024**2}
    unit = units.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal() or int(digits) == 0:
        raise ConfigError(f"--context: {text!r} is no number of tokens; write 8192 or 32k")
    return int(digits) * unit


def _summary(
    shape: ModelShape,
    site: Site,
    use: Use,
    links: Links,
    tiers: list[TierPlan],
    even: BreakEven,
    bandwidths: dict[str, int],
) -> dict[str, Any]:
    need = use.sessions * use.context
    below = sum(tier.tokens for tier in tiers if tier.name != "device")
    several = site.devices // site.tensor_parallel > 1
    return {
        "plan": shape.name,
        "bytes_per_token": shape.kv_bytes_per_token,
        "block_bytes": shape.block_bytes(use.block_tokens),
        "session_bytes": use.context * shape.kv_bytes_per_token,
        "needed_bytes": need * shape.kv_bytes_per_token,
        "tiers": [
            {
                "tier": tier.name,
                "bytes": tier.nbytes,
                "blocks": tier.blocks,
                "tokens": tier.tokens,
                "sessions": tier.holds,
                "hit_rate_up_to_here": None if tier.hit_rate is None else round(tier.hit_rate, 6),
            }
            for tier in tiers
        ],
        "sessions_fit": below >= need,
        "break_even": {
            "prefill_tokens_per_s": even.prefill_rate,
            "bytes_per_s_at_start": round(even.at_start),
            "bytes_per_s_at_end": round(even.at_end),
            "worth_it": {n: even.wins(b) for n, b in bandwidths.items() if b},
        },
        "links": {
            "cards": links.cards,
            "links": links.links,
            "bytes": links.nbytes,
            "lower_memory_factor_by": links.lower_by,
            "memory_factor": links.factor(site.memory_factor),
            "too_many": links.too_many,
        },
        "settings": settings_of(site, use, several),
        "warnings": _warnings(shape, use, links, below >= need, bool(tiers)),
    }


def _warnings(shape: ModelShape, use: Use, links: Links, fits: bool, any_tier: bool) -> list[str]:
    warnings = []
    if shape.max_context and use.context > shape.max_context:
        warnings.append(f"the context is longer than the model's {shape.max_context} tokens")
    if not any_tier:
        warnings.append("no size is given: add --host-size, --disk-size, --device-memory")
    elif not fits:
        warnings.append("not all sessions fit below the devices; the coldest are evicted")
    if links.too_many:
        warnings.append("more than 512 links: they are cut and made again; use fewer cards a pool")
    return warnings


def _print(report: dict[str, Any], console: Console, rate_given: bool) -> None:
    facts = Table(title=f"{report['plan']}", show_header=False)
    facts.add_row("KV of a token", format_bytes(report["bytes_per_token"]))
    facts.add_row("of a block", format_bytes(report["block_bytes"]))
    facts.add_row("of a session", format_bytes(report["session_bytes"]))
    facts.add_row("of all sessions", format_bytes(report["needed_bytes"]))
    even = report["break_even"]
    rate = "" if rate_given else " (assumed; --prefill-rate)"
    facts.add_row("prefill of an engine", f"{even['prefill_tokens_per_s']:,.0f} tokens/s{rate}")
    facts.add_row("loading wins above", f"{format_bytes(even['bytes_per_s_at_start'])}/s")
    facts.add_row("... at the context's end", f"{format_bytes(even['bytes_per_s_at_end'])}/s")
    for name, wins in even["worth_it"].items():
        facts.add_row(f"loading from {name}", "faster than computing" if wins else "slower: no")
    links = report["links"]
    if links["cards"]:
        facts.add_row("links of a card", f"{links['links']}, {format_bytes(links['bytes'])}")
        facts.add_row("memory factor", f"{links['memory_factor']}")
    console.print(facts)
    table = Table("tier", "size", "blocks", "tokens", "sessions", "hit rate up to here")
    for tier in report["tiers"]:
        hit = tier["hit_rate_up_to_here"]
        table.add_row(
            tier["tier"], format_bytes(tier["bytes"]), f"{tier['blocks']:,}", f"{tier['tokens']:,}",
            f"{tier['sessions']:,}", "-" if hit is None else f"{hit:.4f}",
        )  # fmt: skip
    console.print(table)
    console.print(f"pool.json of each host: {json.dumps(report['settings'])}")
    for warning in report["warnings"]:
        console.print(f"note: {warning}")
