"""From a request for the engine to an HTTP answer: whole, or as a stream that has begun well."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

from fastapi import Request
from starlette.responses import StreamingResponse

from kvrecall.engines.base import (
    RECALL_HEADER,
    GenerateError,
    GenerateRequest,
    Generator,
    Update,
)
from kvrecall.server.replies import ReplyError, event, while_connected

Updates = AsyncGenerator[Update, None]


async def whole(request: Request, generator: Generator, asked: GenerateRequest) -> list[Update]:
    """All of an answer, one update for each sequence; aborted when the client goes away.

    Raises ReplyError.
    """
    return await while_connected(request, _all(generator.generate(asked)))


async def begun(
    request: Request, generator: Generator, asked: GenerateRequest
) -> tuple[Update, Updates]:
    """The first update of a stream and those that follow. Raises ReplyError: what fails before
    the first update is still told by an HTTP status."""
    updates = generator.generate(asked)
    try:
        return await while_connected(request, _next(updates)), updates
    except ReplyError:
        await updates.aclose()
        raise


def events(
    first: Update,
    updates: Updates,
    written: Callable[[Update], Iterable[object]],
    headers: dict[str, str],
) -> StreamingResponse:
    """Server-sent events: what ``written`` makes of each update; a failure is the last event."""
    return StreamingResponse(
        _events(first, updates, written), media_type="text/event-stream", headers=headers
    )


async def _events(
    first: Update, updates: Updates, written: Callable[[Update], Iterable[object]]
) -> AsyncIterator[str]:
    try:
        for made in written(first):
            yield event(made)
        async for update in updates:
            for made in written(update):
                yield event(made)
    except GenerateError as error:
        yield event(ReplyError.of(error).body())
    finally:
        await updates.aclose()


def recall_header(update: Update) -> dict[str, str]:
    counts = update.split.as_dict()
    return {RECALL_HEADER: ";".join(f"{name}={count}" for name, count in counts.items())}


async def _all(updates: Updates) -> list[Update]:
    found = []
    try:
        async for update in updates:
            found.append(update)
    except GenerateError as error:
        raise ReplyError.of(error) from error
    finally:
        await updates.aclose()
    if not found:
        raise _nothing()
    return found


async def _next(updates: Updates) -> Update:
    """The next update, its failure as an HTTP error."""
    try:
        return await anext(updates)
    except GenerateError as error:
        raise ReplyError.of(error) from error
    except StopAsyncIteration:
        raise _nothing() from None


def _nothing() -> ReplyError:
    return ReplyError(424, "the engine ended the request without output")
