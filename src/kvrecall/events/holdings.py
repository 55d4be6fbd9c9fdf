"""The blocks that a publisher's KV events say it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvrecall.block import TierName
from kvrecall.events.hashes import HashRule, rule_of
from kvrecall.events.wire import BlockHash

_MOST_BLOCKS = 4_000_000  # of one publisher, as many as it can replay: some 350 MB
_MOST_COMING = 1_000_000  # blocks that one engine was sent
_MOST_NAMES, _LONGEST_NAME = 1024, 1024  # of groups, and of stores
_COMING_S = 30.0  # from sending a prompt until its blocks must have been reported
_BITS = {TierName.DEVICE: 1, TierName.HOST: 2, TierName.DISK: 4, TierName.REMOTE: 8}
TIERS = tuple(_BITS)
"""Nearest first."""
_FULL = ("full_attention", "mla_attention", "sink_full_attention", "unknown")
DEVICE, REMOTE = _BITS[TierName.DEVICE], _BITS[TierName.REMOTE]


class Holdings:
    """The blocks that one publisher reports, by tier. Not thread-safe.

    Of a model with several KV groups only those of full attention count: whether the others can
    continue a prefix is the engine's to find out.
    """

    def __init__(self) -> None:
        self._tiers: dict[BlockHash, int] = {}
        self._counts = dict.fromkeys(TIERS, 0)
        self._coming: dict[BlockHash, float] = {}  # to the device, and until when that is believed
        self._partial: set[int] = set()  # groups of windows or states
        self.rule: HashRule | None = None
        self.unknown_rule = False
        self.stores: set[str] = set()

    def __len__(self) -> int:
        return len(self._tiers)

    def blocks(self, tier: TierName) -> int:
        """How many blocks of a tier are known."""
        return self._counts[tier]

    def hashes(self, tier: TierName) -> set[BlockHash]:
        """All known blocks of a tier: for tests."""
        return {one for one, tiers in self._tiers.items() if tiers & _BITS[tier]}

    def mask(self, block: BlockHash, now: float = 0.0) -> int:
        """The tiers of a block, as bits; 0 if it is not known."""
        known = self._tiers.get(block, 0)
        if self._coming and self._coming.get(block, now) > now:
            return known | DEVICE
        return known

    def sent(self, blocks: Iterable[BlockHash], now: float) -> None:
        """The engine was sent a prompt: these blocks are going to be on its device. That is
        believed until its events speak of them, or a while has passed."""
        for block in blocks:
            self._coming.pop(block, None)
            if not self._tiers.get(block, 0) & DEVICE:
                self._coming[block] = now + _COMING_S
        while self._coming and (
            len(self._coming) > _MOST_COMING or next(iter(self._coming.values())) <= now
        ):
            del self._coming[next(iter(self._coming))]

    def forget_sent(self) -> None:
        """What was sent will not be answered."""
        self._coming.clear()

    def stored(self, tier: TierName, blocks: Iterable[BlockHash], group: int | None = None) -> None:
        """Blocks are in a tier, perhaps for long."""
        if group in self._partial:
            return
        bit, tiers = _BITS[tier], self._tiers
        for block in blocks:
            if bit == DEVICE:
                self._coming.pop(block, None)
            known = tiers.get(block, 0)
            if not known & bit and (known or len(tiers) < _MOST_BLOCKS):
                tiers[block] = known | bit
                self._counts[tier] += 1

    def removed(
        self, tier: TierName, blocks: Iterable[BlockHash], group: int | None = None
    ) -> None:
        """Blocks are not in a tier, and perhaps never were."""
        if group in self._partial:
            return
        bit, tiers = _BITS[tier], self._tiers
        for block in blocks:
            if bit == DEVICE:
                self._coming.pop(block, None)
            known = tiers.get(block, 0)
            if known & bit:
                self._counts[tier] -= 1
                if known == bit:
                    del tiers[block]
                else:
                    tiers[block] = known & ~bit

    def clear(self) -> None:
        """Nothing is known any more, apart from how the engine hashes."""
        self._tiers.clear()
        self._counts = dict.fromkeys(TIERS, 0)

    def group_is(self, group: int | None, kind: str | None) -> None:
        """The engine says what layers of a group are."""
        is_partial = group is not None and kind is not None and kind not in _FULL
        if group is not None and is_partial and len(self._partial) < _MOST_NAMES:
            self._partial.add(group)

    def uses_store(self, name: str) -> None:
        """The engine finds there what others have published with this name."""
        if len(self.stores) < _MOST_NAMES and len(name) <= _LONGEST_NAME:
            self.stores.add(name)

    def learn(
        self, first: BlockHash, tokens: Sequence[int], block_size: int, salt: str | None
    ) -> None:
        """Finds out how the engine hashes, from the first block of a prompt and its tokens."""
        rule = self.rule
        if rule is None or rule.block_size != block_size or not rule.fits(first, tokens, salt):
            self.rule = rule_of(first, tokens, block_size, salt)
            self.unknown_rule = self.rule is None


def tier_of(mask: int) -> TierName | None:
    """The nearest of some tiers, given as bits."""
    return next((tier for tier, bit in _BITS.items() if mask & bit), None)
