"""``kvrecall simulate``: the hit rates of a trace, by capacity and policy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvrecall.config import DEFAULT_POLICY, format_count, format_size, parse_size
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.pool.eviction import POLICY_NAMES, make_policy
from kvrecall.simulate.groups import parse_groups, replay_groups
from kvrecall.simulate.replay import Outcome, TierSpec, clairvoyant_hits, replay
from kvrecall.simulate.trace import Trace, read_trace
from kvrecall.simulate.workload import WORKLOADS, make_workload

app = typer.Typer(add_completion=False)

Row = dict[str, Any]
"""A line of JSON, or a part of it."""

SYNTHETIC = "synthetic:"
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
        str, typer.Option(metavar="P", help=f"{', '.join(POLICY_NAMES)}, or all.")
    ] = DEFAULT_POLICY,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print only the line of JSON.")] = False,
) -> None:
    """Replay TRACE against a pool and report strict-prefix hit rates.

    A request hits a block if that block and all before it are in the pool; with --groups, up to the
    last block at which every group has what it needs. "best" is the exact upper bound of any
    policy, which knows the future (with --groups: of a pool without limit). The last line is JSON.
    """
    if groups:
        _simulate_groups(
            trace, groups, (capacity, tiers, policy), capacity_blocks + block_bytes, as_json
        )
        return
    with errors_shown():
        size = parse_size(block_bytes, "--block-bytes", 1) if block_bytes else 0
        if block_bytes and size <= 0:
            raise ConfigError(f"--block-bytes: {block_bytes!r} must be more than 0")
        specs = parse_tiers(capacity, capacity_blocks, tiers, size)
        names = POLICY_NAMES if policy == "all" else (policy,)
        for name in names:
            make_policy(name, specs[0].capacity)
        loaded = load_trace(trace)
    rows = _run(loaded, specs, names, size)
    if not as_json:
        _print_table(rows, size)
    typer.echo(json.dumps(_summary(rows, policy)))


def _simulate_groups(
    trace: str, groups: str, sized: tuple[str, str, str], others: str, as_json: bool
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
        names = POLICY_NAMES if policy == "all" else (policy,)
        for name in names:
            make_policy(name, 1)
        loaded = load_trace(trace)
    rooms = [(spec.name, spec.capacity) for spec in specs]
    with progress_bar("replaying", (len(names) + 1) * len(loaded.requests)) as advance:
        best = replay_groups(loaded, wanted, [("all", 1 << 62)], "fifo", advance).hit_rate
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
    if policy != "all":
        typer.echo(json.dumps(rows[0]))
        return
    first = max(rows, key=lambda row: float(row["hit_rate"]))
    kept = {name: first[name] for name in ("hit_rate", "unlimited")}
    typer.echo(json.dumps({"policy": "all", "best": first["policy"], **kept, "policies": rows}))


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


def parse_tiers(
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
    specs: list[TierSpec] = []
    for item in tiers.split(","):
        name, colon, amount = (part.strip() for part in item.partition(":"))
        if not colon or not name:
            raise ConfigError(f"--tiers: {item!r} is not NAME:SIZE, for example host:64GiB")
        if any(name == spec.name for spec in specs):
            raise ConfigError(f"--tiers: {name!r} is named twice")
        where = f"--tiers: {name}"
        is_count = re.fullmatch(r"[-\d]*", amount) is not None
        blocks = _blocks(amount, where) if is_count else _blocks_in(amount, where, block_bytes)
        specs.append(TierSpec(name, blocks))
    return tuple(specs)


def _blocks(text: str, name: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > 15 or int(digits) == 0:
        raise ConfigError(f"{name}: {text!r} is not a number of blocks; it must be 1 or more")
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


def load_trace(trace: str) -> Trace:
    """The trace of that file or ``synthetic:NAME``, with a progress bar on stderr. Raises
    ConfigError."""
    if trace.startswith(SYNTHETIC):
        return make_workload(trace.removeprefix(SYNTHETIC))
    path = Path(trace)
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    with progress_bar("reading", size) as advance:
        return read_trace(path, advance)


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
    }


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function to call with each finished part of ``total``; shows a progress bar if stderr is a
    terminal."""
    console = Console(stderr=True)
    done = shown = 0
    columns = TextColumn(title), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(title, total=total)

        def advance(part: int = 1) -> None:
            nonlocal done, shown
            done += part
            if done - shown >= total >> 8:
                shown = done
                bar.update(task, completed=done)

        yield advance


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
