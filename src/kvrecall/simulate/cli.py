"""``kvrecall simulate``: the hit rates of a trace, by capacity and policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Annotated, Any, get_args

import typer
from rich.console import Console, JustifyMethod
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
from kvrecall.simulate.groups import parse_groups, replay_groups
from kvrecall.simulate.replay import Outcome, TierSpec, clairvoyant_hits, replay
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
    if workload:
        with errors_shown():
            trace = _workload_of(trace, workload)
        if not (capacity or capacity_blocks or tiers):
            capacity_blocks = "" if groups else str(WORKLOAD_BLOCKS)
        policy = policy or ("" if hosts > 1 or store else ",".join(WORKLOAD_POLICIES))
    policy = policy or DEFAULT_POLICY
    if not trace:
        raise typer.BadParameter("give TRACE, a file, or --workload NAME")
    if hosts > 1 or store:
        sized = (capacity, capacity_blocks, tiers)
        _simulate_fleet(trace, hours, hosts, store, sized, block_bytes, policy, groups, as_json)
        return
    if groups:
        _simulate_groups(
            trace, hours, groups, (capacity, tiers, policy), capacity_blocks + block_bytes, as_json
        )
        return
    with errors_shown():
        size = block_size(block_bytes)
        specs = parse_tiers(capacity, capacity_blocks, tiers, size)
        names = _policies(policy)
        for name in names:
            make_policy(name, specs[0].capacity)
        loaded = load_trace(trace, hints, hours)
    rows = _run(loaded, specs, names, size)
    if not as_json:
        _print_table(rows, size)
    typer.echo(json.dumps(_summary(rows, policy)))


def _simulate_fleet(
    trace: str,
    hours: float | None,
    hosts: int,
    store: str,
    sized: tuple[str, str, str],
    block_bytes: str,
    policy: str,
    groups: str,
    as_json: bool,
) -> None:
    """The command for several hosts, or one with a store."""
    with errors_shown():
        if groups or policy == "all" or "," in policy:
            other = "--groups" if groups else f"--policy {policy}"
            raise ConfigError(f"{other} does not go together with --hosts and --store")
        size = block_size(block_bytes)
        specs = parse_tiers(*sized, size)
        behind = store_of(store, size)
        make_policy(policy, 1)
        loaded = load_trace(trace, hours=hours)
    routings = get_args(Routing)
    with progress_bar("replaying", len(routings) * len(loaded.requests)) as advance:
        outcomes = [
            replay_fleet(loaded, hosts, specs, behind, routing, policy, advance)
            for routing in routings
        ]
    rows = [_fleet_row(outcome, size) for outcome in outcomes]
    if not as_json:
        _print_fleet(loaded.name, hosts, outcomes, size)
    first = outcomes[0]
    line = {
        "trace": loaded.name,
        "policy": policy,
        "hosts": hosts,
        "requests": first.requests,
        "sessions": first.sessions,
        "blocks": first.accesses,
        "seconds": round(first.seconds, 1),
    }
    typer.echo(json.dumps(line | dict(zip(routings, rows, strict=True))))


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


def _print_fleet(name: str, hosts: int, outcomes: Sequence[FleetOutcome], block_bytes: int) -> None:
    def amount(blocks: float) -> str:
        return (
            format_size(int(blocks * block_bytes))
            if block_bytes
            else f"{blocks:,.1f}".removesuffix(".0")
        )

    first = outcomes[0]
    title = f"{name}: {first.requests:,} requests of {first.sessions:,} sessions on {hosts:,} hosts"
    table = Table(title=Text(title))
    for heading in ("sessions", "tier", "capacity, all", "hits", "rate", "written", "evicted"):
        left = heading in ("sessions", "tier")
        table.add_column(heading, justify="left" if left else "right")
    for outcome in outcomes:
        label: str = outcome.routing
        hits = 0
        for tier in outcome.tiers:
            hits += tier.hits
            table.add_row(
                label, tier.name, amount(tier.capacity), amount(tier.hits),
                f"{hits / outcome.accesses:.4f}", amount(tier.writes), amount(tier.evictions),
            )  # fmt: skip
            label = ""
    table.caption = (
        "sticky: a session stays on one host; spread: each request goes to any\n"
        "rate: share of blocks hit by the tier and those before it"
    )
    console = Console()
    console.print(table)
    network = Table(title="a second, on average and in the busiest minute, of all hosts")
    for heading in ("sessions", "from the store", "at most", "to the store", "at most",
                    "busiest host"):  # fmt: skip
        network.add_column(heading, justify="left" if heading == "sessions" else "right")
    for outcome in outcomes:
        traffic, seconds = outcome.traffic, max(outcome.seconds, 1.0)
        network.add_row(
            outcome.routing,
            amount(traffic.read / seconds),
            amount(traffic.most_read / WINDOW_S),
            amount(traffic.written / seconds),
            amount(traffic.most_written / WINDOW_S),
            f"{outcome.busiest:.2f} of the mean",
        )
    network.caption = f"in {'bytes' if block_bytes else 'blocks; --block-bytes gives bytes'}"
    console.print(network)


def _simulate_groups(
    trace: str,
    hours: float | None,
    groups: str,
    sized: tuple[str, str, str],
    others: str,
    as_json: bool,
) -> None:
    """The command for a model with several KV groups."""
    capacity, tiers, policy = sized
    with errors_shown():
        if others:
            raise ConfigError(
                "--groups has sizes of its own: without --capacity-blocks, --block-bytes"
            )
        wanted = parse_groups(groups)
        smallest = sum(group.nbytes for group in wanted)
        specs = parse_tiers(capacity, "", tiers, 1)
        for spec in specs:
            if spec.capacity < smallest:
                raise ConfigError(
                    f"{spec.name}: {format_size(spec.capacity)} is less than a record of each "
                    f"group ({format_size(smallest)})"
                )
        names = _policies(policy)
        for name in names:
            make_policy(name, 1)
        loaded = load_trace(trace, hours=hours)
    rooms = [(spec.name, spec.capacity) for spec in specs]
    with progress_bar("replaying", (len(names) + 1) * len(loaded.requests)) as advance:
        best = replay_groups(loaded, wanted, [("all", 1 << 62)], "lru", advance).hit_rate
        outcomes = [replay_groups(loaded, wanted, rooms, name, advance) for name in names]
    rows: list[Row] = [
        {
            "policy": outcome.policy,
            "hit_rate": round(outcome.hit_rate, 6),
            "unlimited": round(best, 6),
            "trace": loaded.name,
            "requests": outcome.requests,
            "blocks": outcome.accesses,
            "hits": outcome.hits,
            "groups": groups,
            "read_bytes": outcome.moved,
            "tiers": [asdict(tier) for tier in outcome.tiers],
        }
        for outcome in outcomes
    ]
    if not as_json:
        _print_groups(rows)
    if len(names) == 1:
        typer.echo(json.dumps(rows[0]))
        return
    first = max(rows, key=lambda row: float(row["hit_rate"]))
    kept = {name: first[name] for name in ("hit_rate", "unlimited")}
    typer.echo(json.dumps({"policy": policy, "best": first["policy"], **kept, "policies": rows}))


def _print_groups(rows: Sequence[Row]) -> None:
    first = rows[0]
    title = f"{first['trace']}: {first['requests']:,} requests, {first['blocks']:,} blocks"
    table = Table(title=Text(title))
    for heading in ("policy", "rate", "best", "tier", "capacity", "read", "written", "evicted",
                    "bypassed"):  # fmt: skip
        justify: JustifyMethod = "left" if heading in ("policy", "tier") else "right"
        table.add_column(heading, justify=justify)
    for row in rows:
        shown = (row["policy"], f"{row['hit_rate']:.4f}", f"{row['unlimited']:.4f}")
        for tier in row["tiers"]:
            amounts = ("capacity", "read", "written", "evicted", "bypassed")
            table.add_row(*shown, tier["name"], *(format_size(tier[name]) for name in amounts))
            shown = ("", "", "")
    of_each = ", ".join(f"{kind} {format_size(n)}" for kind, n in first["read_bytes"].items())
    table.caption = (
        f"rate: share of the blocks that is hit by every group ({first['policy']} read {of_each});"
        "\nbest: in a pool without limit"
    )
    Console().print(table)


def _run(
    trace: Trace, specs: Sequence[TierSpec], names: Sequence[str], block_bytes: int
) -> list[Row]:
    """A row of JSON for each policy."""
    rooms = accumulate(spec.capacity for spec in specs)
    with progress_bar("replaying", (len(names) + len(specs)) * len(trace.requests)) as advance:
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
            row["capacity_bytes"] = tier.capacity * block_bytes
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
        "hints": hints_of(outcome, bounds),
        "client_hints": asdict(outcome.client_hints),
        "tenants": {name: round(count.hit_rate, 6) for name, count in outcome.tenants.items()}
        if len(outcome.tenants) > 1
        else {},
    }


def _workload_of(trace: str, workload: str) -> str:
    """The name for ``load_trace``. Raises ConfigError if both are given."""
    if trace:
        raise ConfigError(f"--workload: {workload!r}, but {trace!r} is given as TRACE; give one")
    return SYNTHETIC + workload


def _policies(names: str) -> tuple[str, ...]:
    return POLICY_NAMES if names == "all" else tuple(dict.fromkeys(names.split(",")))


def hints_of(outcome: Outcome, bounds: Sequence[float]) -> list[str]:
    """Why a tier adds less than half a per cent to the tiers before it, and what to do. ``bounds``:
    the best possible hit rate of each tier together with those before it."""
    if not outcome.hits:
        why = "blocks are evicted before they are used again; try a larger pool"
        return [f"nothing is hit: {why if bounds[-1] else 'no block of the trace is used twice'}"]
    hints = []
    for place, tier in enumerate(outcome.tiers[1:], 1):
        if tier.hits > _LITTLE * outcome.accesses:
            continue
        before = outcome.tiers[:place]
        names = " and ".join(each.name for each in before)
        if not any(each.evictions for each in before):
            why = f"{names} holds the whole trace without evicting a block"
        elif bounds[place] - bounds[place - 1] <= _LITTLE:
            why = f"with {names} alone the best possible is about the same"
        elif tier.capacity <= max(each.capacity for each in before):
            why = f"it is no larger than {names}, whose blocks it holds too; try a larger one"
        else:
            why = "its blocks are evicted before they are used again; try a larger one"
        hints.append(f"{tier.name} adds {'little' if tier.hits else 'nothing'}: {why}")
    return hints


def _print_table(rows: Sequence[Row], block_bytes: int) -> None:
    def amount(blocks: int) -> str:
        return format_size(blocks * block_bytes) if block_bytes else format_count(blocks)

    console = Console()
    first = rows[0]
    table = Table(
        title=Text(f"{first['trace']}: {first['requests']:,} requests, {first['blocks']:,} blocks"),
        padding=(0, 1) if console.width >= 100 else 0,
    )
    for heading in ("policy", "tier", "capacity", "hits", "rate", "best", "of it",
                    "written", "evicted", "bypassed"):  # fmt: skip
        justify: JustifyMethod = "left" if heading in ("policy", "tier") else "right"
        table.add_column(heading, justify=justify)
    for row in rows:
        for tier in row["tiers"]:
            rate, bound = tier["hit_rate_up_to_here"], tier["clairvoyant_up_to_here"]
            moved = (tier[f"{name}_blocks"] for name in ("written", "evicted", "bypassed"))
            table.add_row(
                row["policy"], tier["tier"], amount(tier["capacity_blocks"]), amount(tier["hits"]),
                f"{rate:.4f}", f"{bound:.4f}", f"{rate / bound:.0%}" if bound else "-",
                *map(amount, moved),
            )  # fmt: skip
    unit = (
        f"bytes, at {format_size(block_bytes)} a block"
        if block_bytes
        else "blocks; --block-bytes SIZE gives bytes"
    )
    with_those = " by the tier and those before it" if len(first["tiers"]) > 1 else ""
    table.caption = (
        f"in {unit}\nrate: share of blocks hit{with_those}; best: upper bound of any policy "
        "(clairvoyant)"
    )
    console.print(table)
    for hint in dict.fromkeys(hint for row in rows for hint in row["hints"]):
        console.print(f"hint: {hint}", highlight=False, markup=False)


def _summary(rows: Sequence[Row], policy: str) -> Row:
    if len(rows) == 1:
        return rows[0]
    best = max(rows, key=lambda row: float(row["hit_rate"]))
    return {
        "policy": policy,
        "best": best["policy"],
        "hit_rate": best["hit_rate"],
        "clairvoyant": best["clairvoyant"],
        "rates": {row["policy"]: row["hit_rate"] for row in rows}
        | {"clairvoyant": best["clairvoyant"]},
        "policies": list(rows),
    }
