"""What an administrator is shown."""

from __future__ import annotations

from dataclasses import dataclass

from kvrecall.pool.base import PoolStats


@dataclass(frozen=True, slots=True)
class ClientView:
    """A connected process (or one that was lost and whose slots are kept)."""

    pid: int
    seconds: float  # since it connected, or since it was lost
    namespaces: int
    tickets: int
    reserved: int
    requests: int
    lost: bool


@dataclass(frozen=True, slots=True)
class Overview:
    """The service now."""

    pid: int
    version: str
    uptime_s: float
    socket: str
    disk_path: str
    clients: tuple[ClientView, ...]
    stats: PoolStats
    rejected: int  # connections ended for what they sent


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """Blocks of one namespace. Ages are seconds since the last use of a block on disk; negative
    if none is there."""

    digest: str
    parts: dict[str, str]
    block_bytes: int
    host_blocks: int
    disk_blocks: int
    youngest_s: float
    oldest_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    namespaces: tuple[NamespaceView, ...]
