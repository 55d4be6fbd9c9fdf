"""The options of ``kvrecall bench needle``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrecall.bench.needle.papers import SEED, Syllabus
from kvrecall.bench.needle.prompts import Manner
from kvrecall.bench.needle.tasks import TASKS
from kvrecall.errors import ConfigError, KvrecallError

if TYPE_CHECKING:
    from kvrecall.retrieval.settings import RetrievalSettings

PLOT = Path("var/needle.png")
KEY = "OPENAI_API_KEY"
_RETRIEVAL = "Retrieval"
_SERVERS = "Servers instead of a local model"
_OUT = "What is written"


def _option(text: str, panel: str | None = None, *names: str, **bounds: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **bounds)


def needle(
    model: Annotated[
        str | None, _option("Model folder; with --endpoint its name there. Default: the example.")
    ] = None,
    lengths: Annotated[str, _option("Tokens of the prompts, such as 4K,16K,65536.")] = "2K,8K",
    tasks: Annotated[str, _option("Some of single, multikey, several, values, chain, count.")] = (
        ",".join(TASKS)
    ),
    samples: Annotated[int, _option("Questions a task and length.", min=1)] = 16,
    documents: Annotated[
        int | None, _option("Texts a length at most. Default: one for eight of each task.", min=1)
    ] = None,
    depths: Annotated[int, _option("Parts of the text told apart.", min=1, max=50)] = 10,
    seed: Annotated[int, _option("Another seed makes other texts.")] = SEED,
    ask: Annotated[
        Manner | None,
        _option("recall: as recall-tiny was trained; instruct: plain language. Default: by model."),
    ] = None,
    share: Annotated[
        str,
        _option("Share of the middle blocks chosen; several are compared: 0.2,0.05.", _RETRIEVAL),
    ] = "0.2",
    digest: Annotated[str, _option("bounds, deviation or mean.", _RETRIEVAL)] = "bounds",
    digest_tokens: Annotated[
        str,
        _option("Keys to a digest; several are compared: 16,8. Default: by the share.", _RETRIEVAL),
    ] = "",
    least: Annotated[
        int,
        _option(
            "So many blocks are chosen, whatever the share. 0: by the share.", _RETRIEVAL, min=0
        ),
    ] = 0,
    target_mass: Annotated[
        float,
        _option("Only as many blocks as hold this share of estimated attention.", _RETRIEVAL),
    ] = 1.0,
    estimate_rest: Annotated[
        bool, _option("Estimate what is not chosen instead of leaving it out.", _RETRIEVAL)
    ] = False,
    init: Annotated[int, _option("First tokens that always take part.", _RETRIEVAL)] = 128,
    local: Annotated[int, _option("Last tokens that always take part.", _RETRIEVAL)] = 256,
    dense_boundary: Annotated[int, _option("Shorter sequences stay dense.", _RETRIEVAL)] = 512,
    dense_layers: Annotated[
        int, _option("First layers that attend to everything; 0 is the hard case.", _RETRIEVAL)
    ] = 0,
    endpoint: Annotated[
        str | None, _option("URL of an OpenAI-compatible server to measure.", _SERVERS)
    ] = None,
    dense_endpoint: Annotated[
        str | None, _option("URL of one that attends densely, to compare with.", _SERVERS)
    ] = None,
    plot: Annotated[Path | None, _option(f"Heat map (PNG). Default: {PLOT}.", _OUT)] = None,
    records: Annotated[
        Path | None, _option("Every question and reply, lines of JSON.", _OUT)
    ] = None,
    json: Annotated[bool, _option("Print only the line of JSON.", _OUT, "--json")] = False,
) -> None:
    """Does the model still answer? Facts in long texts, asked densely and by retrieval in one run.

    A local model is started once, computes every text once, and answers every question densely and
    with each share. Fails if retrieval was to act and chose no block. The key of an --endpoint is
    taken from OPENAI_API_KEY.
    """
    from kvrecall.bench.needle.command import Keep, Servers, Wanted, measure_needle
    from kvrecall.retrieval.settings import RetrievalSettings

    try:
        if dense_endpoint and not endpoint:
            raise ConfigError("--dense-endpoint is the other side of --endpoint; give both")
        servers = Servers(endpoint, dense_endpoint, os.environ.get(KEY)) if endpoint else None
        wanted = Wanted(
            model=model,
            syllabus=Syllabus(_lengths(lengths), _names(tasks), samples, documents, seed),
            variants=_variants(
                RetrievalSettings(
                    init_tokens=init,
                    local_tokens=local,
                    dense_boundary=dense_boundary,
                    offload_boundary=2**40,
                    dense_layers=dense_layers,
                    gate=False,
                    target_mass=target_mass,
                    estimate_rest=estimate_rest,
                    digest=digest,
                    least_blocks=least,
                ),
                _shares(share),
                _sizes(digest_tokens),
            ),
            bins=depths,
            manner=ask,
            servers=servers,
        )
        keep = Keep(plot or PLOT, records, must_plot=plot is not None)
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _lengths(text: str) -> tuple[int, ...]:
    """``4K`` is 4,096."""
    lengths = []
    for name in _names(text):
        number, scale = (name[:-1], 1024) if name[-1] in "kK" else (name, 1)
        if not number.isdigit():
            raise ConfigError(f"--lengths: {name!r} is no number of tokens; write 4K or 4096")
        lengths.append(int(number) * scale)
    return tuple(lengths)


def _shares(text: str) -> tuple[float, ...]:
    shares = []
    for name in _names(text):
        try:
            value = float(name)
        except ValueError:
            raise ConfigError(f"--share: {name!r} is no number") from None
        if not 0 < value <= 1:
            raise ConfigError(f"--share: {name} is not in (0, 1]; 0.2 chooses a fifth")
        shares.append(value)
    if not shares:
        raise ConfigError("--share: name at least one, such as 0.2")
    return tuple(shares)


def _sizes(text: str) -> tuple[int, ...]:
    names = _names(text)
    for name in names:
        if not name.isdigit() or not int(name) or 128 % int(name):
            raise ConfigError(f"--digest-tokens: {name!r} does not divide a block of 128 tokens")
    return tuple(map(int, names))


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
