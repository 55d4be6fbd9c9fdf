"""The cached blocks as prefix trees: for each model and tenant, prefixes with a common beginning.

A pool knows blocks and their parents. A *node* is a run of blocks without branches; the nodes that
continue its end are its children. All trees together have at most ``limit`` nodes, the largest
ones; the omitted ones are counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName
from kvrecall.pool.entries import BlockInfo

MAX_BLOCKS = 200_000
"""With more blocks in a pool no trees are built: they would delay its engines."""

_CHILDREN = 12
_DEEPEST = 24  # nodes on the way from a root: deeper ones are counted and not shown


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


@dataclass(slots=True)
class _Total:
    """The blocks of one tree. ``host``: keys in the host, which come first; ``both``: those of them
    that are on disk too; ``chain``: what the nodes are made of."""

    chain: list[BlockInfo] = field(default_factory=list)
    host: set[BlockKey] = field(default_factory=set)
    both: set[BlockKey] = field(default_factory=set)
    blocks: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    used: float = 0.0

    def add(self, block: BlockInfo, listed: bool) -> None:
        """``listed``: there may be nodes yet."""
        self.blocks += 1
        self.used = max(self.used, block.used)
        if block.tier is TierName.HOST:
            self.host_bytes += block.slot_bytes
            self.host.add(block.key)
        else:
            self.disk_bytes += block.slot_bytes
            if block.key in self.host:
                self.both.add(block.key)
        if listed and not block.hangs:
            self.chain.append(block)


def prefix_trees(
    held: Iterable[BlockInfo], known: Mapping[bytes, tuple[str, int]], now: float, limit: int = 300
) -> tuple[PrefixTree, ...]:
    """The trees of these blocks, largest first. ``known``: by a namespace's digest, a readable name
    and the bytes of its blocks."""
    groups: dict[tuple[bytes, Tenant], _Total] = {}
    chained = 0
    for block in held:
        total = groups.setdefault((block.key[:NAMESPACE_BYTES], block.tenant), _Total())
        chained += not block.hangs
        total.add(block, chained <= MAX_BLOCKS)
    shown = chained <= MAX_BLOCKS
    budget = max(1, limit // max(1, sum(bool(total.chain) for total in groups.values())))
    trees = []
    for (digest, tenant), total in groups.items():
        name, nbytes = known.get(digest, ("unknown", 0))
        roots = _roots(total.chain) if shown else []
        nodes, hidden = _nodes(roots, now, [budget], 0) if shown else ((), -1)
        trees.append(
            PrefixTree(
                namespace=digest.hex(),
                model=name,
                tenant=str(tenant),
                block_bytes=nbytes,
                host_bytes=total.host_bytes,
                disk_bytes=total.disk_bytes,
                blocks=total.blocks - len(total.both),
                age_s=max(0.0, now - total.used),
                nodes=nodes,
                hidden=hidden,
            )
        )
    return tuple(sorted(trees, key=lambda tree: -(tree.host_bytes + tree.disk_bytes)))


def _roots(held: Sequence[BlockInfo]) -> list[_Block]:
    """The blocks joined to their parents; those without one."""
    blocks: dict[BlockKey, _Block] = {}
    for one in held:
        block = blocks.get(one.key)
        if block is None:
            block = blocks[one.key] = _Block(one.key, one.depth, one.parent)
        if block.parent is None:
            block.parent = one.parent
        if one.tier is TierName.HOST:
            block.host += one.slot_bytes
        else:
            block.disk += one.slot_bytes
        block.used = max(block.used, one.used)
    roots = []
    for block in sorted(blocks.values(), key=lambda block: -block.depth):  # leaves first
        above = blocks.get(block.parent) if block.parent is not None else None
        if above is None or above.depth >= block.depth:
            roots.append(block)  # a sequence's first block, or what is left of an evicted one
            continue
        above.host += block.host
        above.disk += block.disk
        above.used = max(above.used, block.used)
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
