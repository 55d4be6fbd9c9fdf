"""Copies of many small pieces of memory in one call, by a kernel that is told addresses.

A GPU reads page-locked host memory by the address it has in the process (CUDA's unified
addressing), so blocks are fetched from the arena without a call for each. It has run in Triton's
interpreter only (tests/retrieval/test_kernels.py), never on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrecall.attention.kernels.launching import kernel_of

Addresses = npt.NDArray[np.int64]

_WORD = 4
_WORDS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """An item is ``count`` runs of ``nbytes`` each, ``step`` bytes apart; all of whole words of
    four bytes."""

    count: int
    nbytes: int
    step: int


def move(sources: Addresses, targets: Addresses, piece: Piece, device: torch.device) -> None:
    """Copies items, on the device's current stream. All addresses are readable, and the targets
    writable, by the device until it has done so."""
    if not len(sources):
        return
    words = piece.nbytes // _WORD
    parts = -(-words // _WORDS_AT_ONCE)
    both = torch.from_numpy(np.stack([sources, targets])).to(device)
    kernel_of("moving_triton", "move_words")[(len(sources), piece.count, parts)](
        both[0], both[1], words, piece.step // _WORD, AT_ONCE=_WORDS_AT_ONCE
    )
