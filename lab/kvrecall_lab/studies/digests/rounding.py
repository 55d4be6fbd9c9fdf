"""What digests of eight bits lose against bf16: `python -m ...digests.rounding FILE ...`.

The files are those of `capture`. Counted as in `study`, of the default digests and shares.
`same`: share of the blocks chosen by bf16 digests that those of eight bits choose too.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from kvrecall.attention.digest import DIGESTS, digests_of, encode
from kvrecall.attention.selection import ExactSelector
from kvrecall_lab.studies.digests.study import (
    FEW,
    Case,
    Truth,
    captured,
    generated,
    measures,
    middle_of,
    truth_of,
)

KIND = DIGESTS["bounds"]
DEFAULTS = ((0.02, 8), (0.05, 8), (0.2, 16))


def chosen(digests: Tensor, case: Case, count: int) -> Tensor:
    """int64 `[steps, kv_heads, count]`, by the package's own selection."""
    selector, scale = ExactSelector(KIND), case.keys.shape[-1] ** -0.5
    rows = [selector.choose(one, [digests], count, scale) for one in case.queries]
    return torch.stack(rows)


def compare(case: Case, least: int) -> None:
    truth = truth_of(case, 0.3)
    if int(truth.looks.sum()) < FEW:
        return
    steps = truth.looks.any(1)
    truth = Truth(truth.mass[steps], truth.looks[steps])
    case = Case(case.name, case.keys, case.queries[steps].to(torch.bfloat16), case.after[steps])
    blocks = truth.mass.shape[-1]
    for share, size in DEFAULTS:
        count = min(blocks, max(least, math.ceil(blocks * share)))
        digests = digests_of(KIND, middle_of(case.keys), size)
        plain = chosen(digests.to(torch.bfloat16), case, count)
        coded = chosen(encode(digests), case, count)
        same = (plain[..., None] == coded[..., None, :]).any(-1).float().mean()
        before, after = measures(truth, plain), measures(truth, coded)
        print(
            f"{case.name}, {share:g}, {size} keys, {count} of {blocks} blocks: found "
            f"{before['first']:.3f} {after['first']:.3f}, mass {before['mass']:.3f} "
            f"{after['mass']:.3f}, same {same:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument(
        "--random", type=int, nargs="?", const=16_384, metavar="TOKENS",
        help="the random geometries too, so long; 16384",
    )  # fmt: skip
    parser.add_argument("--least", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for path in args.files:
        for case in captured(path):
            compare(case, args.least)
    if args.random:
        for case in generated(args.random, 48):
            compare(case, args.least)


if __name__ == "__main__":
    main()
