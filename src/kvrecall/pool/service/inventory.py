"""The contents of a pool: selected, listed, shown as trees; and the view of an administrator."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrecall.block import NAMESPACE_BYTES, BlockKey, TierName
from kvrecall.errors import ConfigError
from kvrecall.pool.base import PoolStats
from kvrecall.pool.pool import Pool
from kvrecall.pool.residents import BlockInfo, TenantUse
from kvrecall.pool.service.prefix_tree import PrefixTree, prefix_trees

_TENANTS_SHOWN = 200
_MAX_ROWS = 10_000
_SEE = "see: kvrecall pool ls"

OnProgress = Callable[[int, int], None]
"""Called with the work done and the total work."""


@dataclass(frozen=True, slots=True)
class Query:
    """Selects the blocks that match all conditions. ``namespaces``: each a prefix of one digest in
    hex. ``models``: texts contained in the models' descriptions. ``block``: a prefix of the hex
    name of one block, which selects the prefix that ends with it and what hangs on that. ``tier``:
    host, disk, or empty. Ages are seconds since the last use."""

    namespaces: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    block: str = ""
    tier: str = ""
    older_than_s: float | None = None
    younger_than_s: float | None = None
    pinned: bool | None = None


class By(enum.StrEnum):
    """The unit of a listing's rows."""

    NAMESPACE = "namespace"
    MODEL = "model"
    TENANT = "tenant"
    CHAIN = "chain"  # named by its last block
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Row:
    """Blocks of one kind. ``name`` is a namespace's digest, a model, a tenant, or the hex name of a
    block. ``group``: the KV group, of a model with several. Empty fields (-1): the blocks differ in
    it. Ages are seconds since the youngest and the
    oldest last use."""

    name: str
    namespace: str
    model: str
    group: str
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


SORTS: dict[str, Callable[[Row], tuple[float, str]]] = {
    "size": lambda row: (-(row.host_bytes + row.disk_bytes), row.name),
    "blocks": lambda row: (-(row.host_blocks + row.disk_blocks), row.name),
    "age": lambda row: (row.youngest_s, row.name),
    "oldest": lambda row: (-row.oldest_s, row.name),
    "depth": lambda row: (-row.depth, row.name),
    "name": lambda row: (0.0, row.name),
}
"""Sort orders of a listing, most interesting rows first."""


@dataclass(frozen=True, slots=True)
class Listing:
    """``total``: number of rows; those beyond the requested limit are omitted."""

    by: By
    rows: tuple[Row, ...]
    total: int


@dataclass(frozen=True, slots=True)
class ClientView:
    """A connected process, or one whose connection was lost and whose slots are kept."""

    pid: int
    seconds: float  # since it connected, or since it was lost
    namespaces: int
    tickets: int
    reserved: int
    requests: int
    lost: bool


@dataclass(frozen=True, slots=True)
class TenantView:
    """A tenant that holds blocks. Limits are -1 without a limit; ``refused`` and ``evicted`` count
    its blocks refused and evicted because of its limits."""

    tenant: str
    host_bytes: int
    host_limit: int
    disk_bytes: int
    disk_limit: int
    refused: int
    evicted: int


@dataclass(frozen=True, slots=True)
class Overview:
    """The current state of the service. ``tenants``: those that hold most, of ``tenant_count``."""

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


class _Known(NamedTuple):
    """A namespace: a readable name of its model, and the bytes of a block."""

    model: str
    block_bytes: int
    parts: dict[str, str]


_UNKNOWN = _Known("unknown", -1, {})


