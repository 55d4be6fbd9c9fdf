"""``kvrecall bench needle`` as it is typed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from kvrecall.errors import ConfigError, KvrecallError
from kvrecall.lab.bench.needle import options
from kvrecall.lab.bench.needle.papers import SEED, Syllabus
from kvrecall.lab.bench.needle.tasks import TASKS

if TYPE_CHECKING:
    from kvrecall.attention.settings import RetrievalSettings

KEY = "OPENAI_API_KEY"
_ALL_TASKS = ",".join(TASKS)


def needle(
    model: options.Model = None,
    lengths: options.Lengths = "2K,8K",
    tasks: options.Tasks = _ALL_TASKS,
    samples: options.Samples = 16,
    documents: options.Documents = None,
    depths: options.Depths = 10,
    seed: options.Seed = SEED,
    ask: options.Ask = None,
    share: options.Share = "0.2",
    digest: options.Digest = "bounds",
    digest_tokens: options.DigestTokens = "",
    least: options.Least = 0,
    init: options.Init = 128,
    local: options.Local = 256,
    dense_boundary: options.DenseBoundary = 512,
    dense_layers: options.DenseLayers = 0,
    endpoint: options.MeasuredServer = None,
    dense_endpoint: options.DenseServer = None,
    plot: options.Plot = None,
    records: options.Records = None,
    json: options.Json = False,
) -> None:
    """Does the model still answer? Facts in long texts, asked densely and by retrieval in one run.

    A local model is started once, computes every text once, and answers every question densely and
    with each share. Fails if retrieval was to act and chose no block. The key of an --endpoint is
    taken from OPENAI_API_KEY.
    """
    from kvrecall.attention.settings import RetrievalSettings
    from kvrecall.lab.bench.needle.command import Keep, Servers, Wanted, measure_needle

    try:
        if dense_endpoint and not endpoint:
            raise ConfigError("--dense-endpoint is the other side of --endpoint; give both")
        servers = Servers(endpoint, dense_endpoint, os.environ.get(KEY)) if endpoint else None
        syllabus = Syllabus(
            options.lengths_of(lengths), options.names_of(tasks), samples, documents, seed
        )
        settings = RetrievalSettings(
            init_tokens=init, local_tokens=local, dense_boundary=dense_boundary,
            offload_boundary=2**40, dense_layers=dense_layers, gate=False, digest=digest,
            least_blocks=least,
        )  # fmt: skip
        variants = _variants(settings, options.shares_of(share), options.sizes_of(digest_tokens))
        wanted = Wanted(model, syllabus, variants, depths, ask, servers)
        keep = Keep(plot or options.PLOT, records, must_plot=plot is not None)
        report = measure_needle(wanted, keep, _say)
    except KvrecallError as error:
        typer.echo(f"kvrecall: {error}", err=True)
        raise typer.Exit(1) from error
    report.print(json)


def _variants(
    first: RetrievalSettings, shares: Sequence[float], sizes: Sequence[int]
) -> tuple[RetrievalSettings, ...]:
    """One a share and size; without sizes, of the project's."""
    return tuple(
        replace(first, topk_share=share, digest_tokens=size)
        for size in sizes or [first.digest_tokens]
        for share in shares
    )


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
