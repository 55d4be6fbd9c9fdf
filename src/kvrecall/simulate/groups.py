"""The KV groups of a simulated model: which records a hit of each needs, and which it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from kvrecall.config import parse_size
from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind
from kvrecall.simulate.trace import BLOCK_TOKENS

_STEP_TOKENS = 8192
_UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_COUNTS = {"full": (1,), "window": (2,), "chunk": (2,), "state": (1, 2)}  # of what follows


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The records of the layers of one ``kind``. ``tokens``: of a window or chunk, how far it
    reaches; of a recurrent state, between two that are kept. ``nbytes``: of a block of the trace,
    or of one state."""

    kind: CacheKind
    tokens: int
    nbytes: int

    def __str__(self) -> str:
        """As in ``--groups``."""
        reach = "" if self.kind is CacheKind.FULL else f":{self.tokens}"
        unit = next((u for u in _UNITS if self.nbytes % _UNITS[u] == 0), "B")
        return f"{self.kind}{reach}:{self.nbytes // _UNITS[unit]}{unit}"

    def needed(self, boundary: int) -> range:
        """The places whose records a hit of ``boundary`` blocks needs."""
        return self.kind.needed(self.tokens, boundary * BLOCK_TOKENS, BLOCK_TOKENS)

    def kept(self, start: int, length: int) -> range | list[int]:
        """The places whose records a request saves that computes blocks from ``start`` on. A state
        is kept at the end of each step, and of the prompt."""
        if self.kind is not CacheKind.STATE:
            return range(start, length)
        step = max(1, self.tokens // BLOCK_TOKENS)
        places = list(range(start + step - 1, length, step))
        if length > start and (not places or places[-1] != length - 1):
            places.append(length - 1)
        return places


BLOCKS = (GroupSpec(CacheKind.FULL, 0, 1),)
"""A model of one group, counted in blocks instead of bytes."""


def parse_groups(text: str) -> tuple[GroupSpec, ...]:
    """Groups of ``full:SIZE,window:TOKENS:SIZE,chunk:TOKENS:SIZE,state[:TOKENS]:SIZE``; the first
    is the chain, on which the others hang: the full one, or the first window or chunk. Raises
    ConfigError."""
    groups: list[GroupSpec] = []
    for item in text.split(","):
        kind, *more = (part.strip() for part in item.split(":"))
        counts = _COUNTS.get(kind)
        if counts is None or len(more) not in counts:
            raise ConfigError(
                f"--groups: {item!r} is not full:SIZE, window:TOKENS:SIZE, chunk:TOKENS:SIZE or "
                "state:TOKENS:SIZE"
            )
        tokens = 0 if kind == CacheKind.FULL else _STEP_TOKENS
        if len(more) == 2:
            if not more[0].isdecimal() or not 0 < int(more[0]) < 1 << 40:
                raise ConfigError(f"--groups: {item!r}: {more[0]!r} is not a number of tokens")
            tokens = int(more[0])
        nbytes = parse_size(more[-1], f"--groups: {kind}", 1)
        if nbytes <= 0:
            raise ConfigError(f"--groups: {item!r}: the size must be more than 0")
        groups.append(GroupSpec(CacheKind(kind), tokens, nbytes))
    kinds = [group.kind for group in groups]
    if kinds.count(CacheKind.FULL) > 1 or set(kinds) == {CacheKind.STATE}:
        raise ConfigError(
            f"--groups: {text!r} must name one full group, on which the others hang, or none and a "
            "window or chunk"
        )
    return tuple(sorted(groups, key=lambda group: list(CacheKind).index(group.kind)))
