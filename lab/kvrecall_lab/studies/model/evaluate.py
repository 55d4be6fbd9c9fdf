"""Accuracy by task, length and depth: `python -m ...model.evaluate FOLDER --lengths 1024 4096`.

Many questions are asked of each document, each as a continuation of its own, greedily, in
the dtype asked for. Prints a table and, last, one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvrecall_lab.bench.needle import tasks
from kvrecall_lab.bench.needle.tasks import Document, Plan, Question

from .decode import Reader, load
from .tokenizer import END, TURN_END, TURN_START

BINS = 10
SEED = 20_000_003  # no document of it is seen in training, which draws from another stream


def plan_for(length: int) -> Plan:
    """The same mixture at every length from 2K on, as much of it as fits below."""
    size = max(1, min(8, length // 256))
    return Plan(
        singles=2 * size,
        multikeys=2 * size,
        groups=max(1, size * 3 // 4),
        chains=size,
        several=size,
    )


def document_of(seed: int, length: int) -> Document:
    """The seed and the length decide all of it."""
    return tasks.make_document(random.Random(f"{seed}/{length}"), plan_for(length), length)


def raw(document: Document, question: Question) -> tuple[str, str]:
    """Prefix and the rest of the prompt, as plain completion."""
    prompt = tasks.raw_prompt(document.text, question.text)
    return document.text, prompt[len(document.text) :]


def chat(document: Document, question: Question) -> tuple[str, str]:
    """As second turn of a conversation whose first turn asked another question."""
    prefix = f"{TURN_START}user\n{document.text}"
    first = next(
        (q for q in document.questions if not set(q.expected) & set(question.expected)), None
    )
    turns = "\n\n"
    if first is not None:
        turns += f"{first.text}{TURN_END}\n{TURN_START}assistant\n{first.reply}{TURN_END}\n"
        turns += f"{TURN_START}user\n"
    return prefix, f"{turns}{question.text}{TURN_END}\n{TURN_START}assistant\n"


class Tally:
    """Right and asked, by task and by depth of the fact."""

    def __init__(self) -> None:
        self.tasks: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.depths: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        self.wrong: list[tuple[str, str, str]] = []

    def add(self, question: Question, reply: str) -> None:
        right = tasks.is_right(question, reply)
        entries = [self.tasks[question.task]]
        if question.task in ("single", "multikey"):
            entries.append(self.depths[min(BINS - 1, int(question.depth * BINS))])
        for entry in entries:
            entry[0] += right
            entry[1] += 1
        if not right:
            self.wrong.append((question.text, question.reply, reply))

    def summary(self) -> dict[str, object]:
        """Per cent right by task, the numbers asked, and per cent by tenth of depth."""
        percent = {t: round(100 * r / n, 1) for t, (r, n) in sorted(self.tasks.items())}
        asked = {t: n for t, (_, n) in sorted(self.tasks.items())}
        depth = {d: round(100 * r / n, 1) for d, (r, n) in sorted(self.depths.items())}
        return {"percent": percent, "asked": asked, "depth": depth}


def evaluate(
    reader: Reader, tokenizer: Tokenizer, length: int, count: int, form: str, limit: int
) -> Tally:
    """Ask up to `limit` questions of each of `count` documents of `length` tokens."""
    stops = {tokenizer.token_to_id(t) for t in (END, TURN_END, "Ċ")}
    tally = Tally()
    for n in range(count):
        document = document_of(SEED + n, length)
        asked = document.questions[:limit]
        parts = [(raw if form == "raw" else chat)(document, q) for q in asked]
        reader.read(tokenizer.encode(parts[0][0]).ids)
        step = max(1, min(16, 1_500_000 // length))
        for i in range(0, len(parts), step):
            prompts = [tokenizer.encode(rest).ids for _, rest in parts[i : i + step]]
            replies = reader.answer(prompts, stops)
            for question, reply in zip(asked[i : i + step], replies, strict=True):
                tally.add(question, tokenizer.decode(reply))
    return tally


def _counts(lengths: list[int], questions: int) -> dict[int, int]:
    return {n: max(1, round(questions / (9 * max(1, min(8, n // 256))))) for n in lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096, 8192])
    parser.add_argument("--questions", type=int, default=300, help="about so many per length")
    parser.add_argument("--limit", type=int, default=1000, help="questions per document at most")
    parser.add_argument("--form", choices=("raw", "chat"), default="raw")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    reader = Reader(load(args.folder, dtype), dtype)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    print(f"{'length':>8} {'s':>6} " + " ".join(f"{t:>9}" for t in tasks.TASKS) + "   by depth")
    result: dict[str, object] = {}
    for length, count in _counts(args.lengths, args.questions).items():
        start = time.monotonic()
        tally = evaluate(reader, tokenizer, length, count, args.form, args.limit)
        summary = tally.summary()
        result[str(length)] = summary
        cells = " ".join(f"{summary['percent'].get(t, float('nan')):9.1f}" for t in tasks.TASKS)
        depth = " ".join(f"{v:.0f}" for v in summary["depth"].values())
        print(f"{length:8} {time.monotonic() - start:6.0f} {cells}   {depth}", flush=True)
        for wrong in tally.wrong[: args.show_wrong]:
            print("   ", " | ".join(wrong))
    print(json.dumps({"model": str(args.folder), "dtype": args.dtype, "form": args.form, **result}))


if __name__ == "__main__":
    main()
