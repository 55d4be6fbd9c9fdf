"""Plays a workload against servers, every session a client of its own."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvrecall.errors import EngineError
from kvrecall.lab.bench.serving.workload import ANSWER_TOKENS, Session, Workload

REQUEST_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as its client saw it: seconds, tokens, and prompt tokens by source."""

    ttft_s: float
    total_s: float
    answer_tokens: int
    recalled: Mapping[str, int]
    text: str

    @property
    def tpot_s(self) -> float:
        """Seconds a token after the first."""
        return (self.total_s - self.ttft_s) / max(1, self.answer_tokens - 1)


@dataclass(slots=True)
class Run:
    """What a workload gave: all samples, and the seconds from the first request to the last end."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0


def play(workload: Workload, urls: Sequence[str], note: Callable[[int], None]) -> Run:
    """Runs all sessions at once. Each turn goes to one of ``urls``, drawn anew each time.

    ``note`` hears after each request how many are done. Raises EngineError if one fails.
    """
    try:
        return asyncio.run(_play(workload, urls, note))
    except* (EngineError, httpx.HTTPError, OSError) as group:
        first = group.exceptions[0]
        raise EngineError(f"a request failed: {type(first).__name__}: {first}") from group


async def _play(workload: Workload, urls: Sequence[str], note: Callable[[int], None]) -> Run:
    run = Run()
    begin = time.perf_counter()
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=_NO_LIMITS) as client:

        async def converse(number: int, session: Session) -> None:
            draw = random.Random(number)
            prompt = session.opening
            await asyncio.sleep(session.start_s)
            for turn in session.turns:
                await asyncio.sleep(turn.think_s)
                prompt += turn.question
                sample = await _ask(client, draw.choice(urls), prompt)
                prompt += sample.text
                run.samples.append(sample)
                note(len(run.samples))

        async with asyncio.TaskGroup() as tasks:
            for number, session in enumerate(workload.sessions):
                tasks.create_task(converse(number, session))
    run.seconds = time.perf_counter() - begin
    return run


_NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


async def _ask(client: httpx.AsyncClient, url: str, prompt: str) -> Sample:
    parameters = {"max_new_tokens": ANSWER_TOKENS, "details": True}
    body = {"inputs": prompt, "parameters": parameters}
    ttft, tokens = 0.0, 0
    last: dict[str, Any] = {}
    begin = time.perf_counter()
    async with client.stream("POST", f"{url}/generate_stream", json=body) as reply:
        if reply.status_code != 200:
            raise EngineError(f"HTTP {reply.status_code}: {(await reply.aread()).decode()[:500]}")
        async for line in reply.aiter_lines():
            if line.startswith("data:"):
                ttft = ttft or time.perf_counter() - begin
                last = json.loads(line.removeprefix("data:"))
                tokens += 1
    total = time.perf_counter() - begin
    if not last.get("details"):
        raise EngineError(f"the answer broke off: {json.dumps(last)[:500]}")
    return Sample(ttft, total, tokens, last["details"]["recall"], last["generated_text"])
