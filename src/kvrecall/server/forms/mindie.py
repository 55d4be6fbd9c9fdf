"""MindIE's own form: /infer and /infer_token.

Members and framing are those of ``single_req_self_develop_infer_interface.cpp`` in
Ascend/MindIE-LLM (April 2026), which serves both routes, and of MindIE's documents of 2.1 to 2.3
(hiascend.com, mindie_service0010). The documents print a streamed token's id as a number, the
source writes a list; kvrecall follows the source. Where MindIE gives ``token.text`` null in the
last event, kvrecall gives the remaining text, so that the pieces always add up to
``generated_text``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from kvrecall.engines.base import GenerateRequest, Update
from kvrecall.server.forms.base import (
    Form,
    Json,
    Parameters,
    TokenIds,
    ended,
    token_ids,
)


class InferParameters(Parameters):
    """``parameters`` of an /infer request."""

    perf_stat: bool | None = None
    adapter_id: str | None = None

    without_effect: ClassVar[tuple[str, ...]] = ("watermark", "perf_stat")


class InferBody(Form):
    """A request in MindIE's own form: a text or token ids."""

    name = "infer"

    inputs: Annotated[str, Field(min_length=1)] | None = None
    input_id: TokenIds | None = None
    stream: bool | None = None
    parameters: InferParameters | None = None

    @property
    def wanted(self) -> InferParameters:
        return self.parameters or InferParameters()

    @model_validator(mode="after")
    def _one_prompt(self) -> InferBody:
        if (self.inputs is None) == (self.input_id is None):
            raise ValueError("the body needs either inputs (a text) or input_id (token ids)")
        return self

    def to_request(self, stream: bool) -> GenerateRequest:
        prompt = tuple(self.input_id or ()) if self.inputs is None else self.inputs
        sampling = self.wanted.sampling(logprobs=stream or bool(self.wanted.details))
        return self._request(prompt, sampling, stream, adapter=self.wanted.adapter_id)

    def reply(self, request: GenerateRequest, updates: Sequence[Update]) -> Json:
        (update,) = updates
        result: Json = {"generated_text": update.text}
        if self.wanted.details:
            ids = token_ids(update.tokens)
            details = ended(update, len(ids), self.wanted.seed)
            result["details"] = details | {"generated_token_ids": ids}
        return result

    def writer(
        self, request: GenerateRequest, clock: Callable[[], float] = time.monotonic
    ) -> Callable[[Update], Iterator[Json]]:
        """An event for each step, with the milliseconds it took: the first as ``prefill_time``,
        the others as ``decode_time``. The last carries the text and the details."""
        since, text, count = clock(), "", 0

        def written(update: Update) -> Iterator[Json]:
            nonlocal since, text, count
            took, since = round((clock() - since) * 1000, 3), clock()
            first = count == 0
            text, count = text + update.text, count + len(update.tokens)
            made: Json = {
                "prefill_time": took if first else None,
                "decode_time": None if first else took,
                "token": {
                    "id": token_ids(update.tokens),
                    "text": update.text or (None if update.finish else ""),
                },
            }
            if update.finish is not None:
                details = ended(update, count, self.wanted.seed) if self.wanted.details else None
                made |= {"generated_text": text, "details": details}
            yield made

        return written
