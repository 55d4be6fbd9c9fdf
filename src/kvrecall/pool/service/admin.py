"""Administration of a pool: its contents, and every command on them, each in one place.

A command is a struct: its fields travel over the socket, and ``run`` executes it where the pool
is: in the service, or in this process for a disk folder that no pool uses. ``ServiceAdmin`` and
``FolderAdmin`` execute any: ``admin.do(Drop(query, False))``. kvrecall/pool_cli.py has the options.
"""

from __future__ import annotations

import enum
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import msgspec

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName
from kvrecall.config import DiskConfig, PoolTerms
from kvrecall.errors import ConfigError, TierError
from kvrecall.pool.accounts import TenantUse
from kvrecall.pool.arena import Arena
from kvrecall.pool.base import PoolStats
from kvrecall.pool.cipher import read_cipher
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.disk.codec import BlockCodec, make_codec
from kvrecall.pool.disk.folder import FolderHeld, own_bytes
from kvrecall.pool.disk.index import check_index
from kvrecall.pool.entries import BlockInfo, hangs
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.link import Link, LinkLate, LinkLost
from kvrecall.pool.tier import Outcome

R = TypeVar("R")

MAX_BLOCKS = 200_000
"""With more blocks in a pool no prefix trees are built: they would delay its engines."""
_CHILDREN = 12
_DEEPEST = 24  # nodes on the way from a root: deeper ones are counted and not shown
_TENANTS_SHOWN = 200
_MAX_ROWS = 10_000
_LONGEST_NAME = 300
_SEE = "see: kvrecall pool ls"
_PATIENCE_S = 30.0
_RESIZE_LOOK_S = 0.2
_PROGRESS_S = 0.1

OnProgress = Callable[[int, int], None]
"""Called with the work done and the total work."""


# -- what is there --------------------------------------------------------------------------


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
class ListingRow:
    """Blocks of one kind. ``name`` is a namespace's digest, a model, a tenant, or the hex name of a
    block. ``group``: the KV group, of a model with several. Empty fields (-1): the blocks differ in
    it. Ages are seconds since the youngest and the oldest last use."""

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


