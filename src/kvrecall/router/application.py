"""The router's HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from kvrecall.router.accounts import Account
from kvrecall.router.asked import Asked
from kvrecall.router.chooser import Chooser
from kvrecall.router.instance import Fleet
from kvrecall.router.metrics import RouterMetrics
from kvrecall.router.parts import Parts
from kvrecall.router.prefiller import Prefiller
from kvrecall.router.prefixes import PrefixMap, prompt_of
from kvrecall.router.prober import Prober
from kvrecall.router.relay import Relay, error_response
from kvrecall.router.settings import RouterSettings
from kvrecall.router.upstream import InstanceFailedError, Upstream
from kvrecall.server.replies import ReplyError, while_connected

_ROUTES = ("/v1/completions", "/v1/chat/completions")
_PASSED_ON = ("authorization", "x-request-id", "traceparent", "tracestate", "user-agent")


class Router:
    """Serves OpenAI requests with the instances of a fleet."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.fleet = Fleet(settings.prefill, settings.decode)
        self._open = 0
        prefixes = PrefixMap()
        self.metrics = RouterMetrics(self.fleet, prefixes)
        self._upstream = Upstream(settings)
        self.prober = Prober(self.fleet, self._upstream, prefixes, settings.probe_every_s)
        chooser = Chooser(self.fleet, prefixes, settings.imbalance)
        parts = Parts(settings, chooser, prefixes, self._upstream, self.prober, self.metrics)
        self._prefiller = Prefiller(parts)
        self._relay = Relay(parts)

    @contextlib.asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncGenerator[None, None]:
        """Probes for as long as the application runs; the first round is over when it starts."""
        async with self._upstream:
            await self.prober.round()
            task = asyncio.create_task(self.prober.run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def serve(self, request: Request) -> Response:
        """A completion: to a prefill instance, then to a decode instance."""
        if not self._allowed(request):
            return error_response(401, "wrong or no API key", "invalid_api_key")
        if self._open >= self._settings.max_requests:
            self.metrics.requests.labels("shed").inc()
            most = self._settings.max_requests
            return error_response(503, f"{most} requests are under way", "service_unavailable")
        with contextlib.ExitStack() as held:
            self._open += 1
            held.callback(self._ended)
            try:
                body = await self._body(request)
                return await while_connected(request, self._serve(request, body, held))
            except ReplyError as error:
                outcome = "cancelled" if error.status == 499 else "refused"
                self.metrics.requests.labels(outcome).inc()
                return error_response(error.status, str(error), "invalid_request_error")

    async def _serve(
        self, request: Request, body: dict[str, Any], held: contextlib.ExitStack
    ) -> Response:
        account = Account()
        asked = Asked(prompt_of(body), request.url.path, body, _passed_on(request))
        told = await self._prefiller.prefill(asked, account)
        return await self._relay.reply(asked.knowing(told), account, held)

    def _ended(self) -> None:
        self._open -= 1

    def _allowed(self, request: Request) -> bool:
        key = self._settings.api_key
        told = request.headers.get("authorization", "").encode()
        return key is None or secrets.compare_digest(told, f"Bearer {key}".encode())

    async def _body(self, request: Request) -> dict[str, Any]:
        most = self._settings.max_body_bytes
        content = b""
        async for chunk in request.stream():
            content += chunk
            if len(content) > most:
                raise ReplyError(413, f"the body is larger than {most} bytes")
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            raise ReplyError(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise ReplyError(400, "the body must be a JSON object")
        return body

    async def models(self, request: Request) -> Response:
        """/v1/models of the first instance that answers."""
        if not self._allowed(request):
            return error_response(401, "wrong or no API key", "invalid_api_key")
        headers = _passed_on(request)
        for instance in self.fleet.decode + self.fleet.prefill:
            if instance.healthy:
                try:
                    answer = await self._upstream.get(instance, "/v1/models", headers)
                except InstanceFailedError:
                    continue
                return Response(answer.content, answer.status, None, answer.media_type)
        return error_response(503, "no instance is up", "service_unavailable")

    async def health(self) -> Response:
        """200 while any instance can serve; the body lists them all."""
        state: Mapping[str, Any] = {
            "status": "ok" if self.fleet.can_serve else "no instance is up",
            "open_requests": self._open,
            "instances": [
                {
                    "url": instance.url,
                    "role": str(instance.role),
                    "up": instance.healthy,
                    "inflight": instance.inflight,
                }
                for instance in self.fleet.all
            ],
        }
        return JSONResponse(state, 200 if self.fleet.can_serve else 503)


def _passed_on(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name in _PASSED_ON}


def application(settings: RouterSettings) -> FastAPI:
    """The router as an ASGI application."""
    router = Router(settings)
    app = FastAPI(title="kvrecall router", lifespan=router.running, openapi_url=None)
    for path in _ROUTES:
        app.add_api_route(path, router.serve, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", router.models, methods=["GET"], response_model=None)
    app.add_api_route("/health", router.health, methods=["GET"], response_model=None)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(router.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return app
