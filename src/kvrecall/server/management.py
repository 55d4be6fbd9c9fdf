"""The management plane: how the server is, what it is, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvrecall.engines.base import Engine, GenerateRequest, Sampling
from kvrecall.server.answering import whole
from kvrecall.server.figures import MindieFigures, as_json
from kvrecall.server.plan import SHUTDOWN_TIMEOUT_S, Plan
from kvrecall.server.replies import ReplyError
from kvrecall.server.routes import check_model

log = logging.getLogger("kvrecall.server")

_PROBE_LIMIT_S = 600
_POLL_S = 0.05


class Stopping:
    """Ends the server when asked: nothing new is taken, what runs may end, within a bound."""

    def __init__(self, engine: Engine, bound_s: float = SHUTDOWN_TIMEOUT_S) -> None:
        self._engine = engine
        self._bound_s = bound_s
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Does not wait. Asking again changes nothing."""
        if self._task is None:
            self._engine.drain()
            log.info("stopService: no new requests; running ones may end")
            self._task = asyncio.create_task(self._end())

    async def _end(self) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + self._bound_s
        while self._engine.load().unfinished and clock() < end:
            await asyncio.sleep(_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)  # the engine's own way to end, see serving.py


def management_router(engine: Engine, plan: Plan, figures: MindieFigures) -> APIRouter:
    """All of the management plane but the dashboard."""
    router = APIRouter(tags=["management"])
    _add_health(router, engine)
    _add_description(router, engine, plan)
    stopping = Stopping(engine)

    @router.get("/metrics-json")
    async def metrics_json() -> Response:
        return JSONResponse(as_json(figures.collect()))

    @router.api_route("/stopService", methods=["GET", "POST"])
    async def stop_service() -> Response:
        stopping.begin()
        return JSONResponse({"result": "the server stops when its running requests have ended"})

    return router


def _add_health(router: APIRouter, engine: Engine) -> None:
    @router.get("/health")
    @router.get("/v2/health/live")
    async def live() -> Response:
        await _check_alive(engine)
        return Response()

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        await _check_ready(engine)
        return Response()

    @router.get("/v2/models/{model:path}/ready")
    @router.get("/v2/models/{model:path}/versions/{version}/ready", include_in_schema=False)
    async def model_ready(model: str) -> Response:
        check_model(engine, model)
        await _check_alive(engine)
        return Response()

    @router.get("/health/timed")
    async def timed(request: Request) -> Response:
        return await _probe(request, engine, _PROBE_LIMIT_S)

    @router.get("/health/timed-{seconds:int}")
    async def timed_within(request: Request, seconds: int) -> Response:
        if not 1 <= seconds <= _PROBE_LIMIT_S:
            raise ReplyError(422, f"the time is {seconds} s; allowed: 1 to {_PROBE_LIMIT_S}")
        return await _probe(request, engine, seconds)


async def _check_alive(engine: Engine) -> None:
    if not await engine.alive():
        raise ReplyError(503, "the engine has died")


async def _check_ready(engine: Engine) -> None:
    """Whether a request sent now would be worked on at once."""
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


async def _probe(request: Request, engine: Engine, limit_s: int) -> Response:
    """Computes one token, as a request of its own, within the limit."""
    probe = GenerateRequest(
        request_id=f"probe-{os.urandom(8).hex()}",
        prompt="a",
        sampling=Sampling(max_tokens=1),
        priority=-5,
        timeout_s=limit_s,
    )
    await whole(request, engine, probe)
    return Response()


def _add_description(router: APIRouter, engine: Engine, plan: Plan) -> None:
    info = engine.info

    @router.get("/info")
    async def described() -> Response:
        model = {
            "model_id": info.names[0],
            "model_dtype": info.dtype,
            "model_device_type": info.device,
            "model_pipeline_tag": "text-generation",
            "model_sha": None,
        }
        return JSONResponse({**model, "models": [model], **_bounds(engine, plan)})

    @router.get("/v1/config")
    async def configuration() -> Response:
        return JSONResponse(
            {
                "modelName": info.names[0],
                "maxSeqLen": info.max_model_len,
                "maxInputTokenLen": plan.spec.limits.max_input_tokens or info.max_model_len - 1,
                "maxOutputLen": plan.spec.limits.max_new_tokens or info.max_model_len,
                "cacheBlockSize": info.block_size,
                "maxBatchSize": info.max_running,
                "maxPrefillTokens": info.max_step_tokens,
                "worldSize": info.devices,
                "npuBlockNum": info.blocks,
                "kvPool": None if plan.spec.recall is None else dict(plan.spec.recall),
            }
        )

    @router.get("/v1/status")
    async def status() -> Response:
        load = engine.load()
        free = round(load.blocks * (1 - load.used_share))
        return JSONResponse(
            {
                "service": {"roles": "none", "currentRole": "none", "draining": engine.draining},
                "resource": {
                    "availSlotsNum": max(load.max_running - load.running, 0),
                    "availBlockNum": free,
                    "totalBlockNum": load.blocks,
                    "runningRequestNum": load.running,
                    "waitingRequestNum": load.waiting,
                },
                "linkStatus": {"peers": []},
            }
        )


def _bounds(engine: Engine, plan: Plan) -> dict[str, object]:
    info, limits = engine.info, plan.spec.limits
    return {
        "max_concurrent_requests": info.max_running,
        "max_input_length": limits.max_input_tokens or info.max_model_len - 1,
        "max_total_tokens": info.max_model_len,
        "max_batch_prefill_tokens": info.max_step_tokens,
        "max_batch_total_tokens": info.blocks * info.block_size,
        "max_best_of": limits.max_n or 128,
        "version": info.version,
    }
