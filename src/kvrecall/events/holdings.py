"""The blocks that a publisher's KV events say it holds, and vLLM's block hashes without vLLM."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import pickle
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import cbor2
import xxhash

from kvrecall.block import TierName
from kvrecall.events.wire import BlockHash, short_hash

_SEED = "vllm-none-hash"
_KEPT_TOKENS = 1024  # that are hashed, and looked up, together
_KEPT = 2048  # times as many: some 30 MB

_MOST_BLOCKS = 4_000_000  # of one publisher, as many as it can replay: some 350 MB
_MOST_COMING = 1_000_000  # blocks that one engine was sent
_MOST_NAMES, _LONGEST_NAME = 1024, 1024  # of groups, and of stores
_COMING_S = 30.0  # from sending a prompt until its blocks must have been reported
_BITS = {TierName.DEVICE: 1, TierName.HOST: 2, TierName.DISK: 4, TierName.REMOTE: 8}
TIERS = tuple(_BITS)
"""Nearest first."""
_FULL = ("full_attention", "mla_attention", "sink_full_attention", "unknown")
DEVICE, REMOTE = _BITS[TierName.DEVICE], _BITS[TierName.REMOTE]


_Extra = tuple[tuple[str, str], ...] | None
_pickled = functools.partial(pickle.dumps, protocol=pickle.HIGHEST_PROTOCOL)
_cbor: Callable[[object], bytes] = functools.partial(cbor2.dumps, canonical=True)


def _sha256(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).digest()


_ALGORITHMS: Mapping[str, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]] = {
    "sha256_cbor": (_cbor, _sha256),
    "sha256": (_pickled, _sha256),
    "xxhash_cbor": (_cbor, xxhash.xxh3_128_digest),
    "xxhash": (_pickled, xxhash.xxh3_128_digest),
}
"""vLLM's ``prefix_caching_hash_algo`` by name: how a block is encoded, and hashed."""


@dataclass(frozen=True, slots=True)
class HashRule:
    """How an engine hashes blocks: its algorithm, and the tokens of a block."""

    algorithm: str
    block_size: int

    def chain(self, tokens: Sequence[int], salt: str | None = None) -> tuple[BlockHash, ...]:
        """The hashes of all whole blocks of a prompt, as vLLM computes them (v1/core/
        kv_cache_utils.py): of the parent's hash, the tokens, and for the first block the salt. The
        root is vLLM's, of PYTHONHASHSEED if that is set."""
        encode, digest = _ALGORITHMS[self.algorithm]
        parent = digest(encode(os.environ.get("PYTHONHASHSEED", _SEED)))
        extra: _Extra = (("cache_salt", salt),) if salt else None
        step = max(1, _KEPT_TOKENS // self.block_size) * self.block_size
        made: list[BlockHash] = []
        for start in range(0, len(tokens) - self.block_size + 1, step):
            try:
                packed = array("q", tokens[start : start + step])
            except OverflowError:  # of no vocabulary
                break
            hashed = _hashed if len(packed) == step else _hashed.__wrapped__
            parent, hashes = hashed(self, parent, packed.tobytes(), extra)
            made += hashes
            extra = None
        return tuple(made)

    def fits(self, first: BlockHash, tokens: Sequence[int], salt: str | None) -> bool:
        """Whether ``first`` is the hash of the first block of ``tokens``."""
        return self.chain(tokens[: self.block_size], salt) == (first,)


@functools.lru_cache(_KEPT)
def _hashed(
    rule: HashRule, parent: bytes, packed: bytes, extra: _Extra
) -> tuple[bytes, tuple[BlockHash, ...]]:
    """The whole hash of the last block, and the hashes of all, of tokens (int64) after ``parent``.
    Chats and documents come again, and to hash 25,000 tokens takes 4 to 8 ms."""
    encode, digest = _ALGORITHMS[rule.algorithm]
    tokens, size = array("q", packed), rule.block_size
    made = []
    for start in range(0, len(tokens) - size + 1, size):
        parent = digest(encode((parent, tuple(tokens[start : start + size]), extra)))
        made.append(short_hash(parent))
        extra = None
    return parent, tuple(made)


def rule_of(
    first: BlockHash, tokens: Sequence[int], block_size: int, salt: str | None
) -> HashRule | None:
    """The rule by which ``first`` is the hash of the first block of ``tokens``. None if it is of no
    known algorithm, or the engine's root is random or of another PYTHONHASHSEED."""
    rules = (HashRule(name, block_size) for name in _ALGORITHMS)
    return next((rule for rule in rules if rule.fits(first, tokens, salt)), None)


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

    def masks(self, blocks: Sequence[BlockHash], now: float) -> list[int]:
        """The same of many blocks."""
        known = map(self._tiers.get, blocks, itertools.repeat(0))
        if not self._coming:
            return list(known)
        until = map(self._coming.get, blocks, itertools.repeat(now))
        both = zip(known, until, strict=True)
        return [mask | DEVICE if comes > now else mask for mask, comes in both]

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
