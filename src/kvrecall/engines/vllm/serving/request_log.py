"""The requests of this server's engine: those under way and the last that ended."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from vllm.outputs import RequestOutput

from kvrecall.engines.base import REPORT
from kvrecall.engines.insight import Heat, Phase, RequestView
from kvrecall.engines.vllm.serving.reports import ConnectorReports


class RequestLog:
    """The requests of ``engine`` (vLLM's AsyncLLM) that pass ``watch``; see ``Insight``. Used by
    the API process's loop only."""

    remembered = 500

    def __init__(self, reports: ConnectorReports, engine: Any = None) -> None:
        self._reports = reports
        self._engine = engine
        self._ended: deque[RequestView] = deque(maxlen=self.remembered)

    async def watch(
        self, request_id: str, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Passes ``outputs`` on, and notes how the request ended."""
        began = time.time()
        last: RequestOutput | None = None
        phase = Phase.CANCELLED
        try:
            async for output in outputs:
                last = output
                yield output
            phase = Phase.DONE
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            phase = Phase.FAILED
            raise
        finally:
            split = self._reports.split_of(request_id)
            self._ended.append(_view(request_id, phase, began, last, split))
            await outputs.aclose()

    def live(self, most: int) -> tuple[Sequence[RequestView], int]:
        """See Insight.live."""
        states = list(self._engine.output_processor.request_states.values())
        return [_live(state, self._reports) for state in states[-most:]], len(states)

    def ended(self, since: float) -> Sequence[RequestView]:
        """See Insight.ended."""
        return [view for view in self._ended if view.ended > since]

    def heat(self) -> Heat | None:
        """See Insight.heat."""
        return self._reports.heat.heat()


def _view(
    request_id: str,
    phase: Phase,
    began: float,
    last: RequestOutput | None,
    split: Mapping[str, int] | None,
) -> RequestView:
    stats: Any = last.metrics if last is not None else None
    report = ((last.kv_transfer_params if last is not None else None) or {}).get(REPORT)
    return RequestView(
        id=request_id,
        phase=phase,
        began=began if stats is None else min(began, stats.arrival_time),  # as the first token's
        ended=time.time(),
        prompt_tokens=len(last.prompt_token_ids or ()) if last is not None else 0,
        output_tokens=int(stats.num_generation_tokens) if stats is not None else None,
        ttft_s=float(stats.first_token_latency) if stats is not None else 0.0,
        split=_split(report or split, last),
    )


def _split(report: Mapping[str, int] | None, last: RequestOutput | None) -> Mapping[str, int]:
    if report is not None:
        return dict(report)
    if last is None or last.num_cached_tokens is None:
        return {}
    cached = last.num_cached_tokens
    return {"device": cached, "computed": len(last.prompt_token_ids or ()) - cached}


def _live(state: Any, reports: ConnectorReports) -> RequestView:
    stats = state.stats
    split = reports.split_of(state.external_req_id or state.request_id)
    return RequestView(
        id=str(state.external_req_id or state.request_id),
        phase=Phase.PREFILL if state.is_prefilling else Phase.DECODE,
        began=float(stats.arrival_time) if stats is not None else 0.0,
        ended=0.0,
        prompt_tokens=int(state.prompt_len or 0),
        output_tokens=int(stats.num_generation_tokens) if stats is not None else None,
        ttft_s=float(stats.first_token_latency) if stats is not None else 0.0,
        split=dict(split or {}),
    )
