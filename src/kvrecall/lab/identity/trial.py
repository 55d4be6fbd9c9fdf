"""Tries a pair: the first engine, the second, the first again, on one pool's folder."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvrecall.errors import EngineError
from kvrecall.lab.engines.engine import Answer
from kvrecall.lab.identity.engines import Engines, Life, Reply
from kvrecall.lab.identity.pairs import Kv, Pair
from kvrecall.lab.identity.setups import BRANCHES, FRESH, KNOWN, TWIGS, Prompts, Setup, Shelf

LEAST_TOLERANCE = 1e-4
NOISE_MARGIN = 4.0
"""How far log-probabilities of a right reply may lie from those of the engine without a pool.

A recalled prefix is continued in another cut than in the prompt computed whole, and that may move
the last bits of keys, values and sums. How far is measured, engine by engine: without a pool it
answers every prompt twice, computed whole and continued from its own device cache, which cuts the
prompt as a recall does. Four times the greatest distance is allowed, and in any case 1e-4. On a CPU
with one thread an engine the distance is 0: sums are taken in one order, however a prompt is cut.
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """What an engine answers without a pool, by the prompt's name. ``noise``: how far cutting the
    prompts otherwise moves its log-probabilities."""

    answers: Mapping[str, Answer]
    noise: float

    @classmethod
    def of(cls, computed: Sequence[Reply], continued: Sequence[Reply]) -> Reference:
        answers = {reply.name: reply.answer for reply in computed}
        return cls(answers, max(distance(answers[one.name], one.answer) for one in continued))

    @property
    def tolerance(self) -> float:
        """How far right replies may lie from these, in log-probability."""
        return max(LEAST_TOLERANCE, NOISE_MARGIN * self.noise)

    def fault(self, reply: Reply) -> str:
        """What is wrong with an answer; empty if nothing is.

        Tokens are compared up to the first whose lead over the second choice is within what the
        tolerance may turn; with other tokens before it, later ones answer another question.
        """
        truth, answer = self.answers[reply.name], reply.answer
        off = self._off(truth, answer)
        if off == math.inf:
            return f"{list(answer.tokens)} instead of {list(truth.tokens)}"
        return f"log-probabilities off by {off:.2g}" if off > self.tolerance else ""

    def contrast(self, other: Reference) -> Mapping[str, float]:
        """How far the replies of another engine lie from these, by the prompt's name."""
        return {name: self._off(truth, other.answers[name]) for name, truth in self.answers.items()}

    def _off(self, truth: Answer, answer: Answer) -> float:
        """Greatest difference of log-probabilities; infinite if a token is another."""
        sure = sure_tokens(truth, self.tolerance)
        if answer.tokens[:sure] != truth.tokens[:sure]:
            return math.inf
        return distance(truth, answer, sure)


def sure_tokens(answer: Answer, tolerance: float) -> int:
    """Leading tokens that nothing within the tolerance would have chosen otherwise."""
    sure = 0
    while sure < len(answer.gaps) and answer.gaps[sure] > 2 * tolerance:
        sure += 1
    return sure


def distance(one: Answer, other: Answer, count: int | None = None) -> float:
    """Greatest difference of log-probabilities over the first ``count`` tokens, as far as the two
    are the same."""
    greatest = 0.0
    for at in range(len(one.tokens) if count is None else count):
        if one.tokens[at] != other.tokens[at]:
            break
        greatest = max(greatest, abs(one.scores[at] - other.scores[at]))
    return greatest


@dataclass(slots=True)
class Verdict:
    """What a pair has shown.

    ``wrong``: replies that differ from the engine's own without a pool, and recalls of KV that it
    would not have computed. ``unfair``: the pair does not show what it says. ``shared``: prompt
    tokens recalled by the second engine of the first one's, and the other way round. ``silent``:
    prompts of which an engine never recalled anything, not even what it had saved itself, so that
    its pool may not have worked at all; not for blind pairs. ``audits``, ``caught``: of all lives,
    and ``logged`` whether a log speaks of it. ``noise``: as of ``Reference``. ``contrast``: least
    distance between replies of the two engines, each without a pool. ``failed``: why there is no
    verdict.
    """

    pair: Pair
    wrong: list[str] = field(default_factory=list)
    unfair: str = ""
    shared: tuple[int, int] = (0, 0)
    silent: list[str] = field(default_factory=list)
    audits: int = 0
    caught: int = 0
    logged: bool = False
    replies: int = 0
    noise: float = 0.0
    contrast: float = 0.0
    failed: str = ""
    seconds: float = 0.0

    @property
    def has_shared(self) -> bool:
        """Both engines recalled what the other had saved, and every prompt in the end."""
        return min(self.shared) > 0 and not self.silent

    @property
    def is_caught(self) -> bool:
        """The audit spoke, in the counters and the log, and every reply was right."""
        return self.caught > 0 and self.logged and not self.wrong

    @property
    def faults(self) -> list[str]:
        """What keeps the pair from passing; empty if it passes."""
        if self.failed:
            return [f"failed: {self.failed}"]
        found = [f"unfair: {self.unfair}"] if self.unfair else []
        found += [f"wrong: {one}" for one in self.wrong]
        if self.silent:
            found.append(f"never recalled: {', '.join(self.silent)}")
        if self.pair.kv is Kv.EQUAL and not self.has_shared:
            found.append(f"not shared: {self.shared[0]} and {self.shared[1]} tokens")
        if self.pair.blind and not self.is_caught:
            found.append("not caught by the audit")
        if not self.pair.blind and self.caught:
            found.append("an audit failed although the KV is right")
        return found


