"""Reading bodies and making replies: MindIE's errors, whole answers, streams."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, StreamingResponse

from kvrecall.engines.base import (
    MISSED_HEADER,
    RECALL_HEADER,
    Fault,
    GenerateError,
    ServingEngine,
    Update,
)

T = TypeVar("T")
Updates = AsyncGenerator[Update, None]

ERROR_TYPES = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFoundError",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Payload Too Large",
    415: "Unsupported Media Type",
    422: "Input Validation Error",
    424: "Generation Error",
    431: "Request Header Fields Too Large",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}

_GONE = "the client closed the connection"  # never sent
STATUS = {
    Fault.INPUT: 422,
    Fault.UNKNOWN: 404,
    Fault.BUSY: 503,
    Fault.TIMEOUT: 500,
    Fault.ENGINE: 424,
}


class ReplyError(HTTPException):
    """Ends a request with an HTTP error status and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)

    @classmethod
    def of(cls, error: GenerateError) -> ReplyError:
        return cls(STATUS[error.fault], str(error))

    def body(self) -> dict[str, str]:
        """MindIE's error object. The message may quote the client's input, lone surrogates
        included."""
        message = self.detail.encode("utf-8", "backslashreplace").decode()
        return {"error": message, "error_type": ERROR_TYPES.get(self.status_code, "Error")}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code)


async def json_object(request: Request) -> dict[str, Any]:
    """The request's body, a JSON object. Raises ReplyError 422."""
    try:
        value = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "not readable as JSON"
        raise ReplyError(422, f"the body is not JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ReplyError(422, f"the body must be a JSON object, not {type(value).__name__}")
    return value


def served_model(engine: ServingEngine, model: str) -> str:
    """The name of the model in a path ``/v2/models/{model:path}/...``, which may also name a
    version, of which there is one. Raises ReplyError 404 unless it is served."""
    names = engine.info.names
    name = model if model in names else re.sub("/versions/[^/]+$", "", model)
    if name not in names:
        raise ReplyError(404, f"no model {name!r}; served: {', '.join(names)}")
    return name


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects (499, only in the
    log)."""

    has_left = False
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watching = asyncio.get_running_loop().create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise ReplyError(499, _GONE) from None
        raise
    finally:
        watching.cancel()


async def whole(request: Request, updates: Updates) -> list[Update]:
    """The complete answer, one update for each sequence. Raises ReplyError."""

    async def gathered() -> list[Update]:
        return [update async for update in updates]

    return await _generated(request, updates, gathered())


async def _generated(request: Request, updates: Updates, work: Awaitable[T | None]) -> T:
    """The result of ``work`` on ``updates``. If it fails or the client disconnects, ``updates`` are
    closed, which ends the engine's request."""
    try:
        if result := await while_connected(request, work):
            return result
        raise ReplyError(424, "the engine ended the request without output")
    except GenerateError as error:
        raise ReplyError.of(error) from error
    except BaseException:
        await updates.aclose()
        raise


async def streamed(
    request: Request,
    updates: Updates,
    events: AsyncIterator[object],
    frame: Callable[[object], str],
    headers: dict[str, str],
) -> StreamingResponse:
    """The frames of ``events``, made of ``updates``. Raises ReplyError if the first fails: this
    still gets an HTTP status; a later failure is the last frame."""
    first = await _generated(request, updates, anext(events, None))

    async def frames() -> AsyncIterator[str]:
        try:
            yield frame(first)
            async for event in events:
                yield frame(event)
        except GenerateError as error:
            yield frame(ReplyError.of(error).body())
        finally:
            await updates.aclose()

    return StreamingResponse(frames(), media_type="text/event-stream", headers=headers)


def recall_headers(update: Update) -> dict[str, str]:
    """The sources of the prompt, and why the rest was computed."""
    headers = {RECALL_HEADER: _listed(update.split.as_dict())}
    if update.split.missed is not None:
        miss = {name: value for name, value in update.split.missed.items() if name != "text"}
        headers[MISSED_HEADER] = _listed(miss)
    return headers


def _listed(values: Mapping[str, object]) -> str:
    """``name=value;name=value,value``"""
    words = {
        name: ",".join(map(str, value)) if isinstance(value, list | tuple) else value
        for name, value in values.items()
    }
    return ";".join(f"{name}={value}" for name, value in words.items())
