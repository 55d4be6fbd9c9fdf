"""The management plane: health, descriptions, and stopping the server.

The members of descriptions are MindIE's, by its source (Ascend/MindIE-LLM, src/server/endpoint:
``parse_protocol.cpp`` and ``http_handler.cpp``, read in April 2026) and its documents of 2.3 and
3.1 (hiascend.com, mindiellm/llmdev). Further members are additions.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from dataclasses import asdict

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvrecall.engines.base import (
    GenerateRequest,
    RequestView,
    Role,
    Sampling,
    ServingEngine,
    miss_text,
)
from kvrecall.server.metrics import MetricsVector, MindieMetrics
from kvrecall.server.plan import SHUTDOWN_TIMEOUT_S, Plan, Plane
from kvrecall.server.replies import ReplyError, served_model, whole

log = logging.getLogger("kvrecall.server")

Json = dict[str, object]

_ROLES = {Role.BOTH: "none", Role.PREFILL: "prefill", Role.DECODE: "decode"}
_UNKNOWN = (
    "docker_label max_stop_sequences max_waiting_tokens sha validation_workers waiting_served_ratio"
).split()
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
    _add_descriptions(router, engine, plan)
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
        kept = f"those that ended by {ended} are forgotten" if since else "it keeps all so far"
        why = f"it never reached this server, or it is too old ({kept})"
        raise ReplyError(404, f"no request {request_id!r} here: {why}")
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
            now = f"{load.running} requests run and {load.waiting} wait"
            raise ReplyError(503, f"busy: {now}; {load.max_running} can run at once")
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


def _add_descriptions(router: APIRouter, engine: ServingEngine, plan: Plan) -> None:
    """Adds the routes of the management plane that describe model, bounds, load and
    configuration."""
    info = engine.info

    @router.get("/info")
    async def endpoint() -> Json:
        """TGI's description of the model and the bounds of a request."""
        described: Json = {
            "model_id": info.names[0],
            "model_dtype": info.dtype,
            "model_device_type": info.device,
            "model_pipeline_tag": "text-generation",
            "model_sha": None,
            "max_total_tokens": info.max_model_len,
        }
        return {
            **described,
            "models": [described],
            "max_concurrent_requests": info.max_running,
            "max_input_length": plan.longest_prompt(info),
            "max_batch_prefill_tokens": info.max_step_tokens,
            "max_batch_total_tokens": info.blocks * info.block_size,
            "max_best_of": plan.spec.limits.max_n,
            "version": info.version,
            **dict.fromkeys(_UNKNOWN),
        }

    @router.get("/v1/config")
    async def configuration() -> Json:
        """The effective configuration."""
        return {
            "modelName": info.names[0],
            "maxSeqLen": info.max_model_len,
            "npuMemSize": plan.device_gb,
            "cpuMemSize": plan.host_gb,
            "worldSize": info.devices,
            "maxOutputLen": plan.longest_answer(info),
            "cacheBlockSize": info.block_size,
            "maxInputTokenLen": plan.longest_prompt(info),
            "maxBatchSize": info.max_running,
            "maxPrefillTokens": info.max_step_tokens,
            "npuBlockNum": info.blocks,
            "kvPool": None if plan.spec.recall is None else dict(plan.spec.recall),
        }

    role: Json = {"roleStatus": "RoleReady", "currentRole": _ROLES[plan.spec.role]}

    @router.get("/v1/status")
    async def status() -> Json:
        """vLLM swaps no requests and keeps no blocks of its own in host memory, so these numbers
        are 0; the pool's are metrics."""
        load = engine.load()
        return {
            "service": {**role, "draining": engine.draining},
            "resource": {
                "availSlotsNum": load.free_slots,
                "availBlockNum": load.free_blocks,
                "waitingRequestNum": load.waiting,
                "runningRequestNum": load.running,
                "swappedRequestNum": 0,
                "freeNpuBlockNums": load.free_blocks,
                "freeCpuBlockNums": 0,
                "totalNpuBlockNums": load.blocks,
                "totalCpuBlockNums": 0,
            },
            "linkStatus": {"peers": []},
        }

    @router.get("/v2/status")
    async def status_v2() -> Json:
        """There is one group of devices, so the maximum over groups is the total."""
        load = engine.load()
        return {
            "service": role,
            "resource": {
                "totalAvailNpuSlotsNum": load.free_slots,
                "totalAvailNpuBlockNum": load.free_blocks,
                "maxAvailNpuBlockNum": load.free_blocks,
            },
            "linkStatus": {"peers": []},
        }

    @router.get("/v2/models/{model:path}/getSlotCount")
    async def slots(model: str) -> Json:
        """Total and free places in the batch."""
        served_model(engine, model)
        load = engine.load()
        return {
            "total_slots": load.max_running,
            "free_slots": load.free_slots,
            "available_tokens_length": load.free_blocks * info.block_size,
        }
