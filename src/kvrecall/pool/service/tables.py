"""Tables for people."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from kvrecall.block import NAMESPACE_BYTES
from kvrecall.config import format_count, format_size
from kvrecall.pool.base import TierStats
from kvrecall.pool.service.inventory import (
    By,
    ClientView,
    Listing,
    OnProgress,
    Overview,
    TenantView,
)

_TENANTS_SHOWN = 20
_LONG_S = 1.0


def print_out(shown: RenderableType) -> None:
    """To standard output; text as it is."""
    if isinstance(shown, str):
        print(shown)
    else:
        Console().print(shown)


@contextlib.contextmanager
def progress(title: str) -> Iterator[OnProgress]:
    """On standard error, if that is a terminal: a bar, once it takes longer than a second."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda *_: None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=None)
    timer = threading.Timer(_LONG_S, bar.start)
    timer.start()
    try:
        yield lambda done, total: bar.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it is started or never will be
        bar.stop()


def duration(seconds: float) -> str:
    """Seconds, as people read them; ``-`` if there are none (less than 0)."""
    if seconds < 0:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def overview(now: Overview, before: Overview | None, seconds: float) -> RenderableType:
    """The service; with what moved in the ``seconds`` since ``before``."""
    stats = now.stats
    rate = 100 * stats.hits / stats.lookups if stats.lookups else 0.0
    head = (
        f"pool service {now.version}, process {now.pid}, up {duration(now.uptime_s)}, at "
        f"{now.socket}\n"
        f"lookups {stats.lookups:,} blocks, found {rate:.1f} %; leases {stats.leases:,}, being "
        f"filled {stats.reserved:,}, refused {stats.refused:,}; queued: {stats.queued_writes:,} "
        f"writes, {stats.queued_reads:,} reads; connections rejected {now.rejected:,}\n"
        f"write policy {now.write_policy or 'through'}, unwritten "
        f"{format_size(stats.unwritten_bytes)}"
    )
    parts: list[RenderableType] = [Text(head), _tiers(now, before, seconds), _clients(now.clients)]
    if now.tenant_count > 1:
        parts.append(tenants(now.tenants[:_TENANTS_SHOWN], now.tenant_count))
    return Group(*parts)


def _tiers(now: Overview, before: Overview | None, seconds: float) -> Table:
    """A column for each tier: there are four at most, and numbers of any length fit."""
    earlier = {tier.name: tier for tier in before.stats.tiers} if before else {}
    table = _table("tier", *(tier.name for tier in now.stats.tiers))

    def add(title: str, show: Callable[[TierStats], str], is_fault: bool = False) -> None:
        cells = [Text(show(tier)) for tier in now.stats.tiers]
        for cell in cells:
            if is_fault and cell.plain not in ("0", "no"):
                cell.stylize("bold red")
        table.add_row(title, *cells)

    def speed(name: str) -> Callable[[TierStats], str]:
        def show(tier: TierStats) -> str:
            then = earlier.get(tier.name)
            if then is None or seconds <= 0:
                return "-"
            return f"{format_size((getattr(tier, name) - getattr(then, name)) / seconds)}/s"

        return show

    add("used", lambda tier: format_size(tier.used_bytes))
    add("of", lambda tier: format_size(tier.capacity_bytes))
    add("pinned", lambda tier: format_size(tier.pinned_bytes))
    if any(tier.given_bytes for tier in now.stats.tiers):
        add("compressed to", _compressed)
    add("blocks", lambda tier: f"{tier.blocks:,}")
    add("hits", lambda tier: f"{tier.hits:,}")
    add("read", speed("read_bytes"))
    add("written", speed("write_bytes"))
    add("evicted", lambda tier: f"{tier.evictions:,}")
    add("over quota", lambda tier: f"{tier.over_quota:,}")
    add("shed", lambda tier: f"{tier.dropped:,}")
    add("no room", lambda tier: "yes" if tier.full else "no", is_fault=True)
    add("errors", lambda tier: f"{tier.errors:,}", is_fault=True)
    add("corrupt", lambda tier: f"{tier.corrupt:,}", is_fault=True)
    return table


def _compressed(tier: TierStats) -> str:
    return f"{tier.compressed_bytes / tier.given_bytes:.0%}" if tier.given_bytes else "-"


def _table(first: str, *others: str, title: str | None = None, caption: str | None = None) -> Table:
    """Numbers stand to the right. Nothing is cut off: what is too long goes on below."""
    table = Table(title=title, caption=caption, collapse_padding=len(others) > 4)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _clients(clients: tuple[ClientView, ...]) -> Table:
    note = "lost: its slots are kept until its copies have ended"
    table = _table(
        "process", "since", "namespaces", "recalls", "being filled", "requests", "state",
        caption=note if any(client.lost for client in clients) else None,
    )  # fmt: skip
    for client in clients:
        numbers = (client.namespaces, client.tickets, client.reserved, client.requests)
        table.add_row(
            str(client.pid),
            duration(client.seconds),
            *map(format_count, numbers),
            "lost" if client.lost else "",
        )
    return table


def tenants(views: tuple[TenantView, ...], count: int) -> Table:
    """Some of ``count`` tenants: what they hold, of how much."""
    title = f"tenants ({len(views)} of {count})" if count > len(views) else "tenants"
    table = _table("tenant", "in host", "of", "on disk", "of", "refused", "evicted", title=title)
    for view in views:
        table.add_row(
            view.tenant,
            format_size(view.host_bytes),
            _limit(view.host_limit),
            format_size(view.disk_bytes),
            _limit(view.disk_limit),
            format_count(view.refused),
            format_count(view.evicted),
        )
    return table


def _limit(nbytes: int) -> str:
    return "-" if nbytes < 0 else format_size(nbytes)


def listing(found: Listing) -> Table:
    """What ``pool ls`` found; the columns are those that the kind of row has."""
    by, left = found.by, found.total - len(found.rows)
    is_named = by in (By.CHAIN, By.BLOCK)
    whose = [name for name in ("model", "tenant") if name != by]
    table = Table(
        caption=f"{left} more; see --limit" if left > 0 else None,
        collapse_padding=True,
        show_lines=by is not By.BLOCK,
    )
    table.add_column(str(by), no_wrap=by is not By.MODEL, overflow="fold")
    table.add_column(",\n".join(whose), overflow="fold")
    if is_named:
        table.add_column("depth", justify="right")
    for title in ("in host", "on disk", "pinned"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("last used" if by is By.BLOCK else "last used,\noldest", justify="right")
    for row in found.rows:
        name = row.name[2 * NAMESPACE_BYTES :] if is_named else row.name
        cells = [name[:12] if by in (By.CHAIN, By.BLOCK, By.NAMESPACE) else name]
        about = [getattr(row, each) or f"several {each}s" for each in whose]
        if row.group:
            about.append(f"group {row.group}")
        cells.append("\n".join(about))
        if is_named:
            cells.append(format_count(row.depth))
        cells += [
            _held(row.host_blocks, row.host_bytes),
            _held(row.disk_blocks, row.disk_bytes),
            format_count(row.pinned_blocks),
            duration(row.youngest_s) + ("" if by is By.BLOCK else f"\n{duration(row.oldest_s)}"),
        ]
        table.add_row(*map(Text, cells))
    return table


def _held(blocks: int, nbytes: int) -> str:
    return f"{format_count(blocks)}\n{format_size(nbytes)}" if blocks else "-"
