"""The KV groups of a simulated model: which records a hit needs, and which a request leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvrecall.block import BlockKey
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


class GroupRecord(NamedTuple):
    """A block of a group. ``hangs``: it is of another group than the chain."""

    key: BlockKey
    parent: BlockKey | None
    depth: int
    nbytes: int
    hangs: bool


class GroupLayout:
    """The records of a model's groups, named by the keys of the trace: those of the chain, and of
    the other groups."""

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self.chain = groups[0]
        self._others = [(group, dict[BlockKey, BlockKey]()) for group in groups[1:]]

    def of_chain(self, chain: Sequence[BlockKey], boundary: int) -> Sequence[BlockKey]:
        """What a hit of ``boundary`` blocks needs of ``chain`` itself."""
        needed = self.chain.needed(boundary)
        return chain[needed.start : needed.stop]

    def beside(self, chain: Sequence[BlockKey], boundary: int) -> list[tuple[GroupSpec, BlockKey]]:
        """What a hit of ``boundary`` blocks of ``chain`` needs of the other groups."""
        return [
            (group, self._key(number, chain[place]))
            for number, (group, _) in enumerate(self._others)
            for place in group.needed(boundary)
        ]

    def missed(self, chain: Sequence[BlockKey], hit: int, reach: int) -> list[BlockKey]:
        """What would have let a request hit as far as the chain is present: the windows there, and
        any state that was there."""
        found = []
        for number, (group, _) in enumerate(self._others):
            is_state = group.kind is CacheKind.STATE
            places = range(hit, reach) if is_state else group.needed(reach)
            found += [self._key(number, chain[place]) for place in places]
        return found

    def records(self, chain: Sequence[BlockKey], hit: int) -> Iterator[GroupRecord]:
        """What a request leaves in the tiers, each after its parent: the chain, what its hit used,
        and what each group keeps of the rest."""
        places: dict[int, list[int]] = {}
        for number, (group, _) in enumerate(self._others):
            for place in (*group.needed(hit), *group.kept(hit, len(chain))):
                places.setdefault(place, []).append(number)
        parent: BlockKey | None = None
        first = self.chain.needed(hit).start
        for depth, key in enumerate(chain):
            if depth >= first:
                yield GroupRecord(key, parent, depth, self.chain.nbytes, False)
            for number in places.get(depth, ()):
                nbytes = self._others[number][0].nbytes
                yield GroupRecord(self._key(number, key), key, depth + 1, nbytes, True)
            parent = key

    def _key(self, number: int, key: BlockKey) -> BlockKey:
        made = self._others[number][1]
        if key not in made:
            made[key] = BlockKey(bytes([number]) + key)
        return made[key]
