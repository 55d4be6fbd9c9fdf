"""What an administrator asks for and is shown."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
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
class TenantView:
    """A tenant that holds something. Limits are -1 where there is none; ``refused`` and
    ``evicted`` count its blocks for the sake of its limits."""

    tenant: str
    host_bytes: int
    host_limit: int
    disk_bytes: int
    disk_limit: int
    refused: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The service now. ``tenants``: those that hold most, of ``tenant_count``."""

    pid: int
    version: str
    uptime_s: float
    socket: str
    disk_path: str
    clients: tuple[ClientView, ...]
    stats: PoolStats
    rejected: int  # connections ended for what they sent
    tenants: tuple[TenantView, ...]
    tenant_count: int
    write_policy: str


class By(enum.StrEnum):
    """What the rows of a listing are."""

    NAMESPACE = "namespace"
    MODEL = "model"
    TENANT = "tenant"
    CHAIN = "chain"  # named by its last block
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Query:
    """Which blocks: those that everything said here fits.

    ``block``: the beginning of the hex name of one block, which stands for the prefix that ends
    with it. Ages are seconds since the last use.
    """

    namespaces: tuple[bytes, ...] = ()
    tenants: tuple[str, ...] = ()
    block: str = ""
    tier: str = ""
    older_than_s: float | None = None
    younger_than_s: float | None = None
    pinned: bool | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Blocks of one kind. ``name`` is a namespace's digest, a model, a tenant, or the hex name of
    a block. Empty fields (-1) say nothing: the blocks differ in it. Ages are seconds since the
    youngest and the oldest last use."""

    name: str
    namespace: str
    model: str
    tenant: str
    block_bytes: int
    depth: int
    host_blocks: int
    host_bytes: int
    disk_blocks: int
    disk_bytes: int
    pinned_blocks: int
    youngest_s: float
    oldest_s: float
    parts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Listing:
    """``total``: rows there are; those beyond what was asked for are left out."""

    by: By
    rows: tuple[Row, ...]
    total: int


def model_of(parts: Mapping[str, str]) -> str:
    """What a person calls the model of a namespace: architecture, types, adapter."""
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
