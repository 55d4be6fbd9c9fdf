"""The applications of a server: which plane is served where, and the bounds on all of them."""

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

from kvrecall.engines.base import Engine
from kvrecall.server.bounds import Bounds, Closed
from kvrecall.server.dashboard.routes import dashboard_router
from kvrecall.server.figures import MindieFigures
from kvrecall.server.management import management_router
from kvrecall.server.plan import Plan, Plane
from kvrecall.server.replies import ReplyError, error_body
from kvrecall.server.routes import business_router

_MANAGEMENT_PATHS = ("/health", "/load")  # of vLLM's application
_METRICS_PATHS = ("/metrics",)


def attach_all(app: FastAPI, engine: Engine, plan: Plan) -> Mapping[str, FastAPI]:
    """Adds everything of kvrecall's to ``app``, vLLM's application, before its first request, and
    gives the applications of the plan's further listeners, by their names.

    A plane without a listener of its own is served on the business plane's.
    """
    apps = {listener.name: _application() for listener in plan.spec.listeners}
    management = apps.get(plan.home(Plane.MANAGEMENT), app)
    metrics = apps.get(plan.home(Plane.METRICS), app)
    figures = MindieFigures(engine.info.names[0], engine.load)

    _include_first(app, business_router(engine, plan))
    _include_first(management, management_router(engine, plan, figures))
    _include_first(management, dashboard_router(engine.insight))
    metrics.router.routes.insert(0, _metrics_route(figures))
    for each in (app, *apps.values()):
        _complete(each, plan)
    closed: tuple[str, ...] = (
        *(_MANAGEMENT_PATHS if management is not app else ()),
        *(_METRICS_PATHS if metrics is not app else ()),
    )
    if closed:
        app.add_middleware(Closed, prefixes=closed)
    return apps


def _include_first(app: FastAPI, router: APIRouter) -> None:
    """Adds the router before what is there: vLLM's /metrics takes all that begins like it, and the
    paths of the management plane are narrower than some of the business plane."""
    routes = app.router.routes
    before = len(routes)
    app.include_router(router)
    routes[:] = routes[before:] + routes[:before]


def _application() -> FastAPI:
    """An application with nothing but its description."""
    return FastAPI(title="kvrecall", docs_url=None, redoc_url=None)


def _complete(app: FastAPI, plan: Plan) -> None:
    """MindIE's error body for what nobody serves, and the bounds."""
    app.add_exception_handler(ReplyError, _reply_error)
    app.add_exception_handler(HTTPException, _no_such_path)
    if RequestValidationError not in app.exception_handlers:
        app.add_exception_handler(RequestValidationError, _unreadable)
    app.add_middleware(
        Bounds, owner=app, max_body_bytes=plan.max_body_bytes, max_links=plan.max_links
    )


def _metrics_route(figures: MindieFigures) -> Route:
    own = CollectorRegistry(auto_describe=False)
    own.register(figures)

    async def metrics(_: Request) -> Response:
        page = generate_latest(REGISTRY) + generate_latest(own)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return Route("/metrics", metrics, methods=["GET"])


async def _reply_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ReplyError)
    return error.response()


async def _no_such_path(request: Request, error: Exception) -> Response:
    """404 and 405 of the router itself; errors of vLLM's routes keep vLLM's form."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(
        error_body(error.status_code, message),
        status_code=error.status_code,
        headers=error.headers,
    )


async def _unreadable(_: Request, error: Any) -> Response:
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    return ReplyError(422, f"{field}: {problem['msg']}").response()
