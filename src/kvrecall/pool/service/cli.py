"""``kvrecall pool``: run the node's pool service, look at it, check it, empty it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from kvrecall.config import DEFAULT_POLICY, RecallSettings
from kvrecall.errors import ConfigError
from kvrecall.jsonfile import read_json
from kvrecall.pool.keyfile import make_key_file, rotate_key_file
from kvrecall.pool.pool import Pool
from kvrecall.pool.remote.mooncake.master import MasterFlags, check_master, run_master
from kvrecall.pool.remote.mooncake.settings import split_address
from kvrecall.pool.service import commands, tables
from kvrecall.pool.service.admin import ServiceAdmin
from kvrecall.pool.service.choosing import DEFAULT_SOCKET, Json, Socket, errors_shown
from kvrecall.pool.service.serving import serve as run_service

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run the pool service of this node, and administer it or a disk folder.",
)

_EVERY_S = 1.0


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="pool.json with the same settings.")] = None,
    socket: Annotated[
        Path | None, typer.Option(help=f"Where to listen; default {DEFAULT_SOCKET}.")
    ] = None,
    host_size: Annotated[str | None, typer.Option(help="Memory for blocks; default 4GiB.")] = None,
    host_max_size: Annotated[
        str | None, typer.Option(help="How far resize may let it grow; default host-size.")
    ] = None,
    disk_path: Annotated[str | None, typer.Option(help="Folder for blocks on disk.")] = None,
    disk_size: Annotated[str | None, typer.Option(help="Hard limit of it, e.g. 100GiB.")] = None,
    policy: Annotated[
        str | None, typer.Option(help=f"Eviction policy; default {DEFAULT_POLICY}.")
    ] = None,
    encryption_key_file: Annotated[
        str | None, typer.Option(help="Seal blocks below the host with the key in this file.")
    ] = None,
    ttl: Annotated[
        str | None, typer.Option(help="Drop blocks not used for so long: 12h, 30d.")
    ] = None,
    write_policy: Annotated[
        str | None, typer.Option(help="through, back or selective; default through.")
    ] = None,
    tenant_quota: Annotated[
        str | None, typer.Option(help="Of each tier, for one cache_salt: 25% or 4GiB.")
    ] = None,
) -> None:
    """Run the pool of this node for all its engines, until SIGTERM."""
    options = {
        "socket": socket and str(socket),
        "host_size": host_size,
        "host_max_size": host_max_size,
        "disk_path": disk_path,
        "disk_size": disk_size,
        "policy": policy,
        "encryption_key_file": encryption_key_file,
        "ttl": ttl,
        "write_policy": write_policy,
        "tenant_quota": tenant_quota,
    }
    with errors_shown():
        raw: dict[str, object] = {}
        if config is not None:
            read = read_json(config).value
            if not isinstance(read, dict):
                raise ConfigError(f"{config}: must hold an object: {{...}}")
            raw = dict(read)
        raw |= {name: value for name, value in options.items() if value is not None}
        source = str(config or "options")
        path = _text_of(raw, "socket", source) or str(DEFAULT_SOCKET)
        if raw.pop("backend", "service") != "service":
            raise ConfigError(f"{source}: backend must be 'service' here, or absent")
        raw.pop("call_timeout", None)
        settings = RecallSettings.from_mapping(raw, source)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        run_service(settings.pool, Path(path), _announce(settings, path))


def _text_of(raw: dict[str, object], name: str, source: str) -> str:
    """Takes a setting of the service itself out of ``raw``; empty if it is not there."""
    value = raw.pop(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{source}: {name} is {value!r}; it must be a string")
    return value


def _announce(settings: RecallSettings, path: str) -> Callable[[Pool], None]:
    def announce(pool: Pool) -> None:
        disk, remote = settings.pool.disk, settings.pool.remote
        typer.echo(
            f"kvrecall: pool service on {path}: host {tables.size(settings.pool.host_bytes)}, disk "
            + (f"{tables.size(disk.capacity_bytes)} in {disk.path}" if disk else "none")
            + (f", remote {remote.kind}" if remote else "")
        )

    return announce


@app.command()
def master(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of its calls.", min=1, max=65535)] = 50051,
    metrics_port: Annotated[int, typer.Option(help="Port of its metrics.")] = 9003,
    eviction_high_watermark_ratio: Annotated[
        float, typer.Option(help="Share of the memory at which it starts to evict.", min=0, max=1)
    ] = 0.8,
    eviction_ratio: Annotated[
        float, typer.Option(help="Share of the objects it evicts then.", min=0, max=1)
    ] = 0.05,
    rpc_thread_num: Annotated[int, typer.Option(help="Threads for clients.", min=1)] = 128,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="Listen beyond loopback, unprotected.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Let it log what it does.")] = False,
    check: Annotated[
        str | None, typer.Option(help="Start nothing: join the master at HOST:PORT and leave.")
    ] = None,
) -> None:
    """Run Mooncake's master in the foreground, until SIGTERM; or check one that runs."""
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
        flags.command()  # says what is wrong with them
        typer.echo(f"kvrecall: Mooncake master on {host}:{port}, metrics on port {metrics_port}")
        status = run_master(flags, quiet=not verbose)
    raise typer.Exit(status)


@app.command()
def stat(
    socket: Socket = DEFAULT_SOCKET,
    json: Json = False,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
) -> None:
    """Watch a service: tiers, traffic, clients."""
    with errors_shown(), ServiceAdmin(socket) as admin:
        overview = admin.look()
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
                before, overview = overview, admin.look()
                live.update(tables.overview(overview, before, _EVERY_S), refresh=True)


@app.command()
def key(
    file: Annotated[Path, typer.Argument(help="File to make, of the owner's alone.")],
    rotate: Annotated[
        bool,
        typer.Option("--rotate", help="Put a new key before those in the file, which still open."),
    ] = False,
) -> None:
    """Make a key for encryption_key_file (AES-256-GCM)."""
    with errors_shown():
        if rotate:
            typer.echo(f"{file}: {rotate_key_file(file)} keys; the first, new one seals")
        else:
            make_key_file(file)
            typer.echo(f"{file}: a new key; set encryption_key_file to this path, and keep a copy")


app.command("ls")(commands.list_blocks)
for _command in (
    commands.verify,
    commands.drop,
    commands.clear,
    commands.pin,
    commands.unpin,
    commands.resize,
):
    app.command()(_command)
