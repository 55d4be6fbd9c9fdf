"""MindIE's business plane, beside vLLM's OpenAI routes: TGI's, vLLM's older, MindIE's and Triton's
forms of a request."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from kvrecall.engines.base import Engine, GenerateError, GenerateRequest, Generator, Update
from kvrecall.server import descriptions
from kvrecall.server.forms.base import Form, Strict, described, parsed
from kvrecall.server.forms.mindie import InferBody
from kvrecall.server.forms.tgi import TgiBody
from kvrecall.server.forms.triton import StopBody, TextBody, TokenBody
from kvrecall.server.forms.vllm import PromptBody
from kvrecall.server.plan import Plan
from kvrecall.server.replies import ReplyError, begun, json_object, recall_header, streamed, whole

IGNORED_HEADER = "x-kvrecall-ignored"
"""Reply header naming the parameters that were given and have no effect here."""


_Running = dict[str, set[str]]  # name that clients gave -> ids of requests


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
    _add_triton(router, engine, plan)
    return router


def check_model(engine: Engine, model: str) -> None:
    """Raises ReplyError 404 unless ``model`` is served."""
    if model not in engine.info.names:
        raise ReplyError(404, f"no model {model!r}; served: {', '.join(engine.info.names)}")


async def _serve(request: Request, generator: Generator, body: Form, stream: bool) -> Response:
    """The reply to a request in any form."""
    asked = body.to_request(stream)
    ignored = body.wanted.ignored()
    headers = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
    if not stream:
        updates = await whole(request, generator, asked)
        return JSONResponse(body.reply(asked, updates), headers=recall_header(updates[0]) | headers)
    first, updates_after = await begun(request, generator, asked)
    return streamed(first, updates_after, body.writer(asked), body.frame, headers)


def _add_generate(router: APIRouter, engine: Engine) -> None:
    async def tgi(request: Request, stream: bool = False) -> Response:
        raw = await json_object(request)
        if raw.get("inputs") is None:
            raise ReplyError(422, "the body needs inputs (TGI form) or prompt (vLLM form)")
        body = parsed(TgiBody, raw)
        return await _serve(request, engine, body, stream or bool(body.stream))

    @router.post("/generate", openapi_extra=described(TgiBody, PromptBody))
    async def generate(request: Request) -> Response:
        raw = await json_object(request)
        if raw.get("prompt") is None:
            return await tgi(request)
        body = parsed(PromptBody, raw)
        return await _serve(request, engine, body, body.stream)

    @router.post("/generate_stream", openapi_extra=described(TgiBody))
    async def generate_stream(request: Request) -> Response:
        return await tgi(request, stream=True)

    @router.post("/", openapi_extra=described(TgiBody))
    async def compatible_generate(request: Request) -> Response:
        return await tgi(request)


def _add_infer(router: APIRouter, engine: Engine) -> None:
    @router.post("/infer", openapi_extra=described(InferBody))
    async def infer(request: Request) -> Response:
        body = parsed(InferBody, await json_object(request))
        return await _serve(request, engine, body, bool(body.stream))

    @router.post("/infer_token", openapi_extra=described(InferBody))
    async def infer_token(request: Request) -> Response:
        if (await json_object(request)).get("input_id") is None:
            raise ReplyError(422, "the body needs input_id (token ids)")
        return await infer(request)


def _add_openai(router: APIRouter, engine: Engine) -> None:
    """What MindIE serves of the OpenAI API and beside it, and vLLM does not."""

    @router.get("/v1/models/{model:path}")
    async def one_model(model: str) -> Response:
        for card in await engine.models():
            if card["id"] == model:
                return JSONResponse(card)
        error = {"message": f"no model {model!r} is served", "type": "NotFoundError"}
        told = {"error": {**error, "param": "model", "code": 404}}  # OpenAI's form, as vLLM's
        return JSONResponse(told, status_code=404)

    @router.post("/v1/tokenizer", openapi_extra=described(TokenizerBody))
    async def tokenizer(request: Request) -> Response:
        body = parsed(TokenizerBody, await json_object(request))
        try:
            tokens = await engine.tokens(body.inputs) if body.inputs else ()
        except GenerateError as error:
            raise ReplyError.of(error) from error
        shown = [] if body.do_decode is False else list(tokens)
        return JSONResponse({"token_number": len(tokens), "tokens": shown})


class _Named:
    """A generator whose requests run under the ``name`` a client gave, if any, so that stopInfer
    finds their ids in ``running``. Several may share a name."""

    def __init__(
        self, generator: Generator, running: dict[str, set[str]], name: str | None
    ) -> None:
        self._generator, self._running, self._name = generator, running, name

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        """See Generator.generate."""
        updates = self._generator.generate(request)
        if self._name is not None:
            self._running.setdefault(self._name, set()).add(request.request_id)
        try:
            async for update in updates:
                yield update
        finally:
            await updates.aclose()
            if self._name is not None:
                ids = self._running[self._name]
                ids.remove(request.request_id)
                if not ids:
                    del self._running[self._name]


def _add_triton(router: APIRouter, engine: Engine, plan: Plan) -> None:
    @router.get("/v2")
    async def server() -> Response:
        return JSONResponse(descriptions.service(engine.info, plan))

    running: _Running = {}
    versions = APIRouter(include_in_schema=False)  # there is but one version
    _add_triton_at(versions, "/v2/models/{model:path}/versions/{version}", engine, plan, running)
    router.include_router(versions)
    _add_triton_at(router, "/v2/models/{model:path}", engine, plan, running)


def _add_triton_at(
    router: APIRouter, base: str, engine: Engine, plan: Plan, running: _Running
) -> None:
    async def text(request: Request, model: str, stream: bool) -> Response:
        check_model(engine, model)
        body = parsed(TextBody, await json_object(request)).of_model(model)
        generator = _Named(engine, running, body.id)
        return await _serve(request, generator, body, stream or bool(body.stream))

    @router.post(f"{base}/generate", openapi_extra=described(TextBody))
    async def generate(request: Request, model: str) -> Response:
        return await text(request, model, stream=False)

    @router.post(f"{base}/generate_stream", openapi_extra=described(TextBody))
    async def generate_stream(request: Request, model: str) -> Response:
        return await text(request, model, stream=True)

    @router.post(f"{base}/infer", openapi_extra=described(TokenBody))
    async def infer(request: Request, model: str) -> Response:
        check_model(engine, model)
        body = parsed(TokenBody, await json_object(request))
        return await _serve(request, _Named(engine, running, body.id), body, stream=False)

    @router.post(f"{base}/stopInfer", openapi_extra=described(StopBody))
    async def stop_infer(request: Request, model: str) -> Response:
        check_model(engine, model)
        body = parsed(StopBody, await json_object(request))
        if not running.get(body.id):
            raise ReplyError(404, f"no request runs under the id {body.id!r}")
        for request_id in tuple(running[body.id]):
            await engine.stop(request_id)
        return JSONResponse({"id": body.id})

    @router.get(f"{base}/config")
    async def model_config(model: str) -> Response:
        check_model(engine, model)
        return JSONResponse(descriptions.model_config(model, engine.info, plan))

    @router.get(base)
    async def model_metadata(model: str) -> Response:
        check_model(engine, model)
        return JSONResponse(descriptions.model(model))
