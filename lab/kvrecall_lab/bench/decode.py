"""``bench decode``: attention of a decoded token, dense and by retrieval."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from kvrecall.attention.selection import Gate, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import (
    Report,
    Times,
    cells,
    percentiles,
)
from kvrecall.errors import KvrecallError

if TYPE_CHECKING:
    from kvrecall_lab.engines.decode import DecodeTimes

MODEL_LAYERS = 28
"""A step is planned once for all layers; its cost is shared by as many as Qwen2-7B has."""

SHAPE = "16 query heads, 4 KV heads of 128, bf16, blocks of 128 tokens"


def chooses(context: int, settings: RetrievalSettings) -> bool:
    """Whether there are more blocks than are selected; otherwise attention is dense."""
    ungated = replace(settings, gate=False)
    return Gate(ungated, token_bytes=1).passes(context, split_of(context, 128, ungated))


def use_threads(threads: int | None) -> int:
    """Sets torch's number of threads (None: unchanged); returns it."""
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def measure_decode(
    context: Annotated[int, typer.Option(min=128, help="Tokens of the sequence.")] = 65536,
    share: Annotated[float, typer.Option(help="Share of the middle blocks selected.")] = 0.2,
    digest: Annotated[str, typer.Option(help="bounds or mean.")] = "bounds",
    digest_tokens: Annotated[int, typer.Option(help="Keys per digest; 0: by the share.")] = 0,
    local: Annotated[int, typer.Option(min=1, help="Last tokens always attended to.")] = 7192,
    rounds: Times = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
) -> Report:
    """Attention of a decoded token: dense, and by retrieval with RetrievalKV's defaults; from
    65,536 tokens on also with the middle blocks off the device."""
    settings = RetrievalSettings(
        topk_share=share, digest=digest, digest_tokens=digest_tokens, local_tokens=local
    )
    return measure_decode_report(context, settings, rounds, threads)


def measure_decode_report(
    context: int,
    settings: RetrievalSettings,
    rounds: int,
    threads: int | None,
) -> Report:
    """Times one layer at ``context`` tokens; past the offload boundary also with the middle blocks
    offloaded.

    Raises KvrecallError if retrieval did not act, if selecting every block differs from dense
    attention, or if offloaded blocks give another result.
    """
    from kvrecall.engines.vllm.attention.checks import require_block_size
    from kvrecall_lab.engines import decode

    require_block_size(decode.BLOCK, settings)
    if not chooses(context, settings):
        raise KvrecallError(
            f"--context {context} leaves no blocks to select from: the first "
            f"{settings.init_tokens} and the last {settings.local_tokens} tokens are always "
            f"attended to, and between them at least {settings.fewest_blocks} blocks; use a "
            "longer context"
        )
    threads = use_threads(threads)
    times = decode.measure_decode(context, settings, rounds)
    if not times.activity["blocks_selected"]:
        raise KvrecallError(
            "retrieval did not act: no block was selected; the figures are meaningless"
        )
    if times.whole_error > 0.02:
        raise KvrecallError(
            f"selecting every block differs from dense attention by {times.whole_error:.3f}"
        )
    if times.offload is not None and times.offload.error > 0:
        raise KvrecallError(
            f"blocks off the device give other results, by {times.offload.error:.3g}"
        )
    if times.offload is not None and not times.offload.in_place:
        raise KvrecallError(
            "offload did not act: no block was read in the arena; the figures are meaningless"
        )
    return _report(context, settings, times, threads)


def _report(context: int, settings: RetrievalSettings, times: DecodeTimes, threads: int) -> Report:
    milliseconds = {
        name: percentiles([second * 1e3 for second in getattr(times, name)])
        for name in ("dense", "sparse", "selection", "plan")
    }
    dense = milliseconds["dense"]
    planned = milliseconds["plan"]["p50"] / MODEL_LAYERS
    ratios = {
        rank: round((milliseconds["sparse"][rank] + planned) / dense[rank], 4)
        for rank in ("p10", "p50")
    }
    figures = {
        "context": context,
        "dense_ms": dense["p50"],
        "sparse_ms": round(milliseconds["sparse"]["p50"] + planned, 6),
        "selection_ms": milliseconds["selection"]["p50"],
        "plan_ms_a_step": milliseconds["plan"]["p50"],
        "attention_ratio": ratios["p50"],
        "attention_ratio_p10": ratios["p10"],
        "device_blocks_ratio": 1.0,
        "selection_share": round(
            milliseconds["selection"]["p50"] / milliseconds["sparse"]["p50"], 4
        ),
        "selected_share": round(times.selected_share, 4),
        "attended_share": round(times.attended_share, 4),
        "gated": times.gated,
        "active": True,
        "digest": f"{settings.digest} of {settings.tokens_a_digest}",
        "threads": threads,
        "percentiles_ms": milliseconds,
        "activity": times.activity,
    }
    rows = [
        (text, *cells(milliseconds[name], 3))
        for name, text in (
            ("dense", "dense attention"),
            ("sparse", "by retrieval, selection included"),
            ("selection", "  of which selection"),
            ("plan", "planning, once a step for all layers"),
        )
    ]
    notes = [
        f"one layer, one sequence of {context} tokens: {SHAPE}; {threads} threads, "
        + ("processor time" if threads == 1 else "wall time"),
        f"chosen {times.selected_share:.1%} of the middle blocks, attended to "
        f"{times.attended_share:.1%} of the tokens",
        f"ratio {ratios['p50']:.3f} at the median, {ratios['p10']:.3f} at the fastest tenth",
        "random keys: this measures time, not quality",
    ]
    if (offload := times.offload) is not None:
        spent, beside = (
            percentiles([second * 1e3 for second in seconds])
            for seconds in (offload.seconds, offload.here)
        )
        figures |= {
            "offload_ms": round(spent["p50"] + planned, 6),
            "offload_ratio": round((spent["p50"] + planned) / dense["p50"], 4),
            "offload_to_device": round(spent["p50"] / beside["p50"], 4),
            "offload_to_device_p10": round(spent["p10"] / beside["p10"], 4),
            "device_blocks_ratio": round(offload.device_blocks / offload.blocks, 4),
        }
        rows.append(("by retrieval, of the queries below", *cells(beside, 3)))
        rows.append(("the same, middle blocks off the device", *cells(spent, 3)))
        notes.append(
            f"off the device: {offload.device_blocks} of {offload.blocks} blocks held on it; "
            f"{figures['offload_to_device']:.3f} of the time on the device at the median, "
            f"{figures['offload_to_device_p10']:.3f} at the fastest tenth"
        )
    columns = ("milliseconds a layer", "p10", "median", "p90")
    return Report("decode", columns, tuple(rows), figures, tuple(notes))
