"""``/dashboard``: the page, its files, and the JSON it polls."""

from __future__ import annotations

import contextlib
import secrets
import time
from importlib import resources
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from kvrecall import __version__
from kvrecall.engines.base import REASONS, Heat, ServingEngine
from kvrecall.server.dashboard.alarms import ENGINE_DOWN, POOL_AWAY
from kvrecall.server.dashboard.cached_prefixes import CachedPrefixes
from kvrecall.server.dashboard.history import EVERY_S, KEPT, History

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
        alive = await engine.alive()
        history.alarms.note(ENGINE_DOWN, not alive, now)
        away = (prefixes.failure or ("" if sample.pool_up else _AWAY)) if alive else ""
        history.alarms.note(POOL_AWAY, bool(away), now, away)
        answer = {
            "boot": boot,
            "now": now,
            "version": __version__,
            "uptime_s": now - started,
            "model": info.names[0],
            "pool": info.pooled,
            "every_s": EVERY_S,
            "kept_samples": KEPT,
            "kept_requests": insight.remembered,
            "alarms": history.alarms.active(now),
            "bounds": history.bounds,
            "reasons": REASONS,
            "sample": sample,
            "samples": history.since(since),
            "day": {"since": day_since, "missed": day_missed},
            "live": live,
            "live_total": total,
            "ended": insight.ended(ended_since),
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


def _json(answer: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(answer), 200, _HEADERS, _TYPES["json"])


def _heat(heat: Heat) -> dict[str, Any]:
    shares = [
        [chosen / there if there else None for there, chosen in zip(*rows, strict=True)]
        for rows in zip(heat.considered, heat.selected, strict=True)
    ]
    return {"layers": list(heat.layers), "shares": shares}
