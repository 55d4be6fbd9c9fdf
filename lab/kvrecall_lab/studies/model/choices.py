"""Lists and counts by retrieval: which choice of blocks loses answers, by a decoder in plain torch.

Asks recall-tiny the needle benchmark's questions, every layer by retrieval, with several ways to
choose blocks, and beside them the model's own uncertainty: dense attention in single precision
instead of bfloat16, and how near the second token was.

    python -m ...model.choices models/recall-tiny --lengths 16384 --samples 24
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from kvrecall.attention.digest import decode, encode
from kvrecall.attention.selection import CodedQuery, best_products, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall_lab.bench.needle.dataset import SEED, Dataset, PromptStyle, is_answered
from kvrecall_lab.bench.needle.tasks import approximate_tokens, raw_prompt
from kvrecall_lab.bench.needle.words import sentences

from .decode import Reader, load
from .tokenizer import END, TURN_END

BLOCK = 128
SETTINGS = RetrievalSettings(
    init_tokens=128, local_tokens=256, dense_boundary=512, dense_layers=0, gate=False
)
STYLE = PromptStyle.RECALL

Weights = Tensor
"""Of blocks, of which the largest are chosen: float32 ``[questions, kv_heads, group, blocks]``,
each a distribution."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How blocks are chosen. ``score``: ``digests``, by the best of a block's; ``sum``, by all of
    them, as if they were keys; ``halfway``, the same halfway between the bounds of a digest's keys
    and their middle; ``middle``, by the middle; or ``mass``, the attention that a block truly gets.
    ``heads``: a KV head's query heads choose together, by the ``mean`` of their distributions or
    the ``max``, or by ``turns``, each its best block that is not chosen yet; or ``each`` for
    itself, a share of the blocks each, or ``own``, as many blocks each. ``across``: the KV heads
    share one number of blocks. ``kept``: a block weighs what it weighed most in so many steps;
    ``fresh``: the share that is chosen by this step's weights alone. ``union``: and all that were
    chosen in so many steps. ``layers``: these by retrieval, the others densely. ``dense``: all."""

    settings: RetrievalSettings = SETTINGS
    score: str = "digests"
    heads: str = "mean"
    across: bool = False
    kept: int = 1
    fresh: float = 0.0
    union: int = 1
    layers: tuple[int, ...] = (0, 1, 2, 3)
    dense: bool = False


def choices(share: float) -> Mapping[str, Choice]:
    """By name."""
    plain = replace(SETTINGS, topk_share=share)
    base = Choice(plain)
    half = replace(plain, topk_share=0.5)
    return {
        "dense": replace(base, dense=True),
        "as served": base,
        "true attention": replace(base, score="mass"),
        "max of heads": replace(base, heads="max"),
        "each head, half": replace(base, heads="each"),
        "true, each head, half": replace(base, score="mass", heads="each"),
        "budgets by KV head": replace(base, across=True),
        "4 steps": replace(base, kept=4),
        "16 steps": replace(base, kept=16),
        "16 steps, half": replace(base, kept=16, fresh=0.5),
        "union of 4 steps": replace(base, union=4),
        "union of 16 steps": replace(base, union=16),
        "heads by turns": replace(base, heads="turns"),
        "each head, as many": replace(base, heads="own"),
        "sum of digests": replace(base, score="sum"),
        "halfway": replace(base, score="halfway"),
        "middle": replace(base, score="middle"),
        "last 1,024 tokens": replace(base, settings=replace(plain, local_tokens=1024)),
        "half of the blocks": replace(base, settings=half),
        "digests of 8": replace(base, settings=replace(plain, digest_tokens=8)),
        **{f"layer {n} only": replace(base, layers=(n,)) for n in range(4)},
    }


class Chooser(Reader):
    """Decodes by retrieval; prompts are computed densely, as an engine does."""

    choice = Choice(dense=True)
    chosen = offered = 0

    def read(self, document: list[int]) -> None:
        super().read(document)
        self._digests: dict[tuple[int, int], Tensor] = {}
        self._past: dict[int, list[Tensor]] = {}
        self._taken: dict[int, list[Tensor]] = {}

    def answer(self, prompts: list[list[int]], stops: set[int], most: int = 72) -> list[list[int]]:
        self._past, self._taken = {}, {}
        return super().answer(prompts, stops, most)

    def _attend(self, n: int, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        if q.shape[2] > 1 or self.choice.dense or n not in self.choice.layers:
            return super()._attend(n, q, keys, values, seen)
        count, heads, _, d = q.shape
        kv = keys.shape[1]
        grouped = q.view(count, kv, heads // kv, d)
        shared = torch.einsum("ckgd,knd->ckgn", grouped, self._keys[n]).float() * d**-0.5
        own = torch.einsum("ckgd,cksd->ckgs", grouped, keys).float() * d**-0.5
        own = own.masked_fill(~seen[:, None, None, 0], -torch.inf)
        shared = shared.masked_fill(~self._allowed(n, grouped, shared, own, seen), -torch.inf)
        weights = torch.cat([shared, own], -1).softmax(-1).to(q.dtype)
        out = torch.einsum("ckgn,knd->ckgd", weights[..., : self.length], self._values[n])
        out = out + torch.einsum("ckgs,cksd->ckgd", weights[..., self.length :], values)
        return out.reshape(count, heads, 1, d).transpose(1, 2).flatten(2)

    def _allowed(self, n: int, q: Tensor, shared: Tensor, own: Tensor, seen: Tensor) -> Tensor:
        """The document's tokens attended to: bool ``[questions, kv_heads, group, tokens]``."""
        choice, (count, kv, group, _) = self.choice, q.shape
        lengths = self.length + seen[:, 0].sum(-1)
        # Questions differ by some tokens: the same middle blocks for all, of the shortest.
        split = split_of(int(lengths.min()), BLOCK, choice.settings)
        middle = slice(split.init * BLOCK, split.local * BLOCK)
        if choice.score == "mass":
            truth = torch.cat([shared, own], -1).softmax(-1)[..., middle]
            found = truth.unflatten(-1, (split.middle, BLOCK)).sum(-1)
        else:
            rows = self._rows(n, choice.settings)[:, split.init : split.local]
            found = _scores(choice, q, rows).softmax(-1)
        if choice.heads == "mean":
            found = found.mean(2, keepdim=True)
        elif choice.heads == "max":
            found = found.amax(2, keepdim=True)
        elif choice.heads == "turns":
            ranks = found.argsort(-1, descending=True).argsort(-1)
            found = found.mean(2, keepdim=True) - ranks.amin(2, keepdim=True)
        now = found
        if choice.kept > 1:
            past = self._past.setdefault(n, [])
            past.append(found)
            found = _side_by_side(past[-choice.kept :]).amax(0)
        chosen = split.chosen // (group if choice.heads == "each" else 1)
        taken = torch.zeros_like(found, dtype=torch.bool)
        if choice.across:
            flat = found.flatten(1)
            taken = taken.flatten(1).scatter(1, flat.topk(chosen * kv, -1).indices, True)
            taken = taken.view_as(found)
        else:
            if choice.fresh:
                best = now.topk(int(chosen * choice.fresh), -1).indices
                found = found.scatter(-1, best, torch.inf)
            taken.scatter_(-1, found.topk(chosen, -1).indices, True)
        if choice.union > 1:
            before = self._taken.setdefault(n, [])
            before.append(taken)
            taken = _side_by_side(before[-choice.union :]).any(0)
        self.chosen += int(taken.any(2).sum())
        self.offered += count * kv * split.middle
        allowed = torch.ones(count, kv, group, self.length, dtype=torch.bool)
        allowed[..., middle] = taken.expand(count, kv, group, -1).repeat_interleave(BLOCK, -1)
        return allowed

    def _rows(self, n: int, settings: RetrievalSettings) -> Tensor:
        """The coded digests of a layer's whole blocks."""
        key = n, settings.tokens_a_digest
        if key not in self._digests:
            keys, layout = self._keys[n], settings.layout(BLOCK, narrows=False)
            whole = keys[:, : keys.shape[1] // BLOCK * BLOCK].unflatten(1, (-1, BLOCK))
            self._digests[key] = encode(layout.rows_of(whole))
        return self._digests[key]


def _side_by_side(steps: list[Tensor]) -> Tensor:
    """Of blocks in steps, the last of which has the most: ``[steps, ...]``."""
    most = steps[-1].shape[-1]
    return torch.stack([F.pad(one, (0, most - one.shape[-1])) for one in steps])


def _scores(choice: Choice, q: Tensor, rows: Tensor) -> Tensor:
    """Of blocks by their coded digests: ``[questions, kv_heads, group, blocks]``."""
    scale = q.shape[-1] ** -0.5
    if choice.score == "digests":
        kind = choice.settings.layout(BLOCK).kind
        points = [CodedQuery(kind.of_query(one)) for one in q]
        return torch.stack([best_products(one, rows, scale) for one in points])
    high, low = decode(rows).chunk(2, -1)
    q = q.float() * scale

    def products(point: Tensor, of: Tensor) -> Tensor:
        return torch.einsum("ckgd,kbrd->ckgbr", point, of)

    middle = products(q, (high + low) / 2)
    if choice.score == "middle":
        return middle.logsumexp(-1)
    upper = products(q.clamp(min=0), high) + products(q.clamp(max=0), low)
    return (upper if choice.score == "sum" else (upper + middle) / 2).logsumexp(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384])
    parser.add_argument("--samples", type=int, default=24, help="of each task")
    parser.add_argument("--seed", type=int, default=SEED, help="of the texts")
    parser.add_argument("--tasks", nargs="+", default=["values", "count"])
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--only", nargs="+", help="these only, beside dense in bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    stops = {tokenizer.token_to_id(name) for name in (END, TURN_END, "Ċ")}
    ways = dict(choices(args.share))
    if args.only:
        ways = {name: ways[name] for name in ("dense", *args.only)}
    readers = {"bfloat16": Chooser(load(args.folder, torch.bfloat16), torch.bfloat16)}
    if not args.only:
        readers["float32"] = Chooser(load(args.folder, torch.float32), torch.float32)
    # As `kvrecall bench needle` measures documents, so that they are the same.
    text = " ".join(islice(sentences(random.Random(1)), min(120, min(args.lengths) // 24)))
    ratio = 1.005 * len(tokenizer.encode(text).ids) / approximate_tokens(text)
    told = tuple(args.lengths), tuple(args.tasks), args.samples
    dataset = Dataset(*told, seed=args.seed)

    def measure(line: str) -> int:
        return round(approximate_tokens(line) * ratio)

    right: dict[str, list[bool]] = {}
    read: dict[str, list[int]] = {}
    for length in args.lengths:
        for sample in dataset.at(length, STYLE.reserve, measure):
            prompts = [raw_prompt(sample.document.text, one.text) for one in sample.questions]
            ids = [tokenizer.encode(prompt).ids for prompt in prompts]
            same = min(len(one) for one in ids) - 1
            while any(one[:same] != ids[0][:same] for one in ids):
                same -= 1
            for dtype, reader in readers.items():
                reader.read(ids[0][:same])
                for name, choice in ways.items():
                    if dtype == "float32" and not choice.dense:
                        continue
                    began = time.perf_counter()
                    reader.choice, reader.chosen, reader.offered = choice, 0, 0
                    told = [one[same:] for one in ids]
                    replies = [tokenizer.decode(one) for one in reader.answer(told, stops, 72)]
                    label = name if dtype == "bfloat16" else f"{name}, {dtype}"
                    for at, many in enumerate((reader.chosen, reader.offered)):
                        read.setdefault(label, [0, 0])[at] += many
                    asked = zip(sample.questions, replies, strict=True)
                    right.setdefault(label, []).extend(
                        is_answered(STYLE, question, reply) for question, reply in asked
                    )
                    print(f"{label}: {time.perf_counter() - began:.0f} s", flush=True)
    dense = right["dense"]
    for name, got in right.items():
        lost = sum(a and not b for a, b in zip(dense, got, strict=True))
        gained = sum(b and not a for a, b in zip(dense, got, strict=True))
        share = round(read[name][0] / read[name][1], 3) if read[name][1] else 1.0
        figures = {"choice": name, "right": sum(got), "of": len(got), "blocks": share}
        print(json.dumps({**figures, "lost": lost, "gained": gained}), flush=True)


if __name__ == "__main__":
    main()
