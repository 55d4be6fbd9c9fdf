"""vLLM's OpenAI handlers, extended by the sources of a prompt's tokens and by best_of.

For each finished request the connector reports ``kv_transfer_params["kvrecall"]`` (tokens by
source). The handlers below are vLLM's own with that report added to
``usage.prompt_tokens_details`` as ``recall``. They override few methods and take their outputs
apart as little as possible: a reply object gets one more attribute, and in a stream only the usage
chunk is rewritten. ``best_of``, a field that vLLM dropped and would silently ignore, goes to the
engine (sampling.py).
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, cast

from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, PromptTokenUsageInfo
from vllm.outputs import RequestOutput

from kvrecall.engines.base import (
    HINT,
    LONGEST_ID,
    MAX_SEQUENCES,
    MISSED,
    REPORT,
    UNIT,
    Limits,
    Miss,
    RecallSplit,
    recalled,
)
from kvrecall.engines.parting import with_cause
from kvrecall.engines.vllm.serving.sampling import BEST_OF, long_id
from kvrecall.nicety import nicety
from kvrecall.pool.hints import Hint, hint_of, shown

_AROUND = 8  # tokens before and behind the one at which a prompt leaves a known one


class Ledger:
    """Sums the sources of the prompts of one HTTP request, from the outputs passing by."""

    def __init__(
        self,
        pooled: bool,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        """``pooled``: whether a connector is in use. ``decode``: the text of tokens."""
        self._pooled = pooled
        self._decode = functools.cache(lambda part: decode(list(part))) if decode else None
        self._ids: dict[str, Sequence[int]] = {}
        self._cached: dict[str, int] = {}
        self._reports: dict[str, dict[str, object]] = {}

    @nicety("the report of a request")
    def note(self, output: RequestOutput) -> None:
        """Processes an output. For several sequences of a prompt the first one counts; of one
        sequence the latest report."""
        key = output.request_id
        if output.prompt_token_ids is not None:
            self._ids[key] = output.prompt_token_ids
        if output.num_cached_tokens is not None:
            self._cached.setdefault(key, output.num_cached_tokens)
        params = output.kv_transfer_params or {}
        report = params.get(REPORT)
        if isinstance(report, dict):
            unit = params.get(UNIT, report.get("unit", 0))
            if key not in self._reports or all(one.index == 0 for one in output.outputs):
                self._reports[key] = {**report, "unit": unit, "missed": params.get(MISSED)}

    async def watch(self, outputs: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Passes ``outputs`` (RequestOutput, or pairs ending in one) on, noting each."""
        async for item in outputs:
            self.note(item[-1] if isinstance(item, tuple) else item)
            yield item

    @nicety("the report of a request")
    def split(self) -> RecallSplit | None:
        """The sum over the prompts; None if nothing is known (beam search reports nothing)."""
        known = self._reports.keys() | self._cached.keys()
        if not known:
            return None
        counts: Counter[str] = Counter()
        unit, missed = 0, []
        for key in known:
            report, prompt = self._reports.get(key), len(self._ids.get(key, ()))
            part = RecallSplit.of_report(report, prompt, self._cached.get(key, 0), self._pooled)
            counts.update(part.as_dict())
            unit = max(unit, part.unit)
            if part.missed:
                missed.append(self._with_text(key, part.missed))
        costliest = max(missed, key=lambda one: int(str(one["tokens"])), default=None)
        return RecallSplit(**counts, unit=unit, missed=costliest)

    def _with_text(self, key: str, miss: Miss) -> Miss:
        """A miss with the text around the token at which this very prompt leaves a known one."""
        token, ids = miss.get("token"), self._ids.get(key)
        if self._decode is None or not isinstance(token, int) or ids is None:
            return miss
        part = tuple(ids[max(0, token - _AROUND) : token + _AROUND])
        return {**with_cause(miss, ids, self._decode), "text": self._decode(part)}


def _details(ledger: Ledger, usage: Any) -> None:
    """Puts the split into the usage object of a reply."""
    split = ledger.split()
    if split is None or usage is None:
        return
    if usage.prompt_tokens_details is None:
        usage.prompt_tokens_details = PromptTokenUsageInfo()
    for name, value in recalled(split).items():
        setattr(usage.prompt_tokens_details, name, value)


