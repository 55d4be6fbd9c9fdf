"""Retrieval on a device: the search for blocks and the attention over them, against plain torch on
the CPU; and a decoded token's attention in one layer, dense and by retrieval.

This part of the check uses no engine; ``servers.py`` has whole servers.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvrecall.attention.digest import DIGESTS, Layout, digests_of, encode
from kvrecall.attention.kernels.device import Paged, attend_by_triton
from kvrecall.attention.kernels.oracle import attend_plainly
from kvrecall.attention.selection import (
    CodedQuery,
    ExactSelector,
    best_products,
    selector_of,
    split_of,
)
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.lab.gpu_check.outcome import CheckError

BLOCK, KV_HEADS, GROUP, DIM = 128, 8, 4, 128
"""The attention of an 8B model of the Llama family: 32 query heads."""

DIGEST_TOKENS = 16

SHARES = (0.2, 0.02)
"""Of the blocks, to choose: the default, and one for which a search narrows down."""

_LENGTHS = (1, 127, 128, 129, 1000, 4097)
_ROUNDS = 12


def check_attention(device: torch.device) -> None:
    """The Triton kernel agrees with the oracle. Raises CheckError."""
    for dtype, allowed in ((torch.float32, 2e-3), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)):
        for length in _LENGTHS:
            query, paged = _cache(length, dtype)
            want = attend_plainly(query, paged, DIM**-0.5)
            there = Paged(*(t.to(device) for t in _parts(paged)))
            got = attend_by_triton(query.to(device), there, DIM**-0.5, share=3)
            error = float((got.output.cpu() - want.output).abs().max())
            if not error <= allowed:
                raise CheckError(f"attention over {length} tokens of {dtype} is off by {error:.3g}")


def check_selection(device: torch.device, blocks: int = 512) -> float:
    """The device selects the same blocks as the CPU, by digests of every kind. Returns the common
    share, which rounding of uncoded digests may keep below 1. Raises CheckError below 0.98, and for
    any fault of ``check_search``."""
    check_search(device, blocks)
    random = torch.Generator().manual_seed(0)
    shares = []
    for kind in DIGESTS.values():
        keys = torch.randn(KV_HEADS, blocks, BLOCK, DIM, generator=random)
        query = torch.randn(KV_HEADS, GROUP, DIM, generator=random)
        chosen = [
            ExactSelector(kind).choose(
                query.to(place),
                [digests_of(kind, keys.to(place), DIGEST_TOKENS)],
                blocks // 5,
                DIM**-0.5,
            )
            for place in (torch.device("cpu"), device)
        ]
        pairs = zip(*(picked.cpu().tolist() for picked in chosen), strict=True)
        shares += [len(set(a) & set(b)) / len(a) for a, b in pairs]
    least = min(shares)
    if least < 0.98:
        raise CheckError(f"of the blocks the CPU chooses, the device chooses {least:.0%}")
    return least


def check_search(device: torch.device, blocks: int = 512) -> None:
    """The engine's search over digests coded in eight bits: codes, products with a query and
    selected blocks are bit-identical on device and CPU, except blocks of equal scores. Raises
    CheckError."""
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(KV_HEADS, blocks, BLOCK, DIM, generator=random)
    query = torch.randn(KV_HEADS, GROUP, DIM, generator=random)
    for share in SHARES:
        settings = RetrievalSettings(topk_share=share)
        layout = settings.layout(BLOCK)
        coded = encode(layout.rows_of(keys))
        there = encode(layout.rows_of(keys.to(device)))
        _require(torch.equal(there.cpu(), coded), "codes digests otherwise than the CPU", share)
        best = _best(layout, query, coded)
        same = torch.equal(_best(layout, query.to(device), there).cpu(), best)
        _require(same, "finds other products of query and digests than the CPU", share)
        chosen = [
            selector_of(layout).choose(near, [rows], max(1, int(blocks * share)), DIM**-0.5).cpu()
            for near, rows in ((query, coded), (query.to(device), there))
        ]
        _require(_as_good(best, *chosen), "chooses other blocks than the CPU", share)


def _best(layout: Layout, query: torch.Tensor, coded: torch.Tensor) -> torch.Tensor:
    """Products of the query with the best fine row of every block: ``[heads, group, blocks]``."""
    point = CodedQuery(layout.kind.of_query(query))
    return best_products(point, coded[:, :, layout.fine_rows], DIM**-0.5)


def _as_good(best: torch.Tensor, some: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether blocks ``[heads, count]`` equal the others, or tie with them, by these products."""
    if any(len(set(row)) < len(row) for row in others.tolist()):
        return False
    scores = best.softmax(-1).mean(1)
    of_some, of_others = (scores.gather(1, blocks).sort(-1).values for blocks in (some, others))
    return torch.allclose(of_some, of_others, rtol=1e-5, atol=0)


