"""Options that the commands share: which pool, which of its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvrecall.config import default_socket, parse_age, parse_tenant
from kvrecall.errors import ConfigError, KvrecallError
from kvrecall.pool.service.admin import Admin, FolderAdmin, ServiceAdmin
from kvrecall.pool.service.views import Query

DEFAULT_SOCKET = default_socket()

Socket = Annotated[Path, typer.Option(help="The service's socket.")]
Folder = Annotated[
    Path | None,
    typer.Option("--disk-path", help="Instead of a service: a disk folder that none uses."),
]
KeyFile = Annotated[
    Path | None,
    typer.Option("--encryption-key-file", help="Of a folder whose blocks are sealed."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Namespaces = Annotated[
    list[str] | None,
    typer.Option("--namespace", "-n", help="Only this one: its digest or the beginning of it."),
]
Models = Annotated[
    list[str] | None,
    typer.Option("--model", "-m", help="Only models whose description holds this text."),
]
Tenants = Annotated[
    list[str] | None,
    typer.Option("--tenant", "-t", help="Only this one: as `ls --by tenant` prints, or salt:SALT."),
]
OlderThan = Annotated[
    str | None, typer.Option(help="Only blocks not used for so long: 90m, 12h, 7d.")
]
BlockName = Annotated[
    str, typer.Option("--block", help="Only the prefix that ends with this block (ls --by chain).")
]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a person said about which blocks are meant."""

    namespaces: list[str] | None = None
    models: list[str] | None = None
    tenants: list[str] | None = None
    block: str = ""
    tier: str = ""
    older_than: str | None = None
    younger_than: str | None = None
    pinned: bool | None = None

    @property
    def is_all(self) -> bool:
        return self == Choice()

    def query(self, admin: Admin) -> Query:
        """The blocks that are meant. ConfigError if something named is not there, or not one."""
        if self.tier not in ("", "host", "disk"):
            raise ConfigError(f"--tier: {self.tier!r} is none; say host or disk")
        return Query(
            namespaces=self._digests(admin),
            tenants=tuple(parse_tenant(name, "--tenant") for name in self.tenants or ()),
            block=self.block,
            tier=self.tier,
            older_than_s=_age(self.older_than, "--older-than"),
            younger_than_s=_age(self.younger_than, "--younger-than"),
            pinned=self.pinned,
        )

    def _digests(self, admin: Admin) -> tuple[bytes, ...]:
        if not (self.namespaces or self.models):
            return ()
        known = {row.name: row.model for row in admin.listing(Query()).rows}
        chosen = [
            name
            for name, model in known.items()
            if any(text.lower() in model.lower() for text in self.models or ())
        ]
        if self.models and not chosen:
            raise ConfigError(f"--model: none is like {self.models}; see: kvrecall pool ls")
        for prefix in self.namespaces or ():
            fitting = [digest for digest in known if digest.startswith(prefix.lower())]
            if len(fitting) != 1:
                many = f"{len(fitting)} namespaces begin" if fitting else "no namespace begins"
                raise ConfigError(f"--namespace: {many} with {prefix!r}; see: kvrecall pool ls")
            chosen += fitting
        return tuple(map(bytes.fromhex, chosen))


def open_admin(socket: Path, disk_path: Path | None, key_file: Path | None = None) -> Admin:
    """Of a service, or of a folder that none uses."""
    return ServiceAdmin(socket) if disk_path is None else FolderAdmin(disk_path, key_file)


@contextlib.contextmanager
def errors_shown() -> Iterator[None]:
    """Ends the command with a line for people."""
    try:
        yield
    except KvrecallError as error:
        typer.echo(f"kvrecall: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


def _age(text: str | None, name: str) -> float | None:
    return None if text is None else parse_age(text, name)
