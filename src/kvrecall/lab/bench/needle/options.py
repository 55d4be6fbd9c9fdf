"""What can be asked of ``kvrecall bench needle``, and how what is written is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.errors import ConfigError
from kvrecall.lab.bench.needle.prompts import Manner

PLOT = Path("var/needle.png")
_RETRIEVAL = "Retrieval"
_SERVERS = "Servers instead of a local model"
_OUT = "What is written"


def _option(text: str, panel: str | None = None, *names: str, **bounds: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **bounds)


Model = Annotated[
    str | None, _option("Model folder; with --endpoint its name there. Default: the example.")
]
Lengths = Annotated[str, _option("Tokens of the prompts, such as 4K,16K,65536.")]
Tasks = Annotated[str, _option("Some of single, multikey, several, values, chain, count.")]
Samples = Annotated[int, _option("Questions a task and length.", min=1)]
Documents = Annotated[
    int | None, _option("Texts a length at most. Default: one for eight of each task.", min=1)
]
Depths = Annotated[int, _option("Parts of the text told apart.", min=1, max=50)]
Seed = Annotated[int, _option("Another seed makes other texts.")]
Ask = Annotated[
    Manner | None,
    _option("recall: as recall-tiny was trained; instruct: plain language. Default: by model."),
]
Share = Annotated[
    str, _option("Share of the middle blocks chosen; several are compared: 0.2,0.05.", _RETRIEVAL)
]
Digest = Annotated[str, _option("bounds or mean.", _RETRIEVAL)]
DigestTokens = Annotated[
    str,
    _option("Keys to a digest; several are compared: 16,8. Default: by the share.", _RETRIEVAL),
]
Least = Annotated[
    int,
    _option("So many blocks are chosen, whatever the share. 0: by the share.", _RETRIEVAL, min=0),
]
Init = Annotated[int, _option("First tokens that always take part.", _RETRIEVAL)]
Local = Annotated[int, _option("Last tokens that always take part.", _RETRIEVAL)]
DenseBoundary = Annotated[int, _option("Shorter sequences stay dense.", _RETRIEVAL)]
DenseLayers = Annotated[
    int, _option("First layers that attend to everything; 0 is the hard case.", _RETRIEVAL)
]
MeasuredServer = Annotated[
    str | None, _option("URL of an OpenAI-compatible server to measure.", _SERVERS)
]
DenseServer = Annotated[
    str | None, _option("URL of one that attends densely, to compare with.", _SERVERS)
]
Plot = Annotated[Path | None, _option(f"Heat map (PNG). Default: {PLOT}.", _OUT)]
Records = Annotated[Path | None, _option("Every question and reply, lines of JSON.", _OUT)]
Json = Annotated[bool, _option("Print only the line of JSON.", _OUT, "--json")]


def names_of(text: str) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def lengths_of(text: str) -> tuple[int, ...]:
    """Tokens; ``4K`` is 4,096. Raises ConfigError."""
    lengths = []
    for name in names_of(text):
        number, scale = (name[:-1], 1024) if name[-1] in "kK" else (name, 1)
        if not number.isdigit():
            raise ConfigError(f"--lengths: {name!r} is no number of tokens; write 4K or 4096")
        lengths.append(int(number) * scale)
    return tuple(lengths)


def shares_of(text: str) -> tuple[float, ...]:
    """At least one, each in (0, 1]. Raises ConfigError."""
    shares = []
    for name in names_of(text):
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


def sizes_of(text: str) -> tuple[int, ...]:
    """Tokens of a digest, each a divisor of 128; maybe none. Raises ConfigError."""
    names = names_of(text)
    for name in names:
        if not name.isdigit() or not int(name) or 128 % int(name):
            raise ConfigError(f"--digest-tokens: {name!r} does not divide a block of 128 tokens")
    return tuple(map(int, names))
