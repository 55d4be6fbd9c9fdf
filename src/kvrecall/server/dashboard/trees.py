"""What is cached, asked of the pool: seldom, off the server's loop, and told to all that ask."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from kvrecall.block import SHARED
from kvrecall.engines.insight import Insight
from kvrecall.errors import KvrecallError
from kvrecall.pool.service.admin import ServiceAdmin
from kvrecall.pool.service.forest import Tree, Twig

_FRESH_S = 4.0  # an answer is given again for so long
_SHARE = 0.02  # of the time at most, asking may take
_TIMEOUT_S = 5.0


class Trees:
    """The pool's forest, for the page."""

    def __init__(self, insight: Insight) -> None:
        self._insight = insight
        self._lock = asyncio.Lock()
        self._told: dict[str, Any] = {}
        self._good_until = float("-inf")

    async def tell(self) -> dict[str, Any]:
        """Model, tenant and prefixes as nested nodes; or ``empty``, why there are none."""
        async with self._lock:
            if time.monotonic() >= self._good_until:
                began = time.monotonic()
                self._told = await asyncio.to_thread(self._ask)
                took = time.monotonic() - began
                self._good_until = time.monotonic() + max(_FRESH_S, took / _SHARE)
            return self._told

    def _ask(self) -> dict[str, Any]:
        if not self._insight.pooled:
            return _nothing("This server runs without a pool.")
        socket = self._insight.pool_socket
        if socket is None:
            return _nothing("The pool of this engine cannot be asked from outside.")
        try:
            trees = _forest(socket)
        except KvrecallError as error:
            return _nothing(f"The pool does not tell: {error}.")
        if not trees:
            return _nothing("Nothing is cached yet.")
        blocks = sum(tree.blocks for tree in trees)
        return {"roots": _roots(trees), "note": f"{blocks} blocks", "empty": ""}


def _forest(socket: Path) -> tuple[Tree, ...]:
    with ServiceAdmin(socket, _TIMEOUT_S) as admin:
        return admin.forest()


def _nothing(why: str) -> dict[str, Any]:
    return {"roots": [], "note": "", "empty": why}


def _roots(trees: tuple[Tree, ...]) -> list[dict[str, Any]]:
    """One node for each namespace, in it its tenants, in them their prefixes."""
    by_namespace: dict[str, list[Tree]] = {}
    for tree in trees:
        by_namespace.setdefault(tree.namespace, []).append(tree)
    roots = []
    for namespace, tenants in by_namespace.items():
        first = tenants[0]
        roots.append(
            {
                **_sums(tenants),
                "id": namespace,
                "label": first.model,
                "code": namespace[:8],
                "title": f"namespace {namespace}, {first.block_bytes} bytes a block",
                "children": [_tenant(tree) for tree in tenants],
                "hidden": 0,
            }
        )
    return roots


def _sums(trees: list[Tree]) -> dict[str, Any]:
    return {
        "host_bytes": sum(tree.host_bytes for tree in trees),
        "disk_bytes": sum(tree.disk_bytes for tree in trees),
        "age_s": min(tree.age_s for tree in trees),
    }


def _tenant(tree: Tree) -> dict[str, Any]:
    name = "no tenant" if tree.tenant == SHARED else f"tenant {tree.tenant}"
    title = f"{tree.blocks} blocks"
    if tree.hidden < 0:
        title += "; too many to be drawn as a tree, see kvrecall pool ls"
    path = f"{tree.namespace}/{tree.tenant}"
    return {
        **_sums([tree]),
        "id": path,
        "label": f"{name}, {title}",
        "code": "",
        "title": title,
        "children": [_twig(twig, path) for twig in tree.twigs],
        "hidden": max(0, tree.hidden),
    }


def _twig(twig: Twig, above: str) -> dict[str, Any]:
    path = f"{above}/{twig.name}"
    blocks = "1 block" if twig.blocks == 1 else f"{twig.blocks} blocks"
    start = "from the start" if twig.depth == 0 else f"after {twig.depth}"
    return {
        "id": path,
        "label": f"{blocks} {start}",
        "code": twig.name,
        "title": f"blocks {twig.depth} to {twig.depth + twig.blocks - 1}, the last is {twig.name}",
        "host_bytes": twig.host_bytes,
        "disk_bytes": twig.disk_bytes,
        "age_s": twig.age_s,
        "children": [_twig(child, path) for child in twig.children],
        "hidden": twig.hidden,
    }
