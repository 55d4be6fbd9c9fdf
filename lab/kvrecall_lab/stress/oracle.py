"""What is wrong with an answer, compared with that of the engine without a pool.

Both compute in float32 with one thread. Which requests a step computes together, and how a hit or a
preemption splits a prompt, changes log-probabilities by 1e-4 at most, on the device's own hits as
on recalled ones. So they are compared with ``_TOLERANCE``, and tokens up to the first that is as
likely as another one, where answers may part, as drawn ones may at equal log-probabilities.
"""

from __future__ import annotations

from kvrecall_lab.chaos.oracle import AMBIGUOUS
from kvrecall_lab.engines.engine import Answer
from kvrecall_lab.stress.mix import Order

_TOLERANCE = 1e-3
PARTED = "parted"
"""Drawn tokens are others, and log-probabilities equal."""


def fault(order: Order, truth: Answer, answer: Answer) -> str:
    """The fault of an answer, ``PARTED``, or nothing."""
    if answer.finish not in ("length", "stop"):
        return f"ended with {answer.finish!r}"
    if sum(answer.sources.values()) != len(order.question.prompt):
        return "the sources of its prompt are other than its tokens"
    prompts = truth.prompt_scores, answer.prompt_scores
    pairs = zip(*prompts, strict=False)
    if len({*map(len, prompts)}) > 1 or any(abs(a - b) > _TOLERANCE for a, b in pairs):
        return "other log-probabilities of the prompt"
    samples = order.question.samples  # of many, each has all its tokens
    size = order.question.max_tokens if samples > 1 else max(len(truth.tokens), len(answer.tokens))
    places = [range(at, at + size) for at in range(0, size * samples, size)]
    found = [_fault(order, truth, answer, one) for one in places]
    return next((one for one in found if one not in ("", PARTED)), max(found))


def _fault(order: Order, truth: Answer, answer: Answer, places: range) -> str:
    """Of one sample."""
    for at in places:
        ours, theirs = answer.tokens[at : at + 1], truth.tokens[at : at + 1]
        if ours and theirs and answer.gaps:
            off = abs(answer.gaps[at] - truth.gaps[at])  # nan where one token alone is possible
            if ours == theirs:
                off = max(abs(answer.scores[at] - truth.scores[at]), off)
            if off > _TOLERANCE:
                return f"log-probabilities of token {at} are off by {off:.2g}"
        if ours != theirs and order.question.samples > 1 and ours and theirs:
            return PARTED
        if ours != theirs:
            close = theirs and truth.gaps[at] <= AMBIGUOUS["float32"]
            return "" if close else f"{list(answer.tokens)} instead of {list(truth.tokens)}"
    return ""
