"""Text Generation Inference's request and replies, as MindIE serves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field, model_validator

from kvrecall.engines.base import MAX_N_LIMIT, GenerateRequest, Token, Update
from kvrecall.server.forms.base import Form, Json, Parameters, ended
from kvrecall.server.replies import ReplyError


class TgiParameters(Parameters):
    """``parameters`` of a TGI request."""

    truncate: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    decoder_input_details: bool | None = None
    return_full_text: bool | None = None
    adapter_id: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N_LIMIT)] | None = None

    # Sent by TGI clients by default; only their defaults can be served.
    top_n_tokens: Annotated[int, Field(ge=0, le=0)] | None = None
    grammar: None = None

    @model_validator(mode="after")
    def _rankable(self) -> TgiParameters:
        if (self.best_of or 1) > 1 and not self.samples:
            raise ValueError("best_of needs sampling: give do_sample true or a temperature")
        return self


class TgiBody(Form):
    """A TGI request."""

    name = "tgi"

    inputs: Annotated[str, Field(min_length=1)]
    parameters: TgiParameters | None = None
    stream: bool | None = None
    prompt: None = None
    model: str | None = None  # sent by some clients; there is one model

    @property
    def wanted(self) -> TgiParameters:
        return self.parameters or TgiParameters()

    def to_request(self, stream: bool) -> GenerateRequest:
        wanted = self.wanted
        best_of = wanted.best_of if (wanted.best_of or 1) > 1 else None
        if stream and best_of:
            raise ReplyError(422, "parameters.best_of: cannot be streamed")
        sampling = wanted.sampling(
            n=best_of or 1,
            best_of=best_of,
            logprobs=stream or bool(wanted.details or wanted.decoder_input_details),
            prompt_logprobs=bool(wanted.decoder_input_details) and not stream,
        )
        adapter, truncate = wanted.adapter_id, wanted.truncate or 0
        return self._request(self.inputs, sampling, stream, adapter=adapter, truncate=truncate)

    def reply(self, request: GenerateRequest, updates: Sequence[Update]) -> Json:
        wanted, best = self.wanted, updates[0]
        result: Json = {"generated_text": self._full_text(best.text)}
        if wanted.details or wanted.decoder_input_details:
            details = ended(best, len(best.tokens), wanted.seed) | _tokens(best)
            if len(updates) > 1:
                details["best_of_sequences"] = [self._sequence(update) for update in updates[1:]]
            result["details"] = details
        return result

    def writer(self, request: GenerateRequest) -> Callable[[Update], list[Json]]:
        """An event for each token; the last carries the text and the details."""
        text, count, last = "", 0, Token(0, "", None, False)

        def written(update: Update) -> list[Json]:
            nonlocal text, count, last
            text, count = text + update.text, count + len(update.tokens)
            tokens = list(update.tokens)
            if not tokens and (update.finish is not None or update.text):
                tokens = [Token(last.id, update.text, last.logprob, last.special)]
            made: list[Json] = [
                {"token": asdict(token), "generated_text": None, "details": None}
                for token in tokens
            ]
            last = tokens[-1] if tokens else last
            if update.finish is not None:
                made[-1]["generated_text"] = self._full_text(text)
                if self.wanted.details:
                    made[-1]["details"] = ended(update, count, self.wanted.seed)
            return made

        return written

    def _sequence(self, update: Update) -> Json:
        return {
            "generated_text": self._full_text(update.text),
            "finish_reason": update.finish,
            "generated_tokens": len(update.tokens),
            "seed": self.wanted.seed,
            **_tokens(update),
        }

    def _full_text(self, text: str) -> str:
        return self.inputs + text if self.wanted.return_full_text else text


def _tokens(update: Update) -> Json:
    prefill = [{"id": t.id, "text": t.text, "logprob": t.logprob} for t in update.prefill]
    return {"prefill": prefill, "tokens": [asdict(token) for token in update.tokens]}
