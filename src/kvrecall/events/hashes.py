"""vLLM's block hashes of a prompt, computed without vLLM."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import cbor2
import xxhash

from kvrecall.events.wire import BlockHash, short_hash

_SEED = "vllm-none-hash"


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
        extra: tuple[tuple[str, str], ...] | None = (("cache_salt", salt),) if salt else None
        size = self.block_size
        made = []
        for start in range(0, len(tokens) - size + 1, size):
            parent = digest(encode((parent, tuple(tokens[start : start + size]), extra)))
            made.append(short_hash(parent))
            extra = None
        return tuple(made)

    def fits(self, first: BlockHash, tokens: Sequence[int], salt: str | None) -> bool:
        """Whether ``first`` is the hash of the first block of ``tokens``."""
        return self.chain(tokens[: self.block_size], salt) == (first,)


def rule_of(
    first: BlockHash, tokens: Sequence[int], block_size: int, salt: str | None
) -> HashRule | None:
    """The rule by which ``first`` is the hash of the first block of ``tokens``. None if it is of no
    known algorithm, or the engine's root is random or of another PYTHONHASHSEED."""
    rules = (HashRule(name, block_size) for name in _ALGORITHMS)
    return next((rule for rule in rules if rule.fits(first, tokens, salt)), None)
