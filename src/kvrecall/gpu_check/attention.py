"""Retrieval on a device: the search for blocks and the attention over them, against plain torch on
the CPU; and a decoded token's attention in one layer, dense and by retrieval.

This part of the check uses no engine; ``servers.py`` has whole servers.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from kvrecall.attention.digest import DIGESTS, Digest, coded_width, encode
from kvrecall.attention.kernels.device import (
    Bucket,
    DeviceStep,
    SequenceFacts,
    attend_by_triton,
    choose_by_triton,
    digest_by_triton,
)
from kvrecall.attention.kernels.oracle import attend_plainly, logits_plainly, table_plainly
from kvrecall.attention.selection import split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.device import device_of, peer
from kvrecall.gpu_check.outcome import CheckError

BLOCK, KV_HEADS, GROUP, DIM = 128, 8, 4, 128
"""The attention of an 8B model of the Llama family: 32 query heads."""

SHARES = (0.2, 0.02)
"""Of the blocks, to choose: digests of 16 and of 8 keys."""

_SCALE = DIM**-0.5
_LENGTHS = (1, 127, 128, 129, 1000, 4097)
_ROUNDS = 12
_FIRST = 3
"""Rounds that compile kernels, and are not counted."""
_BUSY_BYTES = 1 << 30
"""Written in about a quarter of a millisecond by an H200."""


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
    here, want = coded.cpu(), encode(layout.rows_of(keys.permute(2, 0, 1, 3)))
    apart = int((here[..., :-4].int() - want[..., :-4].int()).abs().max())
    require(apart <= (kind.name == "mean"), "codes digests otherwise than the CPU")
    count = max(1, int(blocks * share))
    plain, step = (_step(at, ids, 0, count) for at in (torch.device("cpu"), device))
    choose_by_triton(query.to(device), coded, step, _SCALE, kind.name == "bounds")
    (best, *_) = logits_plainly(query, here, kind, plain, _SCALE)
    found = step.logits[:KV_HEADS, :, :blocks].cpu()
    require(torch.equal(found, best), "finds other products of query and digests than the CPU")
    chosen = step.table[:KV_HEADS, :count].cpu()
    (others,) = table_plainly([best], plain)
    place = torch.empty(blocks, dtype=torch.int64)
    place[ids] = torch.arange(blocks)
    require(
        bool(((chosen >= 0) & (chosen < blocks)).all())
        and _as_good(best, place[others.long()], place[chosen.long()]),
        "chooses other blocks than the CPU",
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


def decode_times(
    device: torch.device, context: int, settings: RetrievalSettings | None = None
) -> dict[str, float]:
    """Milliseconds of a token's attention in one layer at ``context`` tokens (medians of the
    device's time, with nothing of the cache in its own): over all blocks, by the same kernels and
    by vLLM's FlashAttention if it is there, and by retrieval, by default with its default settings,
    including its search. What the host takes to launch retrieval; and the share of the blocks that
    it reads. The cache lies as FlashAttention has it."""
    settings = settings or RetrievalSettings()
    split = split_of(context, BLOCK, settings)
    if not split.chosen:
        raise CheckError(f"{context} tokens leave nothing to choose from")
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    cache = torch.randn(split.blocks, KV_HEADS, BLOCK, 2 * DIM, dtype=dtype, device=device)
    keys, values = torch.split(cache.transpose(1, 2), DIM, -1)
    query = torch.randn(1, KV_HEADS * GROUP, DIM, dtype=dtype, device=device)
    output = torch.empty_like(query)
    layout = settings.layout(BLOCK, narrows=False)
    coded = _digests(device, split.blocks, layout.rows, layout.kind)
    ids = torch.arange(split.blocks)
    bounds = layout.kind.name == "bounds"
    digest_by_triton(keys, coded, ids.to(device), bounds)
    whole = _step(device, ids, context)
    whole.table[:, : split.blocks] = ids.to(whole.table)
    length = split.attended_tokens
    step = _step(device, ids, length, split.chosen, split.init, split.middle)

    def dense() -> None:
        attend_by_triton(query, keys, values, whole, output, _SCALE)

    def sparse() -> None:
        choose_by_triton(query, coded, step, _SCALE, bounds)
        attend_by_triton(query, keys, values, step, output, _SCALE)

    milliseconds = {"dense_ms": _median_ms(device, dense)}
    flash = peer.flash_attention(query, keys, values, context)
    if flash is not None:
        milliseconds["flash_ms"] = _median_ms(device, flash)
    milliseconds["retrieval_ms"] = _median_ms(device, sparse)
    milliseconds["launch_ms"] = _launch_ms(device, sparse)
    return {**milliseconds, "blocks_read": round(split.attended_blocks / split.blocks, 4)}


def _median_ms(device: torch.device, work: Callable[[], object]) -> float:
    """By the device's clock. What it does first fills its cache with other data, and keeps it busy
    until all of ``work`` is launched."""
    if device.type == "cpu":
        begin = time.perf_counter()
        work()
        return round((time.perf_counter() - begin) * 1e3, 4)
    other = torch.empty(_BUSY_BYTES, dtype=torch.uint8, device=device)
    stream, times = device_of(device).current(), []
    for turn in range(_ROUNDS + _FIRST):
        other.zero_()
        began = stream.record()
        work()
        ended = stream.record()
        ended.wait()
        if turn >= _FIRST:
            times.append(ended.seconds_since(began) * 1e3)
    return round(statistics.median(times), 4)


def _launch_ms(device: torch.device, work: Callable[[], object]) -> float:
    """What the host takes for it, the mean; on a CPU, where that is all, 0."""
    if device.type == "cpu":
        return 0.0
    _synchronize(device)
    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        work()
    taken = time.perf_counter() - begin
    _synchronize(device)
    return round(taken / _ROUNDS * 1e3, 4)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _randn(dtype: torch.dtype, random: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=random).to(dtype)


def _digests(device: torch.device, blocks: int, rows: int, kind: Digest) -> torch.Tensor:
    """Room for those of so many blocks, a block's together."""
    size = (blocks, KV_HEADS, rows, coded_width(kind.parts * DIM))
    return torch.zeros(size, dtype=torch.int8, device=device).transpose(0, 1)


def _step(
    device: torch.device,
    ids: torch.Tensor,
    length: int,
    chosen: int = 0,
    init: int = 0,
    middle: int | None = None,
) -> DeviceStep:
    """The step of one sequence of these blocks, the batch's first; with blocks to choose all are
    middle ones unless told."""
    middle = (len(ids) if chosen else 0) if middle is None else middle
    facts = [SequenceFacts(0, init, middle, chosen, len(ids), length)]
    bucket = Bucket.of(KV_HEADS, facts, 0)
    packed = torch.from_numpy(bucket.pack(facts, [ids.numpy()], []))
    return DeviceStep(packed.to(device), bucket, GROUP)
