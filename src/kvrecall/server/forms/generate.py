"""The two forms of /generate: Text Generation Inference's, as MindIE serves it, and vLLM's older
one, ``{"prompt": ..., "max_tokens": ...}`` -> ``{"text": [...]}``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field, model_validator

from kvrecall.engines.base import MAX_N_LIMIT, GenerateRequest, Token, Update
from kvrecall.server.forms.base import Count, Form, Json, Parameters, Sampled, ended
from kvrecall.server.replies import ReplyError, Updates

Sequences = Annotated[int, Field(ge=1, le=MAX_N_LIMIT)]


class TgiParameters(Parameters):
    """``parameters`` of a TGI request."""

    truncate: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    decoder_input_details: bool | None = None
    return_full_text: bool | None = None
    adapter_id: str | None = None
    best_of: Sequences | None = None

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
            result["details"] = ended(best, len(best.tokens), wanted.seed) | _tokens(best)
            if len(updates) > 1:
                result["details"]["best_of_sequences"] = [
                    {
                        "generated_text": self._full_text(update.text),
                        "finish_reason": update.finish,
                        "generated_tokens": len(update.tokens),
                        "seed": wanted.seed,
                        **_tokens(update),
                    }
                    for update in updates[1:]
                ]
        return result

    async def events(self, request: GenerateRequest, updates: Updates) -> AsyncIterator[Json]:
        """An event for each token; the last carries the text and the details."""
        text, count, last = "", 0, Token(0, "", None, False)
        async for update in updates:
            text, count = text + update.text, count + len(update.tokens)
            tokens = list(update.tokens)
            if not tokens and (update.finish is not None or update.text):
                tokens = [Token(last.id, update.text, last.logprob, last.special)]
            for place, last in enumerate(tokens, start=1):
                made: Json = {"token": asdict(last), "generated_text": None, "details": None}
                if update.finish is not None and place == len(tokens):
                    made["generated_text"] = self._full_text(text)
                    if self.wanted.details:
                        made["details"] = ended(update, count, self.wanted.seed)
                yield made

    def _full_text(self, text: str) -> str:
        return self.inputs + text if self.wanted.return_full_text else text


def _tokens(update: Update) -> Json:
    prefill = [{"id": t.id, "text": t.text, "logprob": t.logprob} for t in update.prefill]
    return {"prefill": prefill, "tokens": [asdict(token) for token in update.tokens]}


class PromptBody(Form, Sampled):
    """A request in vLLM form. With ``use_beam_search`` ``n`` is the width of the beam."""

    name = "gen"

    prompt: Annotated[str, Field(min_length=1)]
    inputs: None = None
    max_tokens: Count = 16
    n: Sequences = 1
    best_of: Sequences | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0
    early_stopping: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1e6)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    model: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> PromptBody:
        several = max(self.n, self.best_of or 1) > 1
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, less than n, which is {self.n}")
        if self.use_beam_search and self.best_of not in (None, self.n):
            raise ValueError("best_of and use_beam_search are mutually exclusive; n is the width")
        if several and self.temperature == 0 and not self.use_beam_search:
            raise ValueError("n and best_of must be 1 when temperature is 0 (greedy)")
        if self.stream and (self.use_beam_search or self.best_of not in (None, self.n)):
            raise ValueError("best_of above n and use_beam_search cannot be streamed")
        return self

    @property
    def wanted(self) -> PromptBody:
        return self

    def ignored(self) -> list[str]:
        return ["early_stopping"] if self.early_stopping else []

    def to_request(self, stream: bool) -> GenerateRequest:
        default = 0.0 if self.use_beam_search else 1.0
        ranked = (self.best_of or 1) > 1 and not stream
        sampling = self.sampling(
            max_tokens=self.max_tokens,
            temperature=default if self.temperature is None else self.temperature,
            top_k=self.top_k,
            n=self.n,
            best_of=self.best_of if ranked else None,
            beam=self.use_beam_search,
            length_penalty=self.length_penalty,
        )
        return self._request(self.prompt, sampling, stream)

    @staticmethod
    def frame(value: object) -> str:
        """NUL-terminated JSON."""
        return json.dumps(value, ensure_ascii=False) + "\0"

    def reply(self, request: GenerateRequest, updates: Sequence[Update]) -> Json:
        in_order = sorted(updates, key=lambda update: update.index)
        return {"text": [self.prompt + update.text for update in in_order]}

    async def events(self, request: GenerateRequest, updates: Updates) -> AsyncIterator[Json]:
        """The whole text so far, as vLLM once streamed."""
        texts = [self.prompt] * self.n
        async for update in updates:
            texts[update.index] += update.text
            yield {"text": texts}
