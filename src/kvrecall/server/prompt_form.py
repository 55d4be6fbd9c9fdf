"""vLLM's older form of /generate: ``{"prompt": ..., "max_tokens": ...}`` -> ``{"text": [...]}``."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from kvrecall.engines.base import MOST_N, GenerateError, GenerateRequest, Sampling, Update
from kvrecall.server.parameters import Count, Parameters, Seed, Share, Stops, Strict
from kvrecall.server.replies import ReplyError


class PromptBody(Strict):
    """A request in vLLM form. With ``use_beam_search`` ``n`` is the width of the beam."""

    prompt: Annotated[str, Field(min_length=1)]
    inputs: None = None
    max_tokens: Count = 16
    n: Annotated[int, Field(ge=1, le=MOST_N)] = 1
    best_of: Annotated[int, Field(ge=1, le=MOST_N)] | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    early_stopping: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1e6)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=1024)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    priority: Annotated[int, Field(ge=1, le=5)] | None = None
    timeout: Annotated[int, Field(ge=1, le=65535)] | None = None
    model: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> PromptBody:
        several = max(self.n, self.best_of or 1) > 1
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, less than n, which is {self.n}")
        if self.use_beam_search and self.best_of not in (None, self.n):
            raise ValueError("best_of and use_beam_search exclude each other; n is the width")
        if several and self.temperature == 0 and not self.use_beam_search:
            raise ValueError("n and best_of must be 1 when temperature is 0 (greedy)")
        if self.stream and (self.use_beam_search or self.best_of not in (None, self.n)):
            raise ValueError("best_of above n and use_beam_search cannot be streamed")
        return self

    def ignored(self) -> list[str]:
        """The fields that were given and have no effect."""
        return ["early_stopping"] if self.early_stopping else []


def to_request(body: PromptBody) -> GenerateRequest:
    """What the engine is to do for ``body``."""
    default = 0.0 if body.use_beam_search else 1.0
    ranked = (body.best_of or 1) > 1 and not body.stream
    return GenerateRequest(
        request_id=f"gen-{uuid.uuid4().hex}",
        prompt=body.prompt,
        sampling=Sampling(
            max_tokens=body.max_tokens,
            temperature=default if body.temperature is None else body.temperature,
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
            best_of=body.best_of if ranked else None,
            beam=body.use_beam_search,
            length_penalty=body.length_penalty,
        ),
        stream=body.stream,
        priority=Parameters(priority=body.priority).engine_priority,
        timeout_s=body.timeout or 0,
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
