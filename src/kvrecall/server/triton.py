"""Triton's forms, as MindIE serves them under /v2: texts (generate) and token ids (infer).

Members are those of ``single_req_triton_{text,token}_infer_interface.cpp`` in Ascend/MindIE-LLM
(April 2026) and of MindIE's documents of 2.1 to 2.3 (hiascend.com, mindie_service0009, 0084 and
0089). Documents and source differ in where a token request's parameters stand, beside ``inputs``
or within its one input: both work here. ``batch_size`` is that of each step, as in MindIE.
``queue_wait_time`` (microseconds) is the wait until the first step only: what runs in vLLM is part
of each step, and waits for none until it is preempted, of which vLLM tells no times. A token
reply's ``parameters`` are ours.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvrecall.engines.base import GenerateRequest, Update
from kvrecall.server.details import counted
from kvrecall.server.infer import Ids
from kvrecall.server.parameters import Parameters, Strict

RequestName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\w.:-]+$")]


class TritonParameters(Parameters):
    """``parameters`` of a /v2 request."""

    batch_size: Annotated[int, Field(ge=1)] | None = None
    perf_stat: bool | None = None

    def ignored(self) -> list[str]:
        names = [name for name in ("batch_size", "perf_stat") if getattr(self, name)]
        return super().ignored() + names


class _Named(Strict):
    """What both forms have: a name by which the request can be stopped, and parameters."""

    id: RequestName | None = None
    parameters: TritonParameters | None = None

    @property
    def wanted(self) -> TritonParameters:
        return self.parameters or TritonParameters()


class TextBody(_Named):
    """A request of /v2/models/{m}/generate[_stream]."""

    text_input: Annotated[str, Field(min_length=1)]
    stream: bool | None = None


class Tensor(Strict):
    """The one input of a token request: ids in one row."""

    name: str
    shape: Annotated[list[int], Field(min_length=1, max_length=2)]
    datatype: Literal["UINT32", "INT32", "INT64", "UINT64"]
    data: Ids | Annotated[list[Ids], Field(min_length=1, max_length=1)]
    parameters: TritonParameters | None = None

    @property
    def ids(self) -> list[int]:
        first = self.data[0]
        return first if isinstance(first, list) else [int(str(item)) for item in self.data]

    @model_validator(mode="after")
    def _one_row(self) -> Tensor:
        if self.shape[-1] != len(self.ids) or self.shape[:-1] not in ([], [1]):
            raise ValueError(
                f"shape is {self.shape}, but data holds one row of {len(self.ids)} ids"
            )
        return self


class Output(Strict):
    """A wanted output; there is one."""

    name: str
    parameters: dict[str, Any] | None = None


class TokenBody(_Named):
    """A request of /v2/models/{m}/infer."""

    inputs: Annotated[list[Tensor], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[Output], Field(max_length=1)] | None = None

    @property
    def wanted(self) -> TritonParameters:
        return self.parameters or self.inputs[0].parameters or TritonParameters()

    @model_validator(mode="after")
    def _one_place(self) -> TokenBody:
        if self.parameters is not None and self.inputs[0].parameters is not None:
            raise ValueError("parameters stand beside inputs or within its input, not in both")
        return self


class StopBody(Strict):
    """A request of /v2/models/{m}/stopInfer."""

    id: RequestName


def to_request(body: TextBody | TokenBody, stream: bool) -> GenerateRequest:
    """What the engine is to do for ``body``."""
    wanted = body.wanted
    text = isinstance(body, TextBody)
    return GenerateRequest(
        request_id=f"v2-{uuid.uuid4().hex}",
        prompt=body.text_input if isinstance(body, TextBody) else tuple(body.inputs[0].ids),
        sampling=wanted.sampling(logprobs=stream or bool(wanted.details) or not text),
        stream=stream,
        priority=wanted.engine_priority,
        timeout_s=wanted.timeout or 0,
        paced=bool(wanted.details),
    )


def text_reply(
    body: TextBody, asked: GenerateRequest, model: str, update: Update
) -> dict[str, object]:
    """The reply of /generate; ``update`` holds everything."""
    result = _text(body, asked, model, update.text)
    if body.wanted.details:
        result["details"] = _details(update, len(update.tokens))
    return result


def token_reply(body: TokenBody, asked: GenerateRequest, update: Update) -> dict[str, object]:
    """The reply of /infer: the ids of the answer's tokens, without those of the prompt."""
    ids = [token.id for token in update.tokens]
    name = (body.outputs[0].name if body.outputs else "") or "output0"
    result: dict[str, object] = {
        "id": body.id or asked.request_id,
        "outputs": [{"name": name, "shape": [1, len(ids)], "datatype": "UINT32", "data": ids}],
    }
    if body.wanted.details:
        result["parameters"] = _details(update, len(ids))
    return result


class EventWriter:
    """Turns the updates of one /generate_stream request into events, one a step."""

    def __init__(
        self,
        body: TextBody,
        asked: GenerateRequest,
        model: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._body = body
        self._asked = asked
        self._model = model
        self._clock = clock
        self._since = clock()
        self._count = 0

    def events(self, update: Update) -> Iterator[dict[str, object]]:
        """The event of ``update``; its times are milliseconds since the one before."""
        now = self._clock()
        took, self._since = round((now - self._since) * 1000, 3), now
        first = self._count == 0
        self._count += len(update.tokens)
        made = _text(self._body, self._asked, self._model, update.text)
        if self._body.wanted.details:
            made["details"] = _details(update, self._count, first)
            made["prefill_time"] = took if first else None
            made["decode_time"] = None if first else took
        yield made


def _text(body: TextBody, asked: GenerateRequest, model: str, text: str) -> dict[str, object]:
    return {
        "id": body.id or asked.request_id,
        "model_name": model,
        "model_version": None,
        "text_output": text,
    }


def _details(update: Update, generated: int, first: bool | None = None) -> dict[str, object]:
    """``finish_reason`` stands in the last update only. Of a whole answer (``first`` None) batches
    and waits are lists, of an event numbers: of its own step, of whether it is the ``first``."""
    sizes, queued = list(update.pace.batch_sizes), update.pace.queued_s
    wait = None if queued is None else round(queued * 1e6)
    step: dict[str, object] = {
        "batch_size": sizes[-1] if sizes else None,
        "queue_wait_time": wait if first else None,
    }
    whole: dict[str, object] = {
        "batch_size": sizes or None,
        "queue_wait_time": None if wait is None else [wait],
    }
    return {
        **({} if update.finish is None else {"finish_reason": update.finish}),
        **counted(update, generated),
        **dict.fromkeys(("first_token_cost", "decode_cost")),  # null in MindIE too
        **(whole if first is None else step),
    }
