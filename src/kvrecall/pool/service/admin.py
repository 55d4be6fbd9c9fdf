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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

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
from kvrecall.pool.disk.folder import LOCK_NAME, FolderHeld, FolderLock, own_bytes
from kvrecall.pool.disk.index import check_index
from kvrecall.pool.entries import BlockInfo, hangs
from kvrecall.pool.pool import Pool
from kvrecall.pool.service import protocol as p
from kvrecall.pool.service.link import Link, LinkLate, LinkLost
from kvrecall.pool.service.sessions import ClientView
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

Counts = dict[str, int]
"""The result of a command that changes blocks, by what it counted."""


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


@dataclass(slots=True)
class ListingRow:
    """Blocks of one kind. ``name`` is a namespace's digest, a model, a tenant, or the hex name of a
    block. ``group``: the KV group, of a model with several. Empty fields (-1): the blocks differ in
    it. Ages are seconds since the youngest and the oldest last use."""

    name: str
    namespace: str = ""
    model: str = ""
    group: str = ""
    tenant: str = ""
    block_bytes: int = -1
    depth: int = -1
    host_blocks: int = 0
    host_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    pinned_blocks: int = 0  # each once, whatever tiers it is in
    youngest_s: float = -1.0
    oldest_s: float = -1.0
    parts: dict[str, str] = field(default_factory=dict)

    def add(self, block: BlockInfo, now: float) -> None:
        namespace, tenant = block.key[:NAMESPACE_BYTES].hex(), str(block.tenant)
        age_s = max(0.0, now - block.used)
        if not (self.host_blocks or self.disk_blocks):
            self.namespace, self.tenant = namespace, tenant
            self.youngest_s = self.oldest_s = age_s
        self.namespace = self.namespace if self.namespace == namespace else ""
        self.tenant = self.tenant if self.tenant == tenant else ""
        self.youngest_s = min(self.youngest_s, age_s)
        self.oldest_s = max(self.oldest_s, age_s)
        if block.tier is TierName.HOST:
            self.host_blocks += 1
            self.host_bytes += block.slot_bytes
        else:
            self.disk_blocks += 1
            self.disk_bytes += block.slot_bytes


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
class TenantView:
    """A tenant that holds blocks. Limits are None without a limit; ``refused`` and ``evicted``
    count its blocks refused and evicted because of its limits."""

    tenant: str
    host_bytes: int
    host_limit: int | None
    disk_bytes: int
    disk_limit: int | None
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


@dataclass(slots=True)
class PrefixNode:
    """A run of blocks without branches. ``name``: hex of its last block's hash, shortened.
    ``depth``: blocks before it in the sequence. Bytes are those of this node and its descendants,
    in each tier; a block in both tiers counts in both. ``age_s``: since the last use of any block
    in it. ``children``: nodes that continue its end; ``hidden``: those that are not shown."""

    name: str = ""
    depth: int = 0
    blocks: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    age_s: float = float("inf")
    children: list[PrefixNode] = field(default_factory=list)
    hidden: int = 0

    def add(self, host_bytes: int, disk_bytes: int, age_s: float) -> None:
        self.host_bytes += host_bytes
        self.disk_bytes += disk_bytes
        self.age_s = min(self.age_s, age_s)


@dataclass(slots=True)
class PrefixTree(PrefixNode):
    """The blocks of one namespace and tenant. ``model``: with the KV group, of a model that has
    several; only one of them has ``children``, the others hang on its blocks. No ``children`` with
    ``hidden`` -1: too many blocks in the pool."""

    namespace: str = ""
    model: str = ""
    tenant: str = ""
    block_bytes: int = 0


class _Known(NamedTuple):
    """A namespace: a readable name of its model, the bytes of a block, and its description."""

    model: str
    block_bytes: int
    parts: dict[str, str]


_UNKNOWN = _Known("unknown", -1, {})


def select(pool: Pool, query: Query) -> Iterator[BlockInfo]:
    """The selected blocks, one after the other: there may be millions. A block in two tiers
    appears twice. Raises ConfigError if the query names something unknown."""
    if query.tier not in ("", TierName.HOST, TierName.DISK):
        raise ConfigError(f"--tier: {query.tier!r} is unknown; allowed: host, disk")
    admin, digests = pool.admin, _digests(pool, query)
    prefix = _prefix_of(query.block, admin.blocks()) if query.block else None
    used: dict[BlockKey, float] = {}  # of those in the host: the later use counts
    if query.older_than_s is not None or query.younger_than_s is not None:
        used = {block.key: block.used for block in pool.host_blocks()}
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


def _digests(pool: Pool, query: Query) -> set[bytes]:
    """The namespaces a query names; empty if it names none."""
    if not (query.namespaces or query.models):
        return set()
    known = namespaces_of(pool)
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


