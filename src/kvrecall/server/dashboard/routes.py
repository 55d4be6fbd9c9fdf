"""``/dashboard``: the page, its files, and the JSON it polls."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from importlib import resources
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from kvrecall import __version__
from kvrecall.block import SHARED
from kvrecall.engines.base import EngineInfo, Heat, Reason, ServingEngine
from kvrecall.errors import KvrecallError
from kvrecall.pool.service.admin import PrefixNode, PrefixTree, PrefixTrees, ServiceAdmin
from kvrecall.server.dashboard.history import EVERY_S, KEPT, History

Json = dict[str, Any]

_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "json": "application/json",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MOST_LIVE = 200
_FRESH_S = 4.0  # an answer of the pool is reused for this long
_SHARE = 0.02  # share of the time that queries of the pool may take
_TIMEOUT_S = 5.0
_AWAY = "as of the engine's last step"
_NO_HEAT = (
    "Retrieval attention has selected no blocks yet. It acts on long sequences if it is enabled "
    "(docs/retrieval.md)."
)


def dashboard_router(engine: ServingEngine) -> APIRouter:
    """The dashboard of a running engine. Its history begins at once if the serving event loop
    runs, otherwise with the first poll."""
    info, insight = engine.info, engine.insight
    boot, started = secrets.token_hex(8), time.time()
    history = History()
    with contextlib.suppress(RuntimeError):
        history.begin()
    prefixes = CachedPrefixes(info)
    router = APIRouter(tags=["dashboard"], include_in_schema=False)

    @router.get("/dashboard")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/dashboard/data.json")
    async def data(
        since: Annotated[float, Query()] = 0.0, ended_since: Annotated[float, Query()] = 0.0
    ) -> Response:
        """The current figures, and the history after ``since`` and ``ended_since``."""
        history.begin()
        live, total = insight.live(_MOST_LIVE)
        heat = insight.heat()
        now = time.time()
        sample = history.latest()
        day_since, day_missed = history.day()
        answer = {
            "boot": boot,
            "now": now,
            "version": __version__,
            "uptime_s": now - started,
            "model": info.names[0],
            "pool": info.pooled,
            "pool_away": prefixes.failure or ("" if sample.pool_up else _AWAY),
            "every_s": EVERY_S,
            "kept_samples": KEPT,
            "kept_requests": insight.remembered,
            "bounds": history.bounds,
            "reasons": {reason: reason.text for reason in Reason},
            "sample": sample,
            "samples": history.since(since),
            "day": {"since": day_since, "missed": day_missed},
            "live": live,
            "live_total": total,
            "ended": insight.ended(ended_since),
            "partings": insight.partings(),
            "heat": None if heat is None else _heat(heat),
            "heat_note": _NO_HEAT,
        }
        return _json(answer)

    @router.get("/dashboard/tree.json")
    async def tree() -> Response:
        return _json(await prefixes.answer())

    @router.get("/dashboard/{name}")
    async def file(name: str) -> Response:
        return _file(name)

    return router


_FILES = {
    entry.name: entry.read_bytes()
    for entry in (resources.files(__package__) / "static").iterdir()
    if entry.is_file()
}


def _file(name: str) -> Response:
    content = _FILES.get(name)
    if content is None:
        return Response("there is no such file", 404, media_type="text/plain")
    return Response(content, 200, _HEADERS, _TYPES[name.rpartition(".")[2]])


def _json(answer: Json) -> Response:
    return Response(msgspec.json.encode(answer), 200, _HEADERS, _TYPES["json"])


def _heat(heat: Heat) -> Json:
    shares = [
        [chosen / there if there else None for there, chosen in zip(*rows, strict=True)]
        for rows in zip(heat.considered, heat.selected, strict=True)
    ]
    return {"layers": list(heat.layers), "shares": shares}


class CachedPrefixes:
    """The pool's prefix trees, queried at intervals and off the event loop; all polling pages share
    an answer. ``failure``: why the last query failed, empty if it did not."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._lock = asyncio.Lock()
        self._answer: Json = {}
        self._good_until = float("-inf")
        self.failure = ""

    async def answer(self) -> Json:
        """Model, tenant and prefixes as nested nodes; or ``empty``, why there are none."""
        async with self._lock:
            if time.monotonic() >= self._good_until:
                began = time.monotonic()
                self._answer = await asyncio.to_thread(self._ask)
                took = time.monotonic() - began
                self._good_until = time.monotonic() + max(_FRESH_S, took / _SHARE)
            return self._answer

    def _ask(self) -> Json:
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
        by_namespace: dict[str, list[PrefixTree]] = {}
        for tree in trees:
            by_namespace.setdefault(tree.namespace, []).append(tree)
        roots = [_namespace(tenants) for tenants in by_namespace.values()]
        return {"roots": roots, "note": f"{blocks} blocks", "empty": ""}


def _nothing(why: str) -> Json:
    return {"roots": [], "note": "", "empty": why}


def _drawn(of: PrefixTree | PrefixNode, key: str, label: str, code: str, title: str) -> Json:
    """A node of the tree as the page draws it, without its children."""
    sizes = {"host_bytes": of.host_bytes, "disk_bytes": of.disk_bytes, "age_s": of.age_s}
    return {"id": key, "label": label, "code": code, "title": title, **sizes}


def _namespace(tenants: list[PrefixTree]) -> Json:
    """The node of a namespace; in it its tenants, in them their prefixes."""
    first = tenants[0]
    title = f"namespace {first.namespace}, {first.block_bytes} bytes a block"
    return {
        **_drawn(first, first.namespace, first.model, first.namespace[:8], title),
        "host_bytes": sum(tree.host_bytes for tree in tenants),
        "disk_bytes": sum(tree.disk_bytes for tree in tenants),
        "age_s": min(tree.age_s for tree in tenants),
        "children": [_tenant(tree) for tree in tenants],
        "hidden": 0,
    }


def _tenant(tree: PrefixTree) -> Json:
    name = "no tenant" if tree.tenant == SHARED else f"tenant {tree.tenant}"
    title = f"{tree.blocks} blocks"
    if tree.hidden < 0:
        title += "; too many to draw as a tree, see kvrecall pool ls"
    path = f"{tree.namespace}/{tree.tenant}"
    children = [_node(node, path) for node in tree.children]
    made = _drawn(tree, path, f"{name}, {title}", "", title)
    return {**made, "children": children, "hidden": max(0, tree.hidden)}


def _node(node: PrefixNode, above: str) -> Json:
    path = f"{above}/{node.name}"
    blocks = "1 block" if node.blocks == 1 else f"{node.blocks} blocks"
    start = "from the start" if node.depth == 0 else f"after {node.depth}"
    title = f"blocks {node.depth} to {node.depth + node.blocks - 1}, the last is {node.name}"
    children = [_node(child, path) for child in node.children]
    made = _drawn(node, path, f"{blocks} {start}", node.name, title)
    return {**made, "children": children, "hidden": node.hidden}
