"""``kvrecall pool``: runs the node's pool service, and shows, checks and empties it.

``pool.service.admin`` has the commands on blocks. Here a function makes each from options: its
docstring is the help, and ``@command`` adds the options that all have. ``--json`` prints a
command's result, else ``_SHOWN`` makes it readable.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
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

from kvrecall.addresses import split_address
from kvrecall.block import NAMESPACE_BYTES
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
)
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.events.publisher import EventPublisher, endpoint_of
from kvrecall.jsonfile import read_under
from kvrecall.pool.base import TierStats
from kvrecall.pool.cipher import make_key_file, rotate_key_file
from kvrecall.pool.pool import Pool
from kvrecall.pool.remote.mooncake.master import MasterFlags, check_master, run_master
from kvrecall.pool.service.admin import (
    SORTS,
    By,
    ClientView,
    Command,
    Drop,
    Dropped,
    FolderAdmin,
    List,
    Listing,
    OnProgress,
    Overview,
    Pin,
    Pinned,
    Query,
    Resize,
    Resized,
    ServiceAdmin,
    Stat,
    TenantView,
    Verified,
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
_LONG_S = 1.0

# -- the service ---


@app.command()
def serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="pool.json with any setting; the options below override it.")
    ] = None,
    socket: Annotated[
        str | None, typer.Option(help=f"Where to listen. Default: {DEFAULT_SOCKET}.")
    ] = None,
    host_size: Annotated[str | None, typer.Option(help=help_of("host_size"))] = None,
    host_max_size: Annotated[str | None, typer.Option(help=help_of("host_max_size"))] = None,
    disk_path: Annotated[str | None, typer.Option(help=help_of("disk_path"))] = None,
    disk_size: Annotated[str | None, typer.Option(help=help_of("disk_size"))] = None,
    disk_compression: Annotated[str | None, typer.Option(help=help_of("disk_compression"))] = None,
    policy: Annotated[str | None, typer.Option(help=help_of("policy"))] = None,
    encryption_key_file: Annotated[
        str | None, typer.Option(help=help_of("encryption_key_file"))
    ] = None,
    ttl: Annotated[str | None, typer.Option(help=help_of("ttl"))] = None,
    write_policy: Annotated[str | None, typer.Option(help=help_of("write_policy"))] = None,
    tenant_quota: Annotated[str | None, typer.Option(help=help_of("tenant_quota"))] = None,
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
        given: dict[str, Any] = {k: v for k, v in context.params.items() if v is not None}
        given.pop("config", None)
        given.pop("events", None)
        given.pop("events_topic", None)
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
    typer.echo(
        f"kvrecall: pool service on {path}: host {format_size(config.host_bytes)}, disk "
        + (
            f"{format_size(config.disk.capacity_bytes)} in {config.disk.path}"
            if config.disk
            else "none"
        )
        + (f", remote {config.remote.kind}" if config.remote else "")
    )


@app.command()
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
    """Run Mooncake's master in the foreground, until SIGTERM; or test one that is running."""
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
            host,
            port,
            metrics_port,
            eviction_high_watermark_ratio,
            eviction_ratio,
            rpc_thread_num,
            allow_plaintext,
        )
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
        console = Console()
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Size = Annotated[str | None, typer.Option(help="A size such as 50GiB.")]


def _option(kind: Any, text: str, *names: str) -> Any:
    """An option that may be left out."""
    return Annotated[kind, typer.Option(*names, help=text)], None


