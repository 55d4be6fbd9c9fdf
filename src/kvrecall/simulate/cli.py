"""``kvrecall simulate``: what a trace would have hit, by capacity and policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, JustifyMethod
from rich.progress import Progress
from rich.table import Table

from kvrecall.config import DEFAULT_POLICY, parse_size
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.pool.eviction import POLICY_NAMES, make_policy
from kvrecall.simulate.replay import Outcome, TierSpec, clairvoyant_hits, replay
from kvrecall.simulate.trace import Trace, TraceError, read_trace
from kvrecall.simulate.workload import WORKLOADS, make_workload

app = typer.Typer(add_completion=False)

Row = dict[str, Any]
"""A line of JSON, or a part of it."""

SYNTHETIC = "synthetic:"
_UNITS = ("B", "KB", "MB", "GB", "TB")


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="File in Mooncake's format (one JSON object a line with timestamp and "
            f"hash_ids), or {SYNTHETIC}NAME with NAME one of {', '.join(WORKLOADS)}.",
        ),
    ],
    capacity_blocks: Annotated[
        str, typer.Option(metavar="N", help="Room of the pool, one tier, in blocks.")
    ] = "",
    tiers: Annotated[
        str, typer.Option(metavar="NAME:N,...", help="Several tiers instead, nearest first.")
    ] = "",
    policy: Annotated[
        str, typer.Option(metavar="P", help=f"{', '.join(POLICY_NAMES)}, or all.")
    ] = DEFAULT_POLICY,
    block_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of a block, e.g. 64MiB; gives bytes moved.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Only the line of JSON.")] = False,
) -> None:
    """Replay TRACE against a pool and report strict-prefix hit rates.

    A request hits a block if that block and all before it are in the pool. "clairvoyant" is the
    most any policy could have hit, knowing the future (exact). The last line is JSON.
    """
    with errors_shown():
        specs = parse_tiers(capacity_blocks, tiers)
        names = POLICY_NAMES if policy == "all" else (policy,)
        for name in names:
            make_policy(name, specs[0].capacity)
        size = parse_size(block_bytes, "--block-bytes") if block_bytes else 0
        if block_bytes and size <= 0:
            raise ConfigError(f"--block-bytes: {block_bytes!r} must be more than 0")
        loaded = _load(trace)
    rows = _run(loaded, specs, names, size)
    if not as_json:
        _print_table(rows, size)
    typer.echo(json.dumps(_summary(rows, policy)))


def parse_tiers(capacity_blocks: str, tiers: str) -> tuple[TierSpec, ...]:
    """Tiers of ``--capacity-blocks N`` or ``--tiers NAME:N,...``. Exactly one, else ConfigError."""
    if bool(capacity_blocks) == bool(tiers):
        raise ConfigError("give either --capacity-blocks N or --tiers host:N,disk:M")
    if capacity_blocks:
        return (TierSpec("host", _blocks(capacity_blocks, "--capacity-blocks")),)
    specs: list[TierSpec] = []
    for item in tiers.split(","):
        name, colon, number = item.strip().partition(":")
        if not colon or not name:
            raise ConfigError(f"--tiers: {item!r} is not NAME:BLOCKS, for example host:5859")
        if any(name == spec.name for spec in specs):
            raise ConfigError(f"--tiers: {name!r} is named twice")
        specs.append(TierSpec(name, _blocks(number, f"--tiers: {name}")))
    return tuple(specs)


def _blocks(text: str, name: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > 15 or int(digits) == 0:
        raise ConfigError(f"{name}: {text!r} is not a number of blocks; it must be 1 or more")
    return int(digits)


def _load(trace: str) -> Trace:
    if trace.startswith(SYNTHETIC):
        return make_workload(trace.removeprefix(SYNTHETIC))
    path = Path(trace)
    if not path.exists():
        raise TraceError(f"{path}: no such file")
    return read_trace(path)


def _run(
    trace: Trace, specs: Sequence[TierSpec], names: Sequence[str], block_bytes: int
) -> list[Row]:
    """A row of JSON for each policy."""
    rooms = accumulate(spec.capacity for spec in specs)
    with _progress((len(names) + len(specs)) * len(trace.requests)) as advance:
        bounds = [clairvoyant_hits(trace, room, advance) / trace.blocks for room in rooms]
        outcomes = [replay(trace, specs, name, advance) for name in names]
    return [_row(trace, outcome, bounds, block_bytes) for outcome in outcomes]


def _row(trace: Trace, outcome: Outcome, bounds: Sequence[float], block_bytes: int) -> Row:
    tiers = []
    hits = 0
    for tier, bound in zip(outcome.tiers, bounds, strict=True):
        hits += tier.hits
        row: Row = {
            "tier": tier.name,
            "capacity_blocks": tier.capacity,
            "hits": tier.hits,
            "hit_rate_up_to_here": round(hits / outcome.accesses, 6),
            "clairvoyant_up_to_here": round(bound, 6),
            "read_blocks": tier.hits,
            "written_blocks": tier.writes,
            "evicted_blocks": tier.evictions,
            "bypassed_blocks": tier.bypassed,
        }
        if block_bytes:
            row["read_bytes"] = tier.hits * block_bytes
            row["written_bytes"] = tier.writes * block_bytes
        tiers.append(row)
    return {
        "policy": outcome.policy,
        "hit_rate": round(outcome.hit_rate, 6),
        "clairvoyant": round(bounds[-1], 6),
        "capacity_blocks": sum(tier.capacity for tier in outcome.tiers),
        "trace": trace.name,
        "requests": outcome.requests,
        "blocks": outcome.accesses,
        "hits": outcome.hits,
        "tiers": tiers,
    }


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """A function to call once a step; moves a bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    done = 0
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=steps)

        def advance() -> None:
            nonlocal done
            done += 1
            if done % 512 == 0:
                bar.update(task, completed=done)

        yield advance


