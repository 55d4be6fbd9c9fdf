"""What lies in a pool or in a disk folder: chosen, listed, checked, dropped, pinned."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Namespace, TierName
from kvrecall.errors import ConfigError
from kvrecall.pool.accounts import TenantUse
from kvrecall.pool.disk import DiskTier
from kvrecall.pool.held import Held
from kvrecall.pool.service.forest import Tree, forest
from kvrecall.pool.service.views import By, Listing, Query, Row, TenantView, model_of
from kvrecall.pool.steward import Steward
from kvrecall.pool.tier import Outcome

_PROGRESS_S = 0.1
_TENANTS_SHOWN = 200
_MAX_ROWS = 10_000

OnProgress = Callable[[int, int, int], None]
"""Called with blocks checked, blocks in all, blocks found damaged."""

SORTS: dict[str, Callable[[Row], tuple[float, str]]] = {
    "size": lambda row: (-(row.host_bytes + row.disk_bytes), row.name),
    "blocks": lambda row: (-(row.host_blocks + row.disk_blocks), row.name),
    "age": lambda row: (row.youngest_s, row.name),
    "oldest": lambda row: (-row.oldest_s, row.name),
    "depth": lambda row: (-row.depth, row.name),
    "name": lambda row: (0.0, row.name),
}
"""Orders of a listing, what people look for first."""


class Inventory:
    """Over a pool, or over the disk tier of a folder that no pool uses. Its methods block, the
    longest (``verify``) for as long as the disk takes; call them outside of any loop."""

    def __init__(self, steward: Steward | None, disk: DiskTier | None = None) -> None:
        self._steward = steward
        self._disk = steward.disk if steward is not None else disk
        self._names: dict[bytes, Namespace] = {}
        self._sizes: dict[bytes, int] = {}
        if self._disk is not None:
            for namespace, nbytes in self._disk.namespaces():
                self.register(namespace, nbytes)

    def register(self, namespace: Namespace, block_bytes: int) -> None:
        """A client told what a namespace is."""
        self._names[namespace.digest] = namespace
        self._sizes[namespace.digest] = block_bytes

    # -- what is there ---------------------------------------------------------------------

    def select(self, query: Query) -> list[Held]:
        """The blocks that fit; one in two tiers is named twice. ConfigError if the block that the
        query names is not there, or not one."""
        held = self._all()
        if query.block:
            prefix = _prefix_of(query.block, held)
            held = [block for block in held if block.key in prefix]
        used: dict[BlockKey, float] = {}
        if query.older_than_s is not None or query.younger_than_s is not None:
            for block in held:  # the later use counts, if tiers differ
                used[block.key] = max(used.get(block.key, 0.0), block.used)
        now = time.time()
        digests, tenants = frozenset(query.namespaces), frozenset(query.tenants)
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

    def listing(
        self, query: Query, by: By = By.NAMESPACE, sort: str = "size", limit: int = _MAX_ROWS
    ) -> Listing:
        """Rows about the blocks that fit."""
        held = self.select(query)
        names = self._namer(by, held)
        groups: dict[str, list[Held]] = {}
        for block in held:
            name = names(block)
            if name:
                groups.setdefault(name, []).append(block)
        if by is By.NAMESPACE and query == Query():
            for digest in self._names:
                groups.setdefault(digest.hex(), [])  # also those with nothing left
        now = time.time()
        rows = [self._row(by, name, blocks, now) for name, blocks in groups.items()]
        rows.sort(key=SORTS.get(sort, SORTS["size"]))
        return Listing(by, tuple(rows[: min(limit, _MAX_ROWS)]), len(rows))

    def forest(self, limit: int) -> tuple[Tree, ...]:
        """What is there, as trees of at most ``limit`` twigs."""
        return forest(self._all(), self._kind, time.time(), limit)

    def tenants(self) -> tuple[tuple[TenantView, ...], int]:
        """Tenants that hold most, and how many there are."""
        host = {} if self._steward is None else {u.tenant: u for u in self._steward.host_uses()}
        disk = {} if self._disk is None else {u.tenant: u for u in self._disk.uses()}
        views = [
            _tenant_view(tenant, host.get(tenant), disk.get(tenant)) for tenant in {**host, **disk}
        ]
        views.sort(key=lambda view: (-(view.host_bytes + view.disk_bytes), view.tenant))
        return tuple(views[:_TENANTS_SHOWN]), len(views)

    # -- what to do with it ----------------------------------------------------------------

    def drop(self, query: Query, pinned: bool = False) -> tuple[int, int]:
        """Drops the blocks that fit, pinned ones only if ``pinned`` says so. Leased blocks stay in
        the host. Returns how many were dropped, and how many pinned ones were not."""
        held = self.select(query)
        kept = set() if pinned else {block.key for block in held if block.pinned}
        keys = {block.key for block in held} - kept
        if self._steward is not None:
            self._steward.drop(keys)
        elif self._disk is not None:
            self._disk.unpin(tuple(keys))
            self._disk.drop(tuple(keys))
        return len(keys), len(kept)

    def drop_namespaces(self, digests: Collection[bytes]) -> None:
        """Drops all blocks of these namespaces, pinned ones too."""
        if digests:
            self.drop(Query(namespaces=tuple(digests)), pinned=True)

    def pin(self, query: Query, on: bool) -> tuple[int, int]:
        """Pins, or unpins, the blocks that fit. Returns how many, and their bytes (each counted
        once). ConfigError if they are too many to be pinned; none is then."""
        sizes = {block.key: block.slot_bytes for block in self.select(query)}
        if self._steward is not None:
            (self._steward.pin if on else self._steward.unpin)(sizes.keys())
        elif self._disk is not None:
            (self._disk.pin if on else self._disk.unpin)(tuple(sizes))
            self._disk.wait_pins_durable(10.0)
        return len(sizes), sum(sizes.values())

    def verify(self, query: Query, progress: OnProgress = lambda *_: None) -> tuple[int, int]:
        """Reads every block on disk that fits and checks its bytes; the damaged are dropped.
        Returns how many were checked, and how many damaged."""
        if self._disk is None:
            return 0, 0
        keys = [block.key for block in self.select(query) if block.tier is TierName.DISK]
        checked = damaged = 0
        told = 0.0
        for key, outcome in self._disk.check(keys):
            checked += outcome is not Outcome.MISS
            if outcome in (Outcome.CORRUPT, Outcome.ERROR):
                damaged += 1
                if self._steward is not None:
                    self._steward.damaged(key)
            if time.monotonic() - told > _PROGRESS_S:
                told = time.monotonic()
                progress(checked, len(keys), damaged)
        progress(checked, len(keys), damaged)
        return checked, damaged

    def resize(self, host_bytes: int | None, disk_bytes: int | None) -> None:
        """Sets the sizes given. What has to go goes in the background; see ``surplus``.
        ConfigError, with nothing changed, if that cannot be."""
        if self._steward is None:
            raise ConfigError("a folder has no size of its own: set disk_size of its pool")
        if disk_bytes is not None and self._disk is None:
            raise ConfigError("disk: this pool has no disk tier; start it with disk_path")
        if host_bytes is not None:
            self._steward.resize_host(host_bytes)
        if disk_bytes is not None and self._disk is not None:
            self._disk.resize(disk_bytes)

    def surplus(self) -> int:
        """Bytes that are still to go after ``resize``."""
        host = 0 if self._steward is None else self._steward.host_surplus()
        return host + (0 if self._disk is None else self._disk.surplus_bytes)

    # -- inside ----------------------------------------------------------------------------

    def _all(self) -> list[Held]:
        if self._steward is not None:
            return self._steward.blocks()
        return [] if self._disk is None else self._disk.held()

    def _kind(self, digest: bytes) -> tuple[str, int]:
        return self._model(digest), self._sizes.get(digest, 0)

    def _model(self, digest: bytes) -> str:
        namespace = self._names.get(digest)
        return model_of(dict(namespace.parts)) if namespace is not None else "unknown"

    def _namer(self, by: By, held: Iterable[Held]) -> Callable[[Held], str]:
        """The name of the row a block belongs to; empty: to none."""
        if by is By.TENANT:
            return lambda block: block.tenant
        if by is By.BLOCK:
            return lambda block: block.key.hex()
        if by is By.CHAIN:
            inner = {block.parent for block in held}
            return lambda block: "" if block.key in inner else block.key.hex()
        if by is By.NAMESPACE:
            return lambda block: block.key[:NAMESPACE_BYTES].hex()
        models: dict[bytes, str] = {}

        def model(block: Held) -> str:
            digest = block.key[:NAMESPACE_BYTES]
            if digest not in models:
                models[digest] = self._model(digest)
            return models[digest]

        return model

    def _row(self, by: By, name: str, blocks: list[Held], now: float) -> Row:
        host = [b.slot_bytes for b in blocks if b.tier is TierName.HOST]
        disk = [b.slot_bytes for b in blocks if b.tier is TierName.DISK]
        digests = {b.key[:NAMESPACE_BYTES] for b in blocks}
        if by is By.NAMESPACE:
            digests = {bytes.fromhex(name)}
        digest = next(iter(digests)) if len(digests) == 1 else b""
        tenants = {b.tenant for b in blocks}
        parts = self._names[digest].parts if digest in self._names else ()
        ages = [max(0.0, now - b.used) for b in blocks]
        return Row(
            name=name,
            namespace=digest.hex(),
            model=self._model(digest) if digest else "",
            tenant=next(iter(tenants)) if len(tenants) == 1 else "",
            block_bytes=self._sizes.get(digest, -1),
            depth=blocks[0].depth if by in (By.BLOCK, By.CHAIN) else -1,
            host_blocks=len(host),
            host_bytes=sum(host),
            disk_blocks=len(disk),
            disk_bytes=sum(disk),
            pinned_blocks=len({b.key for b in blocks if b.pinned}),
            youngest_s=min(ages, default=-1.0),
            oldest_s=max(ages, default=-1.0),
            parts=dict(parts) if by is By.NAMESPACE else {},
        )


def _prefix_of(name: str, held: Collection[Held]) -> set[BlockKey]:
    """The block whose hex name begins with ``name`` (or goes on so after its namespace), with all
    it hangs on."""
    name = name.lower()
    parents = {block.key: block.parent for block in held}
    skip = 2 * NAMESPACE_BYTES
    fitting = [
        key for key in parents if key.hex().startswith(name) or key.hex()[skip:].startswith(name)
    ]
    if len(fitting) != 1:
        many = f"{len(fitting)} blocks' names begin" if fitting else "no block's name begins"
        raise ConfigError(f"--block: {many} with {name!r}; see: kvrecall pool ls --by chain")
    prefix: set[BlockKey] = set()
    key: BlockKey | None = fitting[0]
    while key is not None and key in parents and key not in prefix:
        prefix.add(key)
        key = parents[key]
    return prefix


def _tenant_view(tenant: str, host: TenantUse | None, disk: TenantUse | None) -> TenantView:
    both = [use for use in (host, disk) if use is not None]
    return TenantView(
        tenant,
        host.used_bytes if host else 0,
        _limit(host),
        disk.used_bytes if disk else 0,
        _limit(disk),
        sum(use.refused for use in both),
        sum(use.evicted for use in both),
    )


def _limit(use: TenantUse | None) -> int:
    return -1 if use is None or use.limit_bytes is None else use.limit_bytes