_FOLDER = {
    "disk_path": _option(Path | None, "A disk folder that no pool uses, instead of a service."),
    "encryption_key_file": _option(Path | None, "Key file of a folder with encrypted blocks."),
}
_QUERY = {
    "namespace": _option(
        list[str] | None,
        "Only this namespace: its digest, or a prefix of it.",
        *("--namespace", "-n"),
    ),
    "model": _option(
        list[str] | None,
        "Only models whose description contains this text.",
        *("--model", "-m"),
    ),
    "tenant": _option(
        list[str] | None,
        "Only this tenant: as `ls --by tenant` prints it, or salt:SALT.",
        *("--tenant", "-t"),
    ),
    "block": _option(str | None, "Only the prefix that ends with this block (ls --by chain)."),
    "tier": _option(str | None, "Only blocks in this tier: host or disk."),
    "older_than": _option(str | None, "Only blocks not used for this long, e.g. 90m, 12h, 7d."),
    "younger_than": _option(str | None, "Only blocks used within this time, e.g. 90m, 12h, 7d."),
    "pinned": _option(bool | None, "Only pinned blocks, or only others.", "--pinned/--not-pinned"),
}
"""Options that select blocks."""
_WHOSE = ("namespace", "model", "tenant")


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
        taken["json"] = Json, False

        def run(socket: Path, json: bool, **options: Any) -> None:
            with errors_shown():
                folder, key_file = (options.pop(name, None) for name in _FOLDER)
                query = {name: options.pop(name) for name in which}
                order = make(*([_query(**query)] if which else []), **options)
                with progress_bar(f"opening {folder or socket}"):
                    opened = FolderAdmin(folder, key_file) if folder else ServiceAdmin(socket)
                with opened as admin, progress_bar(order.progress) as progress:
                    result = admin.do(order, progress)
                if json:
                    typer.echo(msgspec.json.encode(result).decode())
                else:
                    shown = shown_as(result, order)
                    print(shown) if isinstance(shown, str) else Console().print(shown)
                status = isinstance(result, Verified) and int(result.damaged > 0)
            if status:
                raise typer.Exit(status)

        run.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
                )
                for name, (kind, default) in taken.items()
            ]
        )
        run.__annotations__ = {name: kind for name, (kind, _) in taken.items()}
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
    """Read and check every block on disk; drop damaged ones. Exits with 1 if there were any."""
    return Verify(query)


@command(*_WHOSE, "older_than")
def drop(
    query: Query,
    with_pinned: Annotated[
        bool, typer.Option("--with-pinned", help="Also drop pinned blocks.")
    ] = False,
) -> Drop:
    """Drop blocks by namespace, model, tenant and age: those that match all conditions."""
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
    """Protect the present blocks from eviction and expiry, also after a restart."""
    return Pin(_some(query), True)


@command(*_WHOSE, "block")
def unpin(
    query: Query,
    everything: Annotated[bool, typer.Option("--all", help="Unpin all blocks.")] = False,
) -> Pin:
    """Allow eviction of pinned blocks again."""
    if everything:
        query = replace(query, pinned=True)
    return Pin(_some(query), False)


@command()
def resize(host: _Size = None, disk: _Size = None) -> Resize:
    """Change how much memory and disk a running service uses, until its next restart.

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


def shown_as(result: Any, order: Command[Any]) -> RenderableType:
    """The result of a command, for people."""
    match result:
        case Listing():
            return listing_of(result)
        case Verified(checked, damaged):
            return f"{checked} blocks checked, {damaged} damaged (and dropped)"
        case Dropped(dropped, pinned):
            kept = f"; {pinned} pinned ones stay (--with-pinned)" if pinned else ""
            return f"{dropped} blocks dropped{kept}"
        case Pinned(blocks, nbytes):
            word = "pinned" if isinstance(order, Pin) and order.on else "unpinned"
            return f"{blocks} blocks ({format_size(nbytes)}) {word}"
        case Resized():
            return "done; set host_size and disk_size as well to keep it after a restart"
    return str(result)


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[OnProgress]:
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


def _duration(seconds: float) -> str:
    """Seconds, as people read them; ``-`` if there are none (less than 0)."""
    if seconds < 0:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


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
    parts: list[RenderableType] = [Text(head), _tiers(now, before, seconds), _clients(now.clients)]
    if now.tenant_count > 1:
        parts.append(_tenants(now.tenants[:_TENANTS_SHOWN], now.tenant_count))
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
            _duration(client.seconds),
            *map(format_count, numbers),
            "lost" if client.lost else "",
        )
    return table


def _tenants(views: tuple[TenantView, ...], count: int) -> Table:
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
        cells += [
            _held(row.host_blocks, row.host_bytes),
            _held(row.disk_blocks, row.disk_bytes),
            format_count(row.pinned_blocks),
            _duration(row.youngest_s) + ("" if by is By.BLOCK else f"\n{_duration(row.oldest_s)}"),
        ]
        table.add_row(*map(Text, cells))
    return table


def _held(blocks: int, nbytes: int) -> str:
    return f"{format_count(blocks)}\n{format_size(nbytes)}" if blocks else "-"
