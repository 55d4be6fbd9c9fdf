"""The nouns every room shares: what a block is called and where it may lie."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

FORMAT_VERSION = 1
"""Version of the bytes a block is stored as; part of every namespace."""

BlockKey = NewType("BlockKey", bytes)
"""``namespace digest (16 bytes) || chained block hash``: equal keys mean equal KV bytes."""

NAMESPACE_BYTES = 16


class TierName(enum.StrEnum):
    """Where a block was found, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Digest of everything a block's bytes depend on that its hash does not carry.

    ``parts`` is kept beside the digest so that people can be told *which* ingredient differs.
    Blocks of different namespaces never match.
    """

    digest: bytes
    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, parts: Mapping[str, str]) -> Namespace:
        """Builds the namespace of the given ingredients; their order does not matter."""
        items = tuple(sorted(parts.items()))
        text = json.dumps([FORMAT_VERSION, items], ensure_ascii=True, separators=(",", ":"))
        digest = hashlib.blake2b(text.encode(), digest_size=NAMESPACE_BYTES).digest()
        return cls(digest, items)

    def key(self, block_hash: bytes) -> BlockKey:
        """Key of the block with vLLM's chained ``block_hash`` in this namespace."""
        return BlockKey(self.digest + block_hash)

    def derive(self, **parts: str) -> Namespace:
        """This namespace with further ingredients, e.g. the content digest of a LoRA adapter."""
        return Namespace.of({**dict(self.parts), **parts})