async def _with_details(events: AsyncIterator[str], ledger: Ledger) -> AsyncGenerator[str, None]:
    """Server-sent events, the usage chunk (the one without choices) completed by the split."""
    async for event in events:
        if '"usage":{' in event and (split := ledger.split()) is not None:
            chunk = json.loads(event.removeprefix("data: "))
            if chunk.get("usage") and not chunk.get("choices"):
                details = chunk["usage"].get("prompt_tokens_details") or {}
                chunk["usage"]["prompt_tokens_details"] = {**details, **recalled(split)}
                text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
                event = f"data: {text}\n\n"
        yield event


_TTLS = {"5m": 300.0, "1h": 3600.0}


def hint_of_messages(body: Any) -> Hint | None:
    """The hint in a chat's ``cache_control`` marks, Anthropic's way to say that a prompt comes
    again within its ``ttl``: of the last message, and else of none, because a hint is about a whole
    prompt. Marks before it are prefixes that the policy knows by their uses. Raises ValueError for
    a mark that is none."""
    messages = body.get("messages") if isinstance(body, dict) else None
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return None
    content = last.get("content")
    parts = [last, *(content if isinstance(content, list) else ())]
    given = [part.get("cache_control") for part in parts if isinstance(part, dict)]
    ttls = [_ttl(mark) for mark in given if mark is not None]
    return Hint(returns=True, pin_s=max(ttls)) if ttls else None


def _ttl(mark: object) -> float:
    """Seconds of a mark."""
    if not isinstance(mark, dict) or mark.get("type") != "ephemeral":
        raise ValueError(f'it is {shown(mark)}; it must be {{"type": "ephemeral"}}')
    ttl = "5m" if mark.get("ttl") is None else mark["ttl"]
    if not isinstance(ttl, str) or ttl not in _TTLS:
        raise ValueError(f"ttl is {shown(ttl)}; it must be 5m or 1h")
    return _TTLS[ttl]


def _no_text(body: bytes) -> str | None:
    """An error if a string of a JSON object has half a surrogate pair: the engine's process cannot
    be sent it. Names the field."""
    if b"\\ud" not in body.lower():
        return None
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):  # vLLM says so
        return None
    for name, value in given.items() if isinstance(given, dict) else ():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            return f"{ascii(name)[1:-1]}: has {half}, half of a surrogate pair, which is no text"
        except RecursionError:
            return f"{ascii(name)[1:-1]}: is nested too deep"
    return None


def _long_id(request: Any) -> str | None:
    """An error if the body names the request at length: vLLM would log all of it."""
    given = getattr(request, "request_id", None)
    return long_id(given) if isinstance(given, str) and len(given) > LONGEST_ID else None


async def _body_of(raw_request: Any) -> bytes:
    """What the client sent; nothing if vLLM asks itself."""
    return b"" if raw_request is None else await raw_request.body()


