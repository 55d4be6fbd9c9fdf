"""Rows of tokens with the places where the loss is, drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer
from torch import Tensor

from kvrecall_lab.bench.needle import tasks, words
from kvrecall_lab.bench.needle.tasks import Document, Plan, Question
from kvrecall_lab.bench.needle.words import sentences, shuffled

from . import corpus
from .tokenizer import END, TURN_END, TURN_START


@dataclass(slots=True)
class Row:
    """`targets`: (place, tokens allowed next, task if the next token is a value, else "")."""

    tokens: list[int] = field(default_factory=list)
    targets: list[tuple[int, tuple[int, ...], str]] = field(default_factory=list)
    document: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens, positions [B, T]; places [N] into the flattened tokens; allowed [N, K], padded
    with -1; kinds: N task names; mask [B, 1, T, T] or None for plain causal attention."""

    tokens: Tensor
    positions: Tensor
    places: Tensor
    allowed: Tensor
    kinds: list[str]
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a stage of the curriculum feeds.

    length: tokens a row. rows: rows a batch. repeats, restated: shares of rows with
    passages that occur twice, and with facts stated twice; the rest are questions. span:
    positions are stretched over up to so many (0: contiguous), and filler weighs in the
    attention as if there were as much of it. kinds: tasks asked.
    """

    length: int
    rows: int
    repeats: float = 0.1
    restated: float = 0.1
    span: int = 0
    kinds: tuple[str, ...] = tasks.TASKS
    alphabet: words.Alphabet = words.ALL
    most_facts: int = 160
    repeat_vocabulary: int = 4096


class Batcher:
    """Makes batches for recipes. Not thread-safe."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._prose = corpus.prose()
        self._stop = tokenizer.token_to_id(".")
        self._nothing = tokenizer.encode(" nothing").ids[0]
        self._end = tokenizer.token_to_id(END)
        self._turn_end = tokenizer.token_to_id(TURN_END)
        self.values = {tokenizer.token_to_id(f"Ġ{v}") for v in words.VALUES}

    def draw(self, recipe: Recipe) -> Batch:
        """A batch with at least one target."""
        rows = [self._row(recipe) for _ in range(recipe.rows)]
        while not any(row.targets for row in rows):
            rows = [self._row(recipe) for _ in range(recipe.rows)]
        return self._collate(rows, recipe)

    def _row(self, recipe: Recipe) -> Row:
        kind = self._rng.random()
        if kind < recipe.repeats:
            return self._repeated(recipe)
        if kind < recipe.repeats + recipe.restated:
            return self._restated(recipe)
        return self._questions(recipe)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def _filler(self) -> Iterator[str]:
        if self._rng.random() < 0.5:
            return sentences(self._rng)
        return corpus.endless(self._rng, self._prose)

    def _repeated(self, recipe: Recipe) -> Row:
        """Passages of a few tokens, filler, the same passages in another order.

        The loss is on the repeats. The new order keeps the distance from giving the answer
        away; passages of few different tokens need longer matches to be told apart.
        """
        half = min(recipe.length // 2, 512)
        size = 6 + int(self._rng.random() * min(14, half // 4))
        most = math.log(recipe.repeat_vocabulary / 32)
        vocabulary = int(32 * math.exp(self._rng.random() * most))
        offset = 3 + int(self._rng.random() * (4093 - vocabulary))
        passages = [
            [offset + int(self._rng.random() * vocabulary) for _ in range(size)]
            for _ in range(half // size)
        ]
        row = Row([token for passage in passages for token in passage])
        row.tokens += self._filler_ids(recipe.length - 2 * len(row.tokens))
        for passage in shuffled(self._rng, passages):
            start = len(row.tokens)
            row.tokens += passage
            for i in range(2, size):
                row.targets.append((start + i - 1, (passage[i],), "repeat"))
        return row

    def _filler_ids(self, count: int) -> list[int]:
        filler, text = self._filler(), ""
        while len(text) < count * 6:
            text += " " + next(filler)
        return (self._ids(text) * 3)[:count]

    def _restated(self, recipe: Recipe) -> Row:
        """Facts among filler, then the facts again; the loss is on the second values."""
        size = min(recipe.most_facts, recipe.length // 20)
        plan = Plan(singles=0, multikeys=max(2, size), cluster=2, alphabet=recipe.alphabet)
        room = recipe.length - 8 * plan.multikeys - 4
        document = tasks.make_document(self._rng, plan, room, filler=self._filler())
        row = Row(self._ids(document.text)[:room])
        row.document = len(row.tokens)
        for question in document.questions:
            row.tokens += self._ids(" " + question.reply)
            value = row.tokens[-2]
            row.targets.append((len(row.tokens) - 3, (value,), "restated"))
        return row

    def _plan(self, recipe: Recipe) -> Plan:
        """Some facts of each kind asked; how many varies from few to crowded."""
        most = min(recipe.most_facts, max(2, recipe.length // 20))
        total = max(2, int(math.exp(self._rng.random() * math.log(most)) + 0.5))
        share = {kind: self._rng.random() for kind in recipe.kinds}
        share["single"] = share.get("single", 0) + share.pop("several", 0)
        share["values"] = share.get("values", 0) + share.pop("count", 0)
        weight = sum(share.values())
        facts = {kind: total * part / weight for kind, part in share.items()}
        return Plan(
            singles=round(facts.get("single", 0)) or 1,
            multikeys=round(facts.get("multikey", 0)),
            cluster=2 + int(self._rng.random() * 5),
            groups=round(facts.get("values", 0) / 3 + 0.3),
            chains=round(facts.get("chain", 0) / 2 + 0.3),
            several=2 if "several" in recipe.kinds else 0,
            alphabet=recipe.alphabet,
        )

    def _questions(self, recipe: Recipe) -> Row:
        """A document and as many questions as fit, in the raw form or as a conversation."""
        plan = self._plan(recipe)
        for_questions = min(max(60, recipe.length * 0.4), 60 + 1500 * self._rng.random() + 300)
        room = int(recipe.length - for_questions)
        document = tasks.make_document(self._rng, plan, room, filler=self._filler())
        ids = self._ids(document.text)
        while len(ids) > recipe.length - 45:
            document = tasks.make_document(self._rng, Plan(singles=2), room - 20)
            ids = self._ids(document.text)
        asked = [q for q in document.questions if q.task in recipe.kinds]
        if self._rng.random() < 0.5:
            return self._raw(ids, asked, recipe.length)
        return self._chat(document, asked, recipe.length)

    def _raw(self, document: list[int], asked: list[Question], length: int) -> Row:
        row = Row(list(document), document=len(document))
        for question in asked:
            prompt = self._ids(tasks.raw_prompt("", question.text))
            if not self._answer(row, prompt, " ", question, self._end, length):
                break
        return row

    def _chat(self, document: Document, asked: list[Question], length: int) -> Row:
        row = Row(self._ids(f"{TURN_START}user\n{document.text}\n\n"))
        row.document = len(row.tokens)
        for n, question in enumerate(asked):
            opening = f"{TURN_END}\n{TURN_START}user\n" if n else ""
            text = f"{opening}{question.text}{TURN_END}\n{TURN_START}assistant\n"
            if not self._answer(row, self._ids(text), "", question, self._turn_end, length):
                break
        return row

    def _answer(
        self, row: Row, prompt: list[int], space: str, question: Question, end: int, length: int
    ) -> bool:
        """Add a question and its reply if there is room; after the reply `end` is expected."""
        reply = self._ids(space + question.reply)
        if len(row.tokens) + len(prompt) + len(reply) > length:
            return False
        row.tokens += prompt
        left = [token for token in reply if token in self.values]
        for token in [*reply, end]:
            allowed: tuple[int, ...] = (token,)
            is_value = token in self.values
            if is_value and question.unordered:
                allowed = tuple(left)
            if is_value:
                left.remove(token)
            complete = question.unordered and token == self._nothing
            kind = question.task if is_value else f"{question.task}/end" if complete else ""
            row.targets.append((len(row.tokens) - 1, allowed, kind))
            row.tokens.append(token)
        row.tokens.pop()
        return True

    def _collate(self, rows: list[Row], recipe: Recipe) -> Batch:
        tokens = torch.zeros(len(rows), recipe.length, dtype=torch.long)
        places, allowed, kinds = [], [], []
        for r, row in enumerate(rows):
            tokens[r, : len(row.tokens)] = torch.tensor(row.tokens)
            for place, tokens_allowed, kind in row.targets:
                places.append(r * recipe.length + place)
                allowed.append(tokens_allowed)
                kinds.append(kind)
        width = max(map(len, allowed))
        padded = torch.tensor([a + (-1,) * (width - len(a)) for a in allowed])
        positions = torch.arange(recipe.length).repeat(len(rows), 1)
        mask = None
        if recipe.span and any(row.document for row in rows):
            mask = self._stretch(rows, positions, recipe)
        return Batch(tokens, positions, torch.tensor(places), padded, kinds, mask)

    def _stretch(self, rows: list[Row], positions: Tensor, recipe: Recipe) -> Tensor:
        """Spread `positions` in place; return a mask by which filler weighs accordingly.

        Gaps are opened after full stops of the document. A key further back than 64 tokens
        that is not part of a sentence with a value counts as `span / length` keys.
        """
        length = recipe.length
        mask = torch.zeros(len(rows), 1, length, length)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        far = torch.ones(length, length, dtype=torch.bool).tril(-64)
        for r, row in enumerate(rows):
            low, high = math.log(length), math.log(recipe.span)
            span = int(math.exp(low + (high - low) * self._rng.random()))
            stops = [i for i in range(row.document) if row.tokens[i] == self._stop]
            chosen = shuffled(self._rng, stops)[: 1 + int(self._rng.random() * 16)]
            cuts = sorted(self._rng.random() for _ in chosen)
            gaps = [b - a for a, b in zip([0.0, *cuts], cuts, strict=False)]
            for stop, gap in zip(chosen, gaps, strict=True):
                positions[r, stop + 1 :] += int(gap * (span - length))
            plain = torch.tensor(self._plain(row), dtype=torch.float)
            bias = torch.zeros(length)
            bias[: row.document] = plain * math.log(span / length)
            mask[r, 0] = torch.where(far, bias[None, :], 0.0)
        return mask.masked_fill_(future, -math.inf).to(torch.bfloat16)

    def _plain(self, row: Row) -> list[bool]:
        """For each token of the document whether it is filler (not within 8 of a value)."""
        plain = [True] * row.document
        for i in range(row.document):
            if row.tokens[i] in self.values:
                for j in range(max(0, i - 8), min(row.document, i + 2)):
                    plain[j] = False
        return plain
