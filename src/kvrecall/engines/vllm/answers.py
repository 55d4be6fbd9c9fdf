"""vLLM's OpenAI handlers, made to say where a prompt's tokens came from; and our Generator.

The connector reports per finished request ``kv_transfer_params["kvrecall"]`` (tokens by source).
The handlers below are vLLM's own with that report added to ``usage.prompt_tokens_details`` as
``recall``. They override four methods, whose outputs they take apart as little as possible: a
reply object is given one more attribute, and of a stream only the usage chunk is rewritten.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, cast

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, PromptTokenUsageInfo
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMServerError,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from kvrecall.engines.base import (
    Fault,
    Finish,
    GenerateError,
    GenerateRequest,
    Limits,
    RecallSplit,
    Sampling,
    Token,
    Update,
)
from kvrecall.engines.vllm.splits import BOARD

REPORT = "kvrecall"
"""Key of the connector's report in ``kv_transfer_params``."""


class Ledger:
    """Adds up where the prompts of one HTTP request came from, from the outputs passing by."""

    def __init__(self, pooled: bool) -> None:
        self._pooled = pooled
        self._prompts: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._reports: dict[str, dict[str, object]] = {}

    def note(self, output: RequestOutput) -> None:
        """Takes what an output says. Of several sequences of a prompt the first one counts."""
        key = output.request_id
        if output.prompt_token_ids is not None:
            self._prompts[key] = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self._cached.setdefault(key, output.num_cached_tokens)
        report = (output.kv_transfer_params or {}).get(REPORT)
        if isinstance(report, dict):
            self._reports.setdefault(key, report)

    async def watch(self, outputs: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Passes ``outputs`` (RequestOutput, or pairs ending in one) on, noting each."""
        async for item in outputs:
            self.note(item[-1] if isinstance(item, tuple) else item)
            yield item

    def split(self) -> RecallSplit | None:
        """The sum over the prompts; None if nothing is known (beam search reports nothing)."""
        known = self._reports.keys() | self._cached.keys()
        if not known:
            return None
        parts = [
            RecallSplit.of_report(
                self._reports.get(key) or BOARD.find(key),
                self._prompts.get(key, 0),
                self._cached.get(key, 0),
                self._pooled,
            ).as_dict()
            for key in known
        ]
        names = {name for part in parts for name in part}
        return RecallSplit(**{name: sum(part.get(name, 0) for part in parts) for name in names})


def _details(ledger: Ledger, usage: Any) -> None:
    """Puts the split into the usage object of a reply."""
    split = ledger.split()
    if split is None or usage is None:
        return
    if usage.prompt_tokens_details is None:
        usage.prompt_tokens_details = PromptTokenUsageInfo()
    usage.prompt_tokens_details.recall = split.as_dict()


async def _with_details(events: AsyncIterator[str], ledger: Ledger) -> AsyncGenerator[str, None]:
    """Server-sent events, the usage chunk (the one without choices) completed by the split."""
    async for event in events:
        yield _completed(event, ledger) if '"usage":{' in event else event


def _completed(event: str, ledger: Ledger) -> str:
    split = ledger.split()
    chunk = json.loads(event.removeprefix("data: "))
    if split is None or chunk.get("choices") or not chunk.get("usage"):
        return event
    details = chunk["usage"].get("prompt_tokens_details") or {}
    chunk["usage"]["prompt_tokens_details"] = {**details, "recall": split.as_dict()}
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _Bounded:
    """The server's bound on prompt lengths, for both handlers."""

    limits: Limits
    pooled: bool

    def _bound(self, request: Any) -> None:
        """Has vLLM cut the prompt where the configuration says so."""
        if self.limits.max_input_tokens and self.limits.truncation != "error":
            request.truncate_prompt_tokens = min(
                request.truncate_prompt_tokens or self.limits.max_input_tokens,
                self.limits.max_input_tokens,
            )
            request.truncation_side = request.truncation_side or self.limits.truncation

    def _too_long(self, lengths: Sequence[int]) -> ErrorResponse | None:
        most = self.limits.max_input_tokens
        longest = max(lengths, default=0)
        if not most or longest <= most:
            return None
        return cast(
            ErrorResponse,
            self.create_error_response(  # type: ignore[attr-defined]
                f"the prompt has {longest} tokens; maxInputTokenLen allows {most}"
            ),
        )


class RecallCompletion(_Bounded, OpenAIServingCompletion):
    """/v1/completions with the recall split in its usage."""

    async def render_completion_request(self, request: CompletionRequest) -> Any:
        self._bound(request)
        inputs = await super().render_completion_request(request)
        if isinstance(inputs, ErrorResponse):
            return inputs
        return self._too_long([self._extract_prompt_len(item) for item in inputs]) or inputs

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], *args: Any, **kwargs: Any
    ) -> Any:
        ledger = Ledger(self.pooled)
        for output in final_res_batch:
            ledger.note(output)
        reply = super().request_output_to_completion_response(final_res_batch, *args, **kwargs)
        _details(ledger, reply.usage)
        return reply

    async def completion_stream_generator(
        self, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        ledger = Ledger(self.pooled)
        events = super().completion_stream_generator(
            request, engine_inputs, ledger.watch(result_generator), *args, **kwargs
        )
        async for event in _with_details(events, ledger):
            yield event


class RecallChat(_Bounded, OpenAIServingChat):
    """/v1/chat/completions with the recall split in its usage."""

    async def render_chat_request(self, request: Any) -> Any:
        self._bound(request)
        result = await super().render_chat_request(request)
        if isinstance(result, ErrorResponse):
            return result
        return self._too_long([self._extract_prompt_len(item) for item in result[1]]) or result

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        ledger = Ledger(self.pooled)
        reply = await super().chat_completion_full_generator(
            request, ledger.watch(result_generator), *args, **kwargs
        )
        if not isinstance(reply, ErrorResponse):
            _details(ledger, reply.usage)
        return reply

    async def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        ledger = Ledger(self.pooled)
        events = super().chat_completion_stream_generator(
            request, ledger.watch(result_generator), *args, **kwargs
        )
        async for event in _with_details(events, ledger):
            yield event


def recall_completion(
    handler: OpenAIServingCompletion, limits: Limits, pooled: bool
) -> RecallCompletion:
    """``handler`` as a RecallCompletion. ``pooled`` says whether a connector is in use."""
    return cast(RecallCompletion, _retyped(handler, RecallCompletion, limits, pooled))


def recall_chat(handler: OpenAIServingChat, limits: Limits, pooled: bool) -> RecallChat:
    """``handler`` as a RecallChat."""
    return cast(RecallChat, _retyped(handler, RecallChat, limits, pooled))


def _retyped(handler: Any, kind: type[Any], limits: Limits, pooled: bool) -> Any:
    """A copy of ``handler`` of the subclass ``kind``: vLLM has configured it, with two dozen
    arguments that change from version to version, and nothing of that is to be repeated here."""
    twin = copy.copy(handler)
    twin.__class__ = kind
    twin.limits, twin.pooled = limits, pooled
    return twin


class VllmGenerator:
    """The Generator over vLLM's async engine. Prompts go through vLLM's own renderer, so that
    the same text gives the same blocks on every route."""

    def __init__(self, handler: RecallCompletion, limits: Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._special = frozenset(handler.renderer.tokenizer.all_special_ids)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        """See Generator.generate."""
        try:
            async for update in self._generate(request):
                yield update
        except GracefulHTTPError as error:
            raise GenerateError(Fault.BUSY, str(error)) from error
        except VLLMNotFoundError as error:
            raise GenerateError(Fault.UNKNOWN, str(error)) from error
        except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
            raise GenerateError(Fault.INPUT, str(error)) from error
        except GenerationError as error:
            fault = Fault.TIMEOUT if type(error).__name__ == "RequestTimeoutError" else Fault.ENGINE
            raise GenerateError(fault, str(error)) from error
        except VLLMServerError as error:
            raise GenerateError(Fault.ENGINE, str(error) or "the engine failed") from error

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        engine_input = await self._render(request)
        params = self._params(request, self._handler._extract_prompt_len(engine_input))
        outputs = self._handler.engine_client.generate(
            engine_input,
            params,
            request.request_id,
            lora_request=self._adapter(request.adapter),
            priority=request.priority,
        )
        ledger = Ledger(self._handler.pooled)
        prompt_tokens = 0
        try:
            async for output in outputs:
                ledger.note(output)
                prompt_tokens = len(output.prompt_token_ids or ()) or prompt_tokens
                prefill = self._prefill(output)
                for sequence in output.outputs:
                    yield self._update(sequence, prompt_tokens, ledger, prefill)
        finally:
            await outputs.aclose()

    async def _render(self, request: GenerateRequest) -> Any:
        body = CompletionRequest(
            prompt=request.prompt,
            truncate_prompt_tokens=request.truncate or None,
            truncation_side="left" if request.truncate else None,
        )
        inputs = await self._handler.render_completion_request(body)
        if isinstance(inputs, ErrorResponse):
            raise GenerateError(Fault.INPUT, inputs.error.message)
        return inputs[0]

    def _params(self, request: GenerateRequest, prompt_tokens: int) -> SamplingParams:
        room = self._handler.model_config.max_model_len - prompt_tokens
        if room < 1:
            raise GenerateError(
                Fault.INPUT,
                f"the prompt has {prompt_tokens} tokens; with maxSeqLen "
                f"{prompt_tokens + room} none is left for an answer",
            )
        sampling = request.sampling
        cap = self._limits.max_new_tokens or sampling.max_tokens
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            max_tokens=min(sampling.max_tokens, cap, room),
            logprobs=0 if sampling.logprobs else None,
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
            output_kind=kind,
            **_given(sampling, self._handler.default_sampling_params),
        )

    def _adapter(self, name: str | None) -> Any:
        if name is None:
            return None
        adapters = self._handler.models.lora_requests
        if name not in adapters:
            known = ", ".join(sorted(adapters)) or "none"
            raise GenerateError(Fault.UNKNOWN, f"no adapter {name!r} is loaded (loaded: {known})")
        return adapters[name]

    def _update(
        self,
        sequence: CompletionOutput,
        prompt_tokens: int,
        ledger: Ledger,
        prefill: tuple[Token, ...],
    ) -> Update:
        ids = list(sequence.token_ids) if sequence.logprobs is not None else []
        found = [places[token] for places, token in zip(sequence.logprobs or (), ids, strict=False)]
        special = [token in self._special for token in ids]
        texts = _spread(sequence.text, [place.decoded_token or "" for place in found], special)
        return Update(
            index=sequence.index,
            tokens=tuple(
                Token(token, text, max(place.logprob, -9999.0), flag)
                for token, text, place, flag in zip(ids, texts, found, special, strict=True)
            ),
            text=sequence.text,
            finish=_finish(sequence),
            prompt_tokens=prompt_tokens,
            split=ledger.split() or RecallSplit(computed=prompt_tokens),
            prefill=prefill,
        )

    def _prefill(self, output: RequestOutput) -> tuple[Token, ...]:
        if not output.prompt_logprobs or not output.prompt_token_ids:
            return ()
        return tuple(
            Token(
                token,
                (places[token].decoded_token or "") if places else "",
                max(places[token].logprob, -9999.0) if places else None,
                token in self._special,
            )
            for token, places in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        )


def _given(sampling: Sampling, defaults: dict[str, Any]) -> dict[str, Any]:
    """Sampling values that were given, over the model's own defaults where it samples."""
    names = (
        "temperature top_k top_p repetition_penalty presence_penalty frequency_penalty seed"
    ).split()
    values = {name: getattr(sampling, name) for name in names}
    greedy = sampling.temperature == 0.0
    chosen = {} if greedy else {k: v for k, v in defaults.items() if k in values}
    chosen |= {name: value for name, value in values.items() if value is not None}
    return chosen | {
        "n": sampling.n,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "include_stop_str_in_output": sampling.include_stop,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
    }


_LOST = 4  # characters that invalid bytes of earlier tokens may have left before a token's text


def _spread(text: str, decoded: list[str], special: list[bool]) -> list[str]:
    """``text`` over its tokens: each gets the part its own decoding accounts for.

    Special tokens keep their own text, which is not part of ``text``. What no token accounts for
    (a character of several tokens, invalid bytes) goes with the next that is found, or the last.
    """
    parts, place = list(decoded), 0
    for index, part in enumerate(decoded):
        if special[index]:
            continue
        found = text.find(part, place, place + len(part) + _LOST)
        parts[index] = text[place : found + len(part)] if found >= 0 else ""
        place += len(parts[index])
    ordinary = [index for index, flag in enumerate(special) if not flag]
    if ordinary:
        parts[ordinary[-1]] += text[place:]
    return parts


def _finish(sequence: CompletionOutput) -> Finish | None:
    if sequence.finish_reason is None:
        return None
    if sequence.finish_reason == "stop":
        return Finish.EOS if sequence.stop_reason is None else Finish.STOP
    if sequence.finish_reason == "repetition":
        return Finish.STOP
    if sequence.finish_reason == "length":
        return Finish.LENGTH
    raise GenerationError(f"the engine ended the request: {sequence.finish_reason}")
