"""Tables for people."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvrecall.block import NAMESPACE_BYTES
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


def print_out(shown: RenderableType) -> None:
    """To standard output; text as it is."""
    if isinstance(shown, str):
        print(shown)
    else:
        Console().print(shown)


@contextlib.contextmanager
def progress(title: str, shown: bool) -> Iterator[OnProgress]:
    """A progress bar, if there is a ``title``, while a command is carried out."""
    if not (title and shown):
        yield lambda *_: None
        return
    columns = TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def size(nbytes: float) -> str:
    """Bytes, as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


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
        f"lookups {stats.lookups} blocks, found {rate:.1f} %; leases {stats.leases}, being filled "
        f"{stats.reserved}, refused {stats.refused}; queued: {stats.queued_writes} writes, "
        f"{stats.queued_reads} reads; connections rejected {now.rejected}\n"
        f"write policy {now.write_policy or 'through'}, unwritten {size(stats.unwritten_bytes)}"
    )
    parts: list[RenderableType] = [Text(head), _tiers(now, before, seconds), _clients(now.clients)]
    if now.tenant_count > 1:
        parts.append(tenants(now.tenants[:_TENANTS_SHOWN], now.tenant_count))
    return Group(*parts)


def _tiers(now: Overview, before: Overview | None, seconds: float) -> Table:
    table = Table("tier", "used", "of", "blocks", "hits", "read/s", "written/s", "evicted")
    for title in ("shed", "over quota", "pinned", "errors", "corrupt"):
        table.add_column(title)
    earlier = {tier.name: tier for tier in before.stats.tiers} if before else {}
    for tier in now.stats.tiers:
        then = earlier.get(tier.name)
        table.add_row(
            tier.name,
            size(tier.used_bytes),
            size(tier.capacity_bytes),
            *map(str, (tier.blocks, tier.hits)),
            _speed(tier, then, "read_bytes", seconds),
            _speed(tier, then, "write_bytes", seconds),
            *map(str, (tier.evictions, tier.dropped, tier.over_quota)),
            size(tier.pinned_bytes),
            *map(str, (tier.errors, tier.corrupt)),
        )
    return table


def _speed(tier: TierStats, then: TierStats | None, name: str, seconds: float) -> str:
    if then is None or seconds <= 0:
        return "-"
    return size((getattr(tier, name) - getattr(then, name)) / seconds)


def _clients(clients: tuple[ClientView, ...]) -> Table:
    table = Table("process", "since", "namespaces", "recalls", "being filled", "requests", "")
    for client in clients:
        numbers = (client.namespaces, client.tickets, client.reserved, client.requests)
        state = "lost; its slots are kept until its copies have ended" if client.lost else ""
        table.add_row(str(client.pid), duration(client.seconds), *map(str, numbers), state)
    return table


def tenants(views: tuple[TenantView, ...], count: int) -> Table:
    """Some of ``count`` tenants: what they hold, of how much."""
    title = f"tenants ({len(views)} of {count})" if count > len(views) else "tenants"
    table = Table("tenant", "in host", "of", "on disk", "of", "refused", "evicted", title=title)
    for view in views:
        table.add_row(
            view.tenant,
            size(view.host_bytes),
            _limit(view.host_limit),
            size(view.disk_bytes),
            _limit(view.disk_limit),
            str(view.refused),
            str(view.evicted),
        )
    return table


def _limit(nbytes: int) -> str:
    return "-" if nbytes < 0 else size(nbytes)


def listing(found: Listing) -> Table:
    """What ``pool ls`` found; the columns are those that the kind of row has."""
    by, left = found.by, found.total - len(found.rows)
    is_named = by in (By.CHAIN, By.BLOCK)
    table = Table(caption=f"{left} more; see --limit" if left > 0 else None)
    table.add_column(str(by), no_wrap=True)
    if by is not By.MODEL:
        table.add_column("model")
    if is_named:
        table.add_column("depth", justify="right")
    if by is not By.TENANT:
        table.add_column("tenant")
    for title in ("in host", "on disk", "pinned", "last used", "oldest"):
        table.add_column(title, justify="right")
    for row in found.rows:
        name = row.name[2 * NAMESPACE_BYTES :][:16] if is_named else row.name
        cells = [name[:12] if by is By.NAMESPACE else name]
        if by is not By.MODEL:
            cells.append(row.model or "several")
        if is_named:
            cells.append(str(row.depth))
        if by is not By.TENANT:
            cells.append(row.tenant or "several")
        cells += [
            f"{row.host_blocks} ({size(row.host_bytes)})",
            f"{row.disk_blocks} ({size(row.disk_bytes)})",
            str(row.pinned_blocks),
            duration(row.youngest_s),
            duration(row.oldest_s),
        ]
        table.add_row(*map(Text, cells))
    return table
