"""``bench decode``: attention of a decoded token, dense and by retrieval."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import Report, Times, names_in, progress
from kvrecall.errors import ConfigError


def lengths_in(text: str) -> tuple[int, ...]:
    """Tokens, as options give them; ``4K`` is 4,096. Raises ConfigError."""
    lengths = []
    for name in names_in(text):
        number, scale = (name[:-1], 1024) if name[-1] in "kK" else (name, 1)
        if not number.isdigit():
            raise ConfigError(f"{name!r} is not a number of tokens; write 4K or 4096")
        lengths.append(int(number) * scale)
    return tuple(lengths)


def shares_in(text: str) -> tuple[float, ...]:
    """At least one, each in (0, 1]. Raises ConfigError."""
    shares = []
    for name in names_in(text):
        try:
            shares.append(float(name))
        except ValueError:
            raise ConfigError(f"--shares: {name!r} is not a number") from None
        if not 0 < shares[-1] <= 1:
            raise ConfigError(f"--shares: {name} is not in (0, 1]; 0.2 selects a fifth")
    if not shares:
        raise ConfigError("--shares: name at least one, such as 0.2")
    return tuple(shares)


def measure_decode(
    contexts: Annotated[
        str, typer.Option("--contexts", "--context", help="Tokens of the sequence: 16K,65536.")
    ] = "64K",
    shares: Annotated[
        str, typer.Option("--shares", "--share", help="Shares of the middle blocks selected.")
    ] = "0.1",
    digest: Annotated[str, typer.Option(help="bounds or mean.")] = "bounds",
    digest_tokens: Annotated[int, typer.Option(help="Keys per digest; 0: by the share.")] = 0,
    local: Annotated[int, typer.Option(min=1, help="Last tokens always attended to.")] = 1024,
    rounds: Times = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    **settings: Any,
) -> Report:
    """Attention of a decoded token: dense, and by retrieval with its defaults; from
    65,536 tokens on also with the middle blocks off the device. Fails if retrieval does not act, if
    selecting every block differs from dense attention, or if offloaded blocks give another
    result."""
    import torch

    from kvrecall_lab.engines.decode import measure

    if threads is not None:
        torch.set_num_threads(threads)
    threads = torch.get_num_threads()
    settings |= {"digest": digest, "digest_tokens": digest_tokens, "local_tokens": local}
    found = []
    for context in lengths_in(contexts):
        for share in shares_in(shares):
            progress(f"{context:,} tokens, a share of {share}")
            found.append(measure(context, RetrievalSettings(topk_share=share, **settings), rounds))
    rows = tuple(
        (
            f"{one['context']:,}",
            f"{one['selected_share']:.0%}",
            f"{one['attended_share']:.1%}",
            f"{one['dense_ms']:.2f}",
            f"{one['sparse_ms']:.2f}",
            f"{one['attention_ratio']:.2f}",
            f"{one['offload_ratio']:.2f}" if "offload_ratio" in one else "",
        )
        for one in found
    )
    columns = ("context", "blocks chosen", "tokens attended to", "dense, ms a layer", "retrieval")
    notes = (
        "one layer, one sequence: 16 query heads, 4 KV heads of 128, bf16, blocks of 128 tokens; "
        f"{threads} threads, {'processor' if threads == 1 else 'wall'} time, medians",
        "random keys: this measures time, not quality",
    )
    return Report("decode", columns, rows, {**found[-1], "threads": threads, "all": found}, notes)
