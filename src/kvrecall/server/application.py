"""The applications of a server: the listener of each plane, and the limits of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrecall.engines.base import LONGEST_ID, Engine
from kvrecall.server.dashboard.routes import dashboard_router
from kvrecall.server.management import management_router
from kvrecall.server.metrics import MindieMetrics
from kvrecall.server.plan import Plan, Plane
from kvrecall.server.replies import ReplyError
from kvrecall.server.routes import business_router

_MANAGEMENT_PATHS = ("/health", "/load")  # of vLLM's application
_METRICS_PATHS = ("/metrics",)


def attach_all(app: FastAPI, engine: Engine, plan: Plan) -> Mapping[str, FastAPI]:
    """Adds kvrecall's routes and limits to ``app``, vLLM's application, before its first request,
    and returns the applications of the plan's further listeners by name.

    A plane without a listener of its own is served on the business plane's.
    """
    apps = {
        listener.name: FastAPI(title="kvrecall", docs_url=None, redoc_url=None)
        for listener in plan.spec.listeners
    }
    management = apps.get(plan.home(Plane.MANAGEMENT), app)
    metrics = apps.get(plan.home(Plane.METRICS), app)
    mindie = MindieMetrics(engine.info.names[0], engine.load)

    _include_first(app, business_router(engine, plan))
    _include_first(management, management_router(engine, plan, mindie))
    _include_first(management, dashboard_router(engine))
    metrics.router.routes.insert(0, _metrics_route(mindie))
    for each in (app, *apps.values()):
        _complete(each, plan)
    closed = (
        *(_MANAGEMENT_PATHS if management is not app else ()),
        *(_METRICS_PATHS if metrics is not app else ()),
    )
    if closed:
        app.add_middleware(Closed, prefixes=closed)
    return apps


def _include_first(app: FastAPI, router: APIRouter) -> None:
    """Adds the router before existing routes: vLLM's /metrics matches every path with that prefix,
    and paths of the management plane are more specific than some of the business plane."""
    routes = app.router.routes
    before = len(routes)
    app.include_router(router)
    routes[:] = routes[before:] + routes[:before]


def _complete(app: FastAPI, plan: Plan) -> None:
    """Adds MindIE's error body for unknown paths, and the limits."""
    app.add_exception_handler(ReplyError, _reply_error)
    app.add_exception_handler(HTTPException, _no_such_path)
    if RequestValidationError not in app.exception_handlers:
        app.add_exception_handler(RequestValidationError, _unreadable)
    app.add_middleware(
        Bounds, owner=app, max_body_bytes=plan.max_body_bytes, max_links=plan.max_links
    )


def _metrics_route(mindie: MindieMetrics) -> Route:
    own = CollectorRegistry(auto_describe=False)
    own.register(mindie)

    async def metrics(_: Request) -> Response:
        page = generate_latest(REGISTRY) + generate_latest(own)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", metrics, methods=["GET"])


async def _reply_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ReplyError)
    return error.response()


async def _no_such_path(request: Request, error: Exception) -> Response:
    """404 and 405 of the router; errors of vLLM's routes keep vLLM's form."""
    assert isinstance(error, HTTPException)
    told = ReplyError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(told.body(), error.status_code, error.headers)


async def _unreadable(_: Request, error: Any) -> Response:
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    return ReplyError(422, f"{field}: {problem['msg']}").response()


class Closed:
    """Answers 404 to paths with one of ``prefixes``, which another address serves."""

    def __init__(self, app: ASGIApp, prefixes: tuple[str, ...]) -> None:
        self._app = app
        self._prefixes = prefixes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["path"].startswith(self._prefixes):
            app = ReplyError(
                404, f"{scope['path']} is on another address of this server"
            ).response()
        await app(scope, receive, send)


class Bounds:
    """Answers 413 to a body of more than ``max_body_bytes``, 503 to requests on more than
    ``max_links`` open connections, and 431 to those with a longer X-Request-Id than is remembered.
    Bodies without a length are counted as they arrive."""

    def __init__(self, app: ASGIApp, owner: FastAPI, max_body_bytes: int, max_links: int) -> None:
        self._app = app
        self._owner = owner
        self._max_body = max_body_bytes
        self._max_links = max_links

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._links() > self._max_links:
            error = ReplyError(503, f"more than {self._max_links} open connections (maxLinkNum)")
            await error.response()(scope, receive, send)
            return
        size = f"{self._max_body / 2**20:g} MB"
        too_large = ReplyError(413, f"the body is larger than {size} (maxRequestLength)")
        headers = dict(scope["headers"])
        name = headers.get(b"x-request-id", b"")
        if len(name) > LONGEST_ID:
            told = f"X-Request-Id: {len(name)} characters; allowed: {LONGEST_ID}"
            await ReplyError(431, told).response()(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            await too_large.response()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise too_large
            return message

        await self._app(scope, counted, send)

    def _links(self) -> int:
        """Open connections, this one included; 0 if the HTTP server does not report them."""
        server = getattr(self._owner.state, "server", None)
        return len(server.server_state.connections) if server is not None else 0
