"""``kvrecall pool``: runs the node's pool service, and shows, checks and empties it.

``pool.service.admin`` has the commands on blocks. Here a function makes each from options: its
docstring is the help, and ``@command`` adds the options that all have. ``--json`` prints a
command's result, else ``shown_as`` makes it readable.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvrecall.block import NAMESPACE_BYTES
from kvrecall.commands import Json, progress_bar, take_options
from kvrecall.config import (
    PoolConfig,
    default_socket,
    format_count,
    format_size,
    help_of,
    option_of,
    parse_age,
    parse_size,
    parse_tenant,
    service_settings,
    split_address,
)
from kvrecall.errors import ConfigError, ExitStatus, errors_shown
from kvrecall.events.publisher import EventPublisher, endpoint_of
from kvrecall.jsonfile import read_under
from kvrecall.pool.base import TierStats
from kvrecall.pool.cipher import make_key_file, rotate_key_file
from kvrecall.pool.pool import Pool
from kvrecall.pool.remote.mooncake.master import MasterFlags, check_master, run_master
from kvrecall.pool.service.admin import (
    SORTS,
    By,
    Command,
    Drop,
    FolderAdmin,
    List,
    Listing,
    Overview,
    Pin,
    Query,
    Resize,
    ServiceAdmin,
    Stat,
    Verify,
)
from kvrecall.pool.service.endpoint import serve as run_service

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run the pool service of this node, and administer it or a disk folder.",
)

DEFAULT_SOCKET = default_socket()
_EVERY_S = 1.0
_TENANTS_SHOWN = 20

# -- the service ---


def _setting(key: str) -> Any:
    return typer.Option(help=help_of(key))


@app.command()
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="pool.json with any setting; the options below override it.")
    ] = None,
    socket: Annotated[
        str | None, typer.Option(help=f"Where to listen. Default: {DEFAULT_SOCKET}.")
    ] = None,
    host_size: Annotated[str | None, _setting("host_size")] = None,
    host_max_size: Annotated[str | None, _setting("host_max_size")] = None,
    disk_path: Annotated[str | None, _setting("disk_path")] = None,
    disk_size: Annotated[str | None, _setting("disk_size")] = None,
    disk_compression: Annotated[str | None, _setting("disk_compression")] = None,
    policy: Annotated[str | None, _setting("policy")] = None,
    encryption_key_file: Annotated[str | None, _setting("encryption_key_file")] = None,
    ttl: Annotated[str | None, _setting("ttl")] = None,
    write_policy: Annotated[str | None, _setting("write_policy")] = None,
    tenant_quota: Annotated[str | None, _setting("tenant_quota")] = None,
    read_only_namespaces: Annotated[list[str] | None, _setting("read_only_namespaces")] = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Publish KV events at this port of 127.0.0.1 or HOST, replay at the next one.",
        ),
    ] = None,
    events_topic: Annotated[
        str, typer.Option(help="Topic of the KV events, for subscribers that ask for one.")
    ] = "",
) -> None:
    """Run the pool of this node for all its engines, until SIGTERM."""
    with errors_shown():
        own = ("config", "events", "events_topic")
        given = {k: v for k, v in context.params.items() if v is not None and k not in own}
        if events is None and events_topic:
            raise ConfigError("--events-topic: no events are published; give --events as well")
        publish = None
        if events is not None:
            host, port = endpoint_of(events)

            def publish(pool: Pool) -> Callable[[], None]:
                return EventPublisher(pool, host, port, events_topic).close

        pool, path = service_settings(*read_under(config, given, option_of))
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        run_service(pool, path, lambda: _announce(pool, path), publish)


def _announce(config: PoolConfig, path: Path) -> None:
    disk = config.disk
    shown = f"{format_size(disk.capacity_bytes)} in {disk.path}" if disk else "none"
    text = f"kvrecall: pool service on {path}: host {format_size(config.host_bytes)}, disk {shown}"
    marked = " ".join(config.terms.read_only_namespaces)
    text += f", read-only {marked}" if marked else ""
    typer.echo(text + (f", remote {config.remote.kind}" if config.remote else ""))


@app.command(context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
def master(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port for RPC.", min=1, max=65535)] = 50051,
    metrics_port: Annotated[int, typer.Option(help="Port for metrics.", min=1, max=65535)] = 9003,
    eviction_high_watermark_ratio: Annotated[
        float, typer.Option(help="Share of memory in use at which eviction starts.", min=0, max=1)
    ] = 0.8,
    eviction_ratio: Annotated[
        float, typer.Option(help="Share of objects evicted at a time.", min=0, max=1)
    ] = 0.05,
    rpc_thread_num: Annotated[int, typer.Option(help="RPC threads.", min=1)] = 128,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="Allow addresses beyond loopback.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the master's log.")] = False,
    check: Annotated[
        str | None, typer.Option(help="Only test that the master at HOST:PORT answers.")
    ] = None,
) -> None:
    """Run Mooncake's master until SIGTERM, or test one that is running."""
    with errors_shown():
        if check is not None:
            address = split_address(check)
            if address is None:
                raise ConfigError(f"--check: {check!r}; write HOST:PORT, e.g. 127.0.0.1:50051")
            seconds = check_master(*address)
            typer.echo(
                f"kvrecall: the Mooncake master at {check} answers (joined in {seconds:.1f} s)"
            )
            return
        flags = MasterFlags(
            host, port, metrics_port, eviction_high_watermark_ratio, eviction_ratio,
            rpc_thread_num, allow_plaintext,
        )  # fmt: skip
        started = f"kvrecall: Mooncake master on {host}:{port}, metrics on port {metrics_port}"
        status = run_master(flags, lambda: typer.echo(started), quiet=not verbose)
    raise typer.Exit(status)


