"""``kvrecall bench decode``: attention of a decoded token, dense and by retrieval, in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrecall.bench.report import Report, percentiles
from kvrecall.errors import KvrecallError
from kvrecall.retrieval.settings import RetrievalSettings
from kvrecall.retrieval.split import split_of

if TYPE_CHECKING:
    from kvrecall.engines.vllm.retrieval.measure import DecodeTimes

MODEL_LAYERS = 28
"""A step is planned once for all layers; its cost is shared by as many as Qwen2-7B has."""

SHAPE = "16 query heads, 4 KV heads of 128, bf16, blocks of 128 tokens"


def measure_decode_report(
    context: int, settings: RetrievalSettings, rounds: int, threads: int | None
) -> Report:
    """Times one layer at ``context`` tokens. Raises KvrecallError if retrieval did not act, or
    does not compute what dense attention computes once it may choose every block."""
    import torch

    from kvrecall.engines.vllm.retrieval.measure import measure_decode

    if not split_of(context, 128, settings).middle:
        raise KvrecallError(
            f"--context {context} leaves nothing to choose from: the first {settings.init_tokens} "
            f"and the last {settings.local_tokens} tokens always take part; ask for more"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    times = measure_decode(context, settings, rounds)
    if not times.activity["blocks_selected"]:
        raise KvrecallError("retrieval did not act: no block was chosen; the figures mean nothing")
    if times.whole_error > 0.02:
        raise KvrecallError(
            f"choosing every block differs from dense attention by {times.whole_error:.3f}"
        )
    return _report(context, settings, times, torch.get_num_threads())


def _report(context: int, settings: RetrievalSettings, times: DecodeTimes, threads: int) -> Report:
    milliseconds = {
        name: percentiles([second * 1e3 for second in getattr(times, name)])
        for name in ("dense", "sparse", "selection", "plan")
    }
    planned = milliseconds["plan"]["p50"] / MODEL_LAYERS
    ratios = {
        rank: round((milliseconds["sparse"][rank] + planned) / milliseconds["dense"][rank], 4)
        for rank in ("p10", "p50")
    }
    figures = {
        "context": context,
        "dense_ms": milliseconds["dense"]["p50"],
        "sparse_ms": round(milliseconds["sparse"]["p50"] + planned, 6),
        "selection_ms": milliseconds["selection"]["p50"],
        "plan_ms_a_step": milliseconds["plan"]["p50"],
        "attention_ratio": ratios["p50"],
        "attention_ratio_p10": ratios["p10"],
        "device_blocks_ratio": 1.0,
        "cache_hit_rate": None,
        "selected_share": round(times.selected_share, 4),
        "attended_share": round(times.attended_share, 4),
        "gated": times.gated,
        "active": True,
        "digest": f"{settings.digest} of {settings.digest_tokens}",
        "threads": threads,
        "percentiles_ms": milliseconds,
        "activity": times.activity,
    }
    rows = tuple(
        (text, *(f"{milliseconds[name][rank]:.3f}" for rank in ("p10", "p50", "p90")))
        for name, text in (
            ("dense", "dense attention"),
            ("sparse", "by retrieval, selection included"),
            ("selection", "  of which selection"),
            ("plan", "planning, once a step for all layers"),
        )
    )
    notes = (
        f"one layer, one sequence of {context} tokens: {SHAPE}; {threads} threads",
        f"chosen {times.selected_share:.1%} of the middle blocks, attended to "
        f"{times.attended_share:.1%} of the tokens",
        f"ratio {ratios['p50']:.3f} at the median, {ratios['p10']:.3f} at the fastest tenth",
        "random keys: this measures time, not quality; blocks are not offloaded in this version",
    )
    columns = ("milliseconds a layer", "p10", "median", "p90")
    return Report("decode", columns, rows, figures, notes)
