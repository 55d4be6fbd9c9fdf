"""``kvrecall pool``: runs the node's pool service, and shows, checks and empties it."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from kvrecall.addresses import split_address
from kvrecall.config import PoolConfig, format_size, help_of, option_of, service_settings
from kvrecall.errors import ConfigError, errors_shown
from kvrecall.jsonfile import read_object
from kvrecall.pool.cipher import make_key_file, rotate_key_file
from kvrecall.pool.remote.mooncake.master import MasterFlags, check_master, run_master
from kvrecall.pool.service import tables
from kvrecall.pool.service.admin import (
    DEFAULT_SOCKET,
    Json,
    ServiceAdmin,
    Socket,
    Stat,
    commands,
)
from kvrecall.pool.service.endpoint import serve as run_service
from kvrecall.pool.service.publisher import endpoint_of

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run the pool service of this node, and administer it or a disk folder.",
)

_EVERY_S = 1.0


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
        publish_at = None if events is None else (*endpoint_of(events), events_topic)
        if config is None:
            pool, path = service_settings(given, option_of)
        else:
            settings, document = read_object(config, "pool settings")
            pool, path = service_settings(
                settings | given,
                lambda key: option_of(key) if key in given else document.where_key(key),
            )
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        run_service(pool, path, lambda: _announce(pool, path), publish_at)


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
            console.print(tables.overview(overview, None, 0.0))
            return
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(tables.overview(overview, None, 0.0), console=console, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(_EVERY_S)
                before, overview = overview, admin.do(Stat())
                live.update(tables.overview(overview, before, _EVERY_S), refresh=True)


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


app.add_typer(commands)
