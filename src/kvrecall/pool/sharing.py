"""Which blocks of the host the remote tier is still owed, where it is written back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvrecall.block import BlockKey
from kvrecall.config import Watermarks
from kvrecall.pool.host import Block
from kvrecall.pool.tier import Tier
from kvrecall.pool.writing import WriteBack

_AT_ONCE = 512
_PAUSE_S = 1.0  # after the remote tier took nothing


class Sharing:
    """Owes the remote tier each block that was committed, until the block is about to leave the
    host, the pool closes, or too much is owed; then it is offered once. What the remote tier does
    not take then, it never gets: nothing here waits for it.

    Without a ``remote`` tier that is written back it owes nothing: every put goes to all tiers.
    Owner: one pool's traffic, under the pool's lock.
    """

    def __init__(
        self, remote: Tier | None, marks: Watermarks, monotonic: Callable[[], float]
    ) -> None:
        """Of the host, ``marks.high`` may be owed; more is offered, until it is ``marks.low``."""
        self._remote = remote
        self._order = WriteBack(marks)
        self._monotonic = monotonic
        self._not_before = float("-inf")

    @property
    def is_on(self) -> bool:
        return self._remote is not None

    def committed(self, blocks: Sequence[Block]) -> None:
        if self.is_on:
            self._order.committed(blocks)

    def asked(self, chain: Sequence[BlockKey]) -> None:
        """A request asked for ``chain``: it is owed longer than what nobody asks for."""
        if self.is_on:
            self._order.asked(chain)

    def owes(self, key: BlockKey) -> bool:
        """Whether the block is in the host and was not offered to the remote tier."""
        return key in self._order

    def settled(self, key: BlockKey) -> None:
        """The remote tier has the block, was offered it, or it has left the host."""
        self._order.settled(key)

    def leaving(self, blocks: Sequence[Block]) -> list[Block]:
        """Of ``blocks``, which are about to be evicted, those to offer before."""
        return self._lacking([block for block in blocks if block.key in self._order])

    def due(self, blocks: Mapping[BlockKey, Block], host_bytes: int) -> list[Block]:
        """Those to offer now because too much is owed, the least recently used first."""
        if not self.is_on or self._monotonic() < self._not_before:
            return []
        return self._lacking(self._order.due(blocks, host_bytes))

    def rest(self, blocks: Mapping[BlockKey, Block]) -> list[Block]:
        """Those to offer before the pool closes, some at a time."""
        idle = [block for key in self._order.rest() if not (block := blocks[key]).pins]
        return self._lacking(idle)[:_AT_ONCE]

    def refused(self) -> None:
        """The remote tier took nothing of what was due."""
        self._not_before = self._monotonic() + _PAUSE_S

    def _lacking(self, blocks: Sequence[Block]) -> list[Block]:
        """Those that are not known to be in the remote tier; the others are settled."""
        lacking: list[Block] = []
        for block in blocks:
            if self._remote is not None and self._remote.contains(block.key):
                self.settled(block.key)
            else:
                lacking.append(block)
        return lacking