SORTS: dict[str, Callable[[ListingRow], tuple[float, str]]] = {
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
    rows: tuple[ListingRow, ...]
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


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """``name``: hex of its last block's hash, shortened. ``depth``: blocks before it in the
    sequence. Bytes are those of this node and its descendants, in each tier; a block in both tiers
    counts in both. ``age_s``: since the last use of any block in it. ``hidden``: children that are
    not shown."""

    name: str
    depth: int
    blocks: int
    host_bytes: int
    disk_bytes: int
    age_s: float
    children: tuple[PrefixNode, ...]
    hidden: int


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The blocks of one namespace and tenant. ``model``: with the KV group, of a model that has
    several; only one of them has ``nodes``, the others hang on its blocks. Empty ``nodes`` with
    ``hidden`` -1: too many blocks in the pool."""

    namespace: str
    model: str
    tenant: str
    block_bytes: int
    host_bytes: int
    disk_bytes: int
    blocks: int
    age_s: float
    nodes: tuple[PrefixNode, ...]
    hidden: int


class _Known(NamedTuple):
    """A namespace: a readable name of its model, the bytes of a block, and its description."""

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
        known = self.namespaces()
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
            uses = [of.get(tenant, TenantUse(tenant, 0, None, 0, 0)) for of in (host, disk)]
            limits = [-1 if use.limit_bytes is None else use.limit_bytes for use in uses]
            refused, evicted = sum(use.refused for use in uses), sum(use.evicted for use in uses)
            used = [use.used_bytes for use in uses]
            views.append(
                TenantView(tenant, used[0], limits[0], used[1], limits[1], refused, evicted)
            )
        views.sort(key=lambda view: (-(view.host_bytes + view.disk_bytes), view.tenant))
        return tuple(views[:_TENANTS_SHOWN]), len(views)

    def namespaces(self) -> dict[bytes, _Known]:
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
    fitting = [
        key
        for key in parents
        if key.hex().startswith(name) or key[NAMESPACE_BYTES:].hex().startswith(name)
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


# -- rows -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """The blocks of one row, added up. Of digests and tenants two are enough: they differ."""

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

    def row(self, by: By, name: str, known: Mapping[bytes, _Known], now: float) -> ListingRow:
        digests = {bytes.fromhex(name)} if by is By.NAMESPACE else self.digests
        digest = next(iter(digests)) if len(digests) == 1 else b""
        namespace = known.get(digest, _UNKNOWN)
        return ListingRow(
            name=name,
            namespace=digest.hex(),
            model=namespace.model if digest else "",
            group=namespace.parts.get("group", ""),
            tenant=next(iter(self.tenants)) if len(self.tenants) == 1 else "",
            block_bytes=namespace.block_bytes,
            depth=self.depth if by in (By.BLOCK, By.CHAIN) else -1,
            host_blocks=self.host_blocks,
            host_bytes=self.host_bytes,
            disk_blocks=self.disk_blocks,
            disk_bytes=self.disk_bytes,
            pinned_blocks=len(self.pinned),
            youngest_s=max(0.0, now - self.youngest) if self.digests else -1.0,
            oldest_s=max(0.0, now - self.oldest) if self.digests else -1.0,
            parts=namespace.parts if by is By.NAMESPACE else {},
        )


def _groups(held: Iterable[BlockInfo], by: By, known: Mapping[bytes, _Known]) -> dict[str, _Group]:
    """Blocks by the name of their row."""
    inner: set[BlockKey | None] = set()
    if by is By.CHAIN:
        held = [block for block in held if not block.hangs]
        inner = {block.parent for block in held}
    groups: dict[str, _Group] = {}
    for block in held:
        digest = block.key[:NAMESPACE_BYTES]
        match by:
            case By.TENANT:
                name = str(block.tenant)
            case By.NAMESPACE:
                name = digest.hex()
            case By.MODEL:
                name = known.get(digest, _UNKNOWN).model
            case _ if block.key in inner:
                continue
            case _:
                name = block.key.hex()
        group = groups.get(name)
        if group is None:
            group = groups[name] = _Group()
        group.add(block)
    return groups


# -- prefix trees ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    """A block in any tier. ``host`` and ``disk``: bytes of it and all after it."""

    key: BlockKey
    depth: int
    parent: BlockKey | None
    host: int = 0
    disk: int = 0
    used: float = 0.0
    children: list[_Block] = field(default_factory=list)

    def add(self, host: int, disk: int, used: float) -> None:
        self.host += host
        self.disk += disk
        self.used = max(self.used, used)


@dataclass(slots=True)
class _Tree:
    """The blocks of one tree. ``chain``: those of its nodes. ``host``: keys in the host, which come
    first."""

    total: _Block
    chain: dict[BlockKey, _Block] = field(default_factory=dict)
    host: set[BlockKey] = field(default_factory=set)
    blocks: int = 0

    def add(self, block: BlockInfo, is_node: bool) -> None:
        sizes = (block.slot_bytes, 0) if block.tier is TierName.HOST else (0, block.slot_bytes)
        self.total.add(*sizes, block.used)
        self.blocks += block.key not in self.host
        if block.tier is TierName.HOST:
            self.host.add(block.key)
        if is_node:
            made = self.chain.setdefault(block.key, _Block(block.key, block.depth, block.parent))
            made.parent = made.parent or block.parent
            made.add(*sizes, block.used)


def prefix_trees(
    held: Iterable[BlockInfo], known: Mapping[bytes, tuple[str, int]], now: float, limit: int = 300
) -> tuple[PrefixTree, ...]:
    """The trees of these blocks, largest first, of at most ``limit`` nodes together. ``known``: by
    a namespace's digest, a readable name and the bytes of its blocks.

    A *node* is a run of blocks without branches; the nodes that continue its end are its children.
    """
    found: dict[tuple[bytes, Tenant], _Tree] = {}
    chained = 0
    for block in held:
        place = block.key[:NAMESPACE_BYTES], block.tenant
        if place not in found:
            found[place] = _Tree(_Block(block.key, 0, None))
        chained += not block.hangs
        found[place].add(block, not block.hangs and chained <= MAX_BLOCKS)
    is_shown = chained <= MAX_BLOCKS
    budget = max(1, limit // max(1, sum(bool(tree.chain) for tree in found.values())))
    trees = []
    for (digest, tenant), tree in found.items():
        name, nbytes = known.get(digest, ("unknown", 0))
        roots = _roots(tree.chain) if is_shown else []
        nodes, hidden = _nodes(roots, now, [budget], 0) if is_shown else ((), -1)
        total = tree.total
        trees.append(
            PrefixTree(
                namespace=digest.hex(),
                model=name,
                tenant=str(tenant),
                block_bytes=nbytes,
                host_bytes=total.host,
                disk_bytes=total.disk,
                blocks=tree.blocks,
                age_s=max(0.0, now - total.used),
                nodes=nodes,
                hidden=hidden,
            )
        )
    return tuple(sorted(trees, key=lambda tree: -(tree.host_bytes + tree.disk_bytes)))


def _roots(blocks: Mapping[BlockKey, _Block]) -> list[_Block]:
    """Joins the blocks to their parents. Returns those without one."""
    roots = []
    for block in sorted(blocks.values(), key=lambda block: -block.depth):  # leaves first
        above = blocks.get(block.parent) if block.parent is not None else None
        if above is None or above.depth >= block.depth:
            roots.append(block)  # a sequence's first block, or what is left of an evicted one
            continue
        above.add(block.host, block.disk, block.used)
        above.children.append(block)
    return roots


def _nodes(
    blocks: list[_Block], now: float, left: list[int], level: int
) -> tuple[tuple[PrefixNode, ...], int]:
    """The largest of ``blocks`` as nodes, as far as ``left`` (nodes that may still be made) allows,
    and the number of omitted ones."""
    if level >= _DEEPEST:
        return (), len(blocks)
    chosen = sorted(blocks, key=lambda block: -(block.host + block.disk))
    chosen = chosen[: min(_CHILDREN, left[0])]
    left[0] -= len(chosen)
    nodes = []
    for block in chosen:
        last, length = block, 1
        while len(last.children) == 1:
            (last,) = last.children
            length += 1
        children, hidden = _nodes(last.children, now, left, level + 1)
        nodes.append(
            PrefixNode(
                name=last.key[NAMESPACE_BYTES:].hex()[:12],
                depth=block.depth,
                blocks=length,
                host_bytes=block.host,
                disk_bytes=block.disk,
                age_s=max(0.0, now - block.used),
                children=children,
                hidden=hidden,
            )
        )
    return tuple(nodes), len(blocks) - len(chosen)


# -- commands ------------------------------------------------------------------------------


class Command(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """Base of all commands. ``result``: what ``run`` returns. ``progress``: title of a progress
    bar, if it takes long. ``on_folder``: whether it works on a disk folder that no pool uses."""

    result: ClassVar[Any]
    progress: ClassVar[str] = "working"
    on_folder: ClassVar[bool] = True

    def run(self, inventory: Inventory, progress: OnProgress) -> R:
        """Executes the command. Blocks. Raises ConfigError if it cannot be executed."""
        raise NotImplementedError


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
        known = {}
        for digest, one in inventory.namespaces().items():
            group = one.parts.get("group", "")
            name = f"{one.model}, KV group {group}" if group else one.model
            known[digest] = name, one.block_bytes
        admin = inventory.pool.admin
        return prefix_trees(admin.blocks(), known, admin.now(), self.limit)


class List(Command[Listing], frozen=True):
    """The selected blocks, in rows."""

    result = Listing
    query: Query = Query()
    by: By = By.NAMESPACE
    sort: str = "size"
    limit: int = 10_000

    def run(self, inventory: Inventory, progress: OnProgress) -> Listing:
        if self.sort not in SORTS:
            raise ConfigError(f"--sort: {self.sort!r} is unknown; known: {', '.join(SORTS)}")
        held, known = inventory.select(self.query), inventory.namespaces()
        groups = _groups(held, self.by, known)
        if self.by is By.NAMESPACE and self.query == Query():  # also those with nothing left
            groups = {digest.hex(): _Group() for digest in known} | groups
        now = inventory.pool.admin.now()
        rows = [group.row(self.by, name, known, now) for name, group in groups.items()]
        rows.sort(key=SORTS[self.sort])
        return Listing(self.by, tuple(rows[: min(self.limit, _MAX_ROWS)]), len(rows))


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
        return BlockCodec()
    return BlockCodec(locked=True) if key_file is None else make_codec(read_cipher(key_file))


def _present_size(path: Path) -> int:
    """A capacity at which opening the folder evicts nothing."""
    own = own_bytes(path)
    system = os.statvfs(path)
    return min(own + own // 10 + (64 << 20), own + system.f_bavail * system.f_frsize)
