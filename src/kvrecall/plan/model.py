"""A model's KV groups, as vLLM makes them of its layers, and the cost of its prefill.

After vLLM 0.32's ``get_kv_cache_groups``: layers that cache alike form groups of equally many
layers; pages of all groups are as large as the largest, by more tokens in a block, or by padding.
A block of attention layers grows until its page holds a recurrent state. The pool stores one record
for each block of a group, without padding.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, lcm
from pathlib import Path

from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind, Fields, read_fields
from kvrecall.plan.layers import (
    DTYPE_BYTES,
    Ffn,
    Layer,
    LayerCache,
    dtype_of,
    experts_of,
    head_size,
    kv_heads,
    read_layers,
)

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


def groups_of(caches: Sequence[LayerCache], block_tokens: int, ranks: int = 1) -> tuple[Group, ...]:
    """vLLM's groups of these layers, with those that come first in the model first."""
    attention = _block_tokens(caches, block_tokens, ranks)
    pages = [
        cache.state.rank_bytes(ranks) if cache.state else cache.rank_token_bytes(ranks) * attention
        for cache in caches
    ]
    if len({(cache.kind, cache.reach, cache.state) for cache in caches}) <= 1:
        # All layers need the same blocks of a prefix.
        return (_group(caches, attention, sum(pages), ranks),) if caches else ()
    largest = max(pages)
    buckets: dict[tuple[LayerCache, int], list[LayerCache]] = defaultdict(list)
    for cache, page in zip(caches, pages, strict=True):
        # More tokens in a block where its page then is as large as the largest; padding elsewhere.
        times = 1 if cache.state or largest % page else largest // page
        buckets[cache, attention * times].append(cache)
    counts = [len(bucket) for bucket in buckets.values()]
    slots = max(counts) if max(counts) < min(counts) * _SIMILAR else min(counts)
    groups = []
    for (_, tokens), bucket in buckets.items():
        number = -(-len(bucket) // slots)
        for start in range(number):
            groups.append(_group(bucket[start::number], tokens, slots * largest, ranks))
    return tuple(groups)


def _group(caches: Sequence[LayerCache], tokens: int, device_bytes: int, ranks: int) -> Group:
    """Of layers whose blocks have so many tokens."""
    return Group(
        kind=caches[0].kind,
        reach=caches[0].reach,
        layers=len(caches),
        block_tokens=tokens,
        device_bytes=device_bytes,
        record_bytes=sum(
            cache.state.rank_bytes(ranks) * ranks if cache.state else cache.token_bytes * tokens
            for cache in caches
        ),
    )


def chain_of(groups: Sequence[Group]) -> Group:
    """The group whose blocks the others hang on: the first with full attention, else the first."""
    return next((group for group in groups if group.kind is CacheKind.FULL), groups[0])


def hit_unit(groups: Iterable[Group]) -> int:
    """Tokens between the ends of possible hits."""
    return lcm(*(group.block_tokens for group in groups))


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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """``caches``: what each layer keeps, in the model's order. ``active_params``: those that take
    part in computing one token."""

    name: str
    layers: int
    kv_heads: int
    is_latent: bool  # MLA: one latent vector for all heads, the same on all ranks
    caches: tuple[LayerCache, ...]
    attention_width: int  # query heads x head size
    params: int
    active_params: int
    weight_bytes: int
    max_context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all attention layers, each head once, as the pool stores them."""
        return sum(cache.token_bytes for cache in self.caches)

    @property
    def full_bytes_per_token(self) -> int:
        """Of the layers that keep all tokens: what each further token of a hit adds."""
        return sum(cache.token_bytes for cache in self.caches if cache.kind is CacheKind.FULL)

    def groups(self, block_tokens: int, ranks: int = 1) -> tuple[Group, ...]:
        """vLLM's KV groups, for a ``--block-size`` of ``block_tokens``."""
        return groups_of(self.caches, block_tokens, ranks)

    def flops_per_token(self, depth: int) -> float:
        """Of prefilling one token after ``depth`` others."""
        attended = 0
        for cache in self.caches:
            attended += min(depth, cache.attends or cache.reach or depth) if cache.heads else 0
        return 2.0 * self.active_params + 4.0 * self.attention_width * attended


def read_shape(path: Path, kv_dtype: str = "auto", name: str = "") -> ModelShape:
    """The shape of the model in a folder, or of a config.json. ``name``: what to call it, if not
    by its folder. Raises ConfigError."""
    fields, file = read_fields(path)
    if fields.is_encoder_decoder or fields.has("cross_attention_layers"):
        raise ConfigError(
            f"{fields.source}: {fields.architecture} has layers that attend to an encoder's output;"
            " vLLM serves no such model with a pool, so there is none to size"
        )
    hidden = fields.number("hidden_size", "n_embd", "d_model")
    layers = read_layers(fields, kv_dtype)
    heads = fields.number("num_attention_heads", "n_head")
    if not (hidden and layers and heads):
        raise ConfigError(f"{fields.source}: hidden_size, layers and heads must be more than 0")
    if not any(layer.caches for layer in layers):
        raise ConfigError(f"{fields.source}: no layer of this model keeps KV, so nothing is pooled")
    is_latent = bool(fields.number("kv_lora_rank", default=0))
    params, active = _params(fields, layers, hidden)
    weights = sum(f.stat().st_size for f in file.parent.glob("*.safetensors"))
    return ModelShape(
        name=name or file.parent.name or str(file),
        layers=len(layers),
        kv_heads=1 if is_latent else kv_heads(fields),
        is_latent=is_latent,
        caches=tuple(cache for layer in layers for cache in layer.caches),
        attention_width=heads * head_size(fields),
        params=params,
        active_params=active,
        weight_bytes=weights or params * DTYPE_BYTES.get(dtype_of(fields), 2),
        max_context=fields.number("max_position_embeddings", default=0),
    )


def _params(fields: Fields, layers: tuple[Layer, ...], hidden: int) -> tuple[int, int]:
    """Parameters in all and those active per token, estimated from the dimensions."""
    matrices = 2 if fields.model_type == "nemotron_h" else 3
    width = fields.number("intermediate_size_mlp", "intermediate_size", "n_inner", default=0)
    dense = matrices * hidden * (width or 4 * hidden)
    embedding = fields.number("vocab_size", default=0) * hidden
    embedding *= 1 if fields.flag("tie_word_embeddings") else 2
    mixing = sum(layer.mixing for layer in layers)
    counts = Counter(layer.ffn for layer in layers)
    base = mixing + counts[Ffn.DENSE] * dense
    if not counts[Ffn.EXPERTS]:
        return base + embedding, base + embedding - embedding // 2
    expert = matrices * hidden * fields.number("moe_intermediate_size", "intermediate_size")
    together = fields.number(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "shared_intermediate_size", default=0,
    )  # fmt: skip
    shared = matrices * hidden * together
    shared = shared or fields.number("n_shared_experts", default=0) * expert
    used = fields.number("num_experts_per_tok", default=2)
    whole = base + counts[Ffn.EXPERTS] * (experts_of(fields) * expert + shared) + embedding
    active = base + counts[Ffn.EXPERTS] * (used * expert + shared) + embedding // 2
    return whole, active
