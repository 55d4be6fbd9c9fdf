"""Write policies: a committed block is written to a lower tier at once, at the last moment, or
after evidence of reuse.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from kvrecall.block import BlockKey
from kvrecall.config import PoolTerms, Watermarks
from kvrecall.pool.host import Block
from kvrecall.pool.tier import Tier

STORE_TRIES = 3
"""Number of failed attempts after which a block is no longer stored below."""
_DUE_AT_ONCE = 512
_REMEMBER = 131_072  # keys; about 20 MB
_LIKELY = 0.5  # chance of being used again from which a block is written at first sight
_PAUSE_S = 1.0  # after the remote tier took nothing


class WritePolicy:
    """Decides which blocks of the host to store below, and when. This one stores none.

    Owner: one pool's writer; used under the pool's lock; never waits. The writer skips blocks that
    are stored already, or being stored, and stores flushed blocks whatever the policy says.
    """

    unwritten_bytes = 0

    def __contains__(self, key: BlockKey) -> bool:
        """Whether the block is dirty: its write is pending."""
        return False

    def committed(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Called when blocks become visible; returns those to store now."""
        return ()

    def touched(
        self, chain: Sequence[BlockKey], hanging: Sequence[BlockKey] = ()
    ) -> Sequence[BlockKey]:
        """Called when a request looks up ``chain`` and what hangs on it; returns keys to store now
        if the host has them."""
        return ()

    def recalled(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Called when unstored blocks are in use; returns those to store now."""
        return ()

    def leaving(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Called before unstored blocks are evicted; returns those to store first."""
        return ()

    def due(self, blocks: Mapping[BlockKey, Block], host_bytes: int) -> Sequence[Block]:
        """Returns further blocks to store now. Called repeatedly."""
        return ()

    def settled(self, key: BlockKey) -> None:
        """Called when the block was stored, or has left the host."""

    def rest(self, blocks: Mapping[BlockKey, Block]) -> Sequence[Block]:
        """Returns blocks to store before the pool closes."""
        return ()

    def pause(self) -> None:
        """Called when the tier accepted none of the due blocks."""


class WriteThrough(WritePolicy):
    def committed(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return blocks

    def recalled(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return blocks


class WriteBack(WritePolicy):
    """Stores every block when it is about to leave the host or too much is unwritten; then the
    least recently used first, until the low watermark."""

    def __init__(self, marks: Watermarks) -> None:
        self._marks = marks
        self._sizes: OrderedDict[BlockKey, int] = OrderedDict()  # the least recently used first
        self._writing = False

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._sizes

    def committed(self, blocks: Sequence[Block]) -> Sequence[Block]:
        for block in reversed(blocks):  # of a chain the end is the oldest
            if block.key not in self._sizes and not block.stored:
                self._sizes[block.key] = block.slot_bytes
                self.unwritten_bytes += block.slot_bytes
        return ()

    def touched(
        self, chain: Sequence[BlockKey], hanging: Sequence[BlockKey] = ()
    ) -> Sequence[BlockKey]:
        for key in (*hanging, *reversed(chain)):
            if key in self._sizes:
                self._sizes.move_to_end(key)
        return ()

    def leaving(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return [block for block in blocks if block.tries < STORE_TRIES]

    def due(self, blocks: Mapping[BlockKey, Block], host_bytes: int) -> Sequence[Block]:
        if self.unwritten_bytes > self._marks.high * host_bytes:
            self._writing = True
        if not self._writing:
            return ()
        surplus = self.unwritten_bytes - self._marks.low * host_bytes
        found: list[Block] = []
        left_alone: list[BlockKey] = []
        for block in map(blocks.__getitem__, self._sizes):
            if surplus <= 0 or len(found) == _DUE_AT_ONCE:
                break
            if block.tries >= STORE_TRIES:
                left_alone.append(block.key)
                continue
            surplus -= block.slot_bytes
            if not block.io_refs:
                found.append(block)
        else:
            self._writing = surplus > 0
        for key in left_alone:
            self.settled(key)
        return found

    def settled(self, key: BlockKey) -> None:
        nbytes = self._sizes.pop(key, None)
        if nbytes is not None:
            self.unwritten_bytes -= nbytes

    def rest(self, blocks: Mapping[BlockKey, Block]) -> Sequence[Block]:
        return [blocks[key] for key in self._sizes]


class RemoteWriteBack(WriteBack):
    """Writes each block to the remote tier when it is about to leave the host, the pool closes, or
    too much is dirty. A block is offered to the remote tier once: a block that it refuses is never
    stored there, because nothing waits for it."""

    def __init__(self, remote: Tier, marks: Watermarks, monotonic: Callable[[], float]) -> None:
        super().__init__(marks)
        self._remote = remote
        self._monotonic = monotonic
        self._not_before = float("-inf")

    def leaving(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return self._lacking([block for block in blocks if block.key in self])

    def due(self, blocks: Mapping[BlockKey, Block], host_bytes: int) -> Sequence[Block]:
        if self._monotonic() < self._not_before:
            return ()
        return self._lacking(super().due(blocks, host_bytes))

    def rest(self, blocks: Mapping[BlockKey, Block]) -> Sequence[Block]:
        idle = [block for block in super().rest(blocks) if not block.io_refs]
        return self._lacking(idle)[:_DUE_AT_ONCE]

    def pause(self) -> None:
        self._not_before = self._monotonic() + _PAUSE_S

    def _lacking(self, blocks: Sequence[Block]) -> list[Block]:
        """Blocks not known to be in the remote tier; the others are settled."""
        lacking: list[Block] = []
        for block in blocks:
            if self._remote.contains(block.key):
                self.settled(block.key)
            else:
                lacking.append(block)
        return lacking


class WriteSelective(WritePolicy):
    """Stores blocks that a second request looks up, or that the eviction policy considers likely to
    be reused. It remembers the latest ``remember`` keys of requests and committed blocks."""

    def __init__(
        self,
        chance: Callable[[BlockKey], float | None] = lambda key: None,
        remember: int = _REMEMBER,
    ) -> None:
        """``chance``: the probability that a block is used again, None if unknown."""
        self._chance = chance
        self._remember = remember
        self._sights: OrderedDict[BlockKey, int] = OrderedDict()

    def committed(self, blocks: Sequence[Block]) -> Sequence[Block]:
        for block in blocks:
            self._sights.setdefault(block.key, 1)
        self._forget()
        sights, chance = self._sights, self._chance
        return [b for b in blocks if sights.get(b.key, 0) > 1 or (chance(b.key) or 0.0) >= _LIKELY]

    def touched(
        self, chain: Sequence[BlockKey], hanging: Sequence[BlockKey] = ()
    ) -> Sequence[BlockKey]:
        sights = self._sights
        again: list[BlockKey] = []
        for key in (*chain, *hanging):
            if key in sights:
                sights[key] = 2
                sights.move_to_end(key)
                again.append(key)
            else:
                sights[key] = 1
        self._forget()
        return again

    def recalled(self, blocks: Sequence[Block]) -> Sequence[Block]:
        return [block for block in blocks if self._sights.get(block.key, 0) > 1]

    def _forget(self) -> None:
        while len(self._sights) > self._remember:
            self._sights.popitem(last=False)


def make_write_policy(terms: PoolTerms, chance: Callable[[BlockKey], float | None]) -> WritePolicy:
    if terms.write_policy == "back":
        return WriteBack(terms.unwritten_marks)
    if terms.write_policy == "selective":
        return WriteSelective(chance)
    return WriteThrough()
