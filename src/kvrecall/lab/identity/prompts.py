"""What the engines of a pair are asked."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BLOCK = 128
"""Tokens per device block, where a setup says nothing else."""

ANSWER_TOKENS = 8

_SEED = 20
_BYTES = 250  # tokens that the models have one letter each for
_TAIL = 40
_BRANCH_TAIL = 70


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts by name. ``known``: the first engine of a pair saves them. ``branches``: whole blocks
    of known ones, then other tokens. ``fresh``: the second engine saves them, and ``twigs`` branch
    off from those."""

    texts: Mapping[str, tuple[int, ...]]
    known: tuple[str, ...]
    branches: tuple[str, ...]
    fresh: tuple[str, ...]
    twigs: tuple[str, ...]

    @classmethod
    def of(cls, blocks: int) -> Prompts:
        """Prompts of so many whole blocks of 128 tokens and a rest. The longest, with its answer,
        takes less than one block more."""
        dice = random.Random(_SEED)

        def drawn(count: int) -> tuple[int, ...]:
            return tuple(dice.randrange(1, _BYTES) for _ in range(count))

        texts = {}
        for place, name in enumerate(("known-1", "known-2", "known-3", "known-4")):
            texts[name] = drawn(blocks * BLOCK + _TAIL - 9 * place)
        for place, name in enumerate(("fresh-1", "fresh-2")):
            texts[name] = drawn(blocks * BLOCK + _TAIL - 9 * place)
        for name, root, kept in (
            ("branch-1", "known-1", blocks),
            ("branch-2", "known-2", blocks - 1),
            ("twig-1", "fresh-1", blocks),
        ):
            texts[name] = texts[root][: kept * BLOCK] + drawn(_BRANCH_TAIL)
        return cls(
            texts,
            ("known-1", "known-2", "known-3", "known-4"),
            ("branch-1", "branch-2"),
            ("fresh-1", "fresh-2"),
            ("twig-1",),
        )

    def shared_tokens(self, name: str, others: Iterable[str], block_size: int) -> int:
        """Tokens in the longest run of whole blocks that a prompt begins with like one of
        ``others``."""
        prompt = self.texts[name]
        longest = 0
        for other in others:
            pairs = zip(prompt, self.texts[other], strict=False)
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(prompt))
            longest = max(longest, same)
        return longest // block_size * block_size