def _require(holds: bool, what: str, share: float) -> None:
    if not holds:
        raise CheckError(f"the device {what} (a share of {share})")


def decode_times(device: torch.device, context: int) -> dict[str, float]:
    """Milliseconds (medians) of a token's attention in one layer at ``context`` tokens: dense over
    all blocks, and retrieval with its default settings, including its search over coded digests;
    and the share of the blocks that retrieval reads."""
    settings = RetrievalSettings()
    split = split_of(context, BLOCK, settings)
    if not split.chosen:
        raise CheckError(f"{context} tokens leave nothing to choose from")
    blocks = split.blocks
    shape = (blocks, BLOCK, KV_HEADS, DIM)
    keys = torch.randn(shape, dtype=torch.bfloat16, device=device)
    values = torch.randn(shape, dtype=torch.bfloat16, device=device)
    query = torch.randn(KV_HEADS, GROUP, DIM, dtype=torch.bfloat16, device=device)
    layout = settings.layout(BLOCK)
    middle = keys[split.init : split.local].permute(2, 0, 1, 3)
    digests = encode(layout.rows_of(middle))
    everything = torch.arange(blocks, dtype=torch.int32, device=device)
    heads = torch.arange(KV_HEADS, dtype=torch.int32, device=device)[:, None]
    outer = torch.cat([everything[: split.init], everything[split.local :]])
    selector = selector_of(layout)

    def attend(table: torch.Tensor) -> None:
        lengths = torch.full((KV_HEADS,), table.shape[1] * BLOCK, dtype=torch.int32, device=device)
        named = table * KV_HEADS + heads
        attend_by_triton(query, Paged(keys, values, named, lengths), DIM**-0.5)

    def dense() -> None:
        attend(everything.expand(KV_HEADS, -1).contiguous())

    def sparse() -> None:
        choice = selector.choose(query, [digests], split.chosen, DIM**-0.5)
        chosen = choice.sort(-1).values + split.init
        attend(torch.cat([chosen.to(torch.int32), outer.expand(KV_HEADS, -1)], 1))

    read = (split.chosen + outer.numel()) / blocks
    milliseconds = {
        name: _median_ms(device, work)
        for name, work in (("dense_ms", dense), ("retrieval_ms", sparse))
    }
    return {**milliseconds, "blocks_read": round(read, 4)}


def _median_ms(device: torch.device, work: Callable[[], None]) -> float:
    times = []
    for turn in range(_ROUNDS + 3):
        _synchronize(device)
        begin = time.perf_counter()
        work()
        _synchronize(device)
        if turn >= 3:  # the first run compiles
            times.append((time.perf_counter() - begin) * 1e3)
    return round(sorted(times)[len(times) // 2], 4)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _cache(length: int, dtype: torch.dtype) -> tuple[torch.Tensor, Paged]:
    """Two rows of random keys in randomly placed blocks; two KV heads."""
    random = torch.Generator().manual_seed(length)
    width = -(-length // BLOCK)
    blocks = torch.randperm(2 * width, generator=random).view(2, width).to(torch.int32)
    table = blocks * 2 + torch.tensor([[0], [1]], dtype=torch.int32)
    keys, values = (
        torch.randn(2 * width, BLOCK, 2, DIM, generator=random).to(dtype) for _ in range(2)
    )
    query = torch.randn(2, GROUP, DIM, generator=random).to(dtype)
    return query, Paged(keys, values, table, torch.tensor([length, length], dtype=torch.int32))


def _parts(paged: Paged) -> tuple[torch.Tensor, ...]:
    return paged.keys, paged.values, paged.table, paged.lengths
