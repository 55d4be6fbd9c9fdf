"""Where in their contexts the layers chose blocks: counted by workers, summed for who watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrecall.engines.base import Heat

_Counts = npt.NDArray[np.int64]

PLACES = 24
"""Parts of equal length that a context is divided into."""


class HeatTotals:
    """Running totals by layer, ``[2, PLACES]`` each: considered and selected. Not thread-safe."""

    def __init__(self) -> None:
        self._layers: dict[int, _Counts] = {}

    def note(self, layer: int, places: _Counts, chosen: _Counts, blocks: int) -> None:
        """Each KV head of layer ``layer`` selected a row of ``chosen`` (``[kv_heads, chosen]``) of
        the blocks ``places``, all of them block numbers within a context of ``blocks`` blocks."""
        totals = self._layers.setdefault(layer, np.zeros((2, PLACES), dtype=np.int64))
        totals[0] += len(chosen) * _by_place(places, blocks)
        totals[1] += _by_place(chosen.ravel(), blocks)

    def take(self) -> dict[int, list[list[int]]]:
        """The counts since the last call, by layer; plain values for the way to the API."""
        layers, self._layers = self._layers, {}
        return {layer: totals.tolist() for layer, totals in layers.items()}

    def add(self, counts: Mapping[Any, Sequence[Sequence[int]]]) -> None:
        """Adds the counts of a worker."""
        for layer, rows in counts.items():
            totals = self._layers.setdefault(int(layer), np.zeros((2, PLACES), dtype=np.int64))
            totals += np.asarray(rows, dtype=np.int64)

    def heat(self) -> Heat | None:
        """The totals; None if there are none."""
        if not self._layers:
            return None
        layers = sorted(self._layers)
        rows = [self._layers[layer].tolist() for layer in layers]
        return Heat(
            tuple(map(str, layers)),
            tuple(tuple(row[0]) for row in rows),
            tuple(tuple(row[1]) for row in rows),
        )


def _by_place(numbers: _Counts, blocks: int) -> _Counts:
    return np.bincount(numbers.astype(np.int64) * PLACES // blocks, minlength=PLACES)
