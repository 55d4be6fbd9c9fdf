"""What is asked, and what must be answered: conversations, played once to an engine without a pool.

A conversation goes on with the engine's own answers, so the whole of it is known before the run.
An answer is used up to its first ambiguous token (two tokens all but equally likely), because
there another cut of the prefill or another batch may rightly choose otherwise; every token that is
asked for later is compared exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrecall.errors import EngineError
from kvrecall.lab.engines.engine import Answer, Question

ANSWER_TOKENS = 20
AMBIGUOUS = 0.01
"""Difference of log-probabilities below which two tokens count as equally likely. Float32 moves
them by 1e-4 at most."""

_ALPHABET = range(1, 250)
_PREFIXES = (128, 300, 640)  # tokens of the system prompts that conversations share
_QUESTION = (30, 260)  # tokens a turn adds


@dataclass(frozen=True, slots=True)
class Turn:
    """A prompt and the tokens that must follow it."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class _Conversation:
    tokens: list[int]
    turns: list[Turn] = field(default_factory=list)


Reference = Callable[[Sequence[Question]], Sequence[Answer]]
"""Answers questions in their order, with gaps."""


class Library:
    """All conversations. ``turns[c]`` are those of conversation c, each with at least one token to
    answer."""

    def __init__(self, turns: Sequence[Sequence[Turn]]) -> None:
        self.turns = [tuple(some) for some in turns if some]
        if not self.turns:
            raise EngineError("the reference engine gave no unambiguous answer")

    @classmethod
    def written(
        cls,
        dice: random.Random,
        conversations: int,
        turns: int,
        ask: Reference,
        progress: Callable[[str], None] = lambda line: None,
    ) -> Library:
        """Plays the conversations to the engine behind ``ask``, a turn of all of them at once."""
        prefixes = [dice.choices(_ALPHABET, k=length) for length in _PREFIXES]
        plays = [_Conversation(list(dice.choice(prefixes))) for _ in range(conversations)]
        for number in range(turns):
            for play in plays:
                play.tokens += dice.choices(_ALPHABET, k=dice.randint(*_QUESTION))
            questions = [
                Question(f"{number}-{place}", tuple(play.tokens), ANSWER_TOKENS)
                for place, play in enumerate(plays)
            ]
            for play, answer in zip(plays, ask(questions), strict=True):
                known = sure_part(answer)
                if known:
                    play.turns.append(Turn(tuple(play.tokens), known))
                play.tokens += known
            progress(f"reference answers: turn {number + 1} of {turns}")
        return cls([play.turns for play in plays])

    def draw(self, dice: random.Random) -> Turn:
        """Some turn; of the first conversations more often, so that hits and misses are mixed."""
        place = int(len(self.turns) * dice.random() ** 2)
        return dice.choice(self.turns[place])


def sure_part(answer: Answer) -> tuple[int, ...]:
    """The answer up to its first ambiguous token."""
    for place, gap in enumerate(answer.gaps):
        if gap < AMBIGUOUS:
            return answer.tokens[:place]
    return answer.tokens
