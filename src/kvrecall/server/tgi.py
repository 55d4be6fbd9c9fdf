"""Text Generation Inference's request and replies, as MindIE serves them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from kvrecall.engines.base import MOST_N, GenerateRequest, Token, Update
from kvrecall.server.details import ended
from kvrecall.server.parameters import Parameters, Strict
from kvrecall.server.replies import ReplyError


class TgiParameters(Parameters):
    """``parameters`` of a TGI request."""

    truncate: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    decoder_input_details: bool | None = None
    return_full_text: bool | None = None
    adapter_id: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_N)] | None = None

    # Sent by TGI clients by default; only their defaults can be served.
    top_n_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    grammar: None = None

    @model_validator(mode="after")
    def _rankable(self) -> TgiParameters:
        if (self.best_of or 1) > 1 and not self.samples:
            raise ValueError("best_of needs sampling: give do_sample true or a temperature")
        return self


class TgiBody(Strict):
    """A TGI request."""

    inputs: Annotated[str, Field(min_length=1)]
    parameters: TgiParameters | None = None
    stream: bool | None = None
    prompt: None = None
    model: str | None = None  # sent by some clients; there is one model

    @property
    def wanted(self) -> TgiParameters:
        return self.parameters or TgiParameters()


def to_request(body: TgiBody, stream: bool) -> GenerateRequest:
    """What the engine is to do for ``body``. Raises ReplyError for what cannot be streamed."""
    wanted = body.wanted
    several = (wanted.best_of or 1) > 1
    if stream and several:
        raise ReplyError(422, "parameters.best_of: cannot be streamed")
    count = wanted.best_of if several else None
    return GenerateRequest(
        request_id=f"tgi-{uuid.uuid4().hex}",
        prompt=body.inputs,
        sampling=wanted.sampling(
            n=count or 1,
            best_of=count,
            logprobs=stream or bool(wanted.details or wanted.decoder_input_details),
            prompt_logprobs=bool(wanted.decoder_input_details) and not stream,
        ),
        stream=stream,
        truncate=wanted.truncate or 0,
        adapter=wanted.adapter_id,
        priority=wanted.engine_priority,
        timeout_s=wanted.timeout or 0,
    )


def reply(body: TgiBody, updates: Sequence[Update]) -> dict[str, object]:
    """The reply to a request that is not streamed; ``updates`` hold everything, one for each
    sequence, the best first."""
    wanted, best = body.wanted, updates[0]
    result: dict[str, object] = {"generated_text": _full_text(body, best.text)}
    if wanted.details or wanted.decoder_input_details:
        details = ended(best, len(best.tokens), wanted.seed) | _tokens(best)
        if len(updates) > 1:
            details["best_of_sequences"] = [_sequence(body, update) for update in updates[1:]]
        result["details"] = details
    return result


def _sequence(body: TgiBody, update: Update) -> dict[str, object]:
    return {
        "generated_text": _full_text(body, update.text),
        "finish_reason": update.finish,
        "generated_tokens": len(update.tokens),
        "seed": body.wanted.seed,
        **_tokens(update),
    }


def _tokens(update: Update) -> dict[str, object]:
    return {
        "prefill": [_prefill(token) for token in update.prefill],
        "tokens": [_token(token) for token in update.tokens],
    }


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
                made[-1]["details"] = ended(update, self._count, self._body.wanted.seed)
        return made


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