class Laboratory:
    """Tries pairs, in any thread. Keeps what several of them need: models, replies of engines
    without a pool, and pools that a first engine has filled."""

    def __init__(self, folder: Path, keep: bool = False) -> None:
        self._folder = folder
        self._keep = keep
        self._shelf = Shelf(folder / "models")
        self._engines = Engines(folder)
        self._lock = threading.Lock()
        self._made: dict[str, Future[Any]] = {}

    def stop(self) -> None:
        """Ends all engines; pairs under way fail."""
        self._engines.stop()

    def trial(self, pair: Pair) -> Verdict:
        """Tries one pair. An engine that fails is part of the verdict."""
        verdict = Verdict(pair)
        began = time.monotonic()
        pool = self._folder / "pools" / pair.name
        try:
            self._try(pair, pool, verdict)
        except EngineError as error:
            verdict.failed = str(error).splitlines()[0]  # its log tells the rest
        finally:
            if not self._keep:
                shutil.rmtree(pool, ignore_errors=True)
        verdict.seconds = time.monotonic() - began
        return verdict

    def _try(self, pair: Pair, pool: Path, verdict: Verdict) -> None:
        prompts = Prompts.of(pair.blocks)
        a, b = pair.make(self._shelf)
        alone_a, alone_b = (self._alone(one, prompts, pair.blocks) for one in (a, b))
        contrast = alone_b.contrast(alone_a)
        verdict.noise = max(alone_a.noise, alone_b.noise)
        verdict.contrast = min(contrast.values())
        verdict.unfair = _unfairness(pair, contrast, alone_b.tolerance)
        first, saved = self._first_life(a, prompts, pair)
        shutil.copytree(saved, pool)
        theirs, own = (*KNOWN, *BRANCHES) * 3, FRESH * 2
        plan: tuple[str, ...] = own + theirs if pair.saves_first else theirs + own
        second = self._engines.live(f"{pair.name}-b", b, prompts, plan, pool, pair.blind)
        theirs = (*FRESH, *TWIGS)
        plan = (*KNOWN, *theirs, *KNOWN, *theirs * 2)
        third = self._engines.live(
            f"{pair.name}-a", a, prompts, plan, pool, pair.blind, before=first.prompts
        )
        _judge("A", first, alone_a, verdict)
        _judge("B", second, alone_b, verdict)
        _judge("A again", third, alone_a, verdict)
        verdict.shared = second.foreign, third.foreign
        if not pair.blind:
            verdict.silent = [
                f"{name} by {who}"
                for who, life in (("B", second), ("A", third))
                for name in _never_recalled(life)
            ]

    def _alone(self, setup: Setup, prompts: Prompts, blocks: int) -> Reference:
        def make() -> Reference:
            return Reference.of(*self._engines.alone("alone", setup, prompts))

        alone: Reference = self._once(f"alone {setup.key} {blocks}", make)
        return alone

    def _first_life(self, setup: Setup, prompts: Prompts, pair: Pair) -> tuple[Life, Path]:
        """Fills a fresh pool with the known prompts. Each is asked for twice: an engine need not
        save before it knows its own identity."""

        def make() -> tuple[Life, Path]:
            pool = self._folder / "pools" / f"first-of-{pair.name}"
            name = f"{pair.name}-first"
            return self._engines.live(name, setup, prompts, KNOWN * 2, pool, pair.blind), pool

        first: tuple[Life, Path] = self._once(f"first {setup.key} {pair.blocks} {pair.blind}", make)
        return first

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        """The result by this key, made by the first thread that asks for it; others wait. An error
        is a result too."""
        with self._lock:
            is_first = key not in self._made
            made = self._made.setdefault(key, Future())
        if is_first:
            try:
                made.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised in every thread that asks
                made.set_exception(error)
        return made.result()


def _unfairness(pair: Pair, contrast: Mapping[str, float], tolerance: float) -> str:
    """Why the engines' own replies contradict what the pair says of their KV."""
    telling = [name for name, off in contrast.items() if off > tolerance]
    if pair.kv is Kv.EQUAL and telling:
        return f"KV should be equal, but replies to {', '.join(telling)} are not"
    if pair.kv is Kv.OTHER and pair.tells and len(telling) < len(contrast):
        silent = [name for name in contrast if name not in telling]
        return f"KV should be other, but replies to {', '.join(silent)} do not show it"
    return ""


def _judge(who: str, life: Life, alone: Reference, verdict: Verdict) -> None:
    for reply in life.replies:
        if fault := alone.fault(reply):
            verdict.wrong.append(f"{who}, {reply.name}: {fault} ({reply.recalled} tokens recalled)")
        elif verdict.pair.kv is Kv.OTHER and reply.foreign:
            verdict.wrong.append(f"{who}, {reply.name}: {reply.foreign} tokens of the other's KV")
    verdict.replies += len(life.replies)
    verdict.audits += life.audits
    verdict.caught += life.caught
    verdict.logged |= life.logged


def _never_recalled(life: Life) -> list[str]:
    recalled = {reply.name for reply in life.replies if reply.recalled}
    return sorted({reply.name for reply in life.replies} - recalled)
