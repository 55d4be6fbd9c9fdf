"""vLLM's older form of /generate: ``{"prompt": ..., "max_tokens": ...}`` -> ``{"text": [...]}``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from pydantic import Field, model_validator

from kvrecall.engines.base import MAX_N_LIMIT, GenerateRequest, Update
from kvrecall.server.forms.base import Count, Form, Json, Sampled


class PromptBody(Form, Sampled):
    """A request in vLLM form. With ``use_beam_search`` ``n`` is the width of the beam."""

    name = "gen"

    prompt: Annotated[str, Field(min_length=1)]
    inputs: None = None
    max_tokens: Count = 16
    n: Annotated[int, Field(ge=1, le=MAX_N_LIMIT)] = 1
    best_of: Annotated[int, Field(ge=1, le=MAX_N_LIMIT)] | None = None
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

    def writer(self, request: GenerateRequest) -> Callable[[Update], Iterator[Json]]:
        """The whole text so far, as vLLM once streamed."""
        texts = [self.prompt] * self.n

        def written(update: Update) -> Iterator[Json]:
            texts[update.index] += update.text
            yield {"text": texts}

        return written
