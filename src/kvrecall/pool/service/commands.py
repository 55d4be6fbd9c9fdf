"""``kvrecall pool ls|verify|drop|clear|pin|unpin|resize``."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from kvrecall.config import parse_size
from kvrecall.errors import ConfigError
from kvrecall.pool.service import tables
from kvrecall.pool.service.choosing import (
    DEFAULT_SOCKET,
    BlockName,
    Choice,
    Folder,
    Json,
    KeyFile,
    Models,
    Namespaces,
    OlderThan,
    Socket,
    Tenants,
    errors_shown,
    open_admin,
)
from kvrecall.pool.service.inventory import SORTS
from kvrecall.pool.service.views import By, Query

_SIZE = "A size such as 50GiB."


def list_blocks(
    socket: Socket = DEFAULT_SOCKET,
    disk_path: Folder = None,
    by: Annotated[By, typer.Option(help="What the rows are.")] = By.NAMESPACE,
    namespace: Namespaces = None,
    model: Models = None,
    tenant: Tenants = None,
    tier: Annotated[str, typer.Option(help="Only blocks there: host or disk.")] = "",
    older_than: OlderThan = None,
    younger_than: Annotated[
        str | None, typer.Option(help="Only blocks used since: 90m, 12h, 7d.")
    ] = None,
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--not-pinned", help="Only blocks that are (not).")
    ] = None,
    sort: Annotated[str, typer.Option(help=f"One of: {', '.join(SORTS)}.")] = "size",
    limit: Annotated[int, typer.Option(min=1, help="Rows at most (10,000).")] = 100,
    json: Json = False,
) -> None:
    """List what is in the pool."""
    choice = Choice(namespace, model, tenant, "", tier, older_than, younger_than, pinned)
    with errors_shown(), open_admin(socket, disk_path) as admin:
        if sort not in SORTS:
            raise ConfigError(f"--sort: {sort!r} is unknown; known: {', '.join(SORTS)}")
        found = admin.listing(choice.query(admin), by, sort, limit)
        if json:
            typer.echo(msgspec.json.encode(found).decode())
        else:
            Console().print(tables.listing(found))


def verify(
    socket: Socket = DEFAULT_SOCKET,
    disk_path: Folder = None,
    encryption_key_file: KeyFile = None,
    namespace: Namespaces = None,
    model: Models = None,
    tenant: Tenants = None,
    json: Json = False,
) -> None:
    """Read and check every block on disk; drop the damaged. Ends with 1 if there were any."""
    choice = Choice(namespace, model, tenant)
    with errors_shown(), open_admin(socket, disk_path, encryption_key_file) as admin:
        query = choice.query(admin)
        if json:
            checked, damaged = admin.verify(query, lambda *_: None)
            typer.echo(msgspec.json.encode({"checked": checked, "damaged": damaged}).decode())
        else:
            with Progress(
                TextColumn("verifying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            ) as bar:
                task = bar.add_task("verifying", total=None)
                checked, damaged = admin.verify(
                    query,
                    lambda done, total, bad: bar.update(task, completed=done, total=total),
                )
            typer.echo(f"{checked} blocks checked, {damaged} damaged (and dropped)")
    if damaged:
        raise typer.Exit(1)


def drop(
    socket: Socket = DEFAULT_SOCKET,
    disk_path: Folder = None,
    namespace: Namespaces = None,
    model: Models = None,
    tenant: Tenants = None,
    older_than: OlderThan = None,
    pinned: Annotated[bool, typer.Option("--with-pinned", help="Pinned blocks, too.")] = False,
    json: Json = False,
) -> None:
    """Drop blocks by namespace, model, tenant and age: those that fit all that is said."""
    choice = Choice(namespace, model, tenant, older_than=older_than)
    with errors_shown(), open_admin(socket, disk_path) as admin:
        if choice.is_all:
            raise ConfigError(
                "say what to drop: --namespace, --model, --tenant, --older-than; or use: pool clear"
            )
        _report_dropped(*admin.drop(choice.query(admin), pinned), json)


def clear(socket: Socket = DEFAULT_SOCKET, disk_path: Folder = None, json: Json = False) -> None:
    """Drop every block that is not in use, pinned or not."""
    with errors_shown(), open_admin(socket, disk_path) as admin:
        _report_dropped(*admin.drop(Query(), True), json)


def _report_dropped(blocks: int, kept: int, json: bool) -> None:
    if json:
        typer.echo(msgspec.json.encode({"dropped": blocks, "pinned": kept}).decode())
    else:
        rest = f"; {kept} pinned ones stay (--with-pinned)" if kept else ""
        typer.echo(f"{blocks} blocks dropped{rest}")


def pin(
    socket: Socket = DEFAULT_SOCKET,
    disk_path: Folder = None,
    namespace: Namespaces = None,
    model: Models = None,
    tenant: Tenants = None,
    block: BlockName = "",
    json: Json = False,
) -> None:
    """Keep blocks that are there now from being evicted or expired, also after a restart."""
    _pin(Choice(namespace, model, tenant, block), (socket, disk_path), True, json)


def unpin(
    socket: Socket = DEFAULT_SOCKET,
    disk_path: Folder = None,
    namespace: Namespaces = None,
    model: Models = None,
    tenant: Tenants = None,
    block: BlockName = "",
    everything: Annotated[bool, typer.Option("--all", help="Whatever is pinned.")] = False,
    json: Json = False,
) -> None:
    """Let pinned blocks be evicted again."""
    choice = Choice(namespace, model, tenant, block, pinned=True if everything else None)
    _pin(choice, (socket, disk_path), False, json)


def _pin(choice: Choice, where: tuple[Socket, Folder], on: bool, json: bool) -> None:
    with errors_shown(), open_admin(*where) as admin:
        if choice.is_all:
            raise ConfigError("say which blocks: --block, --namespace, --model or --tenant")
        blocks, nbytes = admin.pin(choice.query(admin), on)
        if json:
            typer.echo(msgspec.json.encode({"blocks": blocks, "bytes": nbytes}).decode())
        else:
            word = "pinned" if on else "unpinned"
            typer.echo(f"{blocks} blocks ({tables.size(nbytes)}) {word}")


def resize(
    socket: Socket = DEFAULT_SOCKET,
    host: Annotated[str | None, typer.Option(help=_SIZE)] = None,
    disk: Annotated[str | None, typer.Option(help=_SIZE)] = None,
    json: Json = False,
) -> None:
    """Change how much memory and disk a running service uses, until it is started again.

    Shrinking drops what is worth least and waits until it is gone; interrupted, it goes on in the
    service. The host can grow up to the service's host_max_size.
    """
    with errors_shown(), open_admin(socket, None) as admin:
        if host is None and disk is None:
            raise ConfigError("say what to resize: --host, --disk")
        sizes = (_size(host, "--host"), _size(disk, "--disk"))
        with Progress(
            TextColumn("making room"), BarColumn(), DownloadColumn(), disable=json, transient=True
        ) as bar:
            task = bar.add_task("making room", total=None)
            admin.resize(
                *sizes, lambda done, total, _: bar.update(task, completed=done, total=total)
            )
        if json:
            typer.echo(msgspec.json.encode({"host": sizes[0], "disk": sizes[1]}).decode())
        else:
            typer.echo("done; set host_size and disk_size as well to keep it after a restart")


def _size(text: str | None, name: str) -> int | None:
    nbytes = None if text is None else parse_size(text, name)
    if nbytes == 0:
        raise ConfigError(f"{name}: it must be more than 0")
    return nbytes
