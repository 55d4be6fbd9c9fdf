"""Random keys of a given geometry, with blocks that matter to the queries planted in them.

Real keys are neither independent nor round: neighbours resemble each other, and a few channels
are much larger than the rest. A digest that wins on independent keys may lose on such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DIM, KV_HEADS, GROUP = 64, 2, 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """`clusters`: how many the keys fall into, 0 for independent keys. `run`: tokens that stay in
    one. `spread`: of a key around its cluster, in units of the cluster's own. `outliers`: channels
    that are `loud` times as large, off centre, and say nothing of what is looked for. `needles`:
    single keys a query looks for.
    """

    clusters: int = 0
    run: int = 24
    spread: float = 0.5
    outliers: int = 0
    loud: float = 8.0
    needles: int = 1


GEOMETRIES: Mapping[str, Geometry] = {
    "independent": Geometry(),
    "clustered": Geometry(clusters=64),
    "outlier channels": Geometry(clusters=64, outliers=3),
    "four needles": Geometry(clusters=64, needles=4),
}


def geometry(options: Geometry, tokens: int, steps: int, seed: int) -> tuple[Tensor, Tensor]:
    """Keys `[kv_heads, tokens, dim]`, queries `[steps, kv_heads, group, dim]`, in bf16's values.

    Each query points at `needles` keys of its own, strongly enough to put most of its mass there,
    with noise that differs from head to head of a group.
    """
    random = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    loud = torch.ones(DIM)
    loud[: options.outliers] = options.loud
    keys = noise(KV_HEADS, tokens, DIM)
    if options.clusters:
        centres = noise(KV_HEADS, options.clusters, DIM)
        runs = -(-tokens // options.run)
        which = torch.randint(options.clusters, (KV_HEADS, runs), generator=random)
        which = which.repeat_interleave(options.run, 1)[:, :tokens]
        keys = centres.gather(1, which[..., None].expand(-1, -1, DIM)) + options.spread * keys
    offset = torch.zeros(DIM)
    offset[: options.outliers] = 1.0
    keys = (keys + 2 * offset) * loud
    queries = torch.empty(steps, KV_HEADS, GROUP, DIM)
    for step in range(steps):
        for head in range(KV_HEADS):
            places = torch.randint(512, tokens - 512, (options.needles,), generator=random)
            keys[head, places] = (2 * offset + noise(options.needles, DIM)) * loud
            aim = keys[head, places] / loud - 2 * offset
            aim[:, : options.outliers] = 0
            toward = aim.sum(0) / aim.norm() ** 2 * options.needles
            # Strong enough for a logit some 6 above the log of the number of keys.
            strength = (torch.tensor(float(tokens)).log() + 6) * DIM**0.5
            queries[step, head] = toward * strength + 0.6 * noise(GROUP, DIM)
    return keys.to(torch.bfloat16), queries.to(torch.bfloat16)
