"""The kinds of digest under study: those of the package, and variants of theirs."""

from __future__ import annotations

from typing import ClassVar

import torch

from kvrecall.attention.digest import DIGESTS, Digest


class Spread(Digest):
    """Mean and standard deviation: the score is ``q . mean + c |q| . std`` (UNIQUE: c = 1/2)."""

    parts: ClassVar[int] = 2

    def __init__(self, factor: float) -> None:
        self.name = f"mean + {factor:g} std"  # type: ignore[misc]
        self._factor = factor

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        deviation, mean = torch.std_mean(keys.float(), dim=-2, correction=0)
        return torch.cat([mean, deviation], -1)

    def of_query(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([query, query.abs() * self._factor], -1)


class Box(Digest):
    """The bounding box shrunk around its middle; ``1`` is Quest's bound."""

    parts: ClassVar[int] = 2

    def __init__(self, factor: float) -> None:
        self.name = f"box {factor:g}"  # type: ignore[misc]
        self._factor = factor

    def of_keys(self, keys: torch.Tensor) -> torch.Tensor:
        high, low = keys.amax(-2).float(), keys.amin(-2).float()
        return torch.cat([(high + low) / 2, (high - low) / 2], -1)

    def of_query(self, query: torch.Tensor) -> torch.Tensor:
        return torch.cat([query, query.abs() * self._factor], -1)


KINDS: tuple[Digest, ...] = (
    DIGESTS["mean"],
    Spread(0.5),
    Spread(1.0),
    Spread(2.0),
    DIGESTS["bounds"],
    Box(0.5),
    Box(0.7),
)
SIZES: tuple[int, ...] = (4, 8, 16, 32, 128)
SHARES: tuple[float, ...] = (0.02, 0.05, 0.2)
