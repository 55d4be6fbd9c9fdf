"""MindIE's business plane, beside vLLM's OpenAI routes: TGI's, vLLM's older, MindIE's and Triton's
forms of a request."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvrecall.engines.base import Engine, GenerateError, Generator
from kvrecall.server import descriptions, infer, prompt_form, tgi, triton
from kvrecall.server.answering import begun, events, recall_header, whole
from kvrecall.server.naming import Named, RequestNames
from kvrecall.server.parameters import Strict, ignored_header, parsed
from kvrecall.server.plan import Plan
from kvrecall.server.replies import ReplyError, json_object
from kvrecall.server.schemas import described

_TGI = described(tgi.TgiBody)
_INFER = described(infer.InferBody)


class TokenizerBody(Strict):
    """A request of /v1/tokenizer."""

    inputs: str
    do_decode: bool | None = None


def business_router(engine: Engine, plan: Plan) -> APIRouter:
    """All of the business plane that vLLM does not have."""
    router = APIRouter(tags=["kvrecall"])
    _add_generate(router, engine)
    _add_infer(router, engine)
    _add_openai(router, engine)
    _add_tokenizer(router, engine)
    _add_triton(router, engine, plan, RequestNames())
    return router


def _add_generate(router: APIRouter, engine: Engine) -> None:
    @router.post("/generate", openapi_extra=described(tgi.TgiBody, prompt_form.PromptBody))
    async def generate(request: Request) -> Response:
        body = await json_object(request)
        if body.get("prompt") is not None:
            return await _serve_prompt(request, engine, body)
        return await _serve_tgi(request, engine, body, body.get("stream") is True)

    @router.post("/generate_stream", openapi_extra=_TGI)
    async def generate_stream(request: Request) -> Response:
        return await _serve_tgi(request, engine, await json_object(request), True)

    @router.post("/", openapi_extra=_TGI)
    async def compatible_generate(request: Request) -> Response:
        body = await json_object(request)
        return await _serve_tgi(request, engine, body, body.get("stream") is True)


def _add_infer(router: APIRouter, engine: Engine) -> None:
    @router.post("/infer", openapi_extra=_INFER)
    async def mindie_infer(request: Request) -> Response:
        return await _serve_infer(request, engine, await json_object(request))

    @router.post("/infer_token", openapi_extra=_INFER)
    async def infer_token(request: Request) -> Response:
        body = await json_object(request)
        if body.get("input_id") is None:
            raise ReplyError(422, "the body needs input_id (token ids)")
        return await _serve_infer(request, engine, body)


def _add_openai(router: APIRouter, engine: Engine) -> None:
    """What vLLM has not of the OpenAI routes that MindIE serves."""

    @router.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        for card in await engine.models():
            if card["id"] == model:
                return JSONResponse(card)
        error = {"message": f"no model {model!r} is served", "type": "NotFoundError"}
        told = {"error": {**error, "param": "model", "code": 404}}  # OpenAI's form, as vLLM's
        return JSONResponse(told, status_code=404)


def _add_tokenizer(router: APIRouter, engine: Engine) -> None:
    @router.post("/v1/tokenizer", openapi_extra=described(TokenizerBody))
    async def tokenizer(request: Request) -> Response:
        body = parsed(TokenizerBody, await json_object(request))
        try:
            tokens = await engine.tokens(body.inputs) if body.inputs else ()
        except GenerateError as error:
            raise ReplyError.of(error) from error
        shown = [] if body.do_decode is False else list(tokens)
        return JSONResponse({"token_number": len(tokens), "tokens": shown})


def _add_triton(router: APIRouter, engine: Engine, plan: Plan, names: RequestNames) -> None:
    @router.get("/v2")
    async def server() -> Response:
        return JSONResponse(descriptions.service(engine.info, plan))

    versions = APIRouter(include_in_schema=False)  # there is but one version
    for each, base in (
        (versions, "/v2/models/{model:path}/versions/{version}"),
        (router, "/v2/models/{model:path}"),
    ):
        _add_triton_at(each, base, engine, names)
        _add_metadata_at(each, base, engine, plan)
        if each is versions:
            router.include_router(versions)


def _add_triton_at(router: APIRouter, base: str, engine: Engine, names: RequestNames) -> None:
    @router.post(f"{base}/generate", openapi_extra=described(triton.TextBody))
    async def generate(request: Request, model: str) -> Response:
        return await _serve_text(request, engine, names, model, None)

    @router.post(f"{base}/generate_stream", openapi_extra=described(triton.TextBody))
    async def generate_stream(request: Request, model: str) -> Response:
        return await _serve_text(request, engine, names, model, True)

    @router.post(f"{base}/infer", openapi_extra=described(triton.TokenBody))
    async def infer_tensors(request: Request, model: str) -> Response:
        check_model(engine, model)
        body = parsed(triton.TokenBody, await json_object(request))
        asked = triton.to_request(body, False)
        (update,) = await whole(request, Named(engine, names, body.id), asked)
        headers = recall_header(update) | ignored_header(body.wanted.ignored())
        return JSONResponse(triton.token_reply(body, asked, update), headers=headers)

    @router.post(f"{base}/stopInfer", openapi_extra=described(triton.StopBody))
    async def stop_infer(request: Request, model: str) -> Response:
        check_model(engine, model)
        body = parsed(triton.StopBody, await json_object(request))
        running = names.running(body.id)
        if not running:
            raise ReplyError(404, f"no request runs under the id {body.id!r}")
        for request_id in running:
            await engine.stop(request_id)
        return JSONResponse({"id": body.id})


def _add_metadata_at(router: APIRouter, base: str, engine: Engine, plan: Plan) -> None:
    @router.get(f"{base}/config")
    async def model_config(model: str) -> Response:
        check_model(engine, model)
        return JSONResponse(descriptions.model_config(model, engine.info, plan))

    @router.get(base)
    async def model_metadata(model: str) -> Response:
        check_model(engine, model)
        return JSONResponse(descriptions.model(model))


def check_model(engine: Engine, model: str) -> None:
    """Raises ReplyError 404 unless ``model`` is served."""
    if model not in engine.info.names:
        raise ReplyError(404, f"no model {model!r}; served: {', '.join(engine.info.names)}")


async def _serve_tgi(
    request: Request, generator: Generator, raw: dict[str, Any], stream: bool
) -> Response:
    if raw.get("inputs") is None:
        raise ReplyError(422, "the body needs inputs (TGI form) or prompt (vLLM form)")
    body = parsed(tgi.TgiBody, raw)
    asked = tgi.to_request(body, stream)
    ignored = ignored_header(body.wanted.ignored())
    if not stream:
        updates = await whole(request, generator, asked)
        return JSONResponse(tgi.reply(body, updates), headers=recall_header(updates[0]) | ignored)
    first, updates_after = await begun(request, generator, asked)
    return events(first, updates_after, tgi.EventWriter(body).events, ignored)


async def _serve_prompt(request: Request, generator: Generator, raw: dict[str, Any]) -> Response:
    body = parsed(prompt_form.PromptBody, raw)
    asked = prompt_form.to_request(body)
    ignored = ignored_header(body.ignored())
    if not body.stream:
        updates = sorted(await whole(request, generator, asked), key=lambda u: u.index)
        texts = [body.prompt + update.text for update in updates]
        return JSONResponse({"text": texts}, headers=recall_header(updates[0]) | ignored)
    first, updates_after = await begun(request, generator, asked)
    stream = prompt_form.chunks(body, first, updates_after)
    return StreamingResponse(stream, media_type="text/event-stream", headers=ignored)


async def _serve_infer(request: Request, generator: Generator, raw: dict[str, Any]) -> Response:
    body = parsed(infer.InferBody, raw)
    asked = infer.to_request(body)
    ignored = ignored_header(body.wanted.ignored())
    if not body.stream:
        (update,) = await whole(request, generator, asked)
        return JSONResponse(infer.reply(body, update), headers=recall_header(update) | ignored)
    writer = infer.EventWriter(body)
    first, updates = await begun(request, generator, asked)
    return events(first, updates, writer.events, ignored)


async def _serve_text(
    request: Request, engine: Engine, names: RequestNames, model: str, stream: bool | None
) -> Response:
    """/v2's generate; ``stream`` None: as the body says."""
    check_model(engine, model)
    body = parsed(triton.TextBody, await json_object(request))
    stream = bool(body.stream) if stream is None else stream
    asked = triton.to_request(body, stream)
    ignored = ignored_header(body.wanted.ignored())
    named = Named(engine, names, body.id)
    if not stream:
        (update,) = await whole(request, named, asked)
        headers = recall_header(update) | ignored
        return JSONResponse(triton.text_reply(body, asked, model, update), headers=headers)
    writer = triton.EventWriter(body, asked, model)
    first, updates = await begun(request, named, asked)
    return events(first, updates, writer.events, ignored)
