"""``kvrecall bench decode``: attention of a decoded token, dense and by retrieval, in one run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvrecall.attention.gate import Gate
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.attention.split import split_of
from kvrecall.errors import KvrecallError
from kvrecall.lab.bench.report import Report, percentiles

if TYPE_CHECKING:
    from kvrecall.lab.engines.decode import DecodeTimes, OffloadTimes

MODEL_LAYERS = 28
"""A step is planned once for all layers; its cost is shared by as many as Qwen2-7B has."""

SHAPE = "16 query heads, 4 KV heads of 128, bf16, blocks of 128 tokens"


def chooses(context: int, settings: RetrievalSettings) -> bool:
    """Whether there is more to choose from than is chosen; elsewhere no gate makes it sparse."""
    ungated = replace(settings, gate=False)
    return Gate(ungated, token_bytes=1).passes(context, split_of(context, 128, ungated))


def measure_decode_report(
    context: int,
    settings: RetrievalSettings,
    rounds: int,
    threads: int | None,
    cosine: float = 0.9,
) -> Report:
    """Times one layer at ``context`` tokens, past the offload boundary also with the middle blocks
    off the device and queries that resemble the last by ``cosine``.

    Raises KvrecallError if retrieval did not act, does not compute what dense attention computes
    once it may choose every block, or computes something else from recalled blocks.
    """
    import torch

    from kvrecall.lab.engines.decode import measure_decode

    if not chooses(context, settings):
        raise KvrecallError(
            f"--context {context} leaves nothing to choose from: the first {settings.init_tokens} "
            f"and the last {settings.local_tokens} tokens always take part, and between them at "
            f"least {settings.fewest_blocks} blocks; ask for more"
        )
    if threads is not None:
        torch.set_num_threads(threads)
    times = measure_decode(context, settings, rounds, cosine)
    if not times.activity["blocks_selected"]:
        raise KvrecallError("retrieval did not act: no block was chosen; the figures mean nothing")
    if times.whole_error > 0.02:
        raise KvrecallError(
            f"choosing every block differs from dense attention by {times.whole_error:.3f}"
        )
    if times.offload is not None and times.offload.error > 0:
        raise KvrecallError(
            f"blocks recalled to the device give other results, by {times.offload.error:.3g}"
        )
    report = _report(context, settings, times, torch.get_num_threads())
    return report if times.offload is None else _with_offload(report, times, times.offload, cosine)


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
        "digest": f"{settings.digest} of {settings.tokens_a_digest}",
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
        "random keys: this measures time, not quality",
    )
    columns = ("milliseconds a layer", "p10", "median", "p90")
    return Report("decode", columns, rows, figures, notes)


def _with_offload(
    report: Report, times: DecodeTimes, offload: OffloadTimes, cosine: float
) -> Report:
    """The report with what the sequence costs while its middle blocks are off the device."""
    dense = percentiles([second * 1e3 for second in times.dense])
    plan = percentiles([second * 1e3 for second in times.plan])["p50"] / MODEL_LAYERS
    spent = percentiles([second * 1e3 for second in offload.seconds])
    chosen = offload.hits + offload.loaded
    if not chosen:
        raise KvrecallError("offload did not act: no block was recalled; the figures mean nothing")
    hit_rate = offload.hits / chosen
    loaded = offload.bytes_loaded / offload.steps
    figures = {
        **report.figures,
        "offload_ms": round(spent["p50"] + plan, 6),
        "offload_ratio": round((spent["p50"] + plan) / dense["p50"], 4),
        "device_blocks_ratio": round(offload.device_blocks / offload.blocks, 4),
        "cache_hit_rate": round(hit_rate, 4),
        "bytes_loaded_a_step_and_layer": round(loaded),
        "prefetched": offload.prefetched,
        "prefetched_in_vain": offload.vain,
        "query_cosine": cosine,
    }
    row = (
        "the same, middle blocks off the device",
        *(f"{spent[rank]:.3f}" for rank in ("p10", "p50", "p90")),
    )
    notes = (
        *report.notes,
        f"off the device: {offload.device_blocks} of {offload.blocks} blocks held on it; "
        f"successive queries of cosine {cosine}: {hit_rate:.0%} of chosen blocks found in the "
        f"slots, {loaded / 1e6:.1f} MB loaded a step and layer",
    )
    return Report(report.name, report.columns, (*report.rows, row), figures, notes)
