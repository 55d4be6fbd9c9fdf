"""The router's HTTP application: its guard, its limits and its routes."""

from __future__ import annotations

import contextlib

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvrecall.router.bodies import Body, aside
from kvrecall.router.fleet import Fleet
from kvrecall.router.prefixes import Prompt, prompt_of
from kvrecall.router.router import Completion, Router, RouterSettings, error_response, passed_on
from kvrecall.router.upstream import LOOP, NAME, InstanceFailedError
from kvrecall.server.guard import ADMITTED, Guard
from kvrecall.server.replies import ReplyError, while_connected

_MAX_BODY_BYTES = 40 << 20
_MOST_HELD = 1 << 30  # bytes of bodies that instances have not begun to answer
_LONGEST_HEADER = 8192
_REFUSED = ("refused", "invalid_request_error")
_OUTCOMES = {
    401: ("refused", "invalid_api_key"),
    499: ("cancelled", "invalid_request_error"),
    503: ("shed", "service_unavailable"),
    508: ("refused", "router_error"),
}
"""Of requests that the router answers itself, by status: how they count, and the error's type."""
_BY_PREFIX = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
_ANYWHERE = (
    "/v1/messages/count_tokens /tokenize /detokenize /v1/chat/completions/batch /cohere/v2/chat "
    "/cohere/v2/chat/render /inference/v1/generate /v1/decisions /v1/systemone "
    "/generative_scoring /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank "
    "/v1/rerank /v2/rerank /v1/completions/render /v1/chat/completions/render "
    "/v1/messages/render /v1/responses/render /v1/completions/derender "
    "/v1/chat/completions/derender"
).split()
"""Routes of vLLM that go to the least busy instance, and count as unread."""
PASSED_ON = (
    f"authorization x-request-id x-session-id traceparent tracestate user-agent {LOOP}".split()
)
"""Request headers that the router forwards to its instances."""
_FORWARDED = {name.encode(): name for name in PASSED_ON}
_LOOP = LOOP.encode()


def application(settings: RouterSettings, fleet_of: type[Fleet] = Fleet) -> ASGIApp:
    """The router as an ASGI application. ``fleet_of``: how it chooses among its instances."""
    router = Router(settings, fleet_of)
    fleet, metrics = router.fleet, router.metrics
    traces = router.traces
    held_bytes = 0

    def refuse(status: int, message: str) -> Response:
        outcome, kind = _OUTCOMES.get(status, _REFUSED)
        metrics.requests.labels(outcome).inc()
        return error_response(status, message, kind)

    def hold(nbytes: int) -> None:
        """So many bytes more. Raises ReplyError if the bodies that are held would be too large."""
        nonlocal held_bytes
        if held_bytes + nbytes > _MOST_HELD:
            raise ReplyError(503, f"the bodies of requests in flight exceed {_MOST_HELD} bytes")
        held_bytes += nbytes

    async def complete(request: Request) -> Response:
        """Sends a completion to a prefill instance, then to a decode instance."""
        path = str(request.scope["path"])
        span = traces.begin(request)
        with contextlib.ExitStack() as held:
            if span is not None:
                held.callback(span.end)
            try:
                headers = _passed_on(request)
                _check_encoding(request)
                content = (await request.receive()).get("body", b"")  # the guard has it whole
                hold(nbytes := len(content))
                completion = Completion(path, Body({}), headers, None, nbytes, hold, span=span)
                held.callback(completion.forget)
                read = await aside(nbytes, _read, content, path in _BY_PREFIX)
                completion.body, completion.prompt = read
                del content, read
                reply = await while_connected(request, router.serve(completion, held))
            except ReplyError as error:
                reply = refuse(error.status_code, error.detail)
            if span is not None:
                span.answered(reply.status_code)
            return reply

    async def models(request: Request) -> Response:
        """The model list of the first instance that has one."""
        headers = _passed_on(request)
        reply = error_response(503, "no instance is up", "service_unavailable")
        for instance in fleet.decode + fleet.prefill:
            if instance.healthy and reply.status_code >= 500:
                with contextlib.suppress(InstanceFailedError):
                    reply = passed_on(await router.upstream.get(instance, "/v1/models", headers))
        return reply

    async def health(request: Request) -> Response:
        """200 while any instance can serve. The body lists the instances to those who may use the
        router."""
        state: dict[str, object] = {"status": "ok" if fleet.can_serve else "no instance is up"}
        if request.scope.get(ADMITTED):
            state["open_requests"] = guard.running
            state["instances"] = [
                {"url": x.url, "role": str(x.role), "up": x.healthy, "inflight": x.inflight}
                | ({"leaving": True} if x.leaves else {})
                for x in (*fleet.all, *fleet.leaving)
            ]
        way = f"1.1 {NAME}, {fleet.way}".removesuffix(", ")
        return JSONResponse(state, 200 if fleet.can_serve else 503, {"via": way})

    async def page(_: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, ReplyError):
            return refuse(error.status_code, error.detail)
        known = ", ".join((*_BY_PREFIX, *_ANYWHERE, *others))
        why = f"the router does not pass on {request.method} {request.url.path[:80]}; it serves"
        return refuse(error.status_code, f"{why} {known}")

    others = {"/v1/models": models, "/health": health, "/metrics": page}
    passed = frozenset((*_BY_PREFIX, *_ANYWHERE))
    rest = Starlette(
        routes=[
            *(Route(path, complete, methods=["POST"]) for path in passed),
            *(Route(path, endpoint) for path, endpoint in others.items()),
        ],
        exception_handlers={HTTPException: unknown},
        lifespan=lambda _: router.running(),
    )
    rest.router.redirect_slashes = False  # to http, where a proxy before it speaks TLS

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        """What is passed on goes without Starlette's layers, which cost as much as the guard."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in passed:
            reply = await complete(Request(scope, receive))
            await reply(scope, receive, send)
        else:
            await rest(scope, receive, send)

    guard = Guard(
        dispatch,
        access=settings.access,
        refuse=refuse,
        max_body_bytes=_MAX_BODY_BYTES,
        max_requests=settings.max_requests,
        limit_name="--max-requests",
        counts_values=False,
    )
    return guard


def _read(content: bytes, has_prefix: bool) -> tuple[Body, Prompt | None]:
    body = Body.read(content)
    return body, prompt_of(body) if has_prefix else None


def _check_encoding(request: Request) -> None:
    """Raises ReplyError if the body is compressed: engines do not read it then."""
    encoding = dict(request.scope["headers"]).get(b"content-encoding", b"identity")
    if encoding.strip().lower() not in (b"", b"identity"):
        named = repr(encoding[:40].decode("latin-1"))
        why = f"Content-Encoding: {named} is not read here; send the body as plain JSON"
        raise ReplyError(415, why)


def _passed_on(request: Request) -> dict[str, str]:
    """Raises ReplyError for one that is too long, and for a request that was here before."""
    given = request.scope["headers"]
    found = {_FORWARDED[n]: value.decode("latin-1") for n, value in given if n in _FORWARDED}
    before = [value.decode("latin-1") for n, value in given if n == _LOOP]
    found[LOOP] = ", ".join([*before, NAME])
    if NAME in ",".join(before):
        why = "the request was at this router before: one of its instances leads back to it"
        raise ReplyError(508, f"{why}; list engines, and no router that lists this one")
    for name, value in found.items():
        if len(value) > _LONGEST_HEADER:
            message = f"{name}: {len(value)} characters; allowed: {_LONGEST_HEADER}"
            raise ReplyError(431, message)
    return found
