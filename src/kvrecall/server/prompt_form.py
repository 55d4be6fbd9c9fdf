"""vLLM's older form of /generate: ``{"prompt": ..., "max_tokens": ...}`` -> ``{"text": [...]}``."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvrecall.engines.base import GenerateError, GenerateRequest, Sampling, Update
from kvrecall.server.replies import ReplyError
from kvrecall.server.tgi import first_problem


class PromptBody(BaseModel):
    """A request in vLLM form. best_of and beam search are not served yet."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: Annotated[str, Field(min_length=1)]
    inputs: None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = 16
    n: Annotated[int, Field(ge=1, le=128)] = 1
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    model: str | None = None
    use_beam_search: bool = False
    best_of: int | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value


def parse(raw: dict[str, Any]) -> PromptBody:
    """The request in ``raw``. Raises ReplyError 422."""
    try:
        body = PromptBody.model_validate(raw)
    except ValidationError as error:
        raise ReplyError(422, first_problem(error)) from error
    if body.use_beam_search or body.best_of not in (None, body.n):
        raise ReplyError(422, "use_beam_search and best_of are not available in this version")
    return body


def to_request(body: PromptBody) -> GenerateRequest:
    """What the engine is to do for ``body``."""
    return GenerateRequest(
        request_id=f"gen-{uuid.uuid4().hex}",
        prompt=body.prompt,
        sampling=Sampling(
            max_tokens=body.max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=body.seed,
            stop=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            include_stop=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            skip_special_tokens=body.skip_special_tokens,
            n=body.n,
        ),
        stream=body.stream,
    )


async def chunks(
    body: PromptBody, first: Update, updates: AsyncGenerator[Update, None]
) -> AsyncGenerator[str, None]:
    """NUL-terminated JSON objects, each with the whole text so far, as vLLM once streamed."""
    texts = [body.prompt] * body.n
    update: Update | None = first
    try:
        while update is not None:
            texts[update.index] += update.text
            yield json.dumps({"text": texts}, ensure_ascii=False) + "\0"
            update = await anext(updates, None)
    except GenerateError as error:
        yield json.dumps(ReplyError.of(error).body(), ensure_ascii=False) + "\0"
    finally:
        await updates.aclose()
