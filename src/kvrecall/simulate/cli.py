"""``kvrecall simulate``: the hit rates of a trace, by capacity and policy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvrecall.config import DEFAULT_POLICY, format_count, format_size
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.pool.eviction import POLICY_NAMES, make_policy
from kvrecall.simulate.arguments import (
    SYNTHETIC,
    block_size,
    load_trace,
    parse_tiers,
    progress_bar,
    store_of,
)
from kvrecall.simulate.fleet import WINDOW_S, FleetOutcome, Routing, replay_fleet
from kvrecall.simulate.groups import BLOCKS, GroupSpec, parse_groups
from kvrecall.simulate.replay import ReplayOutcome, TierSpec, clairvoyant_hits, replay
from kvrecall.simulate.trace import Trace
from kvrecall.simulate.workload import HINTS, MIXED, WORKLOAD_HOURS, WORKLOADS

app = typer.Typer(add_completion=False)

Row = dict[str, Any]
"""A line of JSON, or a part of it."""

WORKLOAD_BLOCKS = 2_000
WORKLOAD_POLICIES = ("lru", "hazard")
_LITTLE = 0.005  # of all blocks


@app.command()
def simulate(
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE",
            help="File in Mooncake's format (one JSON object a line with timestamp and "
            f"hash_ids), or {SYNTHETIC}NAME with NAME one of {', '.join(WORKLOADS)}.",
        ),
    ] = "",
    workload: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Instead of TRACE: {SYNTHETIC}NAME, and unless given --capacity-blocks "
            f"{WORKLOAD_BLOCKS} and --policy {','.join(WORKLOAD_POLICIES)}.",
        ),
    ] = "",
    hints: Annotated[
        str,
        typer.Option(
            metavar="H",
            help=f"What the clients of --workload agents say about their return: "
            f"{', '.join(HINTS)}; or {MIXED}: a tenant of honest ones, one that says nothing, and "
            "one that lies.",
        ),
    ] = "none",
    hours: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=WORKLOAD_HOURS,
            metavar="H",
            help=f"So much of the beginning of a workload. Default: {WORKLOAD_HOURS:g}, the whole.",
        ),
    ] = None,
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
    ] = "",
    block_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="KV of a block of the trace (512 tokens), e.g. 64MiB: `kvrecall plan MODEL` "
            "prints it. Sizes need it; results are then also in bytes.",
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
        typer.Option(min=1, max=10_000, help="So many hosts, each with these tiers."),
    ] = 1,
    store: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Size of a store that all hosts share, e.g. 10TiB."),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Replay TRACE against a pool and report strict-prefix hit rates.

    A request hits a block if that block and all before it are in the pool; with --groups, up to the
    last block at which every group has what it needs. "best" is the exact upper bound of any
    policy, which knows the future (with --groups: of a pool without limit). With --hosts or --store
    requests are spread over hosts in two ways: all of a session to one host, or each to any; what
    crosses the network to and from the store is reported. The last line is JSON.
    """
    with errors_shown():
        if workload and trace:
            raise ConfigError(
                f"--workload: {workload!r}, but {trace!r} is given as TRACE; give one"
            )
        if workload:
            trace = SYNTHETIC + workload
            if not (capacity or capacity_blocks or tiers or groups):
                capacity_blocks = str(WORKLOAD_BLOCKS)
            policy = policy or ("" if hosts > 1 or store else ",".join(WORKLOAD_POLICIES))
        if not trace:
            raise typer.BadParameter("give TRACE, a file, or --workload NAME")
        policy = policy or DEFAULT_POLICY
        names = POLICY_NAMES if policy == "all" else tuple(dict.fromkeys(policy.split(",")))
        if (hosts > 1 or store) and (groups or len(names) > 1):
            other = "--groups" if groups else f"--policy {policy}"
            raise ConfigError(f"{other} does not go together with --hosts and --store")
        if groups and (capacity_blocks or block_bytes):
            raise ConfigError(
                "--groups has sizes of its own: without --capacity-blocks, --block-bytes"
            )
        kinds = parse_groups(groups) if groups else BLOCKS
        size = block_size(block_bytes)
        specs = parse_tiers(capacity, capacity_blocks, tiers, 1 if groups else size)
        _check_capacity(specs, kinds)
        behind = store_of(store, size)
        for name in names:
            make_policy(name, specs[0].capacity)
        loaded = load_trace(trace, hints, hours)
    if hosts > 1 or store:
        line = _simulate_fleet(loaded, hosts, specs, behind, policy, size, not as_json)
    else:
        if groups:
            rows = _replay_groups(loaded, specs, names, kinds)
            show = _print_groups
        else:
            rows = _replay_blocks(loaded, specs, names, size)
            show = partial(_print_blocks, block_bytes=size)
        if not as_json:
            show(rows)
        line = _summary(rows, policy)
    typer.echo(json.dumps(line))


