"""A byte-level BPE tokenizer in which every word of the tasks is one token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvrecall_lab.bench.needle import words

from . import corpus

END, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = [END, TURN_START, TURN_END]
VOCABULARY = 4096

# GPT-2's pattern with numbers cut after three digits.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_FIXED = """ The code of is owner What are the codes of all How many has That makes and
Question Answer Question: Answer: user assistant system"""


def _training_text() -> Iterator[str]:
    rng = random.Random(1)
    grammar = words.sentences(rng)
    for _ in range(20_000):
        yield " " + next(grammar)
    yield from (" " + line for line in corpus.prose())
    for word in (*words.ADJECTIVES, *words.NOUNS):
        yield f" {word}" * 2000
    for value in range(1000):
        yield f" {value}" * 2000
    for word in _FIXED.split():
        yield f" {word}\n{word}" * 2000


def train(path: Path) -> Tokenizer:
    """Train and save to `path` (tokenizer.json); the same result for the same Python."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    check(tokenizer)
    tokenizer.save(str(path))
    return tokenizer


def check(tokenizer: Tokenizer) -> None:
    """Raise unless every word of the tasks is one token and any text comes back whole."""
    for word in (*words.ADJECTIVES, *words.NOUNS, *words.VALUES):
        if len(tokenizer.encode(f" {word}").ids) != 1:
            raise ValueError(f"{word!r} is not one token")
    for text in ("以查代算 KV 缓存 🙂\n\n\tx  y 4817", "The code of amber falcon is 482."):
        if tokenizer.decode(tokenizer.encode(text).ids) != text:
            raise ValueError(f"{text!r} does not round-trip")


if __name__ == "__main__":
    import sys

    trained = train(Path(sys.argv[1]))
    print(trained.get_vocab_size(), trained.encode(" The code of amber falcon is 482.").tokens)