def tenants_of(pool: Pool) -> tuple[tuple[TenantView, ...], int]:
    """Tenants that hold most, and how many there are."""
    tier = pool.admin.disk
    host = {use.tenant: use for use in pool.host_tenants()}
    disk = {use.tenant: use for use in (tier.catalog.tenants() if tier is not None else ())}
    views = []
    for tenant in {**host, **disk}:
        a, b = (of.get(tenant, TenantUse(tenant, 0, None, 0, 0)) for of in (host, disk))
        views.append(
            TenantView(
                tenant, a.used_bytes, a.limit_bytes, b.used_bytes, b.limit_bytes,
                a.refused + b.refused, a.evicted + b.evicted,
            )
        )  # fmt: skip
    views.sort(key=lambda view: (-(view.host_bytes + view.disk_bytes), view.tenant))
    return tuple(views[:_TENANTS_SHOWN]), len(views)


def namespaces_of(pool: Pool) -> dict[bytes, _Known]:
    """Every namespace that was registered or has blocks on disk, by its digest."""
    disk = pool.admin.disk
    known = [*(disk.namespaces() if disk is not None else ()), *pool.namespaces()]
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


# -- prefix trees ---------------------------------------------------------------------------


def prefix_trees(
    held: Iterable[BlockInfo], known: Mapping[bytes, tuple[str, int]], now: float, limit: int = 300
) -> list[PrefixTree]:
    """The trees of these blocks, largest first, of at most ``limit`` nodes together. ``known``: by
    a namespace's digest, a readable name and the bytes of its blocks. Blocks in the host come
    before those on disk."""
    trees: dict[tuple[bytes, Tenant], PrefixTree] = {}
    nodes: dict[tuple[bytes, Tenant], _Nodes] = defaultdict(dict)
    in_host: set[tuple[BlockKey, Tenant]] = set()
    chained = 0
    for block in held:
        key, tenant, digest = block.key, block.tenant, block.key[:NAMESPACE_BYTES]
        place = digest, tenant
        if (tree := trees.get(place)) is None:
            name, nbytes = known.get(digest, ("unknown", 0))
            tree = trees[place] = PrefixTree(
                namespace=digest.hex(), model=name, tenant=str(tenant), block_bytes=nbytes
            )
        is_host = block.tier is TierName.HOST
        tree.blocks += (key, tenant) not in in_host
        if is_host:
            in_host.add((key, tenant))
        sizes = (block.slot_bytes, 0) if is_host else (0, block.slot_bytes)
        age_s = max(0.0, now - block.used)
        tree.add(*sizes, age_s)
        if block.hangs:
            continue
        chained += 1
        if chained <= MAX_BLOCKS:
            if (found := nodes[place].get(key)) is None:
                found = PrefixNode(key[NAMESPACE_BYTES:].hex()[:12], block.depth, 1), block.parent
            found[0].add(*sizes, age_s)
            nodes[place][key] = found[0], found[1] or block.parent
    left = max(1, limit // max(1, len(nodes)))
    for place, tree in trees.items():
        if chained > MAX_BLOCKS:
            tree.hidden = -1
        else:
            tree.children, tree.hidden = _shown(_roots(nodes.get(place, {})), [left], 0)
    return sorted(trees.values(), key=lambda tree: -(tree.host_bytes + tree.disk_bytes))


_Nodes = dict[BlockKey, tuple[PrefixNode, BlockKey | None]]
"""Blocks as nodes, with their parents."""


def _roots(nodes: _Nodes) -> list[PrefixNode]:
    """Joins the blocks to their parents. Returns those without one."""
    roots = []
    for node, parent in sorted(nodes.values(), key=lambda each: -each[0].depth):  # leaves first
        above, _ = nodes.get(parent, (None, None)) if parent is not None else (None, None)
        if above is None or above.depth >= node.depth:
            roots.append(node)  # a sequence's first block, or what is left of an evicted one
            continue
        above.add(node.host_bytes, node.disk_bytes, node.age_s)
        above.children.append(node)
    return roots


def _shown(nodes: list[PrefixNode], left: list[int], level: int) -> tuple[list[PrefixNode], int]:
    """The largest of ``nodes``, runs joined, as far as ``left`` (nodes that may still be shown)
    allows, and the number of omitted ones."""
    if level >= _DEEPEST:
        return [], len(nodes)
    chosen = sorted(nodes, key=lambda node: -(node.host_bytes + node.disk_bytes))
    chosen = chosen[: min(_CHILDREN, left[0])]
    left[0] -= len(chosen)
    for node in chosen:
        while len(node.children) == 1:
            (last,) = node.children
            node.name, node.children = last.name, last.children
            node.blocks += 1
        node.children, node.hidden = _shown(node.children, left, level + 1)
    return chosen, len(nodes) - len(chosen)


# -- commands ------------------------------------------------------------------------------


class Command(msgspec.Struct, Generic[R], frozen=True, array_like=True):
    """Base of all commands. ``result``: what ``run`` returns. ``progress``: title of a progress
    bar, if it takes long. ``on_folder``: whether it works on a disk folder that no pool uses."""

    result: ClassVar[Any]
    progress: ClassVar[str] = "working"
    on_folder: ClassVar[bool] = True

    def run(self, pool: Pool, progress: OnProgress) -> R:
        """Executes the command. Blocks. Raises ConfigError if it cannot be executed."""
        raise NotImplementedError


class Stat(Command[Overview], frozen=True):
    """The current state of the service, which only the service itself knows."""

    result = Overview
    on_folder = False


class PrefixTrees(Command[list[PrefixTree]], frozen=True):
    """The cached blocks as trees by model and tenant, largest first, of ``limit`` nodes."""

    result = list[PrefixTree]
    limit: int = 300

    def run(self, pool: Pool, progress: OnProgress) -> list[PrefixTree]:
        known = {}
        for digest, one in namespaces_of(pool).items():
            group = one.parts.get("group", "")
            name = f"{one.model}, KV group {group}" if group else one.model
            known[digest] = name, one.block_bytes
        admin = pool.admin
        return prefix_trees(admin.blocks(), known, admin.now(), self.limit)


class List(Command[Listing], frozen=True):
    """The selected blocks, in rows."""

    result = Listing
    query: Query = Query()
    by: By = By.NAMESPACE
    sort: str = "size"
    limit: int = 10_000

    def run(self, pool: Pool, progress: OnProgress) -> Listing:
        if self.sort not in SORTS:
            raise ConfigError(f"--sort: {self.sort!r} is unknown; known: {', '.join(SORTS)}")
        by, known, now = self.by, namespaces_of(pool), pool.admin.now()
        held: Iterable[BlockInfo] = select(pool, self.query)
        inner: set[BlockKey | None] = set()
        if by is By.CHAIN:
            held = [block for block in held if not block.hangs]
            inner = {block.parent for block in held}
        rows: dict[str, ListingRow] = {}
        if by is By.NAMESPACE and self.query == Query():  # also those with nothing left
            rows = {digest.hex(): ListingRow(digest.hex(), digest.hex()) for digest in known}
        pinned: set[BlockKey] = set()
        for block in held:
            if block.key in inner:
                continue
            digest = block.key[:NAMESPACE_BYTES]
            match by:
                case By.TENANT:
                    name = str(block.tenant)
                case By.NAMESPACE:
                    name = digest.hex()
                case By.MODEL:
                    name = known.get(digest, _UNKNOWN).model
                case _:
                    name = block.key.hex()
            if (row := rows.get(name)) is None:
                depth = block.depth if by in (By.BLOCK, By.CHAIN) else -1
                row = rows[name] = ListingRow(name, depth=depth)
            row.add(block, now)
            if block.pinned and block.key not in pinned:
                pinned.add(block.key)
                row.pinned_blocks += 1
        for row in rows.values():
            if row.namespace:
                one = known.get(bytes.fromhex(row.namespace), _UNKNOWN)
                row.model, row.group, row.block_bytes = (
                    one.model, one.parts.get("group", ""), one.block_bytes,
                )  # fmt: skip
                row.parts = one.parts if by is By.NAMESPACE else {}
        found = sorted(rows.values(), key=SORTS[self.sort])
        return Listing(by, tuple(found[: min(self.limit, _MAX_ROWS)]), len(found))


class Verify(Command[Counts], frozen=True):
    """Reads and checks the selected blocks on disk; drops damaged ones unless ``dry_run``."""

    result = Counts
    progress = "verifying"
    query: Query = Query()
    dry_run: bool = False

    def run(self, pool: Pool, progress: OnProgress) -> Counts:
        disk = pool.admin.disk
        if disk is None:
            return {"checked": 0, "damaged": 0}
        keys = [b.key for b in select(pool, self.query) if b.tier is TierName.DISK]
        checked = damaged = 0
        told = 0.0
        for key, outcome in disk.check(keys, self.dry_run):
            checked += outcome is not Outcome.MISS
            if outcome in (Outcome.CORRUPT, Outcome.ERROR):
                damaged += 1
                if not self.dry_run:
                    pool.lost_below([key])
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                progress(checked, len(keys))
        progress(checked, len(keys))
        return {"checked": checked, "damaged": damaged}


class Drop(Command[Counts], frozen=True):
    """Drops the selected blocks, pinned ones only with ``pinned``: those that stay are counted.
    Leased blocks stay in the host. ``dry_run``: only counts."""

    result = Counts
    query: Query
    pinned: bool
    dry_run: bool = False

    def run(self, pool: Pool, progress: OnProgress) -> Counts:
        keys: set[BlockKey] = set()
        kept: set[BlockKey] = set()
        for block in select(pool, self.query):
            (kept if block.pinned and not self.pinned else keys).add(block.key)
        keys -= kept
        if not self.dry_run:
            pool.admin.drop(keys)
        return {"dropped": len(keys), "pinned": len(kept)}


class Pin(Command[Counts], frozen=True):
    """Pins, or unpins, the selected blocks: all or none. Counts each once, whatever tiers it is
    in."""

    result = Counts
    query: Query
    on: bool

    def run(self, pool: Pool, progress: OnProgress) -> Counts:
        sizes = {block.key: block.slot_bytes for block in select(pool, self.query)}
        admin = pool.admin
        (admin.pin if self.on else admin.unpin)(sizes.keys())
        return {"blocks": len(sizes), "bytes": sum(sizes.values())}


class Resize(Command[dict[str, int | None]], frozen=True):
    """Sets the given sizes (bytes); ends when the surplus is gone."""

    result = dict[str, int | None]
    progress = "making room"
    on_folder = False
    host_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None
    disk_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)] | None

    def run(self, pool: Pool, progress: OnProgress) -> dict[str, int | None]:
        disk = pool.admin.disk
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
        return {"host": self.host_bytes, "disk": self.disk_bytes}