def _check_capacity(tiers: Sequence[TierSpec], groups: Sequence[GroupSpec]) -> None:
    """Raises ConfigError unless each tier has room for a record of each group."""
    smallest = sum(group.nbytes for group in groups)
    for tier in tiers:
        if tier.capacity < smallest:
            raise ConfigError(
                f"{tier.name}: {format_size(tier.capacity)} is less than a record of each group "
                f"({format_size(smallest)})"
            )


def _print_table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str
) -> None:
    console = Console()
    padding = (0, 1) if console.width >= 100 or len(headings) < 10 else 0
    table = Table(title=Text(title), caption=caption, padding=padding)
    for heading in headings:
        is_text = heading in ("policy", "tier", "sessions")
        table.add_column(heading, justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _amount(blocks: float, block_bytes: int) -> str:
    """In bytes, if the size of a block is known."""
    if block_bytes:
        return format_size(int(blocks * block_bytes))
    return format_count(blocks) if isinstance(blocks, int) else f"{blocks:,.1f}".removesuffix(".0")


def _simulate_fleet(
    trace: Trace,
    hosts: int,
    tiers: Sequence[TierSpec],
    store: TierSpec | None,
    policy: str,
    block_bytes: int,
    shown: bool,
) -> Row:
    """Replays for both ways to route; returns the line of JSON."""
    routings: tuple[Routing, ...] = get_args(Routing)
    with progress_bar("replaying", len(routings) * len(trace.requests)) as advance:
        outcomes = {
            routing: replay_fleet(trace, hosts, tiers, store, routing, policy, advance)
            for routing in routings
        }
    if shown:
        _print_fleet(trace, hosts, outcomes, block_bytes)
    first = outcomes[routings[0]]
    line: Row = {
        "trace": trace.name,
        "policy": policy,
        "hosts": hosts,
        "requests": len(trace.requests),
        "sessions": first.sessions,
        "blocks": first.accesses,
        "seconds": round(first.seconds, 1),
    }
    return line | {name: _fleet_row(outcome, block_bytes) for name, outcome in outcomes.items()}


def _fleet_row(outcome: FleetOutcome, block_bytes: int) -> Row:
    traffic = outcome.traffic
    seconds = max(outcome.seconds, 1.0)
    row: Row = {
        "hit_rate": round(outcome.hit_rate, 6),
        "busiest_host": round(outcome.busiest, 2),
        "tiers": [asdict(tier) for tier in outcome.tiers],
        "store_read_blocks": traffic.read,
        "store_written_blocks": traffic.written,
    }
    if block_bytes:
        for name in ("read", "written"):
            blocks, most = getattr(traffic, name), getattr(traffic, f"most_{name}")
            row[f"store_{name}_bytes_a_s"] = round(blocks * block_bytes / seconds)
            row[f"store_{name}_bytes_a_s_in_a_minute"] = round(most * block_bytes / WINDOW_S)
    return row


def _print_fleet(
    trace: Trace, hosts: int, outcomes: Mapping[Routing, FleetOutcome], block_bytes: int
) -> None:
    def amounts(*blocks: float) -> list[str]:
        return [_amount(each, block_bytes) for each in blocks]

    tiers, network = [], []
    for routing, outcome in outcomes.items():
        label: str = routing
        rates = accumulate(tier.read for tier in outcome.tiers)
        for tier, hits in zip(outcome.tiers, rates, strict=True):
            moved = amounts(tier.capacity, tier.read)
            rate = f"{hits / outcome.accesses:.4f}"
            tiers.append((label, tier.name, *moved, rate, *amounts(tier.written, tier.evicted)))
            label = ""
        traffic, seconds = outcome.traffic, max(outcome.seconds, 1.0)
        crossed = amounts(
            traffic.read / seconds, traffic.most_read / WINDOW_S,
            traffic.written / seconds, traffic.most_written / WINDOW_S,
        )  # fmt: skip
        network.append((routing, *crossed, f"{outcome.busiest:.2f} of the mean"))
    sessions = next(iter(outcomes.values())).sessions
    _print_table(
        f"{trace.name}: {len(trace.requests):,} requests of {sessions:,} sessions on {hosts:,} "
        "hosts",
        ("sessions", "tier", "capacity, all", "hits", "rate", "written", "evicted"),
        tiers,
        "sticky: a session stays on one host; spread: each request goes to any\n"
        "rate: share of blocks hit by the tier and those before it",
    )
    _print_table(
        "a second, on average and in the busiest minute, of all hosts",
        ("sessions", "from the store", "at most", "to the store", "at most", "busiest host"),
        network,
        f"in {'bytes' if block_bytes else 'blocks; --block-bytes gives bytes'}",
    )


def _replay_groups(
    trace: Trace, tiers: Sequence[TierSpec], policies: Sequence[str], groups: Sequence[GroupSpec]
) -> list[Row]:
    """A row of JSON for each policy."""
    with progress_bar("replaying", (len(policies) + 1) * len(trace.requests)) as advance:
        best = replay(trace, [TierSpec("all", 1 << 62)], "lru", advance, groups).hit_rate
        outcomes = {name: replay(trace, tiers, name, advance, groups) for name in policies}
    return [
        {
            "policy": name,
            "hit_rate": round(outcome.hit_rate, 6),
            "unlimited": round(best, 6),
            "trace": trace.name,
            "requests": len(trace.requests),
            "blocks": outcome.accesses,
            "hits": outcome.hits,
            "groups": ",".join(map(str, groups)),
            "read_bytes": outcome.moved,
            "tiers": [asdict(tier) for tier in outcome.tiers],
        }
        for name, outcome in outcomes.items()
    ]


def _print_groups(rows: Sequence[Row]) -> None:
    first = rows[0]
    moved = ("capacity", "read", "written", "evicted", "bypassed")
    shown = []
    for row in rows:
        label = (row["policy"], f"{row['hit_rate']:.4f}", f"{row['unlimited']:.4f}")
        for tier in row["tiers"]:
            shown.append((*label, tier["name"], *(format_size(tier[name]) for name in moved)))
            label = ("", "", "")
    of_each = ", ".join(f"{kind} {format_size(n)}" for kind, n in first["read_bytes"].items())
    _print_table(
        f"{first['trace']}: {first['requests']:,} requests, {first['blocks']:,} blocks",
        ("policy", "rate", "best", "tier", *moved),
        shown,
        f"rate: share of the blocks that is hit by every group ({first['policy']} read {of_each});"
        "\nbest: in a pool without limit",
    )


def _replay_blocks(
    trace: Trace, tiers: Sequence[TierSpec], policies: Sequence[str], block_bytes: int
) -> list[Row]:
    """A row of JSON for each policy."""
    capacities = accumulate(tier.capacity for tier in tiers)
    parts = (len(policies) + len(tiers)) * len(trace.requests)
    with progress_bar("replaying", parts) as advance:
        bounds = [clairvoyant_hits(trace, each, advance) / trace.blocks for each in capacities]
        outcomes = {name: replay(trace, tiers, name, advance) for name in policies}
    return [_row(trace, name, found, bounds, block_bytes) for name, found in outcomes.items()]


def _row(
    trace: Trace, policy: str, outcome: ReplayOutcome, bounds: Sequence[float], block_bytes: int
) -> Row:
    tiers = []
    read = accumulate(tier.read for tier in outcome.tiers)
    for tier, hits, bound in zip(outcome.tiers, read, bounds, strict=True):
        row: Row = {
            "tier": tier.name,
            "capacity_blocks": tier.capacity,
            "hits": tier.read,
            "hit_rate_up_to_here": round(hits / outcome.accesses, 6),
            "clairvoyant_up_to_here": round(bound, 6),
            "read_blocks": tier.read,
            "written_blocks": tier.written,
            "evicted_blocks": tier.evicted,
            "bypassed_blocks": tier.bypassed,
        }
        if block_bytes:
            for name in ("capacity", "read", "written"):
                row[f"{name}_bytes"] = row[f"{name}_blocks"] * block_bytes
        tiers.append(row)
    tenants = {name: round(count.hit_rate, 6) for name, count in outcome.tenants.items()}
    return {
        "policy": policy,
        "hit_rate": round(outcome.hit_rate, 6),
        "clairvoyant": round(bounds[-1], 6),
        "capacity_blocks": sum(tier.capacity for tier in outcome.tiers),
        "trace": trace.name,
        "requests": len(trace.requests),
        "blocks": outcome.accesses,
        "hits": outcome.hits,
        "tiers": tiers,
        "hints": hints_of(outcome, bounds),
        "client_hints": asdict(outcome.client_hints),
        "tenants": tenants if len(tenants) > 1 else {},
    }


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


def _print_blocks(rows: Sequence[Row], block_bytes: int) -> None:
    first = rows[0]
    shown = [
        (
            row["policy"], tier["tier"],
            _amount(tier["capacity_blocks"], block_bytes), _amount(tier["hits"], block_bytes),
            f"{tier['hit_rate_up_to_here']:.4f}", f"{bound:.4f}",
            f"{tier['hit_rate_up_to_here'] / bound:.0%}" if bound else "-",
            *(_amount(tier[f"{name}_blocks"], block_bytes)
              for name in ("written", "evicted", "bypassed")),
        )
        for row in rows
        for tier in row["tiers"]
        for bound in (tier["clairvoyant_up_to_here"],)
    ]  # fmt: skip
    unit = (
        f"bytes, at {format_size(block_bytes)} a block"
        if block_bytes
        else "blocks; --block-bytes SIZE gives bytes"
    )
    with_those = " by the tier and those before it" if len(first["tiers"]) > 1 else ""
    _print_table(
        f"{first['trace']}: {first['requests']:,} requests, {first['blocks']:,} blocks",
        ("policy", "tier", "capacity", "hits", "rate", "best", "of it",
         "written", "evicted", "bypassed"),
        shown,
        f"in {unit}\nrate: share of blocks hit{with_those}; best: upper bound of any policy "
        "(clairvoyant)",
    )  # fmt: skip
    for hint in dict.fromkeys(hint for row in rows for hint in row["hints"]):
        Console().print(f"hint: {hint}", highlight=False, markup=False)


def _summary(rows: Sequence[Row], policy: str) -> Row:
    if len(rows) == 1:
        return rows[0]
    best = max(rows, key=lambda row: float(row["hit_rate"]))
    line = {"policy": policy, "best": best["policy"]}
    line |= {n: best[n] for n in ("hit_rate", "clairvoyant", "unlimited") if n in best}
    if "clairvoyant" in best:
        rates = {row["policy"]: row["hit_rate"] for row in rows}
        line["rates"] = rates | {"clairvoyant": best["clairvoyant"]}
    return line | {"policies": list(rows)}
