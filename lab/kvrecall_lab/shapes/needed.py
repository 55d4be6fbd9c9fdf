"""The bytes that a hit must move, computed from the shape of the device cache alone.

Of each KV group those blocks that the tokens behind the hit attend to: of full attention all, of a
window or chunk those its tokens reach, of a recurrent layer the state at the end of the hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def needed_bytes(groups: Sequence[Mapping[str, Any]], loads: Sequence[tuple[int, int]]) -> int:
    """Bytes of the blocks that prefixes need from the pool. ``groups``: of an engine's
    ``memory()``; ``loads``: for each prefix, the tokens that the device has and its end."""
    return sum(_bytes_of(group, start, end) for group in groups for start, end in loads)


def _bytes_of(group: Mapping[str, Any], start: int, end: int) -> int:
    size: int = group["block_size"]
    first = max(start, _first_token(group, end)) // size
    page_bytes: int = sum(group["layers"])
    return (-(-end // size) - first) * page_bytes


def _first_token(group: Mapping[str, Any], end: int) -> int:
    """The first token whose KV the token at ``end`` needs."""
    kind = group["kind"]
    if kind == "MambaSpec":
        return end - 1
    if kind == "SlidingWindowSpec":
        return max(0, end - int(group["window"]) + 1)
    if kind == "ChunkedLocalAttentionSpec":
        return end // int(group["chunk"]) * int(group["chunk"])
    return 0
