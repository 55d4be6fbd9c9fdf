"""``kvrecall simulate``: the hit rates of a trace, by capacity and policy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrecall.commands import Json, steps
from kvrecall.config import DEFAULT_POLICY, format_count, format_size, parse_size
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.pool.eviction import POLICY_NAMES, make_policy
from kvrecall.simulate.fleet import WINDOW_S, FleetOutcome, Routing, replay_fleet
from kvrecall.simulate.replay import (
    BLOCKS,
    GroupSpec,
    ReplayOutcome,
    TierSpec,
    clairvoyant_hits,
    parse_groups,
    replay,
)
from kvrecall.simulate.trace import Trace, read_trace

app = typer.Typer(add_completion=False)

Row = dict[str, Any]  # a line of JSON, or a part of it
_LITTLE = 0.005  # of all blocks
_COUNTS = ("capacity", "read", "written", "evicted", "bypassed")
_UNITS = {"bytes": "bytes", "blocks": "blocks; --block-bytes SIZE gives bytes"}


@app.command()
def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="File in Mooncake's format: one JSON object a line with timestamp and hash_ids.",
        ),
    ],
    capacity: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of a pool with one tier, e.g. 64GiB.")
    ] = "",
    capacity_blocks: Annotated[
        str, typer.Option(metavar="N", help="The same in blocks of the trace.")
    ] = "",
    tiers: Annotated[
        str,
        typer.Option(
            metavar="NAME:SIZE,...",
            help="Several tiers instead, nearest first: host:64GiB,disk:1TiB, or in blocks: "
            "host:1000,disk:10000.",
        ),
    ] = "",
    policy: Annotated[
        str, typer.Option(metavar="P,...", help=f"Of {', '.join(POLICY_NAMES)}; or all.")
    ] = DEFAULT_POLICY,
    block_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="KV of a block of the trace (512 tokens), e.g. 64MiB: `kvrecall plan MODEL` "
            "prints it. Sizes need it; results are then in bytes instead of blocks.",
        ),
    ] = "",
    groups: Annotated[
        str,
        typer.Option(
            metavar="GROUP,...",
            help="KV groups of a hybrid model, with the size of a record of 512 tokens, or of one "
            "state: full:24MiB,window:1024:20MiB,chunk:8192:9MiB,state:8192:9MiB (how far a window "
            "or chunk reaches; tokens between kept states): `kvrecall plan MODEL` prints them. "
            "Sizes of the pool are then in bytes.",
        ),
    ] = "",
    hosts: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Number of hosts, each with these tiers."),
    ] = 1,
    store: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Size of a store that all hosts share, e.g. 10TiB."),
    ] = "",
    as_json: Json = False,
) -> None:
    """Replay TRACE against a pool and report strict-prefix hit rates.

    A request hits a block if that block and all before it are in the pool; with --groups, up to the
    last block at which every group has what it needs. "best" is the exact upper bound of any
    policy, which knows the future (with --groups: of a pool without limit). With --hosts or --store
    requests are spread over hosts in two ways: all of a session to one host, or each to any; what
    crosses the network to and from the store is reported.
    """
    with errors_shown():
        names = POLICY_NAMES if policy == "all" else tuple(dict.fromkeys(policy.split(",")))
        is_fleet = hosts > 1 or bool(store)
        if is_fleet and (groups or len(names) > 1):
            other = "--groups" if groups else f"--policy {policy}"
            raise ConfigError(f"{other} cannot be combined with --hosts and --store")
        if groups and (capacity_blocks or block_bytes):
            raise ConfigError(
                "--groups has sizes of its own: without --capacity-blocks, --block-bytes"
            )
        kinds = parse_groups(groups) if groups else BLOCKS
        size = parse_size(block_bytes, "--block-bytes", 1) if block_bytes else 0
        if block_bytes and size <= 0:
            raise ConfigError(f"--block-bytes: {block_bytes!r} must be more than 0")
        specs = _tiers(capacity, capacity_blocks, tiers, 1 if groups else size)
        smallest = sum(group.nbytes for group in kinds)
        for tier in specs:
            if tier.capacity < smallest:
                raise ConfigError(
                    f"{tier.name}: {format_size(tier.capacity)} is less than a record of each "
                    f"group ({format_size(smallest)})"
                )
        shared = TierSpec("store", _amount(store, "--store", size)) if store else None
        for name in names:
            make_policy(name, specs[0].capacity)
        loaded = load_trace(trace)
    if is_fleet:
        line = _simulate_fleet(loaded, hosts, specs, shared, policy, size, not as_json)
    else:
        line = _simulate_pool(loaded, specs, names, kinds, size, not as_json)
    if as_json:
        typer.echo(json.dumps(line))


def load_trace(path: Path) -> Trace:
    """The trace of a file, with a progress bar on stderr. Raises TraceError."""
    size = os.stat(path).st_size if os.path.isfile(path) else 0  # a folder it may not enter: 0
    with steps("reading", size) as advance:
        return read_trace(path, advance)


# -- options ---------------------------------------------------------------------------------


def _tiers(
    capacity: str, capacity_blocks: str, tiers: str, block_bytes: int
) -> tuple[TierSpec, ...]:
    """Tiers of ``--capacity SIZE``, ``--capacity-blocks N`` or ``--tiers NAME:SIZE,...``. Raises
    ConfigError unless exactly one is given."""
    if sum(map(bool, (capacity, capacity_blocks, tiers))) != 1:
        raise ConfigError(
            "give one of --capacity SIZE, --capacity-blocks N and --tiers host:SIZE,disk:SIZE"
        )
    if capacity:
        return (TierSpec("host", _blocks_in(capacity, "--capacity", block_bytes)),)
    if capacity_blocks:
        return (TierSpec("host", _blocks(capacity_blocks, "--capacity-blocks")),)
    specs: dict[str, TierSpec] = {}
    for item in tiers.split(","):
        name, colon, amount = (part.strip() for part in item.partition(":"))
        if not colon or not name:
            raise ConfigError(f"--tiers: {item!r} is not NAME:SIZE, for example host:64GiB")
        if name in specs:
            raise ConfigError(f"--tiers: {name!r} is named twice")
        specs[name] = TierSpec(name, _amount(amount, f"--tiers: {name}", block_bytes))
    return tuple(specs.values())


def _amount(text: str, name: str, block_bytes: int) -> int:
    """Blocks of a size, or of a number of blocks."""
    is_count = re.fullmatch(r"[-\d]*", text) is not None
    return _blocks(text, name) if is_count else _blocks_in(text, name, block_bytes)


def _blocks(text: str, name: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > 15 or int(digits) == 0:
        raise ConfigError(f"{name}: {text!r} is not a whole number of blocks, 1 or more")
    return int(digits)


def _blocks_in(text: str, name: str, block_bytes: int) -> int:
    nbytes = parse_size(text, name)
    if not block_bytes:
        raise ConfigError(
            f"{name}: {text!r} is a size, but the size of a block depends on the model: add "
            "--block-bytes, the KV of 512 tokens, which `kvrecall plan MODEL` prints"
        )
    if nbytes < block_bytes:
        raise ConfigError(f"{name}: {text!r} is smaller than a block ({format_size(block_bytes)})")
    return nbytes // block_bytes


# -- one pool ----------------------------------------------------------------------------------


def _simulate_pool(
    trace: Trace,
    tiers: Sequence[TierSpec],
    policies: Sequence[str],
    groups: Sequence[GroupSpec],
    block_bytes: int,
    shown: bool,
) -> Row:
    in_blocks, requests = groups is BLOCKS, len(trace.requests)
    with steps("replaying", (len(policies) + (len(tiers) if in_blocks else 1)) * requests) as tell:
        if in_blocks:
            capacities = accumulate(tier.capacity for tier in tiers)
            bounds = [clairvoyant_hits(trace, each, tell) / trace.blocks for each in capacities]
        else:
            bounds = [replay(trace, [TierSpec("all", 1 << 62)], "lru", tell, groups).hit_rate]
        outcomes = {name: replay(trace, tiers, name, tell, groups) for name in policies}
    bound = "clairvoyant" if in_blocks else "unlimited"
    unit = "blocks" if in_blocks and not block_bytes else "bytes"
    rows = []
    for name, outcome in outcomes.items():
        row = _row(trace, name, outcome) | {bound: round(bounds[-1], 6)}
        row["tiers"] = _rows_of_tiers(outcome, unit, block_bytes or 1)
        if in_blocks:
            row["hints"] = hints_of(outcome, bounds)
        else:  # a hit may need records of several tiers
            row |= {"groups": ",".join(map(str, groups)), "read_bytes": outcome.moved}
            for tier in row["tiers"]:
                del tier["hit_rate_up_to_here"]
            row["tiers"][-1]["hit_rate_up_to_here"] = row["hit_rate"]
        for tier, best in zip(row["tiers"][-len(bounds) :], bounds, strict=True):
            tier["best_up_to_here"] = round(best, 6)
            tier["of_best"] = round(tier["hit_rate_up_to_here"] / best, 4) if best else None
        rows.append(row)
    if shown:
        _print_rows(rows, unit, len(tiers) > 1)
    if len(rows) == 1:
        return rows[0]
    best_row = max(rows, key=lambda row: float(row["hit_rate"]))
    rates = {row["policy"]: row["hit_rate"] for row in rows} | {bound: best_row[bound]}
    line = {"best": best_row["policy"], "hit_rate": best_row["hit_rate"], bound: best_row[bound]}
    return line | {"rates": rates, "policies": rows}


def _row(trace: Trace, policy: str, outcome: ReplayOutcome) -> Row:
    return {
        "policy": policy,
        "hit_rate": round(outcome.hit_rate, 6),
        "trace": trace.name,
        "requests": len(trace.requests),
        "blocks": outcome.accesses,
        "hits": outcome.hits,
    }


def _rows_of_tiers(outcome: ReplayOutcome, unit: str, size: int) -> list[Row]:
    """With the share of the blocks that each tier and those before it hit. ``size``: of what the
    outcome counts, in ``unit``."""
    rows = []
    for tier, hits in zip(outcome.tiers, accumulate(t.read for t in outcome.tiers), strict=True):
        counts = {f"{name}_{unit}": getattr(tier, name) * size for name in _COUNTS}
        rate = round(hits / max(1, outcome.accesses), 6)
        rows.append({"name": tier.name, **counts, "hit_rate_up_to_here": rate})
    return rows


def hints_of(outcome: ReplayOutcome, bounds: Sequence[float]) -> list[str]:
    """Why a tier adds less than half a per cent to the tiers before it, and what to do. ``bounds``:
    the best possible hit rate of each tier together with those before it."""
    if not outcome.hits:
        why = "blocks are evicted before they are used again; try a larger pool"
        return [f"nothing is hit: {why if bounds[-1] else 'no block of the trace is used twice'}"]
    hints = []
    for place, tier in enumerate(outcome.tiers[1:], 1):
        if tier.read > _LITTLE * outcome.accesses:
            continue
        before = outcome.tiers[:place]
        names = " and ".join(each.name for each in before)
        if not any(each.evicted for each in before):
            why = f"{names} holds the whole trace without evicting a block"
        elif bounds[place] - bounds[place - 1] <= _LITTLE:
            why = f"with {names} alone the best possible is about the same"
        elif tier.capacity <= max(each.capacity for each in before):
            why = f"it is no larger than {names}, whose blocks it holds too; try a larger one"
        else:
            why = "its blocks are evicted before they are used again; try a larger one"
        hints.append(f"{tier.name} adds {'little' if tier.read else 'nothing'}: {why}")
    return hints


def _print_rows(rows: Sequence[Row], unit: str, several: bool) -> None:
    first = rows[0]
    if "read_bytes" in first:
        read_of = (f"{kind} {format_size(size)}" for kind, size in first["read_bytes"].items())
        rate = f"that is hit by every group ({first['policy']} read {', '.join(read_of)})"
        best = "in a pool without limit"
    else:
        rate = "hit by the tier and those before it" if several else "hit"
        best = "upper bound of any policy (clairvoyant)"
    print_records(
        f"{first['trace']}: {first['requests']:,} requests, {first['blocks']:,} blocks",
        [{"policy": row["policy"], **tier} for row in rows for tier in row["tiers"]],
        {"policy": "policy", **_headings(unit), f"bypassed_{unit}": "bypassed"},
        f"in {_UNITS[unit]}\nrate: share of blocks {rate};\nbest: {best}",
    )
    for hint in dict.fromkeys(hint for row in rows for hint in row.get("hints", ())):
        Console(emoji=False).print(f"hint: {hint}", highlight=False, markup=False)


def _headings(unit: str) -> dict[str, str]:
    return {
        "name": "tier", f"capacity_{unit}": "capacity", f"read_{unit}": "hits",
        "hit_rate_up_to_here": "rate", "best_up_to_here": "best", "of_best": "of it",
        f"written_{unit}": "written", f"evicted_{unit}": "evicted",
    }  # fmt: skip


def print_records(
    title: str, rows: Sequence[Row], headings: Mapping[str, str], caption: str
) -> None:
    """Prints a table with a column for each key of ``headings`` that a row has. A size has
    ``bytes`` in its key, a share is at most 1."""

    def cell(key: str, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or "-"
        if "bytes" in key:
            return format_size(value)
        if isinstance(value, int):
            return format_count(value)
        return f"{value:.4f}" if value <= 1 else f"{value:,.2f}"

    console = Console(emoji=False)
    keys = [key for key in headings if any(key in row for row in rows)]
    padding = (0, 1) if console.width >= 100 or len(keys) < 10 else 0
    table = Table(title=Text(title), caption=caption, padding=padding)
    for key in keys:
        is_text = any(isinstance(row.get(key), str) for row in rows)
        table.add_column(headings[key], justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(cell(key, row.get(key)) for key in keys))
    console.print(table)


# -- many hosts --------------------------------------------------------------------------------


def _simulate_fleet(
    trace: Trace,
    hosts: int,
    tiers: Sequence[TierSpec],
    store: TierSpec | None,
    policy: str,
    block_bytes: int,
    shown: bool,
) -> Row:
    """Replays for both ways to route."""
    routings: tuple[Routing, ...] = get_args(Routing)
    with steps("replaying", len(routings) * len(trace.requests)) as advance:
        outcomes = {
            str(routing): replay_fleet(trace, hosts, tiers, store, routing, policy, advance)
            for routing in routings
        }
    first = outcomes[routings[0]]
    line = _row(trace, policy, first) | {"hosts": hosts, "sessions": first.sessions}
    line["seconds"] = round(first.seconds, 1)
    for name in ("hit_rate", "hits"):  # of each way to route
        del line[name]
    unit = "bytes" if block_bytes else "blocks"
    ways = {name: _fleet_row(one, unit, block_bytes or 1) for name, one in outcomes.items()}
    if shown:
        _print_fleet(line, ways, unit)
    return line | ways


def _fleet_row(outcome: FleetOutcome, unit: str, block_bytes: int) -> Row:
    traffic, seconds = outcome.traffic, max(outcome.seconds, 1.0)
    row: Row = {
        "hit_rate": round(outcome.hit_rate, 6),
        "busiest_host": round(outcome.busiest, 2),
        "tiers": _rows_of_tiers(outcome, unit, block_bytes),
    }
    for name in ("read", "written"):
        moved, most = (getattr(traffic, each) * block_bytes for each in (name, f"most_{name}"))
        row[f"store_{name}_{unit}"] = moved
        row[f"store_{name}_{unit}_a_s"] = round(moved / seconds, 1)
        row[f"store_{name}_{unit}_a_s_in_a_minute"] = round(most / WINDOW_S, 1)
    return row


def _print_fleet(line: Row, ways: Mapping[str, Row], unit: str) -> None:
    print_records(
        f"{line['trace']}: {line['requests']:,} requests of {line['sessions']:,} sessions on "
        f"{line['hosts']:,} hosts",
        [{"sessions": name, **tier} for name, row in ways.items() for tier in row["tiers"]],
        {"sessions": "sessions", **_headings(unit)},
        "sticky: a session stays on one host; spread: each request goes to any\n"
        "capacity: of all hosts; rate: share of blocks hit by the tier and those before it",
    )
    print_records(
        "a second, on average and in the busiest minute, of all hosts",
        [{"sessions": name, **row} for name, row in ways.items()],
        {
            "sessions": "sessions",
            f"store_read_{unit}_a_s": "from the store",
            f"store_read_{unit}_a_s_in_a_minute": "at most",
            f"store_written_{unit}_a_s": "to the store",
            f"store_written_{unit}_a_s_in_a_minute": "at most",
            "busiest_host": "busiest host",
        },
        f"in {_UNITS[unit]}; the busiest host: times the mean",
    )
