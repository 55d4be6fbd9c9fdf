"""``/dashboard``: the page, its files, and the JSON it polls."""

from __future__ import annotations

import contextlib
from importlib import resources
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, Response

from kvrecall.engines.insight import Insight
from kvrecall.server.dashboard.figures import Figures
from kvrecall.server.dashboard.history import History
from kvrecall.server.dashboard.trees import Trees

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def dashboard_router(insight: Insight) -> APIRouter:
    """The dashboard of a running engine. Its history begins at once if the loop runs that will
    serve it, else with the first poll."""
    history = History()
    with contextlib.suppress(RuntimeError):
        history.begin()
    figures = Figures(insight, history)
    trees = Trees(insight)
    router = APIRouter(tags=["dashboard"], include_in_schema=False)

    @router.get("/dashboard")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/dashboard/data.json")
    async def data(
        since: Annotated[float, Query()] = 0.0, ended_since: Annotated[float, Query()] = 0.0
    ) -> Response:
        history.begin()
        return JSONResponse(figures.tell(since, ended_since), headers=_HEADERS)

    @router.get("/dashboard/tree.json")
    async def tree() -> Response:
        return JSONResponse(await trees.tell(), headers=_HEADERS)

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
