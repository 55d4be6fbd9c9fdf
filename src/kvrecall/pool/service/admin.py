"""Administration: every command of ``kvrecall pool`` on blocks, each in one place.

A command is a struct: its fields travel over the socket, and ``run`` executes it where the
pool is: in the service, or in this process for a disk folder that no pool uses. ``--json`` prints
its result; ``show`` makes it readable. The function below it, if there is one, builds it
from options: its docstring is the help, and ``@command`` adds the options that all commands have.

``ServiceAdmin`` and ``FolderAdmin`` execute any command: ``admin.do(Drop(query, False))``.
"""

from __future__ import annotations

import inspect
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec
import typer
from rich.console import RenderableType

from kvrecall.block import BlockKey, TierName
from kvrecall.config import (
    DiskConfig,
    PoolTerms,
    default_socket,
    format_size,
    parse_age,
    parse_size,
    parse_tenant,
)
from kvrecall.errors import ConfigError, TierError, errors_shown
from kvrecall.pool.arena import Arena
from kvrecall.pool.cipher import read_cipher
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import BlockCodec, Locked, Plain, make_codec
from kvrecall.pool.disk.folder import FolderHeld, own_bytes
from kvrecall.pool.disk.index import check_index
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service import tables
from kvrecall.pool.service.inventory import SORTS, By, Inventory, Listing, OnProgress, Overview
from kvrecall.pool.service.inventory import Query as Query
from kvrecall.pool.service.link import Link, LinkLate, LinkLost
from kvrecall.pool.service.prefix_tree import PrefixTree
from kvrecall.pool.tier import Outcome

R = TypeVar("R")

DEFAULT_SOCKET = default_socket()
_PATIENCE_S = 30.0
_RESIZE_LOOK_S = 0.2
_PROGRESS_S = 0.1

