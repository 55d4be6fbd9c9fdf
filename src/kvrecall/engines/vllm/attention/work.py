"""What the attention layers of a group have to do in a step beside, or instead of, dense attention
of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrecall.engines.vllm.attention.recalled import OffloadedSequence
from kvrecall.engines.vllm.attention.steps import SparseStep


@dataclass(frozen=True, slots=True)
class DenseRest:
    """The requests of a mixed batch that are attended to densely on the device: ``tokens`` are
    their places in it."""

    tokens: torch.Tensor
    metadata: Any


@dataclass(frozen=True, slots=True)
class AwayRow:
    """A sequence off the device in part. ``places``: of its tokens in the batch; ``table``: its
    device blocks, on the host; ``tokens``: its length; ``prefills``: it is attended to densely in
    all layers. ``metadata``: vLLM's of this sequence alone, whose blocks lie in their order, where
    vLLM's kernel attends to it."""

    sequence: OffloadedSequence
    places: slice
    table: torch.Tensor
    tokens: int
    prefills: bool
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class AwayRows:
    """What a dense layer does in a step with sequences that are off the device in part.

    ``rest``: the other sequences.
    """

    rows: tuple[AwayRow, ...]
    rest: DenseRest | None


@dataclass(frozen=True, slots=True)
class Work:
    """A step's. ``sparse_tokens``: places in the batch of the tokens of sequences that are sparse
    or off the device in part; None if there are none. ``rest``: what sparse layers attend to
    densely on the device; None if nothing. ``away``: None if all blocks are on the device."""

    step: SparseStep | None
    sparse_tokens: torch.Tensor | None = None
    rest: DenseRest | None = None
    away: AwayRows | None = None


def work_of(metadata: Any) -> Work | None:
    """That of a step's attention metadata, which a builder has put there."""
    work: Work | None = getattr(metadata, "retrieval", None)
    return work
