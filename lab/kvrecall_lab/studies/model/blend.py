"""The weights of two checkpoints of one run, averaged: `python -m ...model.blend A B OUT`.

OUT holds `1 - share` of A and `share` of B, and no optimizer: it is for export, not for training
on. A late stage that trains one thing hard costs a little of the others; part of the way back to
where it began gives most of that back and keeps most of what was gained (WiSE-FT, Wortsman et al.
2022).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def blend(first: Path, second: Path, share: float) -> dict[str, torch.Tensor]:
    """Parameter by parameter, in fp32."""
    one = torch.load(first, weights_only=True)["model"]
    two = torch.load(second, weights_only=True)["model"]
    return {name: torch.lerp(one[name], two[name], share) for name in one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, default=0.8)
    args = parser.parse_args()
    torch.save({"model": blend(args.first, args.second, args.share)}, args.out)


if __name__ == "__main__":
    main()