class Inventory:
    """The inventory of a pool. Its methods block; call them outside of any loop. Raises ConfigError
    if a query names something unknown."""

    def __init__(self, pool: Pool, overview: Callable[[], Overview] | None = None) -> None:
        """``overview``: of the service that has the pool."""
        self.pool = pool
        self._overview = overview

    def overview(self) -> Overview:
        if self._overview is None:
            raise ConfigError("a folder has no clients and no traffic; pass the --socket of a pool")
        return self._overview()

    # -- what is there ---------------------------------------------------------------------

    def select(self, query: Query) -> list[BlockInfo]:
        """The selected blocks; a block in two tiers appears twice."""
        if query.tier not in ("", TierName.HOST, TierName.DISK):
            raise ConfigError(f"--tier: {query.tier!r} is unknown; allowed: host, disk")
        held = self.pool.admin.blocks()
        if query.block:
            prefix = _prefix_of(query.block, held)
            held = [block for block in held if block.key in prefix]
        used: dict[BlockKey, float] = {}
        if query.older_than_s is not None or query.younger_than_s is not None:
            for block in held:  # the later use counts, if tiers differ
                used[block.key] = max(used.get(block.key, 0.0), block.used)
        now = time.time()
        digests, tenants = self._digests(query), frozenset(query.tenants)
        least = -1.0 if query.older_than_s is None else query.older_than_s
        most = float("inf") if query.younger_than_s is None else query.younger_than_s
        return [
            b
            for b in held
            if (not digests or b.key[:NAMESPACE_BYTES] in digests)
            and (not tenants or b.tenant in tenants)
            and (not query.tier or b.tier == query.tier)
            and (query.pinned is None or b.pinned == query.pinned)
            and least < max(0.0, now - used.get(b.key, b.used)) < most
        ]

    def _digests(self, query: Query) -> set[bytes]:
        """The namespaces a query names; empty if it names none."""
        if not (query.namespaces or query.models):
            return set()
        known = self._namespaces()
        chosen = {
            digest
            for digest, namespace in known.items()
            if any(text.lower() in namespace.model.lower() for text in query.models)
        }
        if query.models and not chosen:
            raise ConfigError(f"--model: no match for {list(query.models)}; {_SEE}")
        for prefix in query.namespaces:
            fitting = [digest for digest in known if digest.hex().startswith(prefix.lower())]
            if len(fitting) != 1:
                many = f"{len(fitting)} namespaces begin" if fitting else "no namespace begins"
                raise ConfigError(f"--namespace: {many} with {prefix!r}; {_SEE}")
            chosen.update(fitting)
        return chosen

    def listing(self, query: Query, by: By, sort: str, limit: int) -> Listing:
        """Rows about the selected blocks."""
        if sort not in SORTS:
            raise ConfigError(f"--sort: {sort!r} is unknown; known: {', '.join(SORTS)}")
        held = self.select(query)
        known = self._namespaces()
        inner = {b.parent for b in held if not b.hangs} if by is By.CHAIN else set()
        groups: dict[str, list[BlockInfo]] = {}
        if by is By.NAMESPACE and query == Query():
            groups = {digest.hex(): [] for digest in known}  # also those with nothing left
        for block in held:
            digest = block.key[:NAMESPACE_BYTES]
            match by:
                case By.TENANT:
                    name = str(block.tenant)
                case By.NAMESPACE:
                    name = digest.hex()
                case By.MODEL:
                    name = known.get(digest, _UNKNOWN).model
                case By.CHAIN if block.key in inner or block.hangs:
                    name = ""
                case _:
                    name = block.key.hex()
            if name:
                groups.setdefault(name, []).append(block)
        now = time.time()
        rows = [_row(by, name, blocks, known, now) for name, blocks in groups.items()]
        rows.sort(key=SORTS[sort])
        return Listing(by, tuple(rows[: min(limit, _MAX_ROWS)]), len(rows))

    def prefix_trees(self, limit: int) -> tuple[PrefixTree, ...]:
        """The cached blocks as trees of at most ``limit`` nodes."""
        known = {}
        for digest, one in self._namespaces().items():
            group = one.parts.get("group", "")
            name = f"{one.model}, KV group {group}" if group else one.model
            known[digest] = name, one.block_bytes
        return prefix_trees(self.pool.admin.blocks(), known, time.time(), limit)

    def tenants(self) -> tuple[tuple[TenantView, ...], int]:
        """Tenants that hold most, and how many there are."""
        disk_tier = self.pool.admin.disk
        host = {use.tenant: use for use in self.pool.host_tenants()}
        disk = {use.tenant: use for use in disk_tier.tenants()} if disk_tier is not None else {}
        views = []
        for tenant in {**host, **disk}:
            uses = [tier.get(tenant, TenantUse(tenant, 0, None, 0, 0)) for tier in (host, disk)]
            limits = [-1 if use.limit_bytes is None else use.limit_bytes for use in uses]
            views.append(
                TenantView(
                    tenant,
                    uses[0].used_bytes,
                    limits[0],
                    uses[1].used_bytes,
                    limits[1],
                    sum(use.refused for use in uses),
                    sum(use.evicted for use in uses),
                )
            )
        views.sort(key=lambda view: (-(view.host_bytes + view.disk_bytes), view.tenant))
        return tuple(views[:_TENANTS_SHOWN]), len(views)

    def _namespaces(self) -> dict[bytes, _Known]:
        """Every namespace that was registered or has blocks on disk, by its digest."""
        disk = self.pool.admin.disk
        known = [*(disk.namespaces() if disk is not None else ()), *self.pool.namespaces()]
        return {
            namespace.digest: _Known(model_of(namespace.parts), nbytes, dict(namespace.parts))
            for namespace, nbytes in known
        }


