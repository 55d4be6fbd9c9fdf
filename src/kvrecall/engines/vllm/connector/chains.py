"""The token ids of recent prompts and answers, to tell at which token a new prompt leaves them."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvrecall.block import BlockKey

MOST_BYTES = 32 << 20
"""What a memory of chains may take: five million tokens in blocks of 128, 1.5 in those of 16."""

LEAST_COMMON = 8
"""Tokens that a prompt shares with one it is said to leave: fewer are a chat template's."""

_BLOCK_BYTES = 300  # of a block's key, the entry that finds it, and their objects
_SEGMENT_BYTES = 1400  # most of it is the list of what leaves a block
_MOST_BRANCHES = 32  # that leave one block, the latest ones
_PLACE_BITS = 24


@dataclass(slots=True, eq=False)
class _Segment:
    """Blocks that a request was the first to have behind ``parent``: their ``keys``, and their
    tokens with those behind the last whole block. ``owner``: the request."""

    parent: BlockKey
    keys: list[BlockKey]
    tokens: array[int]
    owner: str

    @property
    def nbytes(self) -> int:
        named = _SEGMENT_BYTES + len(self.owner)  # which may be a client's, of megabytes
        return named + len(self.keys) * _BLOCK_BYTES + 4 * len(self.tokens)


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a prompt leaves the nearest known chain: ``common`` tokens of the block are the same,
    and ``ends`` if the chain ends there."""

    common: int
    ends: bool


class Chains:
    """The chains of the latest requests, without those of their tokens that others had before.

    The key of a block contains the salt of its request, and ``root_of`` names the beginning of a
    chain by it, so what is found behind a key is of the same tenant. Not thread-safe. The oldest
    segments are forgotten beyond ``most_bytes``; those that explained a miss count as new.
    """

    def __init__(self, block_size: int, most_bytes: int = MOST_BYTES) -> None:
        self._size = block_size
        self._most = most_bytes
        self._nbytes = 0
        self._last = 0
        self._segments: OrderedDict[int, _Segment] = OrderedDict()
        self._places: dict[BlockKey, int] = {}  # of a block: its segment, and index there
        self._branches: dict[BlockKey, deque[int]] = {}  # segments that begin behind a block

    @property
    def nbytes(self) -> int:
        """Estimate of the memory in use."""
        return self._nbytes

    def add(
        self, parent: BlockKey, keys: Sequence[BlockKey], tokens: Sequence[int], owner: str
    ) -> int:
        """Adds blocks behind ``parent``, with the tokens from the first of them on. Returns the
        number of the segment that they are; 0 without tokens."""
        if not tokens:
            return 0
        self._last = number = self._last + 1
        segment = _Segment(parent, list(keys), array("i", tokens), owner)
        self._segments[number] = segment
        for place, key in enumerate(segment.keys):
            self._places[key] = number << _PLACE_BITS | place
        branches = self._branches.get(parent)
        if branches is None:
            branches = self._branches[parent] = deque(maxlen=_MOST_BRANCHES)
        branches.append(number)
        self._nbytes += segment.nbytes
        while self._nbytes > self._most:
            self._forget()
        return number

    def extend(self, number: int, keys: Sequence[BlockKey], tokens: Sequence[int]) -> bool:
        """Adds the blocks of a segment's request from the first one on of which the segment has no
        key, and the tokens behind its own. False, and no effect, if it is forgotten."""
        segment = self._segments.get(number)
        if segment is None:
            return False
        self._nbytes -= segment.nbytes
        for place, key in enumerate(keys, len(segment.keys)):
            self._places[key] = number << _PLACE_BITS | place
        segment.keys += keys
        segment.tokens.extend(tokens)
        self._nbytes += segment.nbytes
        self._segments.move_to_end(number)
        while self._nbytes > self._most:
            self._forget()
        return True

    def owner(self, key: BlockKey) -> str | None:
        """The request that was the first to have this block; None if it is not known."""
        found = self._places.get(key)
        return None if found is None else self._segments[found >> _PLACE_BITS].owner

    def parting(self, parent: BlockKey, tokens: Sequence[int]) -> Parting | None:
        """Compares the ``tokens`` of a block behind ``parent`` with those known there, of which the
        nearest counts. None if there are none."""
        best: Parting | None = None
        found = -1
        for number, start in self._behind(parent):
            known = self._segments[number].tokens[start : start + self._size]
            common = _common(tokens, known)
            one = Parting(common, common == len(known))
            # Of those as near one that goes on: a prompt's chain is known with its answer, too.
            if best is None or (one.common, best.ends) > (best.common, one.ends):
                best, found = one, number
        if best is not None:
            self._segments.move_to_end(found)
        return best

    def _behind(self, parent: BlockKey) -> list[tuple[int, int]]:
        """What is known behind a block: segments, and where in their tokens."""
        found = [(number, 0) for number in self._branches.get(parent, ())]
        place = self._places.get(parent)
        if place is not None:
            number = place >> _PLACE_BITS
            start = ((place & (1 << _PLACE_BITS) - 1) + 1) * self._size
            if start < len(self._segments[number].tokens):
                found.append((number, start))
        return found

    def _forget(self) -> None:
        number, segment = self._segments.popitem(last=False)
        self._nbytes -= segment.nbytes
        for key in segment.keys:
            if self._places.get(key, 0) >> _PLACE_BITS == number:
                del self._places[key]
        branches = self._branches.get(segment.parent)
        if branches is not None and number in branches:
            branches.remove(number)
            if not branches:
                del self._branches[segment.parent]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for place, (one, other) in enumerate(zip_longest(first, second)):
        if one != other:
            return place
    return len(first)
