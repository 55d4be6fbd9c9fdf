"""``kvrecall pool``: run the node's pool service, look at it, check it, empty it."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvrecall.config import RecallSettings, default_socket
from kvrecall.errors import ConfigError, KvrecallError
from kvrecall.jsonfile import read_json
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import tables
from kvrecall.pool.service.admin import Admin, FolderAdmin, ServiceAdmin
from kvrecall.pool.service.server import Terms
from kvrecall.pool.service.serving import serve as run_service

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Run the pool service of this node, and administer it or a disk folder.",
)

_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_EVERY_S = 1.0
_DEFAULT = default_socket()

Socket = Annotated[Path, typer.Option(help="The service's socket.")]
Folder = Annotated[
    Path | None,
    typer.Option("--disk-path", help="Instead of a service: a disk folder that none uses."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", "-n", help="Only this one: its digest or the beginning of it."),
]


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option(help="pool.json with the same settings.")] = None,
    socket: Annotated[
        Path | None, typer.Option(help=f"Where to listen; default {_DEFAULT}.")
    ] = None,
    host_size: Annotated[str | None, typer.Option(help="Memory for blocks; default 4GiB.")] = None,
    disk_path: Annotated[str | None, typer.Option(help="Folder for blocks on disk.")] = None,
    disk_size: Annotated[str | None, typer.Option(help="Hard limit of it, e.g. 100GiB.")] = None,
    policy: Annotated[str | None, typer.Option(help="Eviction policy; default lru.")] = None,
    ttl: Annotated[
        str | None, typer.Option(help="Drop blocks on disk not used for so long: 12h, 30d.")
    ] = None,
) -> None:
    """Run the pool of this node for all its engines, until SIGTERM."""
    options = {
        "socket": socket and str(socket),
        "host_size": host_size,
        "disk_path": disk_path,
        "disk_size": disk_size,
        "policy": policy,
        "ttl": ttl,
    }
    with _errors_shown():
        raw: dict[str, object] = {}
        if config is not None:
            read = read_json(config).value
            if not isinstance(read, dict):
                raise ConfigError(f"{config}: must hold an object: {{...}}")
            raw = dict(read)
        raw |= {name: value for name, value in options.items() if value is not None}
        source = str(config or "options")
        path = _text_of(raw, "socket", source) or str(_DEFAULT)
        age = _text_of(raw, "ttl", source)
        if raw.pop("backend", "service") != "service":
            raise ConfigError(f"{source}: backend must be 'service' here, or absent")
        raw.pop("call_timeout", None)
        settings = RecallSettings.from_mapping(raw, source)
        terms = Terms(ttl_s=_age(age, "ttl") if age else None)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        run_service(settings.pool, Path(path), _announce(settings, path), terms)


def _text_of(raw: dict[str, object], name: str, source: str) -> str:
    """Takes a setting of the service itself out of ``raw``; empty if it is not there."""
    value = raw.pop(name, "")
    if not isinstance(value, str):
        raise ConfigError(f"{source}: {name} is {value!r}; it must be a string")
    return value


def _announce(settings: RecallSettings, path: str) -> Callable[[Pool], None]:
    def announce(pool: Pool) -> None:
        disk = settings.pool.disk
        typer.echo(
            f"kvrecall: pool service on {path}: host {tables.size(settings.pool.host_bytes)}, disk "
            + (f"{tables.size(disk.capacity_bytes)} in {disk.path}" if disk else "none")
        )

    return announce


@app.command()
def stat(
    socket: Socket = _DEFAULT,
    json: Json = False,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
) -> None:
    """Watch a service: tiers, traffic, clients."""
    with _errors_shown(), ServiceAdmin(socket) as admin:
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


@app.command("ls")
def list_namespaces(
    socket: Socket = _DEFAULT, disk_path: Folder = None, json: Json = False
) -> None:
    """List what is in the pool, by model namespace."""
    with _errors_shown(), _admin(socket, disk_path) as admin:
        listing = admin.listing()
        if json:
            typer.echo(msgspec.json.encode(listing).decode())
        else:
            Console().print(tables.listing(listing))


@app.command()
def verify(
    socket: Socket = _DEFAULT,
    disk_path: Folder = None,
    namespace: Namespaces = None,
    json: Json = False,
) -> None:
    """Read and check every block on disk; drop the damaged. Ends with 1 if there were any."""
    with _errors_shown(), _admin(socket, disk_path) as admin:
        digests = _digests(admin, namespace)
        if json:
            checked, damaged = admin.verify(digests, lambda *_: None)
            typer.echo(msgspec.json.encode({"checked": checked, "damaged": damaged}).decode())
        else:
            with Progress(
                TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            ) as bar:
                task = bar.add_task("verifying", total=None)
                checked, damaged = admin.verify(
                    digests,
                    lambda done, total, bad: bar.update(task, completed=done, total=total),
                )
            typer.echo(f"{checked} blocks checked, {damaged} damaged (and dropped)")
    if damaged:
        raise typer.Exit(1)


@app.command()
def drop(
    socket: Socket = _DEFAULT,
    disk_path: Folder = None,
    namespace: Namespaces = None,
    older_than: Annotated[
        str | None, typer.Option(help="Only blocks on disk not used for so long: 90m, 12h, 7d.")
    ] = None,
    json: Json = False,
) -> None:
    """Drop blocks by namespace, age or both."""
    with _errors_shown(), _admin(socket, disk_path) as admin:
        if not namespace and older_than is None:
            raise ConfigError("say what to drop: --namespace, --older-than; or use: pool clear")
        age = None if older_than is None else _age(older_than, "--older-than")
        _report_dropped(admin.drop(_digests(admin, namespace), age), json)


@app.command()
def clear(socket: Socket = _DEFAULT, disk_path: Folder = None, json: Json = False) -> None:
    """Drop every block that is not in use."""
    with _errors_shown(), _admin(socket, disk_path) as admin:
        _report_dropped(admin.drop(()), json)


def _report_dropped(blocks: int, json: bool) -> None:
    typer.echo(f'{{"dropped":{blocks}}}' if json else f"{blocks} blocks dropped")


def _admin(socket: Path, disk_path: Path | None) -> Admin:
    return ServiceAdmin(socket) if disk_path is None else FolderAdmin(disk_path)


def _digests(admin: Admin, prefixes: list[str] | None) -> tuple[bytes, ...]:
    """Digests of the namespaces that were named. ConfigError if one is not there, or not one."""
    if not prefixes:
        return ()
    known = [row.digest for row in admin.listing().namespaces]
    chosen = []
    for prefix in prefixes:
        fitting = [digest for digest in known if digest.startswith(prefix.lower())]
        if len(fitting) != 1:
            many = f"{len(fitting)} namespaces begin" if fitting else "no namespace begins"
            raise ConfigError(f"--namespace: {many} with {prefix!r}; see: kvrecall pool ls")
        chosen.append(bytes.fromhex(fitting[0]))
    return tuple(chosen)


def _age(text: str, name: str) -> float:
    match = _AGE.fullmatch(text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{name}: {text!r} is no age; write for example 90m, 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]


@contextlib.contextmanager
def _errors_shown() -> Iterator[None]:
    try:
        yield
    except KvrecallError as error:
        typer.echo(f"kvrecall: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
