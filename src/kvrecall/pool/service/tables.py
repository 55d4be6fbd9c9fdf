"""Tables for people."""

from __future__ import annotations

import json

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrecall.pool.base import TierStats
from kvrecall.pool.service.views import ClientView, Listing, NamespaceView, Overview
from kvrecall.pool.slots import slot_bytes_of


def size(nbytes: float) -> str:
    """Bytes, as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
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
        f"{stats.queued_reads} reads; connections rejected {now.rejected}"
    )
    return Group(Text(head), _tiers(now, before, seconds), _clients(now.clients))


def _tiers(now: Overview, before: Overview | None, seconds: float) -> Table:
    table = Table("tier", "used", "of", "blocks", "hits", "read/s", "written/s", "evicted")
    for title in ("shed", "errors", "corrupt"):
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
            *map(str, (tier.evictions, tier.dropped, tier.errors, tier.corrupt)),
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


def listing(rows: Listing) -> Table:
    table = Table("namespace", "model", "block", "in host", "on disk", "last used", "oldest")
    for row in rows.namespaces:
        slot = slot_bytes_of(row.block_bytes)
        table.add_row(
            row.digest[:12],
            Text(model_of(row)),
            size(row.block_bytes),
            f"{row.host_blocks} ({size(row.host_blocks * slot)})",
            f"{row.disk_blocks} ({size(row.disk_blocks * slot)})",
            duration(row.youngest_s),
            duration(row.oldest_s),
        )
    return table


def model_of(row: NamespaceView) -> str:
    """What a person calls the model of a namespace: architecture, types, adapter."""
    parts = row.parts
    name = parts.get("model", "")
    if "architecture" in parts:
        try:
            config = json.loads(parts["architecture"])
        except ValueError:
            config = {}
        if isinstance(config, dict):
            name = " ".join(map(str, config.get("architectures") or [])) or name
    words = [name, parts.get("dtype", "").removeprefix("torch."), parts.get("weights", "")[:20]]
    if "adapter" in parts:
        words.append(f"adapter {parts['adapter'][:12]}")
    return " ".join(word for word in words if word) or "unknown"
