"""Prompts for measuring: byte-level text of an exact length that shares no prefix with another."""

from __future__ import annotations

import random


class Texts:
    """Hands out documents of printable bytes, one token each for a byte-level tokenizer."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def document(self, tokens: int) -> str:
        """A new document; its first token block differs from every other document's."""
        return "".join(self._random.choices("abcdefghijklmnopqrstuvwxyz      \n", k=tokens))
