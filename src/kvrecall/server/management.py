"""The management plane: health, descriptions, and stopping the server."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvrecall.engines.base import GenerateRequest, RequestView, Sampling, ServingEngine, miss_text
from kvrecall.server.descriptions import add_management_descriptions, served_model
from kvrecall.server.metrics import MetricsVector, MindieMetrics
from kvrecall.server.plan import SHUTDOWN_TIMEOUT_S, Plan, Plane
from kvrecall.server.replies import ReplyError, whole

log = logging.getLogger("kvrecall.server")

_PROBE_LIMIT_S = 600
_OUT_OF_TIME = 500
_POLL_S = 0.05
_FORCED_S = 2.0
"""Time for the replies of aborted requests."""


class Stopping:
    """Stops the server on request: refuses new requests, and lets running ones finish within a
    time limit or aborts them."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()
        self._forced = False

    async def drained(self) -> None:
        """Begins to stop, and waits until no request runs or the limit is reached. Idempotent;
        continues if the client disconnects."""
        self._begin("refusing new requests; running ones may finish")
        await self._drained.wait()

    def force(self) -> None:
        """Aborts all running requests, also those that were to finish. Does not wait."""
        self._forced = True
        self._begin("aborting running requests")

    def _begin(self, how: str) -> None:
        log.info("stopService: %s", how)
        self._engine.drain()
        if self._task is None:
            self._task = asyncio.create_task(self._end())

    async def _end(self) -> None:
        await self._idle(SHUTDOWN_TIMEOUT_S, or_forced=True)
        if self._forced:
            await asyncio.sleep(_POLL_S)  # after the reply to this request
            await self._engine.end_all()
            await self._idle(_FORCED_S)
        self._drained.set()
        await asyncio.sleep(_POLL_S)  # after the reply to this request
        os.kill(os.getpid(), signal.SIGTERM)  # the engine's own way to end, see serving.py

    async def _idle(self, seconds: float, or_forced: bool = False) -> None:
        """Waits until no request runs, up to a time limit."""
        end = time.monotonic() + seconds
        while self._engine.load().unfinished and not (or_forced and self._forced):
            if time.monotonic() >= end:
                return
            await asyncio.sleep(_POLL_S)


def health_router(engine: ServingEngine) -> APIRouter:
    """Whether the engine lives; on every plane."""
    router = APIRouter(tags=["management"])

    @router.get("/health")
    async def health() -> Response:
        await _check_alive(engine)
        return Response()

    return router


def management_router(engine: ServingEngine, plan: Plan, metrics: MindieMetrics) -> APIRouter:
    """The routes of the management plane, except the dashboard."""
    router = health_router(engine)
    _add_health(router, engine, metrics)
    add_management_descriptions(router, engine, plan)
    stopping = Stopping(engine)
    vector = MetricsVector(metrics, engine.load, plan.address(Plane.MANAGEMENT))

    @router.get("/metrics-json")
    async def metrics_json() -> Response:
        return JSONResponse(vector.body())

    @router.get("/why/{request_id:path}")
    async def why(request_id: str) -> Response:
        return JSONResponse({"requests": _why(engine, request_id)})

    @router.api_route("/stopService", methods=["POST", *(("GET",) if plan.stop_by_get else ())])
    async def stop_service(mode: str = "") -> Response:
        if mode == "Force":  # in this spelling, as in MindIE
            stopping.force()
        else:
            await stopping.drained()
        return Response()

    return router


def _why(engine: ServingEngine, request_id: str) -> list[dict[str, object]]:
    """The requests of that id, why the rest of their prompts was computed, and that in words.
    Raises ReplyError 404 if there are none."""
    insight = engine.insight
    found = insight.requests(request_id)
    if not found:
        since = insight.forgotten_until
        ended = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(since))
        kept = f"those that ended by {ended} are forgotten" if since else "none was forgotten yet"
        raise ReplyError(
            404,
            f"no request {request_id!r} here: it never reached this server, or it is too old "
            f"({kept})",
        )
    return [{**asdict(view), "why": _words(engine, view)} for view in found]


def _words(engine: ServingEngine, view: RequestView) -> str:
    if view.missed is not None:
        return miss_text(view.missed)
    if not view.split:
        return "not known yet: it waits for its first step" if not view.ended else "not known"
    if not engine.info.pooled:
        return "this server has no pool"
    return "everything that could be recalled was"


def _add_health(router: APIRouter, engine: ServingEngine, metrics: MindieMetrics) -> None:
    @router.get("/v2/health/live")
    async def live() -> Response:
        await _check_alive(engine)
        if engine.load().busy:
            return JSONResponse({"message": "Service is alive but busy"})
        return Response()

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        """Whether a request sent now would run at once."""
        await _check_alive(engine)
        if engine.draining:
            raise ReplyError(503, "the server is stopping")
        load = engine.load()
        if load.busy:
            raise ReplyError(
                503,
                f"busy: {load.running} requests run and {load.waiting} wait; "
                f"{load.max_running} can run at once",
            )
        return Response()

    @router.get("/v2/models/{model:path}/ready")
    async def model_ready(model: str) -> Response:
        served_model(engine, model)
        await _check_alive(engine)
        return Response()

    @router.get("/health/timed")
    async def timed(request: Request) -> Response:
        return await _probe(request, engine, metrics, _PROBE_LIMIT_S)

    @router.get("/health/timed-{seconds:int}")
    async def timed_within(request: Request, seconds: int) -> Response:
        if not 1 <= seconds <= _PROBE_LIMIT_S:
            raise ReplyError(422, f"the time is {seconds} s; allowed: 1 to {_PROBE_LIMIT_S}")
        return await _probe(request, engine, metrics, seconds)


async def _check_alive(engine: ServingEngine) -> None:
    if not await engine.alive():
        raise ReplyError(503, "the engine has died")


async def _probe(
    request: Request, engine: ServingEngine, metrics: MindieMetrics, limit_s: int
) -> Response:
    """Computes one token, in a request of its own, within the limit. A server too busy to run it in
    time is healthy, as in MindIE, if other requests progress meanwhile."""
    probe = GenerateRequest(
        request_id=f"probe-{os.urandom(8).hex()}",
        prompt="a",
        sampling=Sampling(max_tokens=1),
        priority=-5,
        timeout_s=limit_s,
    )
    before = metrics.work_done()
    try:
        await whole(request, engine.generate(probe))
    except ReplyError as error:
        if error.status_code != _OUT_OF_TIME or metrics.work_done() <= before:
            raise
    return JSONResponse({"status": "healthy"})
