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
from kvrecall_lab.engines.engine import Answer
from kvrecall_lab.identity.engines import Life, Lives, Reply
from kvrecall_lab.identity.pairs import Kv, Pair
from kvrecall_lab.identity.setups import BRANCHES, FRESH, KNOWN, PAST, TWIGS, Prompts, Setup, Shelf

LEAST_TOLERANCE = 1e-4
NOISE_MARGIN = 4.0
"""Allowed deviation of log-probabilities from those of the engine without a pool.

A recalled prefix splits the prefill differently from a prompt computed whole, which may change the
last bits of keys, values and sums. The deviation is measured per engine: without a pool it answers
every prompt twice, computed whole and continued from its own device cache, which splits the prompt
as a recall does. Four times the maximum is allowed, but at least 1e-4. On a CPU with one thread per
engine it is 0: sums are taken in one order, however a prompt is split.
"""


@dataclass(frozen=True, slots=True)
class Reference:
    """An engine's answers without a pool, by the prompt's name. ``noise``: maximum change of its
    log-probabilities when prompts are split differently."""

    answers: Mapping[str, Answer]
    noise: float

    @classmethod
    def of(cls, computed: Sequence[Reply], continued: Sequence[Reply]) -> Reference:
        answers = {reply.name: reply.answer for reply in computed}
        return cls(answers, max(distance(answers[one.name], one.answer) for one in continued))

    @property
    def tolerance(self) -> float:
        """Allowed deviation from these replies, in log-probability."""
        return max(LEAST_TOLERANCE, NOISE_MARGIN * self.noise)

    def fault(self, reply: Reply) -> str:
        """The fault of an answer; empty if it has none.

        Tokens are compared up to the first whose lead over the second choice is within the
        tolerance, because a different token there changes all later ones.
        """
        truth, answer = self.answers[reply.name], reply.answer
        off = self._off(truth, answer)
        if off == math.inf:
            return f"{list(answer.tokens)} instead of {list(truth.tokens)}"
        return f"log-probabilities off by {off:.2g}" if off > self.tolerance else ""

    def contrast(self, other: Reference) -> Mapping[str, float]:
        """The distance of another engine's replies from these, by the prompt's name."""
        return {name: self._off(truth, other.answers[name]) for name, truth in self.answers.items()}

    def _off(self, truth: Answer, answer: Answer) -> float:
        """Maximum difference of log-probabilities; infinite if a token differs."""
        sure = truth.sure(2 * self.tolerance)
        if answer.tokens[:sure] != truth.tokens[:sure]:
            return math.inf
        return distance(truth, answer, sure)


def distance(one: Answer, other: Answer, count: int | None = None) -> float:
    """Maximum difference of log-probabilities over the first ``count`` tokens, as far as they are
    equal."""
    greatest = 0.0
    for at in range(len(one.tokens) if count is None else count):
        if one.tokens[at] != other.tokens[at]:
            break
        greatest = max(greatest, abs(one.scores[at] - other.scores[at]))
    return greatest


@dataclass(slots=True)
class Verdict:
    """The result of a pair.

    ``wrong``: replies that differ from the engine's own without a pool, and recalls of KV that it
    would not have computed. ``unfair``: why the pair does not test what it claims. ``shared``:
    prompt tokens of the first engine recalled by the second, and vice versa. ``silent``: prompts of
    which an engine recalled nothing, not even its own blocks, so that its pool may not work at all;
    not for blind pairs. ``audits``, ``caught``: of all lives; ``logged``: whether a log reports a
    failed audit. ``noise``: as in ``Reference``. ``contrast``: minimum distance between replies of
    the two engines without a pool. ``failed``: why there is no verdict.
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
        """The audit failed, in the counters and the log, and every reply was right."""
        return self.caught > 0 and self.logged and not self.wrong

    @property
    def faults(self) -> list[str]:
        """Why the pair does not pass; empty if it does."""
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
    """Tries pairs, in any thread. Caches shared results: models, replies of engines without a pool,
    and pools filled by a first engine."""

    def __init__(self, folder: Path, keep: bool = False) -> None:
        self._folder = folder
        self._keep = keep
        self._shelf = Shelf(folder / "models")
        self.lives = Lives(folder)
        self._lock = threading.Lock()
        self._made: dict[str, Future[Any]] = {}

    def trial(self, pair: Pair) -> Verdict:
        """Tries one pair. An engine that fails is part of the verdict."""
        verdict = Verdict(pair)
        began = time.monotonic()
        pool = self._folder / "pools" / pair.name
        try:
            self._try(pair, pool, verdict)
        except EngineError as error:
            verdict.failed = str(error).splitlines()[0]  # its log has the details
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
        second = self.lives.live(f"{pair.name}-b", b, prompts, plan, pool, pair.blind)
        theirs = (*FRESH, *TWIGS)
        plan = (*KNOWN, *theirs, *KNOWN, *theirs * 2)
        before = [*first.prompts, *(PAST if b.changes else ())]
        third = self.lives.live(f"{pair.name}-a", a, prompts, plan, pool, pair.blind, before)
        _judge("A", first, alone_a, verdict)
        _judge("B", second, alone_b, verdict)
        _judge("A again", third, alone_a, verdict)
        verdict.shared = second.foreign, third.foreign
        if not pair.blind:
            verdict.silent = [
                f"{name} by {who}"
                for who, life in (("B", second), ("A", third))
                for name in _never_recalled(life)
                if pair.pools or who == "A"
            ]

    def _alone(self, setup: Setup, prompts: Prompts, blocks: int) -> Reference:
        def make() -> Reference:
            return Reference.of(*self.lives.alone("alone", setup, prompts))

        alone: Reference = self._once(f"alone {setup.key} {blocks}", make)
        return alone

    def _first_life(self, setup: Setup, prompts: Prompts, pair: Pair) -> tuple[Life, Path]:
        """Fills a fresh pool with the known prompts. Each is sent twice, because an engine need not
        save before its identity is known."""

        def make() -> tuple[Life, Path]:
            pool = self._folder / "pools" / f"first-of-{pair.name}"
            name = f"{pair.name}-first"
            return self.lives.live(name, setup, prompts, KNOWN * 2, pool, pair.blind), pool

        first: tuple[Life, Path] = self._once(f"first {setup.key} {pair.blocks} {pair.blind}", make)
        return first

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        """The result of this key, computed by the first thread that needs it while others wait. An
        error is a result, too."""
        with self._lock:
            is_first = key not in self._made
            made = self._made.setdefault(key, Future())
        if is_first:
            try:
                made.set_result(make())
            except BaseException as error:  # noqa: BLE001 - raised in every waiting thread
                made.set_exception(error)
        return made.result()


def _unfairness(pair: Pair, contrast: Mapping[str, float], tolerance: float) -> str:
    """Why the engines' own replies contradict the pair's claim about their KV."""
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
