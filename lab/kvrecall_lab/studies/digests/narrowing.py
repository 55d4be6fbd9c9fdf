"""What looking at coarse digests first loses: `python -m ...digests.narrowing FILE ...`.

The files are those of `capture`. Counted as in `study`: how often the block attended to most is
among the chosen, and the attention they hold, when fine digests are looked at only of so many times
the blocks to choose. `rows`: digests that a search reads, per middle block.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

from kvrecall.attention.digest import DIGESTS, digests_of
from kvrecall_lab.studies.digests.study import (
    FEW,
    Case,
    Truth,
    captured,
    measures,
    middle_of,
    truth_of,
)

KIND = DIGESTS["bounds"]
FINE = (16, 8)
COARSE = (32, 64, 128)
WIDE = (2, 4, 6, 8)


def logits_of(case: Case, size: int) -> Tensor:
    """`[steps, kv_heads, group, blocks, digests]`, digests in bf16."""
    digests = digests_of(KIND, middle_of(case.keys), size).to(torch.bfloat16).float()
    point = KIND.of_query(case.queries.float())
    return torch.einsum("shgd,hbnd->shgbn", point, digests) * case.keys.shape[-1] ** -0.5


def best(logits: Tensor, count: int) -> Tensor:
    """As the package's selection: int64 `[steps, kv_heads, count]`."""
    mass = logits.flatten(-2).softmax(-1).mean(2).view(*logits.shape[:2], *logits.shape[3:])
    return mass.amax(-1).topk(count, -1).indices


def narrowed(coarse: Tensor, fine: Tensor, count: int, wide: int) -> Tensor:
    near = best(coarse, min(coarse.shape[3], count * wide))
    looked = torch.zeros(*near.shape[:2], coarse.shape[3], dtype=torch.bool).scatter_(
        -1, near, True
    )
    return best(fine.masked_fill(~looked[:, :, None, :, None], -torch.inf), count)


def compare(case: Case, share: float, least: int) -> None:
    truth = truth_of(case, 0.3)
    if int(truth.looks.sum()) < FEW:
        return
    steps = truth.looks.any(1)
    truth = Truth(truth.mass[steps], truth.looks[steps])
    case = Case(case.name, case.keys, case.queries[steps], case.after[steps])
    blocks = truth.mass.shape[-1]
    count = min(blocks, max(least, math.ceil(blocks * share)))
    logits = {size: logits_of(case, size) for size in {*FINE, *COARSE}}
    print(f"{case.name}: {count} of {blocks} blocks, {int(truth.looks.sum())} look-ups")
    for fine in FINE:
        found = measures(truth, best(logits[fine], count))
        print(f"  of {fine}: {found['first']:.3f} {found['mass']:.3f}, rows {128 / fine:.1f}")
        for coarse in COARSE:
            for wide in WIDE:
                found = measures(truth, narrowed(logits[coarse], logits[fine], count, wide))
                read = 128 / coarse + (128 / fine + 128 / coarse) * min(1, count * wide / blocks)
                print(
                    f"  of {coarse}, then {wide} times of {fine}: {found['first']:.3f} "
                    f"{found['mass']:.3f}, rows {read:.1f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--least", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for path in args.files:
        for case in captured(path):
            compare(case, args.share, args.least)


if __name__ == "__main__":
    main()
