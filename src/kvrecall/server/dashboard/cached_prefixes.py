"""The cached prefixes for the dashboard, queried from the pool at intervals and off the event
loop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from kvrecall.block import SHARED
from kvrecall.engines.base import EngineInfo
from kvrecall.errors import KvrecallError
from kvrecall.pool.service.admin import PrefixNode, PrefixTree, PrefixTrees, ServiceAdmin

_FRESH_S = 4.0  # an answer is reused for this long
_SHARE = 0.02  # share of the time that queries may take
_TIMEOUT_S = 5.0


class CachedPrefixes:
    """The pool's prefix trees; all polling pages share an answer. ``failure``: why the last query
    failed, empty if it did not."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._lock = asyncio.Lock()
        self._answer: dict[str, Any] = {}
        self._good_until = float("-inf")
        self.failure = ""

    async def answer(self) -> dict[str, Any]:
        """Model, tenant and prefixes as nested nodes; or ``empty``, why there are none."""
        async with self._lock:
            if time.monotonic() >= self._good_until:
                began = time.monotonic()
                self._answer = await asyncio.to_thread(self._ask)
                took = time.monotonic() - began
                self._good_until = time.monotonic() + max(_FRESH_S, took / _SHARE)
            return self._answer

    def _ask(self) -> dict[str, Any]:
        if not self._info.pooled:
            return _nothing("This server runs without a pool.")
        socket = self._info.pool_socket
        if socket is None:
            return _nothing("The pool of this engine has no administration socket.")
        try:
            with ServiceAdmin(socket, _TIMEOUT_S) as admin:
                trees = admin.do(PrefixTrees())
        except KvrecallError as error:
            self.failure = str(error)
            return _nothing(f"The pool does not answer: {error}.")
        self.failure = ""
        if not trees:
            return _nothing("Nothing is cached yet.")
        blocks = sum(tree.blocks for tree in trees)
        return {"roots": _roots(trees), "note": f"{blocks} blocks", "empty": ""}


def _nothing(why: str) -> dict[str, Any]:
    return {"roots": [], "note": "", "empty": why}


def _roots(trees: list[PrefixTree]) -> list[dict[str, Any]]:
    """One node for each namespace, in it its tenants, in them their prefixes."""
    by_namespace: dict[str, list[PrefixTree]] = {}
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


def _sums(trees: list[PrefixTree]) -> dict[str, Any]:
    return {
        "host_bytes": sum(tree.host_bytes for tree in trees),
        "disk_bytes": sum(tree.disk_bytes for tree in trees),
        "age_s": min(tree.age_s for tree in trees),
    }


def _tenant(tree: PrefixTree) -> dict[str, Any]:
    name = "no tenant" if tree.tenant == SHARED else f"tenant {tree.tenant}"
    title = f"{tree.blocks} blocks"
    if tree.hidden < 0:
        title += "; too many to draw as a tree, see kvrecall pool ls"
    path = f"{tree.namespace}/{tree.tenant}"
    return {
        **_sums([tree]),
        "id": path,
        "label": f"{name}, {title}",
        "code": "",
        "title": title,
        "children": [_node(node, path) for node in tree.children],
        "hidden": max(0, tree.hidden),
    }


def _node(node: PrefixNode, above: str) -> dict[str, Any]:
    path = f"{above}/{node.name}"
    blocks = "1 block" if node.blocks == 1 else f"{node.blocks} blocks"
    start = "from the start" if node.depth == 0 else f"after {node.depth}"
    return {
        "id": path,
        "label": f"{blocks} {start}",
        "code": node.name,
        "title": f"blocks {node.depth} to {node.depth + node.blocks - 1}, the last is {node.name}",
        "host_bytes": node.host_bytes,
        "disk_bytes": node.disk_bytes,
        "age_s": node.age_s,
        "children": [_node(child, path) for child in node.children],
        "hidden": node.hidden,
    }
