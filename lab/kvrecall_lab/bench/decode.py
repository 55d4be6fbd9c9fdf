"""``bench decode`` and ``regimes``: attention of a decoded token, dense and by retrieval.

``decode`` times one length and share in detail. ``regimes`` checks over many whether retrieval is
ever slower than dense attention, as an engine would serve them: where the gate leaves a sequence
dense retrieval costs its planning, elsewhere its selection, loading and attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrecall.attention.selection import Gate, split_of
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import (
    Report,
    Threads,
    Times,
    cells,
    lengths_in,
    percentiles,
    progress,
)
from kvrecall.errors import KvrecallError

if TYPE_CHECKING:
    from kvrecall_lab.engines.decode import DecodeTimes

MODEL_LAYERS = 28
"""A step is planned once for all layers; its cost is shared by as many as Qwen2-7B has."""

SHAPE = "16 query heads, 4 KV heads of 128, bf16, blocks of 128 tokens"

WORST = 1.05
"""Most that attention by retrieval may take, in shares of dense attention's time."""

CONTEXTS = (9216, 10240, 12288, 16384, 24576, 32768, 65536)
SHARES = (0.02, 0.2, 0.6, 1.0)


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
    threads: Threads = None,
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


# -- many lengths and shares ----------------------------------------------------------------


def measure_regimes(
    rounds: Times = 5,
    threads: Threads = None,
    lengths: Annotated[str, typer.Option(help="These only, such as 12K,64K.")] = "",
) -> Report:
    """Attention of a decoded token at many lengths and shares, as an engine serves it, against
    dense; fails where it is slower than 1.05 of dense twice, or never sparse."""
    # Boundaries at 0 (except RetrievalKV's offload boundary), so that the gate alone decides.
    contexts = lengths_in(lengths) or CONTEXTS
    use_threads(threads)
    points: list[dict[str, Any]] = []
    for context in contexts:
        for share in SHARES:
            settings = replace(RetrievalSettings(), dense_boundary=0, topk_share=share)
            if not chooses(context, settings):
                continue  # an engine attends densely here
            best = _time(context, settings, rounds)
            if best["as_served"] > WORST:  # machines are noisy
                best = min(best, _time(context, settings, rounds), key=_as_served)
            progress(f"{context} tokens, share {share}: {best['as_served']:.2f} of dense")
            points.append(best)
    if not points:
        raise KvrecallError(
            f"{max(contexts)} tokens leave no blocks to select from; use a longer context"
        )
    worst = max(points, key=_as_served)
    if worst["as_served"] > WORST:
        raise KvrecallError(
            f"{worst['context']} tokens at share {worst['share']} take "
            f"{worst['as_served']:.2f} of dense attention's time by retrieval; the "
            f"limit is {WORST}"
        )
    figures = {
        "worst_ratio": worst["as_served"],
        "worst_context": worst["context"],
        "worst_share": worst["share"],
        "most": WORST,
        "active": any(not point["gated"] for point in points),
        "regimes": points,
    }
    rows = tuple(
        (
            f"{point['context']:,}",
            str(point["share"]),
            "dense, by the gate" if point["gated"] else "by retrieval",
            f"{point['sparse']:.2f}",
            "" if point["away"] is None else f"{point['away']:.2f}",
            f"{point['as_served']:.2f}",
        )
        for point in points
    )
    columns = ("context", "share", "served", "by retrieval", "off the device", "as served")
    notes = (
        "times of one layer's attention, selection and loading included, in shares of dense",
        f"worst as served: {worst['as_served']:.3f}; the bench fails above {WORST}",
    )
    return Report("regimes", columns, rows, figures, notes)


def _as_served(point: Mapping[str, Any]) -> float:
    return float(point["as_served"])


def _time(context: int, settings: RetrievalSettings, rounds: int) -> dict[str, Any]:
    """One length and share, times in shares of dense attention's: ``as_served``; ``sparse``, as it
    would be without the gate; ``away``, with the middle blocks off the device, if there."""
    from kvrecall_lab.engines import decode

    times = decode.measure_decode(context, settings, rounds)
    dense, sparse, plan = (
        percentiles(values)["p50"] for values in (times.dense, times.sparse, times.plan)
    )
    planned = plan / MODEL_LAYERS / dense
    away = None
    if times.offload is not None:
        away = round(percentiles(times.offload.seconds)["p50"] / dense + planned, 4)
    sparsely = round(sparse / dense + planned, 4)
    return {
        "context": context,
        "share": settings.topk_share,
        "gated": times.gated,
        "sparse": sparsely,
        "away": away,
        "as_served": round(1 + planned, 4) if times.gated else max(sparsely, away or 0.0),
    }