def _print_table(rows: Sequence[Row], block_bytes: int) -> None:
    def amount(blocks: int) -> str:
        return format_bytes(blocks * block_bytes) if block_bytes else f"{blocks:,}"

    first = rows[0]
    table = Table(
        title=f"{first['trace']}: {first['requests']:,} requests, {first['blocks']:,} blocks"
    )
    for heading in ("policy", "tier", "capacity", "hits", "hit rate", "clairvoyant", "of it",
                    "read", "written", "evicted", "bypassed"):  # fmt: skip
        justify: JustifyMethod = "left" if heading in ("policy", "tier") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)
    for row in rows:
        for tier in row["tiers"]:
            rate, bound = tier["hit_rate_up_to_here"], tier["clairvoyant_up_to_here"]
            moved = (tier[f"{name}_blocks"] for name in ("read", "written", "evicted", "bypassed"))
            table.add_row(
                row["policy"], tier["tier"], f"{tier['capacity_blocks']:,}", f"{tier['hits']:,}",
                f"{rate:.4f}", f"{bound:.4f}", f"{rate / bound:.0%}" if bound else "-",
                *map(amount, moved),
            )  # fmt: skip
    if len(first["tiers"]) > 1:
        table.caption = "hit rate and clairvoyant: of the tier and those before it together"
    Console(width=max(120, Console().width)).print(table)


def _summary(rows: Sequence[Row], policy: str) -> Row:
    if policy != "all":
        return rows[0]
    best = max(rows, key=lambda row: float(row["hit_rate"]))
    return {
        "policy": "all",
        "best": best["policy"],
        "hit_rate": best["hit_rate"],
        "clairvoyant": best["clairvoyant"],
        "policies": list(rows),
    }


def format_bytes(nbytes: float) -> str:
    """Decimal units, four digits at most before the next unit: ``9,999 MB``, ``10 GB``."""
    amount, units = float(nbytes), list(_UNITS)
    while amount >= 10_000.0 and len(units) > 1:
        amount /= 1000.0
        del units[0]
    return f"{amount:,.0f} {units[0]}"
