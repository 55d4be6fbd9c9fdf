"""Workloads of conversations, and the clients that run them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from kvrecall.bench.model import Texts
from kvrecall.errors import EngineError
from kvrecall.processes.server import Answer, generate

ANSWER_TOKENS = 24
REQUEST_TIMEOUT_S = 900.0
_SYSTEM_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's turn: its text, and seconds after the last answer (or the session's start)."""

    think_s: float
    question: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation: its prompt begins with ``opening``; each turn repeats all before it."""

    start_s: float
    opening: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Concurrent sessions, with a description."""

    name: str
    story: str
    sessions: tuple[Conversation, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, a byte each, answers not counted."""
        total = 0
        for session in self.sessions:
            length = len(session.opening)
            for turn in session.turns:
                length += len(turn.question)
                total += length
        return total

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, with room for the answers before it."""
        return max(
            len(session.opening) + sum(len(turn.question) + ANSWER_TOKENS for turn in session.turns)
            for session in self.sessions
        )

    def unique_tokens(self, block: int) -> int:
        """Tokens that a pool needs to keep everything: common prefixes count once."""
        prefixes: set[int] = set()
        answers = 0
        for session in self.sessions:
            text = session.opening + "".join(turn.question for turn in session.turns)
            prefixes.update(hash(text[:end]) for end in range(block, len(text) + 1, block))
            answers += ANSWER_TOKENS * len(session.turns)
        return block * len(prefixes) + answers


def conversations(sessions: int, turns: int) -> Workload:
    """Chats and document questions, one in four over a long text, under one system prompt.

    Lengths and think times are drawn, always the same: openings of 128 to 512 tokens, long texts of
    1,536 to 3,072, questions of 32 to 128, pauses of 1 to 6 seconds (exponential).
    """
    draw, texts = random.Random(0), Texts()
    system = texts.document(_SYSTEM_TOKENS)
    made = []
    for number in range(sessions):
        low, high = (1536, 3072) if number % 4 == 0 else (128, 512)
        opening = system + texts.document(draw.randint(low, high))
        made.append(
            Conversation(
                start_s=draw.uniform(0, 10),
                opening=opening,
                turns=tuple(
                    Turn(min(6.0, 1 + draw.expovariate(0.5)), texts.document(draw.randint(32, 128)))
                    for _ in range(turns)
                ),
            )
        )
    story = f"{sessions} sessions of {turns} turns, one in four over a long text"
    return Workload("conversations", story, tuple(made))


# -- clients --------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """The results of a workload: all answers, and the seconds from the first request to the last
    token."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0


def play(workload: Workload, urls: Sequence[str], note: Callable[[int], None]) -> Run:
    """Runs all sessions at once. Each turn goes to a random one of ``urls``.

    Calls ``note`` after each request with the number done. Raises EngineError if one fails.
    """
    run = Run()
    failed = threading.Event()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)

    def converse(number: int, session: Conversation) -> None:
        draw = random.Random(number)
        prompt = session.opening
        failed.wait(session.start_s)
        for turn in session.turns:
            if failed.wait(turn.think_s):
                return
            prompt += turn.question
            url = draw.choice(urls)
            try:
                answer = generate(client, url, prompt, ANSWER_TOKENS, REQUEST_TIMEOUT_S)
            except (EngineError, httpx.HTTPError, OSError) as error:
                failed.set()
                raise EngineError(f"a request failed: {type(error).__name__}: {error}") from error
            prompt += answer.text
            run.answers.append(answer)
            note(len(run.answers))

    begin = time.perf_counter()
    with (
        httpx.Client(limits=limits) as client,
        ThreadPoolExecutor(len(workload.sessions)) as clients,
    ):
        for end in [clients.submit(converse, *one) for one in enumerate(workload.sessions)]:
            end.result()
    run.seconds = time.perf_counter() - begin
    return run
