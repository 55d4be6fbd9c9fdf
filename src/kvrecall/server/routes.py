"""MindIE's business plane beside vLLM's OpenAI routes: the request forms of TGI, older vLLM, MindIE
and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvrecall.engines.base import REQUEST_HEADER, GenerateError, GenerateRequest, ServingEngine
from kvrecall.server.descriptions import add_business_descriptions, served_model
from kvrecall.server.forms.base import Form, Strict, described, parsed
from kvrecall.server.forms.generate import PromptBody, TgiBody
from kvrecall.server.forms.mindie import InferBody, StopBody, TextBody, TokenBody
from kvrecall.server.plan import Plan
from kvrecall.server.replies import (
    ReplyError,
    Updates,
    json_object,
    recall_headers,
    streamed,
    whole,
)
from kvrecall.traces import trace_headers

IGNORED_HEADER = "x-kvrecall-ignored"
"""Reply header: the given parameters that have no effect."""


class TokenizerBody(Strict):
    """A request of /v1/tokenizer."""

    inputs: str
    do_decode: bool | None = None


def business_router(engine: ServingEngine, plan: Plan) -> APIRouter:
    """The routes of the business plane that vLLM lacks."""
    router = APIRouter(tags=["kvrecall"])
    _add_forms(router, engine)
    _add_triton(router, engine)

    @router.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        for card in await engine.models():
            if card["id"] == model:
                return JSONResponse(card)
        error = {"message": f"no model {model!r} is served", "type": "NotFoundError"}
        body = {"error": {**error, "param": "model", "code": 404}}  # OpenAI's form, as vLLM's
        return JSONResponse(body, status_code=404)

    @router.post("/v1/tokenizer", openapi_extra=described(TokenizerBody))
    async def tokenizer(request: Request) -> Response:
        body = parsed(TokenizerBody, await json_object(request))
        try:
            tokens = await engine.tokens(body.inputs) if body.inputs else ()
        except GenerateError as error:
            raise ReplyError.of(error) from error
        shown = [] if body.do_decode is False else list(tokens)
        return JSONResponse({"token_number": len(tokens), "tokens": shown})

    add_business_descriptions(router, engine, plan)
    return router


async def _serve(
    http: Request, generate: Callable[[GenerateRequest], Updates], body: Form, stream: bool
) -> Response:
    """The reply to a request in any form."""
    request = replace(body.to_request(stream), trace_headers=trace_headers(http.headers))
    headers = {REQUEST_HEADER: request.request_id}
    if ignored := body.wanted.ignored():
        headers[IGNORED_HEADER] = ", ".join(ignored)
    updates = generate(request)
    if not stream:
        answer = await whole(http, updates)
        headers |= recall_headers(answer[0])
        return JSONResponse(body.reply(request, answer), headers=headers)
    return await streamed(http, updates, body.events(request, updates), body.frame, headers)


def _add_forms(router: APIRouter, engine: ServingEngine) -> None:
    """TGI's, the older vLLM's, and MindIE's own."""

    async def tgi(request: Request, stream: bool = False) -> Response:
        raw = await json_object(request)
        if raw.get("inputs") is None:
            raise ReplyError(422, "the body needs inputs (TGI form) or prompt (vLLM form)")
        body = parsed(TgiBody, raw)
        return await _serve(request, engine.generate, body, stream or bool(body.stream))

    @router.post("/generate", openapi_extra=described(TgiBody, PromptBody))
    async def generate(request: Request) -> Response:
        raw = await json_object(request)
        if raw.get("prompt") is None:
            return await tgi(request)
        body = parsed(PromptBody, raw)
        return await _serve(request, engine.generate, body, body.stream)

    @router.post("/generate_stream", openapi_extra=described(TgiBody))
    async def generate_stream(request: Request) -> Response:
        return await tgi(request, stream=True)

    @router.post("/", openapi_extra=described(TgiBody))
    async def compatible_generate(request: Request) -> Response:
        return await tgi(request)

    @router.post("/infer", openapi_extra=described(InferBody))
    async def infer(request: Request) -> Response:
        body = parsed(InferBody, await json_object(request))
        return await _serve(request, engine.generate, body, bool(body.stream))

    @router.post("/infer_token", openapi_extra=described(InferBody))
    async def infer_token(request: Request) -> Response:
        if (await json_object(request)).get("input_id") is None:
            raise ReplyError(422, "the body needs input_id (token ids)")
        return await infer(request)


def _add_triton(router: APIRouter, engine: ServingEngine) -> None:
    running: dict[str, str | None] = {}  # ids of requests -> the names that clients gave them
    base = "/v2/models/{model:path}"

    async def named(name: str | None, request: GenerateRequest) -> Updates:
        """The updates of a request, which stopInfer finds by its name; several may share a name."""
        updates = engine.generate(request)
        running[request.request_id] = name
        try:
            async for update in updates:
                yield update
        finally:
            await updates.aclose()
            del running[request.request_id]

    async def text(request: Request, model: str, stream: bool) -> Response:
        name = served_model(engine, model)
        body = parsed(TextBody, await json_object(request)).of_model(name)
        stream = stream or bool(body.stream)
        return await _serve(request, partial(named, body.id), body, stream)

    @router.post(f"{base}/generate", openapi_extra=described(TextBody))
    async def generate(request: Request, model: str) -> Response:
        return await text(request, model, stream=False)

    @router.post(f"{base}/generate_stream", openapi_extra=described(TextBody))
    async def generate_stream(request: Request, model: str) -> Response:
        return await text(request, model, stream=True)

    @router.post(f"{base}/infer", openapi_extra=described(TokenBody))
    async def infer(request: Request, model: str) -> Response:
        served_model(engine, model)
        body = parsed(TokenBody, await json_object(request))
        return await _serve(request, partial(named, body.id), body, stream=False)

    @router.post(f"{base}/stopInfer", openapi_extra=described(StopBody))
    async def stop_infer(request: Request, model: str) -> Response:
        served_model(engine, model)
        body = parsed(StopBody, await json_object(request))
        stopped = [request_id for request_id, name in running.items() if name == body.id]
        if not stopped:
            raise ReplyError(404, f"no running request has the id {body.id!r}")
        for request_id in stopped:
            await engine.stop(request_id)
        return JSONResponse({"id": body.id})
