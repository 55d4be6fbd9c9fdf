"""MindIE's own form, of /infer and /infer_token; and Triton's, as MindIE serves them under /v2:
texts (generate) and token ids (infer).

Members and framing are those of ``single_req_self_develop_infer_interface.cpp`` and
``single_req_triton_{text,token}_infer_interface.cpp`` in Ascend/MindIE-LLM (April 2026), and of
MindIE's documents of 2.1 to 2.3 (hiascend.com, mindie_service0009, 0010, 0084 and 0089).

/infer: the documents print a streamed token's id as a number, the source writes a list; kvrecall
follows the source. Where MindIE gives ``token.text`` null in the last event, kvrecall gives the
remaining text, so that the pieces always add up to ``generated_text``.

/v2: documents and source differ in the place of a token request's parameters, beside ``inputs`` or
within its one input: both work here. ``batch_size`` is that of each step, as in MindIE.
``queue_wait_time`` (microseconds) is the wait until the first step only: a running sequence is part
of every step unless vLLM preempts it, for which vLLM reports no times. A token reply's
``parameters`` are kvrecall's addition.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvrecall.engines.base import GenerateRequest, Update
from kvrecall.server.forms.base import Form, Json, Parameters, Strict, TokenIds, counted, ended
from kvrecall.server.replies import Updates

RequestName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\w.:-]+$")]


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
            details = ended(update, len(update.tokens), self.wanted.seed)
            result["details"] = details | {"generated_token_ids": _ids(update)}
        return result

    async def events(self, request: GenerateRequest, updates: Updates) -> AsyncIterator[Json]:
        """An event for each step; the last carries the text and the details."""
        text = ""
        async for update, count, times in _steps(updates):
            text += update.text
            shown = update.text or (None if update.finish else "")
            made: Json = {**times, "token": {"id": _ids(update), "text": shown}}
            if update.finish is not None:
                wanted = self.wanted
                details = ended(update, count, wanted.seed) if wanted.details else None
                made |= {"generated_text": text, "details": details}
            yield made


class TritonParameters(Parameters):
    """``parameters`` of a /v2 request."""

    batch_size: Annotated[int, Field(ge=1)] | None = None
    perf_stat: bool | None = None

    without_effect: ClassVar[tuple[str, ...]] = ("watermark", "batch_size", "perf_stat")


class _TritonForm(Form):
    """Common part of both forms: an id by which the request can be stopped, and parameters."""

    name = "v2"

    id: RequestName | None = None
    parameters: TritonParameters | None = None

    @property
    def wanted(self) -> TritonParameters:
        return self.parameters or TritonParameters()


class TextBody(_TritonForm):
    """A request of /v2/models/{m}/generate[_stream]."""

    text_input: Annotated[str, Field(min_length=1)]
    stream: bool | None = None

    _model: str = ""

    def of_model(self, model: str) -> TextBody:
        """The same, with the model's name from the route, which replies repeat."""
        self._model = model
        return self

    def to_request(self, stream: bool) -> GenerateRequest:
        details = bool(self.wanted.details)
        sampling = self.wanted.sampling(logprobs=stream or details)
        return self._request(self.text_input, sampling, stream, paced=details)

    def reply(self, request: GenerateRequest, updates: Sequence[Update]) -> Json:
        (update,) = updates
        result = self._text(request, update.text)
        if self.wanted.details:
            result["details"] = _details(update, len(update.tokens))
        return result

    async def events(self, request: GenerateRequest, updates: Updates) -> AsyncIterator[Json]:
        """An event for each step."""
        async for update, count, times in _steps(updates):
            made = self._text(request, update.text)
            if self.wanted.details:
                first = times["decode_time"] is None
                made |= {"details": _details(update, count, first), **times}
            yield made

    def _text(self, request: GenerateRequest, text: str) -> Json:
        return {
            "id": self.id or request.request_id,
            "model_name": self._model,
            "model_version": None,
            "text_output": text,
        }


