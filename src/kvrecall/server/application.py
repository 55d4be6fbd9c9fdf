"""The applications of a server: the listener of each plane, and the guard of all of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvrecall.engines.base import ServingEngine
from kvrecall.server.access import HEALTH, Access, known_hosts
from kvrecall.server.dashboard.routes import dashboard_router
from kvrecall.server.guard import Guard
from kvrecall.server.management import health_router, management_router
from kvrecall.server.metrics import MindieMetrics
from kvrecall.server.plan import Plan, Plane
from kvrecall.server.replies import ReplyError
from kvrecall.server.routes import business_router

_METRICS = "/metrics"
_PUBLIC = re.compile(
    "/(|generate|generate_stream|infer|infer_token|tokenize|detokenize|version|metrics|info"
    "|v1/(chat|completions|messages|responses|models|tokenizer)(/.*)?"
    "|v2(/models(/.*)?)?|inference/v1/generate|invocations)"
)
"""What serves clients. Other routes show prompts or settings, or steer the server."""


def attach_all(
    app: FastAPI,
    engine: ServingEngine,
    keys: Sequence[str] = (),
    origins: Sequence[str] = (),
    *,
    plan: Plan,
) -> Mapping[str, FastAPI]:
    """Adds kvrecall's routes and guard to ``app``, vLLM's application, before its first request,
    and returns the applications of the plan's further listeners by name.

    A plane without a listener of its own is served on the business plane's. ``keys`` open all
    routes; pages of ``origins`` may use them. Raises ConfigError if other hosts would need no key.
    """
    plan.check_reach(bool(keys))
    apps = {
        listener.name: FastAPI(title="kvrecall", docs_url=None, redoc_url=None)
        for listener in plan.spec.listeners
    }
    management = apps.get(plan.home(Plane.MANAGEMENT), app)
    metrics = apps.get(plan.home(Plane.METRICS), app)
    mindie = MindieMetrics(engine.info.names[0], engine.load)

    # Of vLLM's application, whose /metrics matches every path that begins so.
    closed = [
        path for path, home in (("/load", management), (_METRICS, metrics)) if home is not app
    ]
    for path in closed:
        reply = ReplyError(404, f"{path} is on another address of this server").response()
        app.router.routes.insert(0, Route(f"{path}{{rest:path}}", reply))
    _include_first(app, business_router(engine, plan))
    _include_first(management, management_router(engine, plan, mindie))
    _include_first(management, dashboard_router(engine))
    metrics.router.routes.insert(0, _metrics_route(mindie))
    for name, each in {"": app, **apps}.items():
        if each is not management:
            _include_first(each, health_router(engine))
        _complete(each, plan, _access(plan, name, keys, origins))
    return apps


def _include_first(app: FastAPI, router: APIRouter) -> None:
    """Adds the router before existing routes: vLLM's /metrics matches every path with that prefix,
    and paths of the management plane are more specific than some of the business plane."""
    routes = app.router.routes
    before = len(routes)
    app.include_router(router)
    routes[:] = routes[before:] + routes[:before]


def _access(plan: Plan, name: str, keys: Sequence[str], origins: Sequence[str]) -> Access:
    """Of the listener of that name."""
    host, tls = plan.listener(name)
    own = plan.home(Plane.METRICS) == name != plan.home(Plane.MANAGEMENT) and name
    return Access(
        keys=tuple(keys),
        hosts=known_hosts(plan.allowed_hosts, host),
        origins=frozenset(origins),
        open_paths=(*HEALTH, _METRICS) if own else HEALTH,
        public=None if tls else _PUBLIC,
    )


def _complete(app: FastAPI, plan: Plan, access: Access) -> None:
    """Adds MindIE's error body for unknown paths, and the guard."""
    app.add_exception_handler(ReplyError, _reply_error)
    app.add_exception_handler(HTTPException, _no_such_path)
    if RequestValidationError not in app.exception_handlers:
        app.add_exception_handler(RequestValidationError, _unreadable)
    app.add_middleware(
        Guard,
        access=access,
        refuse=lambda status, message: ReplyError(status, message).response(),
        max_body_bytes=plan.max_body_bytes,
        max_requests=plan.max_links,
        limit_name="maxLinkNum",
    )


def _metrics_route(mindie: MindieMetrics) -> Route:
    own = CollectorRegistry(auto_describe=False)
    own.register(mindie)

    async def metrics(_: Request) -> Response:
        page = generate_latest(REGISTRY) + generate_latest(own)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return Route(_METRICS, metrics, methods=["GET"])


async def _reply_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ReplyError)
    return error.response()


async def _no_such_path(request: Request, error: Exception) -> Response:
    """404 and 405 of the router; errors of vLLM's routes keep vLLM's form."""
    assert isinstance(error, HTTPException)
    reply = ReplyError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(reply.body(), error.status_code, error.headers)


async def _unreadable(_: Request, error: Any) -> Response:
    problem = error.errors()[0]
    field = ".".join(str(part) for part in problem["loc"])
    return ReplyError(422, f"{field}: {problem['msg']}").response()
