"""How well digests find the blocks that attention looks at.

`python -m ...digests.study FILE ... [--random] --out study.json`; the files are those of
`capture`. Counted is every step, layer and KV head that looks something up, which is taken to be
where one block of the middle holds at least `--mass` of all attention: where attention is spread
over the text no choice of few blocks can hold it, and where it lies outside none matters.

- `top`: share of the blocks exact attention would choose that the digest chooses too;
- `mass`: attention mass of the chosen blocks, of all the middle's;
- `ideal`: the same for the exact choice, which no digest can beat;
- `first`: how often the block attended to most is among the chosen.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvrecall.attention.digest import Digest, digests_of
from kvrecall.attention.selection import ExactSelector
from kvrecall_lab.studies.digests.geometry import GEOMETRIES, geometry
from kvrecall_lab.studies.digests.kinds import KINDS, SHARES, SIZES

BLOCK, INIT, LOCAL = 128, 128, 256
FEW = 20
"""A layer that looks things up less often than this in a document is left out."""


@dataclass(frozen=True, slots=True)
class Case:
    """Keys `[kv_heads, tokens, dim]` of one layer, queries `[steps, kv_heads, group, dim]`, and the
    log weight of what comes after these keys `[steps, kv_heads, group]`."""

    name: str
    keys: Tensor
    queries: Tensor
    after: Tensor


@dataclass(frozen=True, slots=True)
class Truth:
    """Attention mass of each middle block, `[steps, kv_heads, blocks]`, averaged over the group;
    `looks` `[steps, kv_heads]`: whether one of them holds enough to be what is looked up."""

    mass: Tensor
    looks: Tensor


def middle_of(keys: Tensor) -> Tensor:
    """The middle blocks, `[kv_heads, blocks, BLOCK, dim]`."""
    tokens = keys.shape[1]
    end = (tokens - LOCAL) // BLOCK * BLOCK
    return keys[:, INIT:end].unflatten(1, (-1, BLOCK))


def truth_of(case: Case, least: float) -> Truth:
    """Exact attention to the document."""
    scale = case.keys.shape[-1] ** -0.5
    logits = torch.einsum("shgd,htd->shgt", case.queries.float(), case.keys.float()) * scale
    mass = torch.cat([logits, case.after[..., None]], -1).softmax(-1).mean(2)
    end = (case.keys.shape[1] - LOCAL) // BLOCK * BLOCK
    blocks = mass[..., INIT:end].unflatten(-1, (-1, BLOCK)).sum(-1)
    return Truth(blocks, blocks.amax(-1) >= least)


def chosen_by(kind: Digest, size: int, case: Case, count: int) -> Tensor:
    """int64 `[steps, kv_heads, count]`, by the package's own selection, digests in bf16."""
    digests = digests_of(kind, middle_of(case.keys), size).to(torch.bfloat16).float()
    selector = ExactSelector(kind)
    scale = case.keys.shape[-1] ** -0.5
    rows = [selector.choose(query, [digests], count, scale) for query in case.queries.float()]
    return torch.stack(rows)


def measures(truth: Truth, chosen: Tensor) -> dict[str, float]:
    """The four figures, over the steps and heads that look."""
    count = chosen.shape[-1]
    total = truth.mass.sum(-1)
    best = truth.mass.topk(count, -1)
    taken = torch.zeros_like(truth.mass, dtype=torch.bool).scatter_(-1, chosen, True)
    top = taken.gather(-1, best.indices).float().mean(-1)
    mass = (truth.mass * taken).sum(-1) / total
    ideal = best.values.sum(-1) / total
    first = taken.gather(-1, best.indices[..., :1])[..., 0].float()
    looks = truth.looks
    named = {"top": top, "mass": mass, "ideal": ideal, "first": first}
    return {name: float(value[looks].mean()) for name, value in named.items()}


def study(case: Case, least: float) -> Iterator[dict[str, Any]]:
    """One row a digest, size and share."""
    truth = truth_of(case, least)
    looking = int(truth.looks.sum())
    if looking < FEW:
        return
    steps = truth.looks.any(1)
    truth = Truth(truth.mass[steps], truth.looks[steps])
    case = Case(case.name, case.keys, case.queries[steps], case.after[steps])
    blocks = truth.mass.shape[-1]
    for share in SHARES:
        count = math.ceil(blocks * share)
        for kind in KINDS:
            for size in SIZES:
                found = measures(truth, chosen_by(kind, size, case, count))
                yield {"case": case.name, "share": share, "digest": kind.name, "tokens": size,
                       "bytes": kind.parts / (2 * size), "looking": looking, **found}  # fmt: skip


def captured(path: Path) -> Iterator[Case]:
    """One case a layer."""
    found = torch.load(path)
    kv_heads = found["keys"].shape[1]
    length = found["keys"].shape[2]
    layers = zip(found["keys"], found["queries"], found["after"], strict=True)
    for layer, (keys, queries, after) in enumerate(layers):
        shape = (kv_heads, -1)
        name = f"layer {layer}, {_near(length)}"
        yield Case(name, keys, queries.unflatten(1, shape), after.unflatten(1, shape))


def _near(tokens: int) -> str:
    return f"{2 ** round(math.log2(tokens)) // 1024}K"


def generated(tokens: int, steps: int) -> Iterator[Case]:
    """One case a random geometry."""
    for name, options in GEOMETRIES.items():
        keys, queries = geometry(options, tokens, steps, seed=11)
        nothing = torch.full(queries.shape[:-1], -torch.inf)
        yield Case(f"{name}, {_near(tokens)}", keys, queries, nothing)


def table(rows: Sequence[dict[str, Any]], figure: str) -> str:
    """Markdown: a line a digest and size, a column a case and share."""
    columns = sorted({(row["case"], row["share"]) for row in rows})
    cells: dict[tuple[str, int], dict[tuple[str, float], float]] = defaultdict(dict)
    for row in rows:
        cells[row["digest"], row["tokens"]][row["case"], row["share"]] = row[figure]
    lines = ["| digest | " + " | ".join(f"{c}, {s:g}" for c, s in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for (digest, tokens), found in cells.items():
        values = " | ".join(f"{found[c]:.2f}" if c in found else "" for c in columns)
        lines.append(f"| {digest} of {tokens} | {values} |")
    return "\n".join(lines)


def merged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the same case from several documents made one, weighed by what looked."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["case"], row["share"], row["digest"], row["tokens"]].append(row)
    out = []
    for found in groups.values():
        looking = sum(row["looking"] for row in found)
        mean = {
            name: sum(row[name] * row["looking"] for row in found) / looking
            for name in ("top", "mass", "ideal", "first")
        }
        out.append({**found[0], **mean, "looking": looking})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument(
        "--random", type=int, nargs="?", const=16_384, metavar="TOKENS",
        help="the random geometries too, so long; 16384",
    )  # fmt: skip
    parser.add_argument("--mass", type=float, default=0.3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [case for path in args.files for case in captured(path)]
    if args.random:
        cases += generated(args.random, 48)
    rows = []
    for case in cases:
        rows += list(study(case, args.mass))
        print(case.name, flush=True)
    rows = merged(rows)
    args.out.write_text(json.dumps(rows, indent=1))
    for figure in ("first", "mass"):
        print(f"\n{figure}\n{table(rows, figure)}")


if __name__ == "__main__":
    main()
