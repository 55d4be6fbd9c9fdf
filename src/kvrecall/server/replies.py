"""Error replies in MindIE's form, and small pieces every route uses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from kvrecall.engines.base import Fault, GenerateError

T = TypeVar("T")

ERROR_TYPES = {
    404: "NotFoundError",
    405: "Method Not Allowed",
    413: "Payload Too Large",
    422: "Input Validation Error",
    424: "Generation Error",
    500: "Incomplete Generation",
    503: "Service Unavailable",
}

_GONE = "the client closed the connection"  # seen by nobody
_STATUS = {
    Fault.INPUT: 422,
    Fault.UNKNOWN: 404,
    Fault.BUSY: 503,
    Fault.TIMEOUT: 500,
    Fault.ENGINE: 424,
}


class ReplyError(Exception):
    """Ends a request with an HTTP error status and a message for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @classmethod
    def of(cls, error: GenerateError) -> ReplyError:
        return cls(_STATUS[error.fault], str(error))

    def body(self) -> dict[str, str]:
        return error_body(self.status, str(self))

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status)


def error_body(status: int, message: str) -> dict[str, str]:
    """MindIE's error object. What a client sent may be in the message, lone surrogates too."""
    message = message.encode("utf-8", "backslashreplace").decode()
    return {"error": message, "error_type": ERROR_TYPES.get(status, "Error")}


def event(value: object) -> str:
    """A server-sent event with ``value`` as JSON."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def json_object(request: Request) -> dict[str, Any]:
    """The request's body, a JSON object. Raises ReplyError 422, and 499 when the client goes away
    before its end."""
    try:
        raw = await request.body()
    except ClientDisconnect as error:
        raise ReplyError(499, _GONE) from error
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "not readable as JSON"
        raise ReplyError(422, f"the body is not JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ReplyError(422, f"the body must be a JSON object, not {type(value).__name__}")
    return value


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away (499, unseen)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ReplyError(499, _GONE)
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
