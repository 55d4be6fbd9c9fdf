"""Retrieval on a device: the search for blocks and the attention over them, against plain torch on
the CPU.

This part of the check uses no engine; ``servers.py`` has whole servers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvrecall.attention.digest import DIGESTS, LOADED_BYTES, Digest, coded_width, encode
from kvrecall.attention.kernels.device import (
    DeviceStep,
    SequenceFacts,
    attend_by_triton,
    choose_by_triton,
    digest_by_triton,
)
from kvrecall.attention.kernels.oracle import attend_plainly, logits_plainly, table_plainly
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.gpu_check import CheckError

BLOCK, KV_HEADS, GROUP, DIM = 128, 8, 4, 128
"""The attention of an 8B model of the Llama family: 32 query heads."""

SHARES = (0.2, 0.02)
"""Of the blocks, to choose: digests of 16 and of 8 keys."""

_SCALE = DIM**-0.5
_LENGTHS = (1, 127, 128, 129, 1000, 4097)


def check_attention(device: torch.device) -> None:
    """The attention kernels agree with the oracle. Raises CheckError."""
    allowed = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
    lengths: Sequence[int] = _LENGTHS
    if device.type == "cpu":  # Triton's interpreter, which is slow and cannot multiply bfloat16
        lengths = _LENGTHS[:4]
        del allowed[torch.bfloat16]
    for dtype, most in allowed.items():
        for length in lengths:
            random = torch.Generator().manual_seed(length)
            blocks = -(-length // BLOCK)
            ids = torch.randperm(blocks, generator=random)
            keys, values = (_randn(dtype, random, blocks, BLOCK, KV_HEADS, DIM) for _ in range(2))
            query = _randn(dtype, random, 1, KV_HEADS * GROUP, DIM)
            steps = [_step(place, ids, length) for place in (torch.device("cpu"), device)]
            for step in steps:
                step.table[:, :blocks] = ids.to(step.table)
            want = attend_plainly(query, keys, values, steps[0], _SCALE)
            output = torch.zeros_like(query, device=device)
            on, ours, theirs = (each.to(device) for each in (query, keys, values))
            attend_by_triton(on, ours, theirs, steps[1], output, _SCALE, share=3)
            error = float((output.cpu().float() - want).abs().max())
            if not error <= most:
                raise CheckError(f"attention over {length} tokens of {dtype} is off by {error:.3g}")


def check_selection(device: torch.device, blocks: int = 512) -> float:
    """The device codes digests, multiplies them with queries and selects blocks as the CPU does:
    to the bit, except means, which add up in another order, and blocks of equal scores. Returns the
    least share of the selected blocks that both select. Raises CheckError."""
    shares = []
    for kind in DIGESTS.values():
        for share in SHARES:
            shares.append(_check_search(device, blocks, kind, share))
    return min(shares)


def _check_search(device: torch.device, blocks: int, kind: Digest, share: float) -> float:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise CheckError(f"the device {what} ({kind.name}, a share of {share})")

    random = torch.Generator().manual_seed(1)
    keys = _randn(torch.float32, random, blocks, BLOCK, KV_HEADS, DIM)
    query = _randn(torch.float32, random, 1, KV_HEADS * GROUP, DIM)
    ids = torch.randperm(blocks, generator=random)
    layout = RetrievalSettings(topk_share=share).layout(BLOCK, narrows=False)
    layout = dataclasses.replace(layout, kind=kind)
    coded = _digests(device, blocks, layout.rows, kind)
    digest_by_triton(keys.to(device), coded, ids.to(device), kind.name == "bounds")
    want = encode(layout.rows_of(keys.permute(2, 0, 1, 3)))
    here = coded.cpu()[..., : want.shape[-1]]
    apart = int((here[..., :-4].int() - want[..., :-4].int()).abs().max())
    require(apart <= (kind.name == "mean"), "encodes digests differently from the CPU")
    count = max(1, int(blocks * share))
    plain, step = (_step(at, ids, 0, count) for at in (torch.device("cpu"), device))
    choose_by_triton(query.to(device), coded, step, _SCALE, kind.name == "bounds")
    (best, *_) = logits_plainly(query, here, kind, plain, _SCALE)
    found = step.logits[:KV_HEADS, :, :blocks].cpu()
    require(torch.equal(found, best), "computes other scores of digests than the CPU")
    chosen = step.table[:KV_HEADS, :count].cpu()
    (others,) = table_plainly([best], plain)
    place = torch.empty(blocks, dtype=torch.int64)
    place[ids] = torch.arange(blocks)
    require(
        bool(((chosen >= 0) & (chosen < blocks)).all())
        and _as_good(best, place[others.long()], place[chosen.long()]),
        "selects other blocks than the CPU",
    )
    pairs = zip(chosen.tolist(), others.tolist(), strict=True)
    return min(len(set(a) & set(b)) / len(b) for a, b in pairs)


def _as_good(best: torch.Tensor, some: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether blocks ``[heads, count]`` equal the others, or tie with them, by these products."""
    if any(len(set(row)) < len(row) for row in others.tolist()):
        return False
    scores = best.softmax(-1).mean(1)
    of_some, of_others = (scores.gather(1, blocks).sort(-1).values for blocks in (some, others))
    return torch.allclose(of_some, of_others, rtol=1e-5, atol=0)


def _randn(dtype: torch.dtype, random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random).to(dtype)


def _digests(device: torch.device, blocks: int, rows: int, kind: Digest) -> torch.Tensor:
    """Room for those of so many blocks, a block's together."""
    size = (blocks, KV_HEADS, rows, coded_width(kind.parts * DIM, LOADED_BYTES))
    return torch.zeros(size, dtype=torch.int8, device=device).transpose(0, 1)


def _step(device: torch.device, ids: torch.Tensor, length: int, chosen: int = 0) -> DeviceStep:
    """The step of one sequence of these blocks, the batch's first; with blocks to choose all are
    middle ones."""
    facts = [SequenceFacts(0, 0, len(ids) if chosen else 0, chosen, len(ids), length)]
    return DeviceStep.of(facts, ids[None].to(device, torch.int32), KV_HEADS, GROUP)
