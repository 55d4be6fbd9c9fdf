"""The state of one acquisition."""

from __future__ import annotations

from kvrecall.block import TierName
from kvrecall.pool.base import Recall, RecallState
from kvrecall.pool.host import Block

_PENDING = Recall(RecallState.PENDING)


class Ticket:
    """Blocks of one recall, leased as they arrive. Only its pool uses it, under its lock.

    Methods that shorten it return the blocks whose lease the pool has to give back.
    """

    __slots__ = ("_blocks", "_missing", "_result", "deadline", "tiers")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self._blocks: list[Block | None] = []
        self.tiers: list[TierName] = []
        self._missing = 0
        self._result: Recall | None = None

    @property
    def is_settled(self) -> bool:
        """Whether its result stands (or nobody waits for it any more)."""
        return self._result is not None

    @property
    def is_waiting(self) -> bool:
        """Whether some block is not there yet."""
        return self._missing > 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, tier: TierName, block: Block | None) -> None:
        """The next block of the chain; None if it is still below."""
        self.tiers.append(tier)
        self._blocks.append(block)
        self._missing += block is None

    def waiting(self) -> list[int]:
        """Places of blocks that are not there."""
        return [place for place, block in enumerate(self._blocks) if block is None]

    def fill(self, place: int, block: Block) -> bool:
        """A block arrived. False if the recall does not need it any more."""
        if place >= len(self._blocks):
            return False
        self._blocks[place] = block
        self._missing -= 1
        return True

    def cut(self, place: int) -> list[Block]:
        """The block at ``place`` cannot come: the recall ends before it."""
        beyond = self._blocks[place:]
        del self._blocks[place:]
        del self.tiers[place:]
        self._missing -= sum(block is None for block in beyond)
        return [block for block in beyond if block is not None]

    def settle(self, now: float) -> tuple[Recall, list[Block]]:
        """The recall as it stands at ``now``."""
        if self._result is not None:
            return self._result, []
        if self._missing and now < self.deadline:
            return _PENDING, []
        beyond = self.cut(self.waiting()[0]) if self._missing else []
        offsets = tuple(block.offset for block in self._blocks if block is not None)
        self._result = Recall(RecallState.READY, offsets, tuple(self.tiers))
        return self._result, beyond

    def give_up(self) -> list[Block]:
        """Nobody waits any more."""
        self._result = _PENDING if self._result is None else self._result
        return self.cut(0)