class Tensor(Strict):
    """The one input of a token request: ids in one row."""

    name: str
    shape: Annotated[list[int], Field(min_length=1, max_length=2)]
    datatype: Literal["UINT32", "INT32", "INT64", "UINT64"]
    data: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=1)]
    parameters: TritonParameters | None = None

    @property
    def ids(self) -> list[int]:
        first = self.data[0]
        return first if isinstance(first, list) else [int(str(item)) for item in self.data]

    @model_validator(mode="after")
    def _one_row(self) -> Tensor:
        if self.shape[-1] != len(self.ids) or self.shape[:-1] not in ([], [1]):
            row = f"data holds one row of {len(self.ids)} ids"
            raise ValueError(f"shape is {self.shape}, but {row}")
        return self


class Output(Strict):
    """A wanted output; there is one."""

    name: str
    parameters: dict[str, Any] | None = None


class TokenBody(_TritonForm):
    """A request of /v2/models/{m}/infer. It is never streamed."""

    inputs: Annotated[list[Tensor], Field(min_length=1, max_length=1)]
    outputs: Annotated[list[Output], Field(max_length=1)] | None = None

    @property
    def wanted(self) -> TritonParameters:
        return self.parameters or self.inputs[0].parameters or TritonParameters()

    @model_validator(mode="after")
    def _one_place(self) -> TokenBody:
        if self.parameters is not None and self.inputs[0].parameters is not None:
            raise ValueError("parameters may be beside inputs or within its input, not both")
        return self

    def to_request(self, stream: bool) -> GenerateRequest:
        prompt, sampling = tuple(self.inputs[0].ids), self.wanted.sampling(logprobs=True)
        return self._request(prompt, sampling, stream, paced=bool(self.wanted.details))

    def reply(self, request: GenerateRequest, updates: Sequence[Update]) -> Json:
        """The ids of the answer's tokens, without those of the prompt."""
        (update,) = updates
        ids = _ids(update)
        name = (self.outputs[0].name if self.outputs else "") or "output0"
        result: Json = {
            "id": self.id or request.request_id,
            "outputs": [{"name": name, "shape": [1, len(ids)], "datatype": "UINT32", "data": ids}],
        }
        if self.wanted.details:
            result["parameters"] = _details(update, len(ids))
        return result


class StopBody(Strict):
    """A request of /v2/models/{m}/stopInfer."""

    id: RequestName


def _ids(update: Update) -> list[int]:
    return [token.id for token in update.tokens]


async def _steps(updates: Updates) -> AsyncIterator[tuple[Update, int, Json]]:
    """The updates of a stream, each with the number of tokens so far and the milliseconds it took:
    the first as ``prefill_time``, the others as ``decode_time``."""
    since, count = time.monotonic(), 0
    async for update in updates:
        took, since = round((time.monotonic() - since) * 1000, 3), time.monotonic()
        first, count = count == 0, count + len(update.tokens)
        times = {"prefill_time": took, "decode_time": None}
        yield update, count, times if first else {"prefill_time": None, "decode_time": took}


def _details(update: Update, generated: int, first: bool | None = None) -> Json:
    """``finish_reason`` is in the last update only. In a whole answer (``first`` None) batches and
    waits are lists, in an event numbers of its own step; ``first``: whether it is the first."""
    sizes, queued = list(update.pace.batch_sizes), update.pace.queued_s
    wait = None if queued is None else round(queued * 1e6)
    if first is None:
        pace: Json = {
            "batch_size": sizes or None,
            "queue_wait_time": None if wait is None else [wait],
        }
    else:
        pace = {
            "batch_size": sizes[-1] if sizes else None,
            "queue_wait_time": wait if first else None,
        }
    return {
        **({} if update.finish is None else {"finish_reason": update.finish}),
        **counted(update, generated),
        **dict.fromkeys(("first_token_cost", "decode_cost")),  # null in MindIE too
        **pace,
    }
