"""An Engine without a model: it answers with given words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
from fastapi import FastAPI

from kvrecall.engines.base import (
    EngineInfo,
    EngineLoad,
    Finish,
    GenerateError,
    GenerateRequest,
    Pace,
    RecallSplit,
    RequestView,
    Token,
    Update,
)
from kvrecall.engines.parting import PartingPlace, Partings
from kvrecall.server.access import OWN_HEADER

SPLIT = RecallSplit(device=128, host=256, disk=384, computed=5)
INFO = EngineInfo(("tiny",), "m", "bfloat16", "cpu", 4096, 8, 8192, 128, 64, 1, "0")
IDLE = EngineLoad(running=0, waiting=0, unfinished=0, max_running=8, blocks=64, used_share=0.25)


class FakeEngine:
    """Answers every request with ``words``, one token each; fails after ``fail_after`` of them.

    ``delay`` seconds pass before each token. ``requests`` and ``aborted`` keep what came and what
    was aborted. A paced request waited a quarter of a second, and its batch grows with each step.
    """

    def __init__(
        self,
        words: tuple[str, ...] = ("Hello", ",", " 世", "界"),
        finish: Finish = Finish.EOS,
        failure: GenerateError | None = None,
        fail_after: int = 0,
        delay: float = 0.0,
    ) -> None:
        self.words = words
        self.finish = finish
        self.failure = failure
        self.fail_after = fail_after
        self.delay = delay
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.info = INFO
        self.now = IDLE
        self.lives = True
        self.draining = False
        self.ended = False
        self.insight = FakeInsight()

    def load(self) -> EngineLoad:
        return self.now

    def drain(self) -> None:
        self.draining = True

    async def end_all(self) -> None:
        self.ended = True
        self.now = IDLE

    async def alive(self) -> bool:
        return self.lives

    async def models(self) -> list[dict[str, object]]:
        return [{"id": name, "object": "model"} for name in self.info.names]

    async def tokens(self, text: str) -> list[str]:
        return text.split()

    async def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        self.requests.append(request)
        done = False
        whole = tuple(range(1, len(self.words) + 1))
        try:
            tokens = []
            for index, word in enumerate(self.words):
                await asyncio.sleep(self.delay)
                if request.request_id in self.stopped:
                    done = True
                    yield self._update((), "", True, Finish.STOPPED)
                    return
                if self.failure is not None and index >= self.fail_after:
                    raise self.failure
                token = Token(index, word, -0.5 * index, False)
                tokens.append(token)
                last = index == len(self.words) - 1
                if request.stream:
                    pace = Pace(0.25, (index + 1,)) if request.paced else None
                    yield self._update((token,), word, last, pace=pace)
            if not request.stream:
                pace = Pace(0.25, whole) if request.paced else None
                yield self._update(tuple(tokens), "".join(self.words), True, pace=pace)
            done = True
        finally:
            if not done and self.failure is None:
                self.aborted.append(request.request_id)

    def _update(
        self,
        tokens: tuple[Token, ...],
        text: str,
        last: bool,
        finish: Finish | None = None,
        pace: Pace | None = None,
    ) -> Update:
        prompt = 128 + 256 + 384 + 5
        told = (finish or self.finish) if last else None
        return Update(0, tokens, text, told, prompt, SPLIT, pace=pace or Pace())


def ask(
    app: FastAPI, path: str, method: str = "GET", body: object = None, **more: Any
) -> httpx.Response:
    """The reply of an application to a client on this host, which sends its body as JSON."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(
                method, path, content=content, headers={OWN_HEADER: "1"}, **more
            )

    return asyncio.run(send())


class FakeInsight:
    """An insight without figures."""

    remembered = 500
    forgotten_until = 0.0

    def __init__(self) -> None:
        self.known: list[RequestView] = []

    def requests(self, request_id: str) -> list[RequestView]:
        return [view for view in self.known if view.id == request_id]

    def live(self, most: int) -> tuple[list[RequestView], int]:
        return [], 0

    def ended(self, since: float) -> list[RequestView]:
        return []

    def partings(self) -> list[PartingPlace]:
        found = Partings()
        for view in self.known:
            if view.missed:
                found.note(view.id, view.missed)
        return found.costliest()

    def heat(self) -> None:
        return None