Socket = Annotated[Path, typer.Option(help="The service's socket.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Size = Annotated[str | None, typer.Option(help="A size such as 50GiB.")]
_FOLDER = {
    "disk_path": Annotated[
        Path | None, typer.Option(help="A disk folder that no pool uses, instead of a service.")
    ],
    "encryption_key_file": Annotated[
        Path | None, typer.Option(help="Key file of a folder with encrypted blocks.")
    ],
}
_QUERY = {
    "namespace": Annotated[
        list[str] | None,
        typer.Option(
            "--namespace", "-n", help="Only this namespace: its digest, or a prefix of it."
        ),
    ],
    "model": Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Only models whose description contains this text."),
    ],
    "tenant": Annotated[
        list[str] | None,
        typer.Option(
            "--tenant", "-t", help="Only this tenant: as `ls --by tenant` prints it, or salt:SALT."
        ),
    ],
    "block": Annotated[
        str | None, typer.Option(help="Only the prefix that ends with this block (ls --by chain).")
    ],
    "tier": Annotated[str | None, typer.Option(help="Only blocks in this tier: host or disk.")],
    "older_than": Annotated[
        str | None, typer.Option(help="Only blocks not used for this long, e.g. 90m, 12h, 7d.")
    ],
    "younger_than": Annotated[
        str | None, typer.Option(help="Only blocks used within this time, e.g. 90m, 12h, 7d.")
    ],
    "pinned": Annotated[
        bool | None,
        typer.Option("--pinned/--not-pinned", help="Only pinned blocks, or only others."),
    ],
}
"""Options that select blocks; all default to None."""
_WHOSE = ("namespace", "model", "tenant")

commands = typer.Typer()
"""The commands below that have options."""


class Command(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """Base of all commands. ``result``: what ``run`` returns. ``progress``: title of a progress
    bar, if it takes long. ``on_folder``: whether it works on a disk folder that no pool uses."""

    result: ClassVar[Any]
    progress: ClassVar[str] = "working"
    on_folder: ClassVar[bool] = True

    def run(self, inventory: Inventory, progress: OnProgress) -> R:
        """Executes the command. Blocks. Raises ConfigError if it cannot be executed."""
        raise NotImplementedError

    def show(self, result: R) -> RenderableType:
        """The result, for people."""
        return str(result)

    def status(self, result: R) -> int:
        """The exit status."""
        return 0


def command(*which: str) -> Callable[[Callable[..., Command[Any]]], None]:
    """Adds a function that makes a command from options to the command line. With ``which``, names
    of options in ``_QUERY``, its first argument is the query that they make."""

    def add(make: Callable[..., Command[Any]]) -> None:
        own = inspect.signature(make, eval_str=True)
        kind: type[Command[Any]] = own.return_annotation
        given: list[tuple[str, Any, Any]] = [("socket", Socket, DEFAULT_SOCKET)]
        given += [(name, _FOLDER[name], None) for name in _FOLDER if kind.on_folder]
        given += [(name, _QUERY[name], None) for name in which]
        given += [(one.name, one.annotation, one.default) for one in own.parameters.values()]
        given += [("json", Json, False)]

        def run(socket: Path, json: bool, **options: Any) -> None:
            with errors_shown():
                folder, key_file = (options.pop(name, None) for name in _FOLDER)
                query = {name: options.pop(name) for name in which}
                order = make(*([_query(**query)] if which else []), **options)
                with tables.progress(f"opening {folder or socket}"):
                    opened = FolderAdmin(folder, key_file) if folder else ServiceAdmin(socket)
                with opened as admin, tables.progress(order.progress) as progress:
                    result = admin.do(order, progress)
                if json:
                    typer.echo(msgspec.json.encode(result).decode())
                else:
                    tables.print_out(order.show(result))
                status = order.status(result)
            if status:
                raise typer.Exit(status)

        taken = [one for one in given if one[0] != "query"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        run.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[
                inspect.Parameter(name, keyword, default=default, annotation=annotation)
                for name, annotation, default in taken
            ]
        )
        run.__annotations__ = {name: annotation for name, annotation, _ in taken}
        commands.command(make.__name__, help=inspect.getdoc(make))(run)

    return add


# -- what is there ------------------------------------------------------------------------------


class Stat(Command[Overview], frozen=True):
    """The current state of the service."""

    result = Overview
    on_folder = False

    def run(self, inventory: Inventory, progress: OnProgress) -> Overview:
        return inventory.overview()


class PrefixTrees(Command[tuple[PrefixTree, ...]], frozen=True):
    """The cached blocks as trees by model and tenant, largest first, of ``limit`` nodes."""

    result = tuple[PrefixTree, ...]
    limit: int = 300

    def run(self, inventory: Inventory, progress: OnProgress) -> tuple[PrefixTree, ...]:
        return inventory.prefix_trees(self.limit)


class List(Command[Listing], frozen=True):
    """The selected blocks, in rows."""

    result = Listing
    query: Query = Query()
    by: By = By.NAMESPACE
    sort: str = "size"
    limit: int = 10_000

    def run(self, inventory: Inventory, progress: OnProgress) -> Listing:
        return inventory.listing(self.query, self.by, self.sort, self.limit)

    def show(self, result: Listing) -> RenderableType:
        return tables.listing(result)


@command(*_QUERY)
def ls(
    query: Query,
    by: Annotated[By, typer.Option(help="What each row represents.")] = By.NAMESPACE,
    sort: Annotated[str, typer.Option(help=f"One of: {', '.join(SORTS)}.")] = "size",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rows (10,000).")] = 100,
) -> List:
    """List the contents of the pool."""
    return List(query, by, sort, limit)


class Verified(msgspec.Struct, frozen=True):
    checked: int
    damaged: int


class Verify(Command[Verified], frozen=True):
    """Reads and checks the selected blocks on disk; drops damaged ones."""

    result = Verified
    progress = "verifying"
    query: Query = Query()

    def run(self, inventory: Inventory, progress: OnProgress) -> Verified:
        disk = inventory.pool.admin.disk
        if disk is None:
            return Verified(0, 0)
        keys = [b.key for b in inventory.select(self.query) if b.tier is TierName.DISK]
        checked = damaged = 0
        told = 0.0
        for key, outcome in disk.check(keys):
            checked += outcome is not Outcome.MISS
            if outcome in (Outcome.CORRUPT, Outcome.ERROR):
                damaged += 1
                inventory.pool.lost_below([key])
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                progress(checked, len(keys))
        progress(checked, len(keys))
        return Verified(checked, damaged)

    def show(self, result: Verified) -> str:
        return f"{result.checked} blocks checked, {result.damaged} damaged (and dropped)"

    def status(self, result: Verified) -> int:
        return int(result.damaged > 0)


@command(*_WHOSE)
def verify(query: Query) -> Verify:
    """Read and check every block on disk; drop damaged ones. Exits with 1 if there were any."""
    return Verify(query)


# -- dropping -----------------------------------------------------------------------------------


class Dropped(msgspec.Struct, frozen=True):
    """``pinned``: blocks that were not dropped because they are pinned."""

    dropped: int
    pinned: int


class Drop(Command[Dropped], frozen=True):
    """Drops the selected blocks, pinned ones only with ``pinned``. Leased blocks stay in the
    host."""

    result = Dropped
    query: Query
    pinned: bool

    def run(self, inventory: Inventory, progress: OnProgress) -> Dropped:
        keys: set[BlockKey] = set()
        kept: set[BlockKey] = set()
        for block in inventory.select(self.query):
            (kept if block.pinned and not self.pinned else keys).add(block.key)
        keys -= kept
        inventory.pool.admin.drop(keys)
        return Dropped(len(keys), len(kept))

    def show(self, result: Dropped) -> str:
        kept = f"; {result.pinned} pinned ones stay (--with-pinned)" if result.pinned else ""
        return f"{result.dropped} blocks dropped{kept}"


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


# -- pins ---------------------------------------------------------------------------------------


class Pinned(msgspec.Struct, frozen=True):
    """Each block is counted once, regardless of the number of tiers it is in."""

    blocks: int
    bytes: int


class Pin(Command[Pinned], frozen=True):
    """Pins, or unpins, the selected blocks: all or none."""

    result = Pinned
    query: Query
    on: bool

    def run(self, inventory: Inventory, progress: OnProgress) -> Pinned:
        sizes = {block.key: block.slot_bytes for block in inventory.select(self.query)}
        admin = inventory.pool.admin
        (admin.pin if self.on else admin.unpin)(sizes.keys())
        return Pinned(len(sizes), sum(sizes.values()))

    def show(self, result: Pinned) -> str:
        word = "pinned" if self.on else "unpinned"
        return f"{result.blocks} blocks ({format_size(result.bytes)}) {word}"


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


def _some(query: Query) -> Query:
    if query == Query():
        raise ConfigError("select blocks: --block, --namespace, --model or --tenant")
    return query


# -- sizes --------------------------------------------------------------------------------------


class Resized(msgspec.Struct, frozen=True):
    host: int | None
    disk: int | None


class Resize(Command[Resized], frozen=True):
    """Sets the given sizes (bytes); ends when the surplus is gone."""

    result = Resized
    progress = "making room"
    on_folder = False
    host_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None
    disk_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None

    def run(self, inventory: Inventory, progress: OnProgress) -> Resized:
        pool, disk = inventory.pool, inventory.pool.admin.disk
        if self.disk_bytes is not None and disk is None:
            raise ConfigError("disk: this pool has no disk tier; start it with disk_path")
        if self.host_bytes is not None:
            pool.resize_host(self.host_bytes)
        if self.disk_bytes is not None and disk is not None:
            disk.resize(self.disk_bytes)
        most = 0
        time.sleep(_RESIZE_LOOK_S)
        while left := pool.host_surplus() + (0 if disk is None else disk.surplus_bytes):
            most = max(most, left)
            progress(most - left, most)
            time.sleep(_RESIZE_LOOK_S)
        return Resized(self.host_bytes, self.disk_bytes)

    def show(self, result: Resized) -> str:
        return "done; set host_size and disk_size as well to keep it after a restart"


@command()
def resize(host: _Size = None, disk: _Size = None) -> Resize:
    """Change how much memory and disk a running service uses, until its next restart.

    Shrinking drops the least valuable blocks and waits until they are gone; if interrupted, it
    continues in the service. The host can grow up to the service's host_max_size.
    """
    if host is None and disk is None:
        raise ConfigError("specify the tier to resize: --host, --disk")
    return Resize(_size(host, "--host"), _size(disk, "--disk"))


def _size(text: str | None, name: str) -> int | None:
    nbytes = None if text is None else parse_size(text, name)
    if nbytes == 0:
        raise ConfigError(f"{name}: it must be more than 0")
    return nbytes


def _query(
    namespace: list[str] | None = None,
    model: list[str] | None = None,
    tenant: list[str] | None = None,
    block: str | None = None,
    tier: str | None = None,
    older_than: str | None = None,
    younger_than: str | None = None,
    pinned: bool | None = None,
) -> Query:
    return Query(
        namespaces=tuple(namespace or ()),
        models=tuple(model or ()),
        tenants=tuple(parse_tenant(name, "--tenant") for name in tenant or ()),
        block=block or "",
        tier=tier or "",
        older_than_s=None if older_than is None else parse_age(older_than, "--older-than"),
        younger_than_s=None if younger_than is None else parse_age(younger_than, "--younger-than"),
        pinned=pinned,
    )


_COMMANDS = {kind.__name__: kind for kind in (Stat, PrefixTrees, List, Verify, Drop, Pin, Resize)}


def command_of(name: str, fields: bytes) -> Command[Any]:
    """The command received over the socket. Raises ProtocolError."""
    kind = _COMMANDS.get(name)
    if kind is None:
        raise p.ProtocolError(f"unknown command: {name!r}")
    try:
        return msgspec.msgpack.decode(fields, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise p.ProtocolError(f"invalid command {name}: {error}") from error


# -- where a pool is ----------------------------------------------------------------------------


class Admin(ABC):
    """Executes commands on a pool. A context manager."""

    @abstractmethod
    def do(self, command: Command[R], progress: OnProgress = lambda *_: None) -> R:
        """Executes it. Blocks. Raises TierError; ConfigError if it cannot be executed."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServiceAdmin(Admin):
    """Administration of the service at a socket."""

    def __init__(self, path: Path, timeout_s: float = 5.0) -> None:
        self._path = path
        try:
            self._link = Link.open(path, timeout_s)
        except LinkLost as error:
            raise TierError(str(error)) from error

    def do(self, command: Command[R], progress: OnProgress = lambda *_: None) -> R:
        name, fields = type(command).__name__, msgspec.msgpack.encode(command)
        try:
            reply = self._link.ask(
                p.Administer,
                name,
                fields,
                timeout_s=_PATIENCE_S,
                slow=True,
                on_progress=lambda news: progress(news.done, news.total),
            )
        except LinkLate as error:
            raise TierError(f"the pool service at {self._path} does not answer") from error
        except LinkLost as error:
            raise TierError(
                f"the pool service at {self._path} ended the connection: {error}"
            ) from error
        if isinstance(reply, p.Trouble):
            raise ConfigError(reply.text)
        assert isinstance(reply, p.Administered)
        result: R = msgspec.msgpack.decode(reply.result, type=command.result)
        return result

    def close(self) -> None:
        self._link.close()


class FolderAdmin(Admin):
    """Administration of a disk tier's folder, which it locks: a pool without host memory. If its
    blocks are encrypted, verifying them needs the key; all other commands do not."""

    def __init__(self, path: Path, key_file: Path | None = None) -> None:
        codec = _codec_for(path, key_file)  # first: opening a folder may change it
        terms = PoolTerms(pin_limit=1.0)  # the pool's own limit is of a size not known here
        config = DiskConfig(path, _present_size(path))
        try:
            disk = DiskTier(config, codec=codec, terms=terms)
        except FolderHeld as error:
            raise TierError(
                f"{error}. A pool in an engine's own process cannot be administered while it "
                "runs; a service's can: --socket"
            ) from error
        self._pool = Pool(Arena.create(4096), disk, terms=terms)
        self._inventory = Inventory(self._pool)

    def do(self, command: Command[R], progress: OnProgress = lambda *_: None) -> R:
        return command.run(self._inventory, progress)

    def close(self) -> None:
        self._pool.close()


def _codec_for(path: Path, key_file: Path | None) -> BlockCodec:
    """A codec that changes nothing in the folder. Raises TierError if that is no disk tier's."""
    if not check_index(path):
        return Plain()
    return Locked() if key_file is None else make_codec(read_cipher(key_file))


def _present_size(path: Path) -> int:
    """A capacity at which opening the folder evicts nothing."""
    own = own_bytes(path)
    system = os.statvfs(path)
    return min(own + own // 10 + (64 << 20), own + system.f_bavail * system.f_frsize)