_COMMANDS = {kind.__name__: kind for kind in (Stat, PrefixTrees, List, Verify, Drop, Pin, Resize)}


def command_of(request: p.Administer) -> Command[Any]:
    """The command received over the socket. Raises ProtocolError."""
    name = request.command
    if name not in _COMMANDS:
        raise p.ProtocolError(f"unknown command: {name!r}")
    try:
        return msgspec.msgpack.decode(request.fields, type=_COMMANDS[name])
    except (ValueError, RecursionError) as error:
        raise p.ProtocolError(f"invalid command {name}: {error}") from error


# -- where a pool is ----------------------------------------------------------------------------


class ServiceAdmin(AbstractContextManager["ServiceAdmin"]):
    """Executes commands in the service at a socket."""

    def __init__(self, path: Path, timeout_s: float = 5.0) -> None:
        self._path = path
        try:
            self._link = Link.open(path, timeout_s)
        except LinkLost as error:
            hint = "; for the pool in an engine, set its admin_socket and give that as --socket"
            raise TierError(f"{error}{hint}") from error

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def do(self, command: Command[R], progress: OnProgress = lambda *_: None) -> R:
        """Executes it. Blocks. Raises TierError; ConfigError if it cannot be executed."""
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
        try:
            answer = reply.result if isinstance(reply, p.Administered) else b""
            result: R = msgspec.msgpack.decode(answer, type=command.result)
        except (ValueError, RecursionError) as error:
            raise TierError(f"{self._path}: a service of another version; restart it") from error
        return result


