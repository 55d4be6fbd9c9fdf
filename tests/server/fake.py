"""A generator without an engine: it answers with the words it is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from kvrecall.engines.base import (
    Finish,
    GenerateError,
    GenerateRequest,
    RecallSplit,
    Token,
    Update,
)

SPLIT = RecallSplit(device=128, host=256, disk=384, computed=5)


class FakeGenerator:
    """Answers every request with ``words``, one token each; fails after ``fail_after`` of them.

    ``delay`` seconds pass before each token. What was asked and what was aborted is kept.
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
        self.asked: list[GenerateRequest] = []
        self.aborted: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
        self.asked.append(request)
        done = False
        try:
            tokens = []
            for index, word in enumerate(self.words):
                await asyncio.sleep(self.delay)
                if self.failure is not None and index >= self.fail_after:
                    raise self.failure
                token = Token(index, word, -0.5 * index, False)
                tokens.append(token)
                last = index == len(self.words) - 1
                if request.stream:
                    yield self._update((token,), word, last)
            if not request.stream:
                yield self._update(tuple(tokens), "".join(self.words), True)
            done = True
        finally:
            if not done and self.failure is None:
                self.aborted.append(request.request_id)

    def _update(self, tokens: tuple[Token, ...], text: str, last: bool) -> Update:
        prompt = 128 + 256 + 384 + 5
        return Update(0, tokens, text, self.finish if last else None, prompt, SPLIT)