class _Bounded:
    """The server's bounds on prompts and time, best_of and hints, for both handlers."""

    limits: Limits
    pooled: bool
    """Whether a connector is in use."""

    def ledger(self) -> Ledger:
        """For one HTTP request."""
        decode = self.renderer.tokenizer.decode  # type: ignore[attr-defined]
        return Ledger(self.pooled, decode)

    def _rank(self, request: Any) -> ErrorResponse | None:
        """Passes ``best_of`` to the engine; returns an error if it is not a valid number of
        sequences."""
        best_of = (request.model_extra or {}).get("best_of")
        if best_of is None:
            return None
        if isinstance(best_of, bool) or not isinstance(best_of, int) or best_of < 1:
            return self._refused(f"best_of is {best_of!r}; allowed: 1 or more")
        if request.use_beam_search and best_of != request.n:
            return self._refused("best_of and use_beam_search are mutually exclusive")
        if request.stream and best_of != (request.n or 1):
            return self._refused("best_of above n cannot be streamed; leave out stream or best_of")
        if (best_of, request.n) != (1, 1) and not request.stream:
            request.vllm_xargs = {**(request.vllm_xargs or {}), BEST_OF: best_of}
        return None

    def _marked(self, body: bytes) -> Hint | None:
        """What the prompt itself says of its return. Raises ValueError."""
        return None

    def _hint(self, request: Any, body: bytes) -> ErrorResponse | None:
        """Passes the request's ``hint``, or what its messages' ``cache_control`` says, to the
        connector; returns an error if it is none."""
        given, name = (request.model_extra or {}).get("hint"), "cache_control"
        try:
            hint = self._marked(body)
            name = "hint"
            hint = hint if given is None else hint_of(given)
        except ValueError as error:
            return self._refused(f"{name}: {error}")
        if hint is not None:
            params = request.kv_transfer_params or {}
            request.kv_transfer_params = {HINT: hint._asdict()} | params
        return None

    def _refusal(self, request: Any, body: bytes) -> ErrorResponse | None:
        """The error of a request that is not served."""
        wrong = _no_text(body) or _long_id(request)
        return self._refused(wrong) if wrong else self._rank(request) or self._hint(request, body)

    def beam_search(
        self, prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """vLLM's, within the limits; the server lets it end like any request."""
        found = super().beam_search(prompt, request_id, params, *args, **kwargs)  # type: ignore[misc]
        return self.engine_client.searched(found, params.beam_width)  # type: ignore[attr-defined]

    def _refused(self, message: str) -> ErrorResponse:
        return cast(ErrorResponse, self.create_error_response(message))  # type: ignore[attr-defined]

    def _bound(self, request: Any) -> None:
        """Makes vLLM truncate the prompt as configured."""
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
        return self._refused(f"the prompt has {longest} tokens; maxInputTokenLen allows {most}")


class RecallCompletion(_Bounded, OpenAIServingCompletion):
    """/v1/completions with the recall split in its usage."""

    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        refused = self._refusal(request, await _body_of(raw_request)) or self._too_many(request)
        return refused or await super().create_completion(request, raw_request)

    def _too_many(self, request: CompletionRequest) -> ErrorResponse | None:
        """An error if a list of prompts asks for more sequences than one request may."""
        given = request.prompt
        prompts = 1
        if isinstance(given, list) and given and not isinstance(given[0], int):
            prompts = len(given)
        best_of = (request.vllm_xargs or {}).get(BEST_OF)
        wanted = prompts * max(request.n, best_of if isinstance(best_of, int) else 1)
        if prompts == 1 or wanted <= MAX_SEQUENCES:
            return None
        return self._refused(
            f"{prompts} prompts ask for {wanted} sequences; one request may ask for {MAX_SEQUENCES}"
        )

    async def render_completion_request(self, request: CompletionRequest) -> Any:
        self._bound(request)
        inputs = await super().render_completion_request(request)
        if isinstance(inputs, ErrorResponse):
            return inputs
        return self._too_long([self._extract_prompt_len(item) for item in inputs]) or inputs

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], *args: Any, **kwargs: Any
    ) -> Any:
        ledger = self.ledger()
        for output in final_res_batch:
            ledger.note(output)
        reply = super().request_output_to_completion_response(final_res_batch, *args, **kwargs)
        _details(ledger, reply.usage)
        return reply

    def completion_stream_generator(
        self, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        ledger = self.ledger()
        events = super().completion_stream_generator(
            request, engine_inputs, ledger.watch(result_generator), *args, **kwargs
        )
        return _with_details(events, ledger)


class RecallChat(_Bounded, OpenAIServingChat):
    """/v1/chat/completions with the recall split in its usage."""

    def _marked(self, body: bytes) -> Hint | None:
        return hint_of_messages(json.loads(body)) if b"cache_control" in body else None

    async def create_chat_completion(
        self, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return self._refusal(request, await _body_of(raw_request)) or (
            await super().create_chat_completion(request, raw_request, *args, **kwargs)
        )

    async def render_chat_request(self, request: Any) -> Any:
        self._bound(request)
        result = await super().render_chat_request(request)
        if isinstance(result, ErrorResponse):
            return result
        return self._too_long([self._extract_prompt_len(item) for item in result[1]]) or result

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        ledger = self.ledger()
        reply = await super().chat_completion_full_generator(
            request, ledger.watch(result_generator), *args, **kwargs
        )
        if not isinstance(reply, ErrorResponse):
            _details(ledger, reply.usage)
        return reply

    def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        ledger = self.ledger()
        events = super().chat_completion_stream_generator(
            request, ledger.watch(result_generator), *args, **kwargs
        )
        return _with_details(events, ledger)


class RecallMessages(RecallChat, AnthropicServingMessages):
    """/v1/messages, Anthropic's form of a chat, which vLLM turns into one: within the limits, and
    with hints."""

    async def create_chat_completion(
        self, request: Any, raw_request: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        body = await _body_of(raw_request)
        if b'"hint"' in body:
            request.hint = json.loads(body).get("hint")
        return await super().create_chat_completion(request, raw_request, *args, **kwargs)