@app.command()
def stat(
    socket: Socket = DEFAULT_SOCKET,
    json: Json = False,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
) -> None:
    """Watch a service: tiers, traffic, clients."""
    with errors_shown(), ServiceAdmin(socket) as admin:
        overview = admin.do(Stat())
        if json:
            typer.echo(msgspec.json.encode(overview).decode())
            return
        console = Console(emoji=False)
        if once or not console.is_terminal:
            console.print(overview_of(overview, None, 0.0))
            return
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(overview_of(overview, None, 0.0), console=console, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(_EVERY_S)
                before, overview = overview, admin.do(Stat())
                live.update(overview_of(overview, before, _EVERY_S), refresh=True)


@app.command()
def key(
    file: Annotated[Path, typer.Argument(help="File to create, readable by its owner only.")],
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Add a new key for encryption; those in the file still decrypt."
        ),
    ] = False,
) -> None:
    """Create a key for encryption_key_file (AES-256-GCM)."""
    with errors_shown():
        if rotate:
            typer.echo(f"{file}: {rotate_key_file(file)} keys; the first one is new and encrypts")
        else:
            make_key_file(file)
            typer.echo(f"{file}: a new key; set encryption_key_file to this path, and keep a copy")


# -- commands on blocks ---

Socket = Annotated[Path, typer.Option(help="The service's socket.")]
_Size = Annotated[str | None, typer.Option(help="A size such as 50GiB.")]


def _option(kind: Any, text: str, *names: str) -> Any:
    """An option that may be left out."""
    return Annotated[kind, typer.Option(*names, help=text)], None


def _names(name: str, text: str) -> Any:
    """A repeatable option with a short form."""
    return _option(list[str] | None, text, f"--{name}", f"-{name[0]}")


