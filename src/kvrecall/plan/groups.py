"""The KV groups that vLLM makes of a model's layers, and what a block of each takes.

After vLLM 0.32's ``get_kv_cache_groups``: layers that cache alike form groups of equally many
layers; pages of all groups are as large as the largest, by more tokens in a block, or by padding.
A block of attention layers grows until its page holds a recurrent state. The pool stores one record
for each block of a group, without padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, lcm

from kvrecall.modelconfig import CacheKind
from kvrecall.plan.layers import LayerCache

_ALIGNMENT = 16  # tokens that divide a block of attention layers, in backends for GPUs
_LATENT_ALIGNMENT = 128  # of blocks beside recurrent layers
_SIMILAR = 1.5  # counts of layers that differ by less make groups as large as the larger


@dataclass(frozen=True, slots=True)
class Group:
    """``layers``: how many it has. ``reach``: of a window or chunk, in tokens. ``device_bytes``: of
    a block on one rank, with padding. ``record_bytes``: of a block in the pool, of all ranks."""

    kind: CacheKind
    reach: int
    layers: int
    block_tokens: int
    device_bytes: int
    record_bytes: int

    def device_blocks(self, context: int) -> int:
        """Blocks that a running sequence of ``context`` tokens holds."""
        every = -(-context // self.block_tokens)
        match self.kind:
            case CacheKind.FULL:
                return every
            case CacheKind.WINDOW:
                return min(every, -(-(self.reach - 1) // self.block_tokens) + 1)
            case CacheKind.CHUNK:
                return min(every, -(-self.reach // self.block_tokens))
            case CacheKind.STATE:
                return 2  # the one that runs, and the last boundary's

    def pool_blocks(self, context: int) -> int:
        """Records that a sequence leaves in the pool, with vLLM's default retention: windows where
        its prompt and its answer end, the state where its prompt ends."""
        every = -(-context // self.block_tokens)
        match self.kind:
            case CacheKind.WINDOW:
                return max(1, min(every, 2 * -(-(self.reach - 1) // self.block_tokens)))
            case CacheKind.STATE:
                return min(1, every)
        return every

    def state_tokens(self, step_tokens: int) -> int:
        """Tokens between two states that are kept."""
        return max(1, step_tokens // self.block_tokens) * self.block_tokens

    def needed(self, hit: int) -> int:
        """Records that a hit of ``hit`` tokens, a multiple of all block sizes, loads."""
        return len(self.kind.needed(self.reach, hit, self.block_tokens))


@dataclass(frozen=True, slots=True)
class _LayerPage:
    """A layer's cache and its block: ``real`` bytes on a rank, in ``padded`` ones."""

    cache: LayerCache
    tokens: int
    real: int
    padded: int


def groups_of(caches: Sequence[LayerCache], block_tokens: int, ranks: int = 1) -> tuple[Group, ...]:
    """vLLM's groups of these layers, with those that come first in the model first."""
    pages = _pages(caches, _block_tokens(caches, block_tokens, ranks), ranks)
    if _is_uniform(caches):
        return (_group(pages, sum(page.padded for page in pages), ranks),) if pages else ()
    buckets: dict[tuple[object, ...], list[_LayerPage]] = {}
    for page in _unified(pages):
        key = (page.cache, page.tokens, page.padded)
        buckets.setdefault(key, []).append(page)
    counts = [len(bucket) for bucket in buckets.values()]
    slots = max(counts) if max(counts) < min(counts) * _SIMILAR else min(counts)
    groups = []
    for bucket in buckets.values():
        number = -(-len(bucket) // slots)
        nbytes = slots * bucket[0].padded
        groups += [_group(bucket[start::number], nbytes, ranks) for start in range(number)]
    return tuple(groups)


def chain_of(groups: Sequence[Group]) -> Group:
    """The group whose blocks the others hang on: the first with full attention, else the first."""
    return next((group for group in groups if group.kind is CacheKind.FULL), groups[0])


def hit_unit(groups: Iterable[Group]) -> int:
    """Tokens between the ends of possible hits."""
    return lcm(*(group.block_tokens for group in groups))


def _is_uniform(caches: Sequence[LayerCache]) -> bool:
    """Whether all layers need the same blocks of a prefix, so that they are one group."""
    kinds = {(cache.kind, cache.reach) for cache in caches}
    states = {cache.state for cache in caches}
    return len(kinds) <= 1 and (len(states) <= 1)


def _block_tokens(caches: Sequence[LayerCache], given: int, ranks: int) -> int:
    """Of attention layers: enough for the largest recurrent state, if there are any."""
    states = [cache.state.rank_bytes(ranks) for cache in caches if cache.state]
    tokens = [cache.rank_token_bytes(ranks) for cache in caches if not cache.state]
    if not states or not tokens:
        return given
    is_latent = any(cache.is_latent for cache in caches)
    least = max(given, _ALIGNMENT, _LATENT_ALIGNMENT if is_latent else 0)
    raised = least * ceil(max(states) / (least * max(tokens)))
    return max(given, -(-raised // _ALIGNMENT) * _ALIGNMENT)


def _pages(caches: Sequence[LayerCache], tokens: int, ranks: int) -> list[_LayerPage]:
    pages = []
    for cache in caches:
        real = cache.state.rank_bytes(ranks) if cache.state else 0
        real = real or cache.rank_token_bytes(ranks) * tokens
        pages.append(_LayerPage(cache, tokens, real, real))
    return pages


def _unified(pages: Sequence[_LayerPage]) -> list[_LayerPage]:
    """With equal pages: more tokens in a block where that fits exactly, padding elsewhere."""
    largest = max(page.real for page in pages)
    unified = []
    for page in pages:
        times = 1 if page.cache.state or largest % page.real else largest // page.real
        unified.append(
            replace(page, tokens=page.tokens * times, real=page.real * times, padded=largest)
        )
    return unified


def _group(pages: Sequence[_LayerPage], device_bytes: int, ranks: int) -> Group:
    first = pages[0]
    return Group(
        kind=first.cache.kind,
        reach=first.cache.reach,
        layers=len(pages),
        block_tokens=first.tokens,
        device_bytes=device_bytes,
        record_bytes=sum(_record_bytes(page, ranks) for page in pages),
    )


def _record_bytes(page: _LayerPage, ranks: int) -> int:
    if page.cache.state:
        return page.real * ranks
    return page.cache.token_bytes * page.tokens