def _prefix_of(name: str, held: Collection[BlockInfo]) -> set[BlockKey]:
    """The block whose hex name begins with ``name`` (or continues so after its namespace), with all
    its ancestors, and what hangs on these."""
    name = name.lower()
    parents = {block.key: block.parent for block in held}
    skip = 2 * NAMESPACE_BYTES
    fitting = [
        key for key in parents if key.hex().startswith(name) or key.hex()[skip:].startswith(name)
    ]
    if len(fitting) != 1:
        many = f"{len(fitting)} blocks' names begin" if fitting else "no block's name begins"
        raise ConfigError(f"--block: {many} with {name!r}; {_SEE} --by chain")
    prefix: set[BlockKey] = set()
    key: BlockKey | None = fitting[0]
    while key is not None and key in parents and key not in prefix:
        prefix.add(key)
        key = parents[key]
    return prefix.union(block.key for block in held if block.hangs and block.parent in prefix)


def _row(
    by: By,
    name: str,
    blocks: Sequence[BlockInfo],
    known: Mapping[bytes, _Known],
    now: float,
) -> Row:
    host = [b.slot_bytes for b in blocks if b.tier is TierName.HOST]
    disk = [b.slot_bytes for b in blocks if b.tier is TierName.DISK]
    digests = {b.key[:NAMESPACE_BYTES] for b in blocks}
    if by is By.NAMESPACE:
        digests = {bytes.fromhex(name)}
    digest = next(iter(digests)) if len(digests) == 1 else b""
    tenants = {b.tenant for b in blocks}
    namespace = known.get(digest, _UNKNOWN)
    ages = [max(0.0, now - b.used) for b in blocks]
    return Row(
        name=name,
        namespace=digest.hex(),
        model=namespace.model if digest else "",
        group=namespace.parts.get("group", ""),
        tenant=next(iter(tenants)) if len(tenants) == 1 else "",
        block_bytes=namespace.block_bytes,
        depth=blocks[0].depth if by in (By.BLOCK, By.CHAIN) else -1,
        host_blocks=len(host),
        host_bytes=sum(host),
        disk_blocks=len(disk),
        disk_bytes=sum(disk),
        pinned_blocks=len({b.key for b in blocks if b.pinned}),
        youngest_s=min(ages, default=-1.0),
        oldest_s=max(ages, default=-1.0),
        parts=namespace.parts if by is By.NAMESPACE else {},
    )


def model_of(parts: Iterable[tuple[str, str]]) -> str:
    """A readable name of a namespace's model: architecture, types, adapter."""
    named = dict(parts)
    name = named.get("model", "")
    if "architecture" in named:
        try:
            config = json.loads(named["architecture"])
        except ValueError:
            config = {}
        if isinstance(config, dict):
            name = " ".join(map(str, config.get("architectures") or [])) or name
    words = [name, named.get("dtype", "").removeprefix("torch."), named.get("weights", "")[:20]]
    if "adapter" in named:
        words.append(f"adapter {named['adapter'][:12]}")
    return " ".join(word for word in words if word) or "unknown"
