"""Lengths of sequences as options give them."""

from __future__ import annotations

from kvrecall.bench.report import names_in
from kvrecall.errors import ConfigError


def lengths_in(text: str) -> tuple[int, ...]:
    """Tokens; ``4K`` is 4,096. Raises ConfigError."""
    lengths = []
    for name in names_in(text):
        number, scale = (name[:-1], 1024) if name[-1] in "kK" else (name, 1)
        if not number.isdigit():
            raise ConfigError(f"--lengths: {name!r} is not a number of tokens; write 4K or 4096")
        lengths.append(int(number) * scale)
    return tuple(lengths)
