"""What the server learns about its running engine: sources of prompts, steps, requests.

vLLM passes a connector's final parameters of a request to the API process only when the *engine*
ends it; a stop string is found outside the engine, which then merely aborts the request. The split
of every request therefore also travels with the step's statistics, and its outputs get it here.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.metrics.loggers import StatLoggerBase

from kvrecall.engines.base import (
    MISSED,
    REPORT,
    Heat,
    Miss,
    Phase,
    Reason,
    RecallSplit,
    RequestView,
)
from kvrecall.engines.parting import PartingPlace, Partings, with_cause
from kvrecall.engines.vllm.attention.activity import HeatTotals
from kvrecall.nicety import nicety

_REMEMBERED = 16_384
_CHILD = re.compile(r"^\d+_")  # one of several samples of a request
_EXPLAINED = 4096  # ended requests that can be asked for by their id
_KEPT = 8192  # steps of an engine
WINDOW_S = 10.0
"""Time over which throughputs are averaged; vLLM's own log takes the same."""


class ConnectorReports(StatLoggerBase):
    """The latest splits by request, as many as can be under way at once, and the sum of what the
    workers' layers chose. Owned by the served engine; not thread-safe.

    Requests have the engine's ids, which are unique: clients choose those of the API (the header
    ``X-Request-Id``), and two tenants may choose the same.
    """

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._splits: OrderedDict[str, Mapping[str, int]] = OrderedDict()
        self._misses: OrderedDict[str, Miss] = OrderedDict()
        self._remembered = remembered
        self.heat = HeatTotals()

    def take(self, payload: Mapping[str, Any]) -> None:
        """Adds one payload of ``RecallStats``. If a request has several samples, the first split
        counts: the others hit blocks that it computed."""
        for engine_id, split in payload.get("splits", {}).items():
            self._splits.setdefault(_CHILD.sub("", engine_id), split)
        for engine_id, miss in payload.get("misses", {}).items():
            name = _CHILD.sub("", engine_id)
            if miss["reason"] == Reason.FAILED or name not in self._misses:
                self._misses[name] = miss
        for known in (self._splits, self._misses):
            while len(known) > self._remembered:
                known.popitem(last=False)
        self.heat.add(payload.get("heat", {}))

    def split_of(self, engine_id: str) -> Mapping[str, int] | None:
        """Prompt tokens by source of a request; None if they are not known yet."""
        return self._splits.get(_CHILD.sub("", engine_id))

    def miss_of(self, engine_id: str) -> Miss | None:
        """Why the rest of a prompt was computed."""
        return self._misses.get(_CHILD.sub("", engine_id))

    def stat_logger(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """The stat logger of each of vLLM's engines."""
        return self

    @nicety("the reading of statistics")
    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        if payload := getattr(scheduler_stats, "kv_connector_stats", None):
            self.take(payload)

    def log_engine_initialized(self) -> None:
        """Does nothing."""


class Steps:
    """The results of the engines' last steps: how many sequences got a token, and tokens per
    second, by the outputs that vLLM's engine processes send after each step and by their clock,
    which is that of the requests' own statistics. Used by the API process's loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sizes: dict[int, deque[tuple[float, int]]] = {}  # by engine; time and sequences
        self._tokens: deque[tuple[float, int, int]] = deque()  # time, of prompts, of answers

    @nicety("the count of steps")
    def note(self, outputs: Any) -> None:
        """Takes the outputs of one step of one engine (vLLM's EngineCoreOutputs)."""
        given = [output for output in outputs.outputs if output.new_token_ids]
        if not given:
            return
        sizes = self._sizes.setdefault(outputs.engine_index, deque(maxlen=_KEPT))
        sizes.append((outputs.timestamp, len(given)))
        starts = (output.prefill_stats for output in given)
        prompts = sum(start.num_prompt_tokens for start in starts if start is not None)
        answers = sum(len(output.new_token_ids) for output in given)
        self._tokens.append((self._clock(), prompts, answers))
        self._forget()

    def sizes(self, first: float, last: float) -> tuple[int, ...]:
        """How many sequences got a token in each step from ``first`` to ``last``, times of steps
        of one engine; nothing if not all of them are known any more."""
        for sizes in self._sizes.values():
            found = [*takewhile(lambda step: step[0] >= first, reversed(sizes))]
            while found and found[0][0] > last:
                del found[0]
            if found and (found[-1][0], found[0][0]) == (first, last):
                return tuple(size for _, size in reversed(found))
        return ()

    def throughputs(self) -> tuple[float, float]:
        """Tokens a second over the last WINDOW_S: of prompts, which count when their first token
        is there, and of answers."""
        self._forget()
        prompts = sum(prompt for _, prompt, _ in self._tokens)
        answers = sum(answer for _, _, answer in self._tokens)
        return prompts / WINDOW_S, answers / WINDOW_S

    def _forget(self) -> None:
        end = self._clock() - WINDOW_S
        while self._tokens and self._tokens[0][0] <= end:
            self._tokens.popleft()


class RequestLog:
    """The requests of ``engine`` (vLLM's AsyncLLM) that pass ``watch``; see ``Insight``. Used by
    the API process's loop only."""

    remembered = 500

    def __init__(self, reports: ConnectorReports, engine: Any = None) -> None:
        self._reports = reports
        self._engine = engine
        self._ended: deque[RequestView] = deque(maxlen=self.remembered)
        self._by_id: OrderedDict[str, RequestView] = OrderedDict()
        self._partings = Partings()
        self.forgotten_until = 0.0

    async def watch(
        self,
        request_id: str,
        outputs: AsyncGenerator[RequestOutput, None],
        engine_id: Callable[[], str],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Passes ``outputs`` on, with the report of the request, and records how it ended.
        ``engine_id``: gives the engine's id of it, "" before it has one. It is asked until it gives
        one: of several prompts in one HTTP request vLLM takes each output in a task of its own, and
        only the first of them knows the id."""
        began, name, phase = time.time(), "", Phase.CANCELLED
        output: RequestOutput | None = None
        try:
            async for output in outputs:
                name = name or engine_id()
                self._complete(output, name)
                yield output
            phase = Phase.DONE
        except Exception:
            phase = Phase.FAILED
            raise
        finally:
            self._note_ended(request_id, name or engine_id(), phase, began, output)
            await outputs.aclose()

    @nicety("the record of a request")
    def _note_ended(
        self, request_id: str, name: str, phase: Phase, began: float, last: RequestOutput | None
    ) -> None:
        report, stats, prompt = self._report(name), None, 0
        if last is not None:
            stats, prompt = last.metrics, len(last.prompt_token_ids or ())
            params, cached = last.kv_transfer_params or {}, last.num_cached_tokens
            if REPORT in params:
                report = {**params[REPORT], "missed": params.get(MISSED)}
            elif report is None and cached is not None:
                report = {"device": cached, "computed": prompt - cached}
        if stats is not None:  # from the arrival, as the wait for the first token
            began = min(began, stats.arrival_time)
        view = _view(request_id, phase, began, time.time(), prompt, report, stats)
        if view.missed is not None and last is not None and last.prompt_token_ids is not None:
            told = with_cause(view.missed, last.prompt_token_ids, self._decode)
            view = replace(view, missed=told)
            self._partings.note(request_id, told)
        self._ended.append(view)
        self._by_id[name or request_id] = view
        if len(self._by_id) > _EXPLAINED:
            self.forgotten_until = self._by_id.popitem(last=False)[1].ended

    @nicety("the report of a request")
    def _complete(self, output: RequestOutput, engine_id: str) -> None:
        """Adds the report to an output that has none, or that of another sample than the first,
        which hit what the first computed."""
        params = output.kv_transfer_params or {}
        if REPORT in params and all(sequence.index == 0 for sequence in output.outputs):
            return
        split, miss = self._reports.split_of(engine_id), self._reports.miss_of(engine_id)
        if split is None:
            return
        output.kv_transfer_params = {**params, REPORT: split, **({MISSED: miss} if miss else {})}

    def live(self, most: int) -> tuple[Sequence[RequestView], int]:
        states = list(self._engine.output_processor.request_states.values())
        return [self._live_view(state) for state in states[-most:]], len(states)

    def ended(self, since: float) -> Sequence[RequestView]:
        return [view for view in self._ended if view.ended > since]

    def requests(self, request_id: str) -> Sequence[RequestView]:
        states = list(self._engine.output_processor.request_states.values())
        found = [*map(self._live_view, states), *self._by_id.values()]
        return [view for view in found if _is_of(view.id, request_id)]

    def partings(self) -> Sequence[PartingPlace]:
        return self._partings.costliest()

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._engine.renderer.tokenizer.decode(list(ids)))

    def heat(self) -> Heat | None:
        return self._reports.heat.heat()

    def _live_view(self, state: Any) -> RequestView:
        return _view(
            str(state.external_req_id or state.request_id),
            Phase.PREFILL if state.is_prefilling else Phase.DECODE,
            0.0 if state.stats is None else float(state.stats.arrival_time),
            0.0,
            int(state.prompt_len or 0),
            self._report(str(state.request_id)),
            state.stats,
        )

    def _report(self, engine_id: str) -> Mapping[str, object] | None:
        split = self._reports.split_of(engine_id)
        return None if split is None else {**split, "missed": self._reports.miss_of(engine_id)}


def _is_of(name: str, request_id: str) -> bool:
    """Whether a request has that id, or is one of the several prompts of the one that has it."""
    if not name.startswith(request_id):
        return False
    sign, number = name[len(request_id) :][:1], name[len(request_id) + 1 :]
    return not sign or (sign == "-" and number.isdecimal())


def _view(
    name: str,
    phase: Phase,
    began: float,
    ended: float,
    prompt: int,
    report: Mapping[str, object] | None,
    stats: Any,
) -> RequestView:
    """``report``: as of a connector; ``stats``: vLLM's of the request. None if they are off."""
    split = None if report is None else RecallSplit.of_report(report, 0, 0, True)
    return RequestView(
        id=name,
        phase=phase,
        began=began,
        ended=ended,
        prompt_tokens=prompt,
        output_tokens=None if stats is None else int(stats.num_generation_tokens),
        ttft_s=0.0 if stats is None else float(stats.first_token_latency),
        split={} if split is None else split.as_dict(),
        missed=None if split is None else split.missed,
    )
