"""What the engines' last steps gave: how many sequences got a token, and how many tokens a second.

Everything is read off the outputs that vLLM's engine processes send after each step, by the clock
of these processes, which is the clock of the requests' own statistics too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import Any

WINDOW_S = 10.0
"""Time over which throughputs are averaged; vLLM's own log takes the same."""

_KEPT = 8192  # steps of an engine


class Steps:
    """Notes steps and tells of them. Used by the API process's loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sizes: dict[int, deque[tuple[float, int]]] = {}  # by engine; time and sequences
        self._tokens: deque[tuple[float, int, int]] = deque()  # time, of prompts, of answers

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