class FolderAdmin(AbstractContextManager["FolderAdmin"]):
    """Executes commands on a disk tier's folder, which it locks: a pool without host memory. If its
    blocks are encrypted, verifying them needs the key; all other commands do not."""

    def __init__(self, path: Path, key_file: Path | None = None) -> None:
        """Opening changes nothing in the folder, and evicts nothing. Raises TierError if it is no
        disk tier's, or another process has it."""
        codec = BlockCodec()
        terms = PoolTerms(pin_limit=1.0)  # the pool's own limit is of a size not known here
        try:
            if os.access(path / LOCK_NAME, os.F_OK):  # its tier's index cannot be read
                FolderLock(path).release()
            if check_index(path):
                given = None if key_file is None else read_cipher(key_file)
                codec = BlockCodec(locked=True) if given is None else make_codec(given)
            own, system = own_bytes(path), os.statvfs(path)
            room = min(own // 10 + (64 << 20), system.f_bavail * system.f_frsize)
            disk = DiskTier(DiskConfig(path, own + room), codec=codec, terms=terms)
        except FolderHeld as error:
            raise TierError(
                f"{error}. A pool in an engine's own process cannot be administered while it "
                "runs; a service's can: --socket"
            ) from error
        self._pool = Pool(Arena.create(4096), disk, terms=terms)

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def do(self, command: Command[R], progress: OnProgress = lambda *_: None) -> R:
        """Executes it. Blocks. Raises ConfigError if it cannot be executed."""
        return command.run(self._pool, progress)
