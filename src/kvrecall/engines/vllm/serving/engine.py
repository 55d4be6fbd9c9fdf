"""``ServingEngine`` over vLLM's async engine, for the MindIE and TGI routes and management.

Prompts go through vLLM's own renderer, so that the same text gives the same blocks on every route.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import (
    GenerationError,
    GracefulHTTPError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMServerError,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.version import __version__ as VLLM_VERSION

from kvrecall.engines.base import (
    HINT,
    EngineInfo,
    EngineLoad,
    Fault,
    Finish,
    GenerateError,
    GenerateRequest,
    Limits,
    Pace,
    RecallSplit,
    Token,
    Update,
)
from kvrecall.engines.vllm.serving.openai_handlers import RecallCompletion
from kvrecall.engines.vllm.serving.sampling import BEST_OF
from kvrecall.engines.vllm.serving.served_llm import (
    STOPPED,
    RequestTimeoutError,
    ServedLLM,
    with_timeout,
)

_SAMPLED = (
    "temperature top_k top_p repetition_penalty presence_penalty frequency_penalty seed"
).split()


class VllmEngine:
    """See ServingEngine. ``handler`` is vLLM's for completions, over ``engine``; its pool answers
    queries at ``pool_socket``."""

    def __init__(
        self,
        engine: ServedLLM,
        handler: RecallCompletion,
        limits: Limits,
        pool_socket: Path | None = None,
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._limits = limits
        self._special = frozenset(handler.renderer.tokenizer.all_special_ids)
        self._stopped: set[str] = set()
        self.info = _info(engine, handler, pool_socket)
        self.insight = engine.request_log
        self.end_all = engine.end_all

    @property
    def draining(self) -> bool:
        return self._engine.draining

    def drain(self) -> None:
        self._engine.draining = True

    async def alive(self) -> bool:
        try:
            await self._engine.check_health()
        except EngineDeadError:
            return False
        return True

    def load(self) -> EngineLoad:
        """Running, waiting and used are as of the engine's last step."""
        prompts, answers = self._engine.steps.throughputs()
        return EngineLoad(
            running=int(_gauge("vllm:num_requests_running")),
            waiting=int(_gauge("vllm:num_requests_waiting")),
            unfinished=max(self._engine.get_num_unfinished_requests(), self._engine.searches),
            max_running=self.info.max_running,
            blocks=self.info.blocks,
            used_share=_gauge("vllm:kv_cache_usage_perc"),
            prompt_throughput=prompts,
            generation_throughput=answers,
        )

    async def models(self) -> Sequence[Mapping[str, object]]:
        found = await self._handler.models.show_available_models()
        return [card.model_dump() for card in found.data]

    async def tokens(self, text: str) -> Sequence[str]:
        """Bytes of a character that is split over tokens go with its last."""
        async with _faults():
            rendered = await self._rendered(
                CompletionRequest(prompt=text, add_special_tokens=False)
            )
        ids, decode = rendered["prompt_token_ids"], self._handler.renderer.tokenizer.decode
        decoded = [decode([token]) for token in ids]
        return _spread(text, decoded, [token in self._special for token in ids])

    async def stop(self, request_id: str) -> None:
        self._stopped.add(request_id)
        await self._engine.abort(request_id)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        async with _faults():
            outputs = self._outputs(request, await self._render(request))
            ledger = self._handler.ledger()
            prompt_tokens = 0
            try:
                async for output in outputs:
                    ledger.note(output)
                    prompt_tokens = len(output.prompt_token_ids or ()) or prompt_tokens
                    prefill, pace = self._prefill(output), self._pace(request, output.metrics)
                    for sequence in output.outputs:
                        yield Update(
                            index=sequence.index,
                            tokens=self._tokens(sequence) if request.sampling.logprobs else (),
                            text=sequence.text,
                            finish=self._finish(request, sequence),
                            prompt_tokens=prompt_tokens,
                            split=ledger.split() or RecallSplit(computed=prompt_tokens),
                            prefill=prefill,
                            pace=pace,
                        )
            finally:
                await outputs.aclose()
                self._stopped.discard(request.request_id)

    def _outputs(
        self, request: GenerateRequest, engine_input: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        prompt_tokens = self._handler._extract_prompt_len(engine_input)
        longest = self._handler.model_config.max_model_len
        if prompt_tokens >= longest:
            raise GenerateError(
                Fault.INPUT,
                f"the prompt has {prompt_tokens} tokens, which leaves none for an answer within "
                f"maxSeqLen {longest}",
            )
        cap = self._limits.max_new_tokens or request.sampling.max_tokens
        max_tokens = min(request.sampling.max_tokens, cap, longest - prompt_tokens)
        adapter = self._adapter(request.adapter)
        if request.sampling.beam:
            params = _beam_params(request, max_tokens)
            found = self._handler.beam_search(
                engine_input, request.request_id, params, lora_request=adapter
            )
            return self._engine.timed(found, request.timeout_s, stepwise=False)
        return self._engine.generate(
            engine_input,
            self._params(request, max_tokens),
            request.request_id,
            lora_request=adapter,
            priority=request.priority,
            trace_headers=request.trace_headers or None,
        )

    async def _render(self, request: GenerateRequest) -> Any:
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        sampling = request.sampling
        body = CompletionRequest(
            prompt=prompt,
            n=max(sampling.best_of or 0, sampling.n),  # counted by vLLM's admission
            truncate_prompt_tokens=request.truncate or None,
            truncation_side="left" if request.truncate else None,
        )
        return await self._rendered(body)

    async def _rendered(self, body: CompletionRequest) -> Any:
        inputs = await self._handler.render_completion_request(body)
        if isinstance(inputs, ErrorResponse):
            raise GenerateError(Fault.INPUT, inputs.error.message)
        return inputs[0]

    def _params(self, request: GenerateRequest, max_tokens: int) -> SamplingParams:
        """What was given, over the model's own defaults where it samples."""
        sampling = request.sampling
        extra: dict[str, Any] = with_timeout(request.timeout_s)
        if sampling.best_of is not None:
            extra[BEST_OF] = sampling.best_of
        if request.hint is not None:
            extra["kv_transfer_params"] = {HINT: request.hint._asdict()}
        given = {name: getattr(sampling, name) for name in _SAMPLED}
        of_model = self._handler.default_sampling_params if sampling.temperature != 0.0 else {}
        chosen = {name: value for name, value in of_model.items() if name in given}
        chosen |= {name: value for name, value in given.items() if value is not None}
        kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(
            n=sampling.n,
            max_tokens=max_tokens,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            include_stop_str_in_output=sampling.include_stop,
            ignore_eos=sampling.ignore_eos,
            skip_special_tokens=sampling.skip_special_tokens,
            logprobs=0 if sampling.logprobs else None,
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
            output_kind=kind,
            extra_args=extra or None,
            **chosen,
        )

    def _adapter(self, name: str | None) -> Any:
        adapters = self._handler.models.lora_requests
        if name is not None and name not in adapters:
            known = ", ".join(sorted(adapters)) or "none"
            raise GenerateError(Fault.UNKNOWN, f"no adapter {name!r} is loaded (loaded: {known})")
        return None if name is None else adapters[name]

    def _tokens(self, sequence: CompletionOutput) -> tuple[Token, ...]:
        """The new tokens, each with its part of the text."""
        if sequence.logprobs is None:
            return ()
        ids = list(sequence.token_ids)
        found = [places[token] for places, token in zip(sequence.logprobs, ids, strict=False)]
        decoded = [place.decoded_token or "" for place in found]
        texts = _spread(sequence.text, decoded, [token in self._special for token in ids])
        return tuple(map(self._token, ids, texts, found))

    def _finish(self, request: GenerateRequest, sequence: CompletionOutput) -> Finish | None:
        match sequence.finish_reason:
            case None:
                return None
            case "abort" if self._engine.ended:
                raise GenerateError(Fault.BUSY, STOPPED)
            case "abort" if request.request_id in self._stopped:
                return Finish.STOPPED
            case "stop":
                return Finish.EOS if sequence.stop_reason is None else Finish.STOP
            case "repetition":
                return Finish.STOP
            case "length":
                return Finish.LENGTH
        raise GenerationError(f"the engine ended the request: {sequence.finish_reason}")

    def _pace(self, request: GenerateRequest, stats: Any) -> Pace:
        """``stats`` are vLLM's of the request (RequestStateStats), None if they are off."""
        if not request.paced or stats is None or not stats.scheduled_ts:
            return Pace()
        first = stats.last_token_ts if request.stream else stats.first_token_ts
        sizes = self._engine.steps.sizes(first, stats.last_token_ts)
        foreign = stats.num_preemptions or len(sizes) > stats.num_generation_tokens
        return Pace(
            queued_s=stats.scheduled_ts - stats.queued_ts,
            batch_sizes=() if foreign and not request.stream else sizes,
        )

    def _prefill(self, output: RequestOutput) -> tuple[Token, ...]:
        if not output.prompt_logprobs or not output.prompt_token_ids:
            return ()
        ids = output.prompt_token_ids
        pairs = zip(ids, output.prompt_logprobs, strict=True)
        found = [places[token] if places else None for token, places in pairs]
        texts = [(place.decoded_token or "") if place else "" for place in found]
        return tuple(map(self._token, ids, texts, found))

    def _token(self, token: int, text: str, place: Any) -> Token:
        """``place``: vLLM's log probability; None of the first token of a prompt."""
        logprob = None if place is None else max(place.logprob, -9999.0)
        return Token(token, text, logprob, token in self._special)


@asynccontextmanager
async def _faults() -> AsyncIterator[None]:
    """vLLM's errors as GenerateError."""
    try:
        yield
    except GracefulHTTPError as error:
        raise GenerateError(Fault.BUSY, str(error)) from error
    except VLLMNotFoundError as error:
        raise GenerateError(Fault.UNKNOWN, str(error)) from error
    except (VLLMClientError, ValueError, TypeError, OverflowError) as error:
        raise GenerateError(Fault.INPUT, str(error)) from error
    except RequestTimeoutError as error:
        raise GenerateError(Fault.TIMEOUT, str(error)) from error
    except VLLMServerError as error:
        raise GenerateError(Fault.ENGINE, str(error) or "the engine failed") from error


def _info(engine: ServedLLM, handler: RecallCompletion, pool_socket: Path | None) -> EngineInfo:
    config = engine.vllm_config
    parallel = config.parallel_config
    return EngineInfo(
        names=tuple(path.name for path in handler.models.base_model_paths),
        model=config.model_config.model,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        device=current_platform.device_name,
        max_model_len=config.model_config.max_model_len,
        max_running=config.scheduler_config.max_num_seqs,
        max_step_tokens=config.scheduler_config.max_num_batched_tokens,
        block_size=config.cache_config.block_size,
        blocks=config.cache_config.num_gpu_blocks or 0,
        devices=parallel.world_size * parallel.data_parallel_size,
        version=VLLM_VERSION,
        pooled=config.kv_transfer_config is not None,
        pool_socket=pool_socket,
    )


def _gauge(name: str) -> float:
    """The sum of a gauge over the engines of this server; 0 without statistics."""
    families = REGISTRY.restricted_registry([name]).collect()
    return sum(sample.value for family in families for sample in family.samples)


def _beam_params(request: GenerateRequest, max_tokens: int) -> BeamSearchParams:
    sampling = request.sampling
    if request.stream:
        raise GenerateError(Fault.INPUT, "a beam search cannot be streamed")
    return BeamSearchParams(
        beam_width=sampling.n,
        max_tokens=max_tokens,
        ignore_eos=sampling.ignore_eos,
        temperature=sampling.temperature or 0.0,
        length_penalty=sampling.length_penalty,
        include_stop_str_in_output=sampling.include_stop,
        skip_special_tokens=sampling.skip_special_tokens,
    )


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
