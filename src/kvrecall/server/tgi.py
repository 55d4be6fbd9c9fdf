"""Text Generation Inference's request and replies, as MindIE serves them."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvrecall.engines.base import GenerateRequest, Sampling, Token, Update
from kvrecall.server.replies import ReplyError

_SEED_MAX = 2**63 - 1


class TgiParameters(BaseModel):
    """``parameters`` of a TGI request. null stands for the default everywhere."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_new_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, le=_SEED_MAX)] | None = None
    truncate: Annotated[int, Field(ge=0)] | None = None
    stop: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    return_full_text: bool | None = None
    watermark: bool | None = None
    adapter_id: str | None = None
    priority: Annotated[int, Field(ge=1, le=5)] | None = None

    # Sent by TGI clients by default; only their defaults can be served.
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    top_n_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    grammar: None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @property
    def samples(self) -> bool:
        """do_sample decides; if it is not given, any sampling value means sampling."""
        if self.do_sample is not None:
            return self.do_sample
        given = (self.temperature, self.top_k, self.top_p, self.typical_p)
        return any(value is not None for value in given)


class TgiBody(BaseModel):
    """A TGI request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    inputs: Annotated[str, Field(min_length=1)]
    parameters: TgiParameters | None = None
    stream: bool | None = None
    prompt: None = None
    model: str | None = None  # sent by some clients; there is one model

    @property
    def wanted(self) -> TgiParameters:
        return self.parameters or TgiParameters()


def parse(body: dict[str, Any]) -> TgiBody:
    """The request in ``body``. Raises ReplyError 422 naming the field and what is allowed."""
    try:
        return TgiBody.model_validate(body)
    except ValidationError as error:
        raise ReplyError(422, first_problem(error)) from error


def to_request(body: TgiBody, stream: bool) -> GenerateRequest:
    """What the engine is to do for ``body``."""
    wanted = body.wanted
    samples = wanted.samples
    return GenerateRequest(
        request_id=f"tgi-{uuid.uuid4().hex}",
        prompt=body.inputs,
        sampling=Sampling(
            max_tokens=wanted.max_new_tokens or 20,
            temperature=(wanted.temperature or 1.0) if samples else 0.0,
            top_k=wanted.top_k if samples else None,
            top_p=wanted.top_p if samples else None,
            repetition_penalty=wanted.repetition_penalty,
            frequency_penalty=wanted.frequency_penalty,
            seed=wanted.seed,
            stop=tuple(wanted.stop or ()),
            include_stop=bool(wanted.include_stop_str_in_output),
            logprobs=stream or bool(wanted.details or wanted.decoder_input_details),
            prompt_logprobs=bool(wanted.decoder_input_details) and not stream,
        ),
        stream=stream,
        truncate=wanted.truncate or 0,
        adapter=wanted.adapter_id,
        priority=wanted.priority or 0,
    )


def reply(body: TgiBody, update: Update) -> dict[str, object]:
    """The reply to a request that is not streamed; ``update`` holds everything."""
    wanted = body.wanted
    result: dict[str, object] = {"generated_text": _full_text(body, update.text)}
    if wanted.details or wanted.decoder_input_details:
        result["details"] = _details(body, update, len(update.tokens)) | {
            "prefill": [_prefill(token) for token in update.prefill],
            "tokens": [_token(token) for token in update.tokens],
        }
    return result


class EventWriter:
    """Turns the updates of one streamed request into TGI's events, one for each token."""

    def __init__(self, body: TgiBody) -> None:
        self._body = body
        self._text = ""
        self._count = 0
        self._last = Token(0, "", None, False)

    def events(self, update: Update) -> list[dict[str, object]]:
        """The events of ``update``; the last of the request carries the text and the details."""
        self._text += update.text
        self._count += len(update.tokens)
        tokens = list(update.tokens)
        if not tokens and (update.finish is not None or update.text):
            tokens = [Token(self._last.id, update.text, self._last.logprob, self._last.special)]
        made: list[dict[str, object]] = [
            {"token": _token(token), "generated_text": None, "details": None} for token in tokens
        ]
        if tokens:
            self._last = tokens[-1]
        if update.finish is not None:
            made[-1]["generated_text"] = _full_text(self._body, self._text)
            if self._body.wanted.details:
                made[-1]["details"] = _details(self._body, update, self._count)
        return made


def _details(body: TgiBody, update: Update, generated: int) -> dict[str, object]:
    return {
        "finish_reason": update.finish,
        "generated_tokens": generated,
        "seed": body.wanted.seed,
        "prompt_tokens": update.prompt_tokens,
        "recall": update.split.as_dict(),
    }


def _full_text(body: TgiBody, text: str) -> str:
    return body.inputs + text if body.wanted.return_full_text else text


def _token(token: Token) -> dict[str, object]:
    return {
        "id": token.id,
        "text": token.text,
        "logprob": token.logprob,
        "special": token.special,
    }


def _prefill(token: Token) -> dict[str, object]:
    return {"id": token.id, "text": token.text, "logprob": token.logprob}


def first_problem(error: ValidationError) -> str:
    """The first problem of a body, with its field."""
    problem = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    if problem["type"] == "missing":
        return f"{field}: required"
    given = repr(problem["input"])
    return f"{field}: {problem['msg']}, got {given if len(given) <= 80 else given[:80] + '...'}"
