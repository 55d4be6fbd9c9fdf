"""The contents of a pool: selected, listed, shown as trees; and the view of an administrator."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvrecall.block import NAMESPACE_BYTES, BlockKey, TierName
from kvrecall.errors import ConfigError
from kvrecall.pool.accounts import TenantUse
from kvrecall.pool.base import PoolStats
from kvrecall.pool.entries import BlockInfo, hangs
from kvrecall.pool.pool import Pool
from kvrecall.pool.service.prefix_tree import PrefixTree, prefix_trees

_TENANTS_SHOWN = 200
_MAX_ROWS = 10_000
_LONGEST_NAME = 300
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

    def select(self, query: Query) -> Iterator[BlockInfo]:
        """The selected blocks, one after the other: there may be millions. A block in two tiers
        appears twice."""
        if query.tier not in ("", TierName.HOST, TierName.DISK):
            raise ConfigError(f"--tier: {query.tier!r} is unknown; allowed: host, disk")
        digests = self._digests(query)
        prefix = _prefix_of(query.block, self.pool.admin.blocks()) if query.block else None
        return self._matching(query, digests, prefix)

    def _matching(
        self, query: Query, digests: Collection[bytes], prefix: Collection[BlockKey] | None
    ) -> Iterator[BlockInfo]:
        """The blocks of these namespaces (of any, if none is given) and keys that match the rest of
        the query."""
        admin = self.pool.admin
        used: dict[BlockKey, float] = {}  # of those in the host: the later use counts
        if query.older_than_s is not None or query.younger_than_s is not None:
            used = {block.key: block.used for block in self.pool.host_blocks()}
            for block in admin.disk.catalog.infos() if admin.disk is not None and used else ():
                if block.key in used:
                    used[block.key] = max(used[block.key], block.used)
        now, tenants = admin.now(), frozenset(query.tenants)
        least = -1.0 if query.older_than_s is None else query.older_than_s
        most = float("inf") if query.younger_than_s is None else query.younger_than_s
        for block in admin.blocks():
            if (
                (prefix is None or block.key in prefix)
                and (not digests or block.key[:NAMESPACE_BYTES] in digests)
                and (not tenants or block.tenant in tenants)
                and (not query.tier or block.tier == query.tier)
                and (query.pinned is None or block.pinned == query.pinned)
                and least < max(0.0, now - used.get(block.key, block.used)) < most
            ):
                yield block

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
        held: Iterable[BlockInfo] = self.select(query)
        known = self._namespaces()
        inner: set[BlockKey | None] = set()
        if by is By.CHAIN:
            held = list(held)
            inner = {block.parent for block in held if not block.hangs}
        groups: dict[str, _Group] = {}
        if by is By.NAMESPACE and query == Query():
            groups = {digest.hex(): _Group() for digest in known}  # also those with nothing left
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
                group = groups.get(name)
                if group is None:
                    group = groups[name] = _Group()
                group.add(block)
        now = self.pool.admin.now()
        rows = [_row(by, name, group, known, now) for name, group in groups.items()]
        rows.sort(key=SORTS[sort])
        return Listing(by, tuple(rows[: min(limit, _MAX_ROWS)]), len(rows))

    def prefix_trees(self, limit: int) -> tuple[PrefixTree, ...]:
        """The cached blocks as trees of at most ``limit`` nodes."""
        known = {}
        for digest, one in self._namespaces().items():
            group = one.parts.get("group", "")
            name = f"{one.model}, KV group {group}" if group else one.model
            known[digest] = name, one.block_bytes
        return prefix_trees(self.pool.admin.blocks(), known, self.pool.admin.now(), limit)

    def tenants(self) -> tuple[tuple[TenantView, ...], int]:
        """Tenants that hold most, and how many there are."""
        disk_tier = self.pool.admin.disk
        host = {use.tenant: use for use in self.pool.host_tenants()}
        disk = (
            {use.tenant: use for use in disk_tier.catalog.tenants()}
            if disk_tier is not None
            else {}
        )
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


def _prefix_of(name: str, held: Iterable[BlockInfo]) -> set[BlockKey]:
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
    return prefix.union(
        key for key, above in parents.items() if above in prefix and hangs(key, above)
    )


@dataclass(slots=True)
class _Group:
    """The blocks of one row, added up. The set of digests, and that of tenants, stays small: with
    two of them it is known that they differ."""

    depth: int = -1
    host_blocks: int = 0
    host_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    youngest: float = float("-inf")
    oldest: float = float("inf")
    pinned: set[BlockKey] = field(default_factory=set)
    digests: set[bytes] = field(default_factory=set)
    tenants: set[str] = field(default_factory=set)

    def add(self, block: BlockInfo) -> None:
        if not (self.host_blocks or self.disk_blocks):
            self.depth = block.depth
        if block.tier is TierName.HOST:
            self.host_blocks += 1
            self.host_bytes += block.slot_bytes
        else:
            self.disk_blocks += 1
            self.disk_bytes += block.slot_bytes
        self.youngest = max(self.youngest, block.used)
        self.oldest = min(self.oldest, block.used)
        if block.pinned:
            self.pinned.add(block.key)
        if len(self.digests) < 2:
            self.digests.add(block.key[:NAMESPACE_BYTES])
        if len(self.tenants) < 2:
            self.tenants.add(block.tenant)


def _row(by: By, name: str, group: _Group, known: Mapping[bytes, _Known], now: float) -> Row:
    digests = {bytes.fromhex(name)} if by is By.NAMESPACE else group.digests
    digest = next(iter(digests)) if len(digests) == 1 else b""
    namespace = known.get(digest, _UNKNOWN)
    is_empty = not (group.host_blocks or group.disk_blocks)
    return Row(
        name=name,
        namespace=digest.hex(),
        model=namespace.model if digest else "",
        group=namespace.parts.get("group", ""),
        tenant=next(iter(group.tenants)) if len(group.tenants) == 1 else "",
        block_bytes=namespace.block_bytes,
        depth=group.depth if by in (By.BLOCK, By.CHAIN) else -1,
        host_blocks=group.host_blocks,
        host_bytes=group.host_bytes,
        disk_blocks=group.disk_blocks,
        disk_bytes=group.disk_bytes,
        pinned_blocks=len(group.pinned),
        youngest_s=-1.0 if is_empty else max(0.0, now - group.youngest),
        oldest_s=-1.0 if is_empty else max(0.0, now - group.oldest),
        parts=namespace.parts if by is By.NAMESPACE else {},
    )


def model_of(parts: Iterable[tuple[str, str]]) -> str:
    """A readable name of a namespace's model: architecture, types, adapter. Safe to print: clients
    and files say what they like."""
    named = dict(parts)
    name = named.get("model", "")
    if "architecture" in named:
        try:
            config = json.loads(named["architecture"])
        except (ValueError, RecursionError):
            config = {}
        given = config.get("architectures") if isinstance(config, dict) else None
        if isinstance(given, list):
            name = " ".join(map(str, given)) or name
    words = [name, named.get("dtype", "").removeprefix("torch."), named.get("weights", "")[:20]]
    if "adapter" in named:
        words.append(f"adapter {named['adapter'][:12]}")
    text = " ".join(word for word in words if word) or "unknown"
    return "".join(one if one.isprintable() else "?" for one in text[:_LONGEST_NAME])
