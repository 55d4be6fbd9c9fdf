"""What is cached, as trees: by model and tenant, the prefixes that begin alike.

A pool knows blocks and their parents. A *twig* is a run of blocks in which nothing branches; the
twigs that grow out of its end are its children. A whole forest has at most ``limit`` twigs, the
largest ones; what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvrecall.block import NAMESPACE_BYTES, BlockKey, Tenant, TierName
from kvrecall.pool.held import Held

MOST_BLOCKS = 200_000
"""With more blocks in a pool its trees are not built: they would hold up its engines."""

_CHILDREN = 12
_DEEPEST = 24  # twigs on the way from a root: deeper ones are counted and not shown


@dataclass(frozen=True, slots=True)
class Twig:
    """``name``: hex of its last block's hash, shortened. ``depth``: blocks before it in the
    sequence. Bytes are those of this twig and all that grows out of it, in each tier; a block in
    both tiers counts in both. ``age_s``: since the last use of any block in it. ``hidden``:
    children that are not shown."""

    name: str
    depth: int
    blocks: int
    host_bytes: int
    disk_bytes: int
    age_s: float
    children: tuple[Twig, ...]
    hidden: int


@dataclass(frozen=True, slots=True)
class Tree:
    """The blocks of one namespace and tenant. Empty ``twigs`` with ``hidden`` -1: too many blocks
    in the pool."""

    namespace: str
    model: str
    tenant: str
    block_bytes: int
    host_bytes: int
    disk_bytes: int
    blocks: int
    age_s: float
    twigs: tuple[Twig, ...]
    hidden: int


@dataclass(slots=True)
class _Node:
    """A block in any tier. ``host`` and ``disk``: bytes of it and all after it."""

    key: BlockKey
    depth: int
    tenant: Tenant
    parent: BlockKey | None
    host: int = 0
    disk: int = 0
    used: float = 0.0
    children: list[_Node] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.host + self.disk


def forest(
    held: Sequence[Held],
    model: Callable[[bytes], tuple[str, int]],
    now: float,
    limit: int = 300,
) -> tuple[Tree, ...]:
    """The trees of these blocks, largest first. ``model``: of a namespace's digest, what a person
    calls it and the bytes of its blocks."""
    groups: dict[tuple[bytes, Tenant], list[Held]] = {}
    for block in held:
        groups.setdefault((block.key[:NAMESPACE_BYTES], block.tenant), []).append(block)
    budget = max(1, limit // max(1, len(groups)))
    shown = len(held) <= MOST_BLOCKS
    trees = []
    for (digest, tenant), blocks in groups.items():
        name, nbytes = model(digest)
        twigs, hidden = _grown(blocks, now, budget) if shown else ((), -1)
        trees.append(
            Tree(
                namespace=digest.hex(),
                model=name,
                tenant=str(tenant),
                block_bytes=nbytes,
                host_bytes=sum(b.slot_bytes for b in blocks if b.tier is TierName.HOST),
                disk_bytes=sum(b.slot_bytes for b in blocks if b.tier is not TierName.HOST),
                blocks=len({block.key for block in blocks}),
                age_s=max(0.0, now - max(block.used for block in blocks)),
                twigs=twigs,
                hidden=hidden,
            )
        )
    return tuple(sorted(trees, key=lambda tree: -(tree.host_bytes + tree.disk_bytes)))


def _grown(blocks: Iterable[Held], now: float, budget: int) -> tuple[tuple[Twig, ...], int]:
    nodes = _nodes(blocks)
    roots: list[_Node] = []
    for node in sorted(nodes.values(), key=lambda node: -node.depth):  # leaves first
        above = nodes.get(node.parent) if node.parent is not None else None
        if above is None or above.depth >= node.depth:
            roots.append(node)  # a sequence's first block, or what is left of an evicted one
            continue
        above.host += node.host
        above.disk += node.disk
        above.used = max(above.used, node.used)
        above.children.append(node)
    left = [budget]
    return _twigs(roots, now, left, 0)


def _nodes(blocks: Iterable[Held]) -> dict[BlockKey, _Node]:
    nodes: dict[BlockKey, _Node] = {}
    for block in blocks:
        node = nodes.get(block.key)
        if node is None:
            node = nodes[block.key] = _Node(block.key, block.depth, block.tenant, block.parent)
        if node.parent is None:
            node.parent = block.parent
        if block.tier is TierName.HOST:
            node.host += block.slot_bytes
        else:
            node.disk += block.slot_bytes
        node.used = max(node.used, block.used)
    return nodes


def _twigs(
    nodes: list[_Node], now: float, left: list[int], level: int
) -> tuple[tuple[Twig, ...], int]:
    """The largest of ``nodes`` as twigs, as far as ``left`` (twigs that may still be made) goes,
    and how many of them are not among them."""
    if level >= _DEEPEST:
        return (), len(nodes)
    chosen = sorted(nodes, key=lambda node: -node.nbytes)[: min(_CHILDREN, left[0])]
    left[0] -= len(chosen)
    twigs = []
    for node in chosen:
        last, blocks = node, 1
        while len(last.children) == 1:
            (last,) = last.children
            blocks += 1
        children, hidden = _twigs(last.children, now, left, level + 1)
        twigs.append(
            Twig(
                name=last.key[NAMESPACE_BYTES:].hex()[:12],
                depth=node.depth,
                blocks=blocks,
                host_bytes=node.host,
                disk_bytes=node.disk,
                age_s=max(0.0, now - node.used),
                children=children,
                hidden=hidden,
            )
        )
    return tuple(twigs), len(nodes) - len(chosen)
