"""The oracles: the tokens of every answer, and the durability of every block reported durable; and
what they and the run count.

Each conversation is first run on an engine without a pool and continues with its answers. An
answer is compared exactly up to its first ambiguous token (two tokens almost equally likely), where
another chunking of the prefill or another batch may legitimately give another token.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvrecall.block import BlockKey, TierName
from kvrecall.errors import EngineError
from kvrecall.pool.base import ArenaHandle
from kvrecall.pool.service.client import ServiceClient
from kvrecall_lab.engines.engine import Answer, Question

ANSWER_TOKENS = 20
AMBIGUOUS = {"float32": 0.01, "bfloat16": 2.0}
"""By dtype, the difference of log-probabilities below which two tokens count as equally likely.
Float32 moves them by 1e-4 at most."""

_ALPHABET = range(1, 250)
_PREFIXES = (128, 300, 640)  # tokens of the system prompts that conversations share
_QUESTION = (30, 260)  # tokens per turn
_FLUSH_S = 5.0
_JOIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and the tokens that must follow it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def fault(self, question: Question, answer: Answer) -> tuple[str, str] | None:
        """The fault of the answer to ``question``, one of ``FAULTS``, with details; None if
        correct."""
        expected = self.answer[: question.max_tokens]
        if answer.finish not in ("length", "stop"):
            return "failed", f"ended with {answer.finish!r}"
        if answer.tokens != expected:
            return "wrong", f"{list(answer.tokens)} instead of {list(expected)}"
        return None


class Conversations:
    """The workload. ``turns[c]`` are those of conversation c, each with at least one token to
    answer. Raises EngineError without any."""

    def __init__(self, turns: Sequence[Sequence[Turn]]) -> None:
        self.turns = [tuple(some) for some in turns if some]
        if not self.turns:
            raise EngineError("the reference engine gave no unambiguous answer")

    @classmethod
    def played(
        cls,
        dice: random.Random,
        conversations: int,
        turns: int,
        ask: Callable[[Sequence[Question]], Sequence[Answer]],
        progress: Callable[[str], None] = lambda line: None,
        ambiguous: float = AMBIGUOUS["float32"],
    ) -> Conversations:
        """Runs a turn of all conversations at once on the engine behind ``ask``, which answers in
        order, with gaps. ``ambiguous``: see ``AMBIGUOUS``."""
        prefixes = [dice.choices(_ALPHABET, k=length) for length in _PREFIXES]
        tokens = [list(dice.choice(prefixes)) for _ in range(conversations)]
        played: list[list[Turn]] = [[] for _ in tokens]
        for number in range(turns):
            for some in tokens:
                some += dice.choices(_ALPHABET, k=dice.randint(*_QUESTION))
            questions = [
                Question(f"{number}-{place}", tuple(some), ANSWER_TOKENS)
                for place, some in enumerate(tokens)
            ]
            for some, done, answer in zip(tokens, played, ask(questions), strict=True):
                known = answer.tokens[: answer.sure(ambiguous)]
                if known:
                    done.append(Turn(tuple(some), known))
                some += known
            progress(f"reference answers: turn {number + 1} of {turns}")
        return cls(played)

    def draw(self, dice: random.Random) -> Turn:
        """A random turn; the first conversations are more frequent, which mixes hits and misses."""
        place = int(len(self.turns) * dice.random() ** 2)
        return dice.choice(self.turns[place])


class DurabilityOracle:
    """A separate client of the service. Its thread calls ``flush`` for saved blocks; acknowledged
    blocks must be found after a kill, unless damaged or evicted since."""

    def __init__(self, socket: Path) -> None:
        self._client = ServiceClient(socket, call_timeout_s=2.0)
        self._chains: queue.SimpleQueue[tuple[BlockKey, ...] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while the sets must not change
        self._durable: set[BlockKey] = set()
        self._damaged: set[BlockKey] = set()
        self.arenas: set[ArenaHandle] = set()  # of all lives of the service
        self.evictions = 0  # from disk, in all lives of the service
        self._thread = threading.Thread(target=self._run, name="durability-oracle", daemon=True)
        self._thread.start()

    @property
    def durable(self) -> int:
        return len(self._durable)

    def saved(self, keys: Iterable[BlockKey]) -> None:
        """Notes that an engine saved these."""
        self._chains.put(tuple(keys))

    def damaged(self, keys: Iterable[BlockKey]) -> None:
        """Notes that the run damaged these; they may be lost."""
        with self._lock:
            self._damaged.update(keys)

    def evicted(self, keys: Iterable[BlockKey]) -> None:
        """Notes that these were evicted; they may be lost."""
        with self._lock:
            self._durable.difference_update(keys)

    def observe(self) -> None:
        """Notes what only a running service can report. Blocks briefly."""
        self.arenas.add(self._client.arena_handle())
        for tier in self._client.stats().tiers:
            if tier.name == TierName.DISK:
                self.evictions = tier.evictions

    def wait_joined(self, seconds: float = _JOIN_S) -> bool:
        """Waits until the service is connected."""
        until = time.monotonic() + seconds
        while not self._client.is_connected:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        self.observe()
        return True

    def missing(self) -> list[BlockKey]:
        """Durable blocks that the restarted service does not find. Each is looked up three times,
        because a late reply counts as none."""
        with self._lock:
            return [
                key
                for key in self._durable - self._damaged
                if not any(self._client.locate([key]).blocks for _ in range(3))
            ]

    def undamaged(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """Those of ``keys`` that the run did not damage."""
        with self._lock:
            return set(keys) - self._damaged

    def close(self) -> None:
        """Waits until all saved blocks are flushed, and closes."""
        if self._thread.is_alive():
            self._chains.put(None)
            self._thread.join(60)
            self._client.close()

    def _run(self) -> None:
        while (keys := self._chains.get()) is not None:
            new = [key for key in keys if key not in self._durable]
            if new and self._client.flush(new, _FLUSH_S):
                with self._lock:
                    self._durable.update(new)


FIGURES = ("requests", "service_kills", "engine_kills", "corruptions")
FAULTS = ("wrong", "hung", "failed", "lost_committed", "leaked_bytes")
"""Each of these must be 0."""


class Report:
    """Counts of a run, and a line for each fault. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._rejoins: list[float] = []
        self.faults: list[str] = []

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def fault(self, name: str, what: str, count: int = 1) -> None:
        """Counts one of ``FAULTS``."""
        with self._lock:
            self._counts[name] += count
            self.faults.append(f"{name}: {what}")

    def rejoined(self, seconds: float) -> None:
        """Notes how many seconds after the service was ready an engine reconnected."""
        with self._lock:
            self._rejoins.append(max(0.0, seconds))

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    @property
    def is_clean(self) -> bool:
        """Whether there were requests and no faults."""
        return self["requests"] > 0 and not any(self[name] for name in FAULTS)

    def figures(self) -> dict[str, object]:
        """Figures and faults first, then the other counts."""
        names = (*FIGURES, *FAULTS)
        with self._lock:
            others = {n: c for n, c in sorted(self._counts.items()) if n not in names}
            rejoins = {
                "rejoins": len(self._rejoins),
                "rejoin_s_max": round(max(self._rejoins, default=0.0), 2),
            }
        return {**{name: self[name] for name in names}, **others, **rejoins}
