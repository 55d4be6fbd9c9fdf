"""The routes kvrecall adds to vLLM's application: MindIE's business plane in TGI and vLLM form."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvrecall.engines.base import GenerateError, GenerateRequest, Generator, Update
from kvrecall.server import prompt_form, tgi
from kvrecall.server.replies import ReplyError, error_body, event, json_object, while_connected

RECALL_HEADER = "x-kvrecall"
"""Reply header with the recall split, for replies whose body has no place for it."""


def attach(app: FastAPI, generator: Generator) -> None:
    """Adds the routes, and MindIE's error body for paths that nobody serves."""
    app.include_router(business_router(generator))
    app.add_exception_handler(ReplyError, _reply_error)
    app.add_exception_handler(HTTPException, _no_such_path)


def business_router(generator: Generator) -> APIRouter:
    """POST /generate (dispatched by its body), /generate_stream and /."""
    router = APIRouter(tags=["kvrecall"])

    @router.post("/generate")
    async def generate(request: Request) -> Response:
        body = await json_object(request)
        if body.get("prompt") is not None:
            return await _serve_prompt(request, generator, body)
        return await _serve_tgi(request, generator, body, bool(body.get("stream") is True))

    @router.post("/generate_stream")
    async def generate_stream(request: Request) -> Response:
        return await _serve_tgi(request, generator, await json_object(request), True)

    @router.post("/")
    async def compatible_generate(request: Request) -> Response:
        body = await json_object(request)
        return await _serve_tgi(request, generator, body, bool(body.get("stream") is True))

    return router


async def _serve_tgi(
    request: Request, generator: Generator, raw: dict[str, Any], stream: bool
) -> Response:
    if raw.get("inputs") is None:
        raise ReplyError(422, "the body needs inputs (TGI form) or prompt (vLLM form)")
    body = tgi.parse(raw)
    asked = tgi.to_request(body, stream)
    if not stream:
        update = await while_connected(request, _only(generator, asked))
        return JSONResponse(tgi.reply(body, update), headers=_recall_header(update))
    updates = generator.generate(asked)
    first = await while_connected(request, _next(updates))
    return StreamingResponse(_tgi_events(body, first, updates), media_type="text/event-stream")


async def _serve_prompt(request: Request, generator: Generator, raw: dict[str, Any]) -> Response:
    body = prompt_form.parse(raw)
    asked = prompt_form.to_request(body)
    updates = generator.generate(asked)
    if not body.stream:
        texts = await while_connected(request, _all_texts(updates, body.n))
        return JSONResponse({"text": [body.prompt + text for text in texts]})
    first = await while_connected(request, _next(updates))
    stream = prompt_form.chunks(body, first, updates)
    return StreamingResponse(stream, media_type="text/event-stream")


async def _tgi_events(
    body: tgi.TgiBody, first: Update, updates: AsyncGenerator[Update, None]
) -> AsyncGenerator[str, None]:
    writer = tgi.EventWriter(body)
    try:
        for made in writer.events(first):
            yield event(made)
        async for update in updates:
            for made in writer.events(update):
                yield event(made)
    except GenerateError as error:
        yield event(ReplyError.of(error).body())
    finally:
        await updates.aclose()


async def _only(generator: Generator, asked: GenerateRequest) -> Update:
    """The one update of a request that is not streamed."""
    updates = generator.generate(asked)
    try:
        return await _next(updates)
    finally:
        await updates.aclose()


async def _next(updates: AsyncGenerator[Update, None]) -> Update:
    """The next update, its failure as an HTTP error."""
    try:
        return await anext(updates)
    except GenerateError as error:
        raise ReplyError.of(error) from error
    except StopAsyncIteration:
        raise ReplyError(424, "the engine ended the request without output") from None


async def _all_texts(updates: AsyncGenerator[Update, None], count: int) -> list[str]:
    texts = [""] * count
    try:
        async for update in updates:
            texts[update.index] += update.text
    except GenerateError as error:
        raise ReplyError.of(error) from error
    finally:
        await updates.aclose()
    return texts


def _recall_header(update: Update) -> dict[str, str]:
    counts = update.split.as_dict()
    return {RECALL_HEADER: ";".join(f"{name}={count}" for name, count in counts.items())}


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
