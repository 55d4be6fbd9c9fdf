"""vLLM's async engine as a server uses it: with time limits, refusal of new requests, ending of
running ones, and ``best_of``, which vLLM no longer has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GenerationError, GracefulHTTPError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from kvrecall.engines.base import LONGEST_ID, Limits
from kvrecall.engines.vllm.compat.serving import note_outputs
from kvrecall.engines.vllm.serving import sampling
from kvrecall.engines.vllm.serving.insight import ConnectorReports, RequestLog, Steps

_TIMEOUT = "kvrecall_timeout"
STOPPED = "the server was stopped"
"""The error of requests that end with the server."""
_AFFIX = 64
"""Characters that vLLM puts before and behind a client's id, and more."""

_POLL_S = 0.05
_SEARCHING: ContextVar[bool] = ContextVar("searching", default=False)
_ENGINE_ID: ContextVar[str] = ContextVar("engine_id", default="")
"""The engine's id of the request that this task sent to it last."""
_FORCED_S = 15.0
"""Time for the engine to close after all requests were ended; vLLM may wait 9 s for a worker."""


class RequestTimeoutError(GenerationError):
    """A request ran past the token or the end-to-end timeout and was aborted."""


def with_timeout(seconds: float) -> dict[str, float]:
    """``extra_args`` of sampling parameters that shorten the time limit of the request."""
    return {_TIMEOUT: seconds} if seconds else {}


class ServedLLM(AsyncLLM):
    """The engine, with the server's limits on every request of every route."""

    limits: Limits = Limits()
    died: bool = False
    """Whether the engine had failed when it was first shut down."""
    draining: bool = False
    """Whether new requests are refused; never reset."""
    ended: bool = False
    """Whether all requests were ended; never reset."""
    searches: int = 0
    """Running beam searches."""
    _closed: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.reports = ConnectorReports()
        self.request_log = RequestLog(self.reports, self)
        self.steps = Steps()
        if kwargs.get("log_stats"):
            loggers = kwargs.get("stat_loggers") or ()
            kwargs["stat_loggers"] = [*loggers, self.reports.stat_logger]
        super().__init__(*args, **kwargs)
        note_outputs(self.engine_core, self.steps.note)

    async def end_all(self) -> None:
        """Ends all requests, present and future; the engine then has little time to close."""
        self.draining = self.ended = True
        with contextlib.suppress(EngineDeadError):
            await self.abort(list(self.output_processor.external_req_ids))

    def shutdown(self, timeout: float | None = None) -> None:
        if self.ended:
            timeout = _FORCED_S if timeout is None else min(timeout, _FORCED_S)
        elif timeout and not _on_a_loop():
            timeout = self._let_searches_end(timeout)
        self.draining = True
        if not self._closed and "engine_core" in vars(self):  # not so if its start failed
            self._closed, self.died = True, bool(self.errored)
            if not self.died:  # vLLM's output loop may find the engine gone before it is cancelled
                logging.getLogger("vllm.v1.engine.async_llm").addFilter(
                    lambda record: record.msg != "AsyncLLM output_handler failed."
                )
        super().shutdown(timeout=timeout)

    def _let_searches_end(self, timeout: float) -> float:
        """Waits while beam searches run, for a limited time; returns the remaining time. vLLM's
        engine lets requests end, of which a beam search is one for each step."""
        self.draining = True
        end = time.monotonic() + timeout
        while self.searches and not self.errored and time.monotonic() < end:
            time.sleep(_POLL_S)
        return max(end - time.monotonic(), 1.0)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Like AsyncLLM's, for every request before its reply begins; refuses all requests when the
        server is about to end, except steps of running beam searches, and requests for too many
        sequences."""
        if self.draining and not _SEARCHING.get():
            raise GracefulHTTPError(
                "the server is stopping and accepts no new requests", HTTPStatus.SERVICE_UNAVAILABLE
            )
        self._check_count("n", n)
        super().check_admission(n, request_id)

    def _check_count(self, name: str, count: int) -> None:
        if count > (most := self.limits.max_n):
            message = f"{name} is {count}; this server allows {most} (maxN, --max-n)"
            raise VLLMValidationError(message, parameter=name)

    async def add_request(self, *args: Any, **kwargs: Any) -> RequestOutputCollector:
        """Like AsyncLLM's; notes the id that the engine knows the request by."""
        queue = await super().add_request(*args, **kwargs)
        _ENGINE_ID.set(queue.request_id)
        return queue

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Like AsyncLLM.generate; raises RequestTimeoutError when a step or the whole request takes
        too long, and VLLMValidationError for parameters that ``sampling.check`` refuses and for too
        long an id. The request is then aborted in the engine."""
        if len(request_id) > LONGEST_ID + _AFFIX:
            raise VLLMValidationError(sampling.long_id(request_id), parameter="request_id")
        wanted = sampling_params
        if self.ended:  # a step of a beam search, or what waited for its prompt's tokens
            raise GracefulHTTPError(STOPPED, HTTPStatus.SERVICE_UNAVAILABLE)
        sampling.check(wanted)
        best_of = sampling.requested_best_of(wanted)
        if best_of is not None:
            self._check_count("best_of", best_of)
            sampling_params = sampling.widened(wanted, best_of)
        _ENGINE_ID.set("")
        outputs = super().generate(prompt, sampling_params, request_id, **kwargs)
        timed = self.timed(outputs, _own_timeout(wanted.extra_args))
        watched = self.request_log.watch(request_id, timed, _ENGINE_ID.get)
        try:
            async for output in watched:
                sampling.check_output(output, wanted)
                yield output if best_of is None else sampling.ranked(output, wanted)
        finally:
            await watched.aclose()

    async def searched(
        self, found: AsyncGenerator[RequestOutput, None], width: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """``found`` of a beam search, whose steps are separate requests, within the limits for the
        whole (see ``timed``). It may finish like any request."""
        self.check_admission(width)
        _SEARCHING.set(True)  # of this request's task, and of those it starts for the steps
        self.searches += 1
        timed = self.timed(found, 0.0, stepwise=False)
        try:
            async for output in timed:
                yield output
        finally:
            self.searches -= 1
            await timed.aclose()

    async def timed(
        self, outputs: AsyncGenerator[RequestOutput, None], own: float, stepwise: bool = True
    ) -> AsyncGenerator[RequestOutput, None]:
        """``outputs`` within the limits, of which ``own`` (0: none) is the request's. Without
        ``stepwise`` an output need not come at each step."""
        clock = asyncio.get_running_loop().time
        limit = self.limits.total_timeout_s
        step = self.limits.token_timeout_s if stepwise else 0.0
        total = min(filter(None, (limit, own)), default=0.0)
        end = clock() + total if total else None
        try:
            while True:
                deadlines = [t for t in (end, clock() + step if step else None) if t is not None]
                try:
                    async with asyncio.timeout_at(min(deadlines, default=None)):
                        output = await anext(outputs)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if end is not None and clock() >= end:
                        name = "e2eTimeout" if total == limit else "the request's timeout"
                        message = f"request took longer than {total:g} s ({name})"
                    else:
                        message = f"no token for {step:g} s (tokenTimeout)"
                    raise RequestTimeoutError(message) from None
                yield output
        finally:
            await outputs.aclose()


def _on_a_loop() -> bool:
    """Whether this thread runs an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _own_timeout(extra: Mapping[str, Any] | None) -> float:
    """The request's own limit in seconds; 0 if it has none."""
    value = (extra or {}).get(_TIMEOUT, 0)
    return float(value) if isinstance(value, int | float) and value > 0 else 0.0
