"""``/dashboard``: the page, its files, and the JSON it polls."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from kvrecall import __version__
from kvrecall.engines.base import Engine
from kvrecall.engines.insight import Heat, RequestView
from kvrecall.server.dashboard.cached_prefixes import CachedPrefixes
from kvrecall.server.dashboard.history import EVERY_S, KEPT, History

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def dashboard_router(engine: Engine) -> APIRouter:
    """The dashboard of a running engine. Its history begins at once if the loop runs that will
    serve it, else with the first poll."""
    history = History()
    with contextlib.suppress(RuntimeError):
        history.begin()
    figures = _Figures(engine, history)
    prefixes = CachedPrefixes(engine.info)
    router = APIRouter(tags=["dashboard"], include_in_schema=False)

    @router.get("/dashboard")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/dashboard/data.json")
    async def data(
        since: Annotated[float, Query()] = 0.0, ended_since: Annotated[float, Query()] = 0.0
    ) -> Response:
        history.begin()
        return JSONResponse(figures.answer(since, ended_since), headers=_HEADERS)

    @router.get("/dashboard/tree.json")
    async def tree() -> Response:
        return JSONResponse(await prefixes.answer(), headers=_HEADERS)

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


_MOST_LIVE = 200
_NO_HEAT = (
    "Retrieval attention has chosen no blocks yet. It acts on long sequences where it is switched "
    "on (docs/retrieval.md)."
)


class _Figures:
    """Over the engine and the history. Work and size of an answer are bounded."""

    def __init__(self, engine: Engine, history: History) -> None:
        self._info = engine.info
        self._insight = engine.insight
        self._history = history
        self._boot = secrets.token_hex(8)
        self._began = time.time()

    def answer(self, since: float, ended_since: float) -> dict[str, Any]:
        """Everything now, and of the history what came after ``since`` and ``ended_since``."""
        live, total = self._insight.live(_MOST_LIVE)
        heat = self._insight.heat()
        now = time.time()
        return {
            "boot": self._boot,
            "now": now,
            "version": __version__,
            "uptime_s": now - self._began,
            "model": self._info.names[0],
            "pool": self._info.pooled,
            "every_s": EVERY_S,
            "kept_samples": KEPT,
            "kept_requests": self._insight.remembered,
            "sample": asdict(self._history.latest()),
            "samples": [asdict(sample) for sample in self._history.since(since)],
            "live": _plain(live),
            "live_total": total,
            "ended": _plain(self._insight.ended(ended_since)),
            "heat": None if heat is None else _heat(heat),
            "heat_note": _NO_HEAT,
        }


def _plain(views: Sequence[RequestView]) -> list[dict[str, Any]]:
    return [
        {
            "id": view.id,
            "state": str(view.phase),
            "began": view.began,
            "ended": view.ended,
            "prompt_tokens": view.prompt_tokens,
            "output_tokens": view.output_tokens,
            "ttft_s": view.ttft_s,
            "split": dict(view.split),
        }
        for view in views
    ]


def _heat(heat: Heat) -> dict[str, Any]:
    shares = [
        [chosen / there if there else None for there, chosen in zip(*rows, strict=True)]
        for rows in zip(heat.considered, heat.selected, strict=True)
    ]
    return {"layers": list(heat.layers), "shares": shares}
