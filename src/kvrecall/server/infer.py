"""MindIE's own form: /infer and /infer_token.

Members and framing are those of ``single_req_self_develop_infer_interface.cpp`` in
Ascend/MindIE-LLM (April 2026), which serves both routes, and of MindIE's documents of 2.1 to 2.3
(hiascend.com, mindie_service0010). The documents print a streamed token's id as a number, the
source writes a list: a list it is. Where MindIE gives ``token.text`` null in the last event,
whatever text there still is stands there, so that the pieces always add up to ``generated_text``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated

from pydantic import Field, model_validator

from kvrecall.engines.base import GenerateRequest, Update
from kvrecall.server.details import ended
from kvrecall.server.parameters import Parameters, Strict

Ids = Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(min_length=1)]


class InferParameters(Parameters):
    """``parameters`` of an /infer request."""

    perf_stat: bool | None = None
    adapter_id: str | None = None

    def ignored(self) -> list[str]:
        return super().ignored() + (["perf_stat"] if self.perf_stat else [])


class InferBody(Strict):
    """A request in MindIE's own form: a text, or the ids of its tokens."""

    inputs: Annotated[str, Field(min_length=1)] | None = None
    input_id: Ids | None = None
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


def to_request(body: InferBody) -> GenerateRequest:
    """What the engine is to do for ``body``."""
    wanted, stream = body.wanted, bool(body.stream)
    return GenerateRequest(
        request_id=f"infer-{uuid.uuid4().hex}",
        prompt=body.inputs if body.inputs is not None else tuple(body.input_id or ()),
        sampling=wanted.sampling(logprobs=stream or bool(wanted.details)),
        stream=stream,
        adapter=wanted.adapter_id,
        priority=wanted.engine_priority,
        timeout_s=wanted.timeout or 0,
    )


def reply(body: InferBody, update: Update) -> dict[str, object]:
    """The reply to a request that is not streamed; ``update`` holds everything."""
    result: dict[str, object] = {"generated_text": update.text}
    if body.wanted.details:
        ids = [token.id for token in update.tokens]
        result["details"] = ended(update, len(ids), body.wanted.seed) | {"generated_token_ids": ids}
    return result


class EventWriter:
    """Turns the updates of one streamed request into MindIE's events, one a step, with the
    milliseconds it took: the first as ``prefill_time``, the others as ``decode_time``."""

    def __init__(self, body: InferBody, clock: Callable[[], float] = time.monotonic) -> None:
        self._body = body
        self._clock = clock
        self._since = clock()
        self._text = ""
        self._count = 0

    def events(self, update: Update) -> Iterator[dict[str, object]]:
        """The events of ``update``; the last of the request carries the text and the details."""
        now = self._clock()
        took, self._since = round((now - self._since) * 1000, 3), now
        first = self._count == 0
        self._text += update.text
        self._count += len(update.tokens)
        made: dict[str, object] = {
            "prefill_time": took if first else None,
            "decode_time": None if first else took,
            "token": {
                "id": [token.id for token in update.tokens],
                "text": update.text or (None if update.finish else ""),
            },
        }
        if update.finish is not None:
            wanted = self._body.wanted
            details = ended(update, self._count, wanted.seed) if wanted.details else None
            made |= {"generated_text": self._text, "details": details}
        yield made
