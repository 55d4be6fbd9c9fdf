"""The nouns that all packages share: keys, namespaces, tenants and tiers of blocks."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType

FORMAT_VERSION = 1
"""Version of the bytes a block is stored as; part of every namespace."""

BlockKey = NewType("BlockKey", bytes)
"""``namespace digest (16 bytes) || chained block hash``: equal keys mean equal KV bytes."""

NAMESPACE_BYTES = 16

_TAIL = b"/tail"

Tenant = NewType("Tenant", str)
"""The tenant of a block, for accounting: the digest of the requests' ``cache_salt``, 16 hex digits.
Tenants share nothing: the salt is part of the block hash."""

SHARED = Tenant("-")
"""Blocks of requests without a salt."""


def tenant_of(salt: str | None) -> Tenant:
    """The tenant of requests with that ``cache_salt``."""
    if not salt:
        return SHARED
    return Tenant(hashlib.blake2b(salt.encode(), digest_size=8).hexdigest())


_TENANT = re.compile("-|[0-9a-f]{16}")


@functools.lru_cache(1024)
def is_tenant(text: str) -> bool:
    """Whether ``text`` has the form of a tenant."""
    return _TENANT.fullmatch(text) is not None


def is_tail(key: BlockKey) -> bool:
    """Whether a key is a tail's. It takes the room of a whole block, saves fewer tokens, and is
    worth nothing once its block is complete: so it never displaces a whole block."""
    return key.endswith(_TAIL)


class TierName(enum.StrEnum):
    """Where a block was found, nearest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Digest of everything a block's bytes depend on that its hash does not carry.

    ``parts`` is kept beside the digest to report *which* ingredient differs.
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

    def tail_key(self, block_hash: bytes) -> BlockKey:
        """Key of a tail: of the block that has KV up to a token inside it only. ``block_hash``: of
        the tokens up to there."""
        return BlockKey(self.digest + block_hash + _TAIL)

    def derive(self, **parts: str) -> Namespace:
        """This namespace with further ingredients, e.g. the content digest of a LoRA adapter."""
        return Namespace.of({**dict(self.parts), **parts})