_FOLDER = {
    "disk_path": _option(Path | None, "A disk folder that no pool uses, instead of a service."),
    "encryption_key_file": _option(Path | None, "Key file of a folder with encrypted blocks."),
}
_QUERY = {
    "namespace": _names("namespace", "Only this namespace: its digest, or a prefix of it."),
    "model": _names("model", "Only models whose description contains this text."),
    "tenant": _names("tenant", "Only this tenant: as `ls --by tenant` prints it, or salt:SALT."),
    "block": _option(str | None, "Only the prefix that ends with this block (ls --by chain)."),
    "tier": _option(str | None, "Only blocks in this tier: host or disk."),
    "older_than": _option(str | None, "Only blocks not used for this long, e.g. 90m, 12h, 7d."),
    "younger_than": _option(str | None, "Only blocks used within this time, e.g. 90m, 12h, 7d."),
    "pinned": _option(bool | None, "Only pinned blocks, or only others.", "--pinned/--not-pinned"),
}
"""Options that select blocks."""
_WHOSE = ("namespace", "model", "tenant")
_DELETING = {
    "dry_run": (Annotated[bool, typer.Option("--dry-run", help="Count; delete nothing.")], False),
    "yes": (Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")], False),
}


def _ask(counted: Mapping[str, int] | None) -> None:
    """Asks on the terminal before blocks are deleted: as many as ``counted``, or damaged ones.
    Raises ConfigError without a terminal; ends the command unless the answer is yes."""
    if not sys.stdin.isatty():
        raise ConfigError("this deletes blocks; add --yes, or --dry-run to count them first")
    what = f"{counted['dropped']:,} blocks" if counted else "blocks that turn out damaged"
    print(f"Delete {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SystemExit(ExitStatus.FAILED)


def command(*which: str) -> Callable[[Callable[..., Command[Any]]], None]:
    """Adds a function that makes a command from options to the command line. With ``which``, names
    of options in ``_QUERY``, its first argument is the query that they make."""

    def add(make: Callable[..., Command[Any]]) -> None:
        own = inspect.signature(make, eval_str=True)
        taken: dict[str, tuple[Any, Any]] = {"socket": (Socket, DEFAULT_SOCKET)}
        taken |= _FOLDER if own.return_annotation.on_folder else {}
        taken |= {name: _QUERY[name] for name in which}
        taken |= {
            one.name: (one.annotation, one.default)
            for one in own.parameters.values()
            if one.name != "query"
        }
        deletes = own.return_annotation in (Drop, Verify)
        taken |= _DELETING if deletes else {}
        taken["json"] = Json, False

        def run(socket: Path, json: bool, **options: Any) -> None:
            with errors_shown():
                folder, key_file = (options.pop(name, None) for name in _FOLDER)
                dry_run, yes = (options.pop(name, False) for name in _DELETING)
                query = {name: options.pop(name) for name in which}
                order = make(*([_query(**query)] if which else []), **options)
                with progress_bar(f"opening {folder or socket}"):
                    opened = FolderAdmin(folder, key_file) if folder else ServiceAdmin(socket)
                with opened as admin:
                    if deletes:
                        trial = msgspec.structs.replace(order, dry_run=True)
                        order = trial if dry_run else order
                        if not (dry_run or yes):
                            _ask(admin.do(trial) if isinstance(trial, Drop) else None)
                    with progress_bar(order.progress) as progress:
                        result = admin.do(order, progress)
                if json:
                    typer.echo(msgspec.json.encode(result).decode())
                elif isinstance(result, Listing):
                    Console(emoji=False).print(listing_of(result))
                else:
                    print(shown_as(result, order))
            if isinstance(order, Verify) and result["damaged"]:
                raise typer.Exit(1)

        take_options(run, taken)
        app.command(make.__name__, help=inspect.getdoc(make))(run)

    return add


@command(*_QUERY)
def ls(
    query: Query,
    by: Annotated[By, typer.Option(help="What each row represents.")] = By.NAMESPACE,
    sort: Annotated[str, typer.Option(help=f"One of: {', '.join(SORTS)}.")] = "size",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows (10,000).")] = 100,
) -> List:
    """List the contents of the pool."""
    return List(query, by, sort, limit)


@command(*_WHOSE)
def verify(query: Query) -> Verify:
    """Read and check every block on disk; delete damaged ones. Exits with 1 if there were any."""
    return Verify(query)


@command(*_WHOSE, "older_than")
def drop(
    query: Query,
    with_pinned: Annotated[
        bool, typer.Option("--with-pinned", help="Also drop pinned blocks.")
    ] = False,
) -> Drop:
    """Drop the blocks that match all of these conditions."""
    if query == Query():
        raise ConfigError(
            "select what to drop: --namespace, --model, --tenant, --older-than; or use: pool clear"
        )
    return Drop(query, with_pinned)


@command()
def clear() -> Drop:
    """Drop every block that is not in use, pinned or not."""
    return Drop(Query(), True)


@command(*_WHOSE, "block")
def pin(query: Query) -> Pin:
    """Protect blocks from eviction and expiry, also after restarts."""
    return Pin(_some(query), True)


@command(*_WHOSE, "block")
def unpin(
    query: Query,
    everything: Annotated[bool, typer.Option("--all", help="Unpin all blocks.")] = False,
) -> Pin:
    """Allow eviction of pinned blocks again."""
    return Pin(replace(query, pinned=True) if everything else _some(query), False)


@command()
def resize(host: _Size = None, disk: _Size = None) -> Resize:
    """Change the memory and disk of a service until its next restart.

    Shrinking drops the least valuable blocks and waits until they are gone; if interrupted, it
    continues in the service. The host can grow up to the service's host_max_size.
    """
    if host is None and disk is None:
        raise ConfigError("specify the tier to resize: --host, --disk")
    return Resize(_size(host, "--host"), _size(disk, "--disk"))


def _some(query: Query) -> Query:
    if query == Query():
        raise ConfigError("select blocks: --block, --namespace, --model or --tenant")
    return query


def _size(text: str | None, name: str) -> int | None:
    nbytes = None if text is None else parse_size(text, name)
    if nbytes == 0:
        raise ConfigError(f"{name}: it must be more than 0")
    return nbytes


def _query(
    tenant: list[str] | None = None,
    older_than: str | None = None,
    younger_than: str | None = None,
    **given: Any,
) -> Query:
    return Query(
        namespaces=tuple(given.get("namespace") or ()),
        models=tuple(given.get("model") or ()),
        tenants=tuple(parse_tenant(name, "--tenant") for name in tenant or ()),
        block=given.get("block") or "",
        tier=given.get("tier") or "",
        older_than_s=None if older_than is None else parse_age(older_than, "--older-than"),
        younger_than_s=None if younger_than is None else parse_age(younger_than, "--younger-than"),
        pinned=given.get("pinned"),
    )


# -- for people -----------------------------------------------------------------------------


def shown_as(result: Any, order: Command[Any]) -> str:
    """The result of a command, for people."""
    match order:
        case Verify():
            deleted = "kept" if order.dry_run else "deleted"
            return f"{result['checked']} blocks checked, {result['damaged']} damaged ({deleted})"
        case Drop():
            pinned = result["pinned"]
            kept = f"; {pinned} pinned ones stay (--with-pinned)" if pinned else ""
            return f"{result['dropped']} blocks {'would be ' * order.dry_run}dropped{kept}"
        case Pin():
            word = "pinned" if order.on else "unpinned"
            return f"{result['blocks']} blocks ({format_size(result['bytes'])}) {word}"
    return "done; set host_size and disk_size as well to keep it after a restart"


def _duration(seconds: float) -> str:
    """Seconds, as people read them; ``-`` if there are none (less than 0)."""
    if seconds < 0:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _table(*columns: str, title: str | None = None, caption: str | None = None) -> Table:
    """Numbers stand to the right. Nothing is cut off: what is too long goes on below."""
    table = Table(title=title, caption=caption, collapse_padding=len(columns) > 5)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", overflow="fold")
    return table


def overview_of(now: Overview, before: Overview | None, seconds: float) -> RenderableType:
    """The service; with what moved in the ``seconds`` since ``before``."""
    stats = now.stats
    rate = 100 * stats.hits / stats.lookups if stats.lookups else 0.0
    head = (
        f"pool service {now.version}, process {now.pid}, up {_duration(now.uptime_s)}, at "
        f"{now.socket}\n"
        f"lookups {stats.lookups:,} blocks, found {rate:.1f} %; leases {stats.leases:,}, being "
        f"filled {stats.reserved:,}, refused {stats.refused:,}; queued: {stats.queued_writes:,} "
        f"writes, {stats.queued_reads:,} reads; connections rejected {now.rejected:,}\n"
        f"write policy {now.write_policy or 'through'}, unwritten "
        f"{format_size(stats.unwritten_bytes)}"
    )
    is_lost = any(client.lost for client in now.clients)
    clients = _table(
        "process", "since", "namespaces", "recalls", "being filled", "requests", "state",
        caption="lost: its slots are kept until its copies have ended" if is_lost else None,
    )  # fmt: skip
    for client in now.clients:
        numbers = (client.namespaces, client.tickets, client.reserved, client.requests)
        clients.add_row(
            str(client.pid), _duration(client.seconds), *map(format_count, numbers),
            "lost" if client.lost else "",
        )  # fmt: skip
    parts: list[RenderableType] = [Text(head), _tiers(now, before, seconds), clients]
    if now.tenant_count > 1:
        parts.append(_tenants(now))
    return Group(*parts)


def _tiers(now: Overview, before: Overview | None, seconds: float) -> Table:
    """A column for each tier: there are four at most, and numbers of any length fit."""
    earlier = {tier.name: tier for tier in before.stats.tiers} if before else {}

    def speed(tier: TierStats, name: str) -> str:
        then = earlier.get(tier.name)
        if then is None or seconds <= 0:
            return "-"
        return f"{format_size((getattr(tier, name) - getattr(then, name)) / seconds)}/s"

    def compressed(tier: TierStats) -> str:
        return f"{tier.compressed_bytes / tier.given_bytes:.0%}" if tier.given_bytes else "-"

    rows: dict[str, Callable[[TierStats], str]] = {
        "used": lambda tier: format_size(tier.used_bytes),
        "of": lambda tier: format_size(tier.capacity_bytes),
        "pinned": lambda tier: format_size(tier.pinned_bytes),
        "compressed to": compressed,
        "blocks": lambda tier: f"{tier.blocks:,}",
        "hits": lambda tier: f"{tier.hits:,}",
        "read": lambda tier: speed(tier, "read_bytes"),
        "written": lambda tier: speed(tier, "write_bytes"),
        "evicted": lambda tier: f"{tier.evictions:,}",
        "over quota": lambda tier: f"{tier.over_quota:,}",
        "shed": lambda tier: f"{tier.dropped:,}",
        "no room": lambda tier: "yes" if tier.full else "no",
        "errors": lambda tier: f"{tier.errors:,}",
        "corrupt": lambda tier: f"{tier.corrupt:,}",
    }
    table = _table("tier", *(tier.name for tier in now.stats.tiers))
    for title, show in rows.items():
        cells = [Text(show(tier)) for tier in now.stats.tiers]
        if title == "compressed to" and all(cell.plain == "-" for cell in cells):
            continue
        for cell in cells:
            if title in ("no room", "errors", "corrupt") and cell.plain not in ("0", "no"):
                cell.stylize("bold red")
        table.add_row(title, *cells)
    return table


def _tenants(now: Overview) -> Table:
    shown, count = now.tenants[:_TENANTS_SHOWN], now.tenant_count
    title = f"tenants ({len(shown)} of {count})" if count > len(shown) else "tenants"
    table = _table("tenant", "in host", "of", "on disk", "of", "refused", "evicted", title=title)
    for view in shown:
        sizes = (view.host_bytes, view.host_limit, view.disk_bytes, view.disk_limit)
        table.add_row(
            view.tenant, *("-" if nbytes is None else format_size(nbytes) for nbytes in sizes),
            format_count(view.refused), format_count(view.evicted),
        )  # fmt: skip
    return table


def listing_of(found: Listing) -> Table:
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
        tiers = (row.host_blocks, row.host_bytes), (row.disk_blocks, row.disk_bytes)
        for blocks, nbytes in tiers:
            cells.append(f"{format_count(blocks)}\n{format_size(nbytes)}" if blocks else "-")
        cells.append(format_count(row.pinned_blocks))
        oldest = "" if by is By.BLOCK else f"\n{_duration(row.oldest_s)}"
        cells.append(_duration(row.youngest_s) + oldest)
        table.add_row(*map(Text, cells))
    return table
