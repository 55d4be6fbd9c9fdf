"""The router's HTTP application: authorization, concurrency limit, routes."""

from __future__ import annotations

import contextlib
import secrets

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from kvrecall.router.bodies import Body, aside
from kvrecall.router.fleet import Fleet
from kvrecall.router.prefixes import prompt_of
from kvrecall.router.router import Completion, Router, RouterSettings, error_response, passed_on
from kvrecall.router.upstream import InstanceFailedError
from kvrecall.server.replies import ReplyError, while_connected

_MAX_BODY_BYTES = 40 << 20
_REFUSED = ("refused", "invalid_request_error")
_OUTCOMES = {
    499: ("cancelled", "invalid_request_error"),
    503: ("shed", "service_unavailable"),
}
"""Of requests that the router answers itself, by status: how they count, and the error's type."""
_ROUTES = ("/v1/completions", "/v1/chat/completions")
PASSED_ON = "authorization x-request-id x-session-id traceparent tracestate user-agent".split()
"""Request headers that the router forwards to its instances."""


def application(settings: RouterSettings, fleet_of: type[Fleet] = Fleet) -> FastAPI:
    """The router as an ASGI application. ``fleet_of``: how it chooses among its instances."""
    router = Router(settings, fleet_of)
    fleet, metrics = router.fleet, router.metrics
    traces = router.traces
    app = FastAPI(title="kvrecall router", lifespan=lambda _: router.running(), openapi_url=None)
    open_requests = 0

    async def complete(request: Request) -> Response:
        """Sends a completion to a prefill instance, then to a decode instance. One whose body has
        not arrived yet takes nobody's place."""
        nonlocal open_requests

        def ended() -> None:
            nonlocal open_requests
            open_requests -= 1

        if not _allowed(request, settings):
            return error_response(401, "wrong or no API key", "invalid_api_key")
        span = traces.begin(request.headers, request.url.path)
        with contextlib.ExitStack() as held:
            if span is not None:
                held.callback(span.end)
            try:
                body = await aside(Body.read, await _content(request))
                if open_requests >= settings.max_requests:
                    told = f"{settings.max_requests} requests are in flight, the limit"
                    raise ReplyError(503, f"{told} (--max-requests)")
                open_requests += 1
                held.callback(ended)
                completion = Completion(
                    request.url.path,
                    body,
                    _passed_on(request),
                    await aside(prompt_of, body),
                    span=span,
                )
                reply = await while_connected(request, router.serve(completion, held))
                if span is not None:
                    span.answered(reply.status_code)
                return reply
            except ReplyError as error:
                if span is not None:
                    span.answered(error.status_code)
                outcome, kind = _OUTCOMES.get(error.status_code, _REFUSED)
                metrics.requests.labels(outcome).inc()
                return error_response(error.status_code, error.detail, kind)

    for path in _ROUTES:
        app.add_api_route(path, complete, methods=["POST"], response_model=None)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The model list of the first instance that answers."""
        if not _allowed(request, settings):
            return error_response(401, "wrong or no API key", "invalid_api_key")
        for instance in fleet.decode + fleet.prefill:
            if instance.healthy:
                with contextlib.suppress(InstanceFailedError):
                    answer = await router.upstream.get(instance, "/v1/models", _passed_on(request))
                    return passed_on(answer)
        return error_response(503, "no instance is up", "service_unavailable")

    @app.get("/health")
    async def health() -> Response:
        """200 while any instance can serve; the body lists them all."""
        state = {
            "status": "ok" if fleet.can_serve else "no instance is up",
            "open_requests": open_requests,
            "instances": [
                {"url": x.url, "role": str(x.role), "up": x.healthy, "inflight": x.inflight}
                | ({"leaving": True} if x.leaves else {})
                for x in (*fleet.all, *fleet.leaving)
            ],
        }
        return JSONResponse(state, 200 if fleet.can_serve else 503)

    @app.get("/metrics")
    async def page() -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return app


def _allowed(request: Request, settings: RouterSettings) -> bool:
    given = request.headers.get("authorization", "").encode()
    wanted = f"Bearer {settings.api_key}".encode()
    return settings.api_key is None or secrets.compare_digest(given, wanted)


def _passed_on(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name in PASSED_ON}


async def _content(request: Request) -> bytes:
    """The body. Raises ReplyError."""
    content = bytearray()
    announced = request.headers.get("content-length", "")
    too_large = ReplyError(413, f"the body is larger than {_MAX_BODY_BYTES} bytes")
    if announced.isdecimal() and int(announced) > _MAX_BODY_BYTES:
        raise too_large
    try:
        async for chunk in request.stream():
            content += chunk
            if len(content) > _MAX_BODY_BYTES:
                raise too_large
    except ClientDisconnect:
        raise ReplyError(499, "the client closed the connection") from None
    return bytes(content)
