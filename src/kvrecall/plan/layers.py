"""What each layer of a model caches, by its ``config.json``: all tokens, a window, or a state.

Shapes and dtypes follow vLLM 0.32 (``MambaStateShapeCalculator``, ``MambaStateDtypeCalculator``,
the KV cache specs of its attention layers). Tests compare the result with vLLM's own specs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvrecall.errors import ConfigError
from kvrecall.modelconfig import CacheKind, Fields

DTYPE_BYTES = {
    "float32": 4, "float": 4, "fp32": 4, "bfloat16": 2, "bf16": 2, "float16": 2, "fp16": 2,
    "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
    "int8_per_token_head": 1, "fp8_per_token_head": 1,
}  # fmt: skip
_SCALE_BYTES = 4  # of a token's keys, and of its values, in one head
_SPARSE_FP8_BYTES = 656  # fp8_ds_mla: a token's latent, its position part and scales
_INDEX_QUANT = 128  # elements of an indexer's key that share a scale of 4 bytes

_OTHER_CACHES = (
    "compress_ratios", "indexer_n_heads", "ple_layer_ids",  # DeepSeek V4, Qwen4
    "state_size", "ssm_cfg", "layer_group_size",  # other recurrent layers
)  # fmt: skip
"""Fields of models whose layers cache what is not sized here."""
_MOST_LAYERS = 10_000
_FULL = ("full_attention", "attention", "*", "global_attention", "indexed_attention")
_WINDOW = ("sliding_attention", "local_attention")
_CHUNK = ("chunked_attention",)
_STATE = ("linear_attention", "mamba", "mamba2", "M", "conv", "kda")
_BOTH = ("hybrid",)
_DENSE = ("mlp", "-")
_EXPERTS = ("moe", "E")


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of a recurrent layer: the last inputs of its convolution, and its memory.

    ``width``: of the convolution, of all ranks. ``per_group``, ``groups``: of Mamba-2, whose
    groups are repeated on ranks that share one. ``memory``: elements.
    """

    width: int
    inputs: int
    memory: int
    width_bytes: int
    memory_bytes: int
    per_group: int = 0
    groups: int = 0

    def rank_bytes(self, ranks: int) -> int:
        repeated = ranks - self.groups if self.groups % ranks else 0
        width = (self.width + max(0, repeated) * self.per_group) // ranks
        convolution = width * self.inputs * self.width_bytes
        return max(1, convolution + self.memory // ranks * self.memory_bytes)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """What a layer caches. ``reach``: of a window or chunk, in tokens. ``head_bytes``: keys and
    values of a token in one of its ``heads``; an MLA layer has one latent vector instead, the same
    on all ranks. ``attends``: tokens that it attends to at most; 0: all it keeps. ``state``: of a
    recurrent layer, which has no heads."""

    kind: CacheKind
    reach: int = 0
    head_bytes: int = 0
    heads: int = 0
    is_latent: bool = False
    attends: int = 0
    state: RecurrentState | None = None

    @property
    def token_bytes(self) -> int:
        """Of all ranks, each head once; 0 for a state."""
        return self.head_bytes * self.heads

    def rank_token_bytes(self, ranks: int) -> int:
        """On one of ``ranks``: heads that do not divide are on several."""
        return self.head_bytes * max(1, self.heads // ranks) if self.heads else 0


class Ffn(enum.Enum):
    """What follows a layer's mixing."""

    NONE = "none"
    DENSE = "dense"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True)
class Layer:
    """``mixing``: parameters of attention or recurrence."""

    caches: tuple[LayerCache, ...]
    mixing: int
    ffn: Ffn


def read_layers(fields: Fields, kv_dtype: str) -> tuple[Layer, ...]:
    """Raises ConfigError for layers whose cache is not known here."""
    model_dtype = dtype_of(fields)
    wanted = model_dtype if kv_dtype == "auto" else kv_dtype
    if wanted not in DTYPE_BYTES:
        raise ConfigError(f"--kv-dtype: {wanted!r}; known: auto, {', '.join(DTYPE_BYTES)}")
    kinds = _kinds(fields)
    owners = len(kinds) - fields.number("num_kv_shared_layers", default=0)
    layers = []
    for place, kind in enumerate(kinds):
        caches: list[LayerCache] = []
        mixing = 0
        if kind in (*_FULL, *_WINDOW, *_CHUNK, *_BOTH):
            own = fields.of_layer(place)
            caches += _attention(own, kind, wanted)
            mixing += _attention_params(own, kind)
        if kind in (*_STATE, *_BOTH):
            state, params = _state(fields, kind, model_dtype)
            caches.append(LayerCache(CacheKind.STATE, state=state))
            mixing += params
        if not all(cache.state or cache.token_bytes for cache in caches):
            raise ConfigError(f"{fields.source}: layer {place} has attention heads of size 0")
        owned = tuple(caches) if place < owners else ()
        layers.append(Layer(owned, mixing, _ffn(fields, place, kind)))
    return tuple(layers)


def dtype_of(fields: Fields) -> str:
    """The dtype the model computes in."""
    return fields.text("torch_dtype", "dtype").removeprefix("torch.") or "bfloat16"


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer, in the words of Hugging Face's ``layer_types``."""
    recurrent = any(kind != 1 for kind in fields.list("attn_type_list"))  # of MiniMax
    if recurrent or any(map(fields.has, _OTHER_CACHES)):
        raise ConfigError(
            f"{fields.source}: layers of a {fields.model_type or 'model'} keep caches whose size "
            "is not known here; start it and read the record sizes in `kvrecall pool ls`"
        )
    if pattern := fields.text("hybrid_override_pattern"):
        return _known(list(pattern), fields)
    count = fields.number("num_hidden_layers", "n_layer", "num_layers")
    if count > _MOST_LAYERS:
        raise ConfigError(f"{fields.source}: {count} layers; no model has more than {_MOST_LAYERS}")
    places = range(count)
    if fields.model_type == "llama4_text" and not fields.number("attention_chunk_size", default=0):
        return ["full_attention"] * count
    if fields.model_type == "llama4_text":
        interval = max(1, fields.number("no_rope_layer_interval"))
        turned = fields.list("no_rope_layers") or [(place + 1) % interval for place in places]
        return ["chunked_attention" if place else "full_attention" for place in turned[:count]]
    if linear := fields.part("linear_attn_config").list("kda_layers"):
        return ["kda" if place + 1 in linear else "full_attention" for place in places]
    if fields.model_type == "falcon_h1":
        return ["hybrid"] * count
    if named := fields.list("layer_types", "layers_block_type"):
        return _known([str(each) for each in named[:count]], fields)
    if period := fields.number("attn_layer_period", default=0):
        offset = fields.number("attn_layer_offset", default=0)
        return ["attention" if place % period == offset else "mamba" for place in places]
    if fields.model_type == "bamba":
        full = fields.list("attn_layer_indices")
        return ["attention" if place in full else "mamba" for place in places]
    if interval := fields.number("full_attention_interval", default=0):
        return ["linear_attention" if (p + 1) % interval else "full_attention" for p in places]
    window = fields.number("sliding_window", default=0)
    if window and (pattern_ := fields.number("sliding_window_pattern", default=0)):
        return ["sliding_attention" if (p + 1) % pattern_ else "full_attention" for p in places]
    if window and fields.has("use_sliding_window"):
        first = fields.number("max_window_layers", default=0)
        first = first if fields.flag("use_sliding_window") else count
        return ["sliding_attention" if p >= first else "full_attention" for p in places]
    return ["sliding_attention" if window else "full_attention"] * count


def _known(kinds: list[str], fields: Fields) -> list[str]:
    known = {*_FULL, *_WINDOW, *_CHUNK, *_STATE, *_BOTH, *_DENSE, *_EXPERTS}
    if not (fields.has("index_topk") and fields.has("kv_lora_rank")):
        known -= {"indexed_attention"}  # its indexer is known for latent attention alone
    if strange := sorted(set(kinds) - known):
        raise ConfigError(
            f"{fields.source}: layers of type {strange[0]!r} are not known here; start the model "
            "and read the record sizes in `kvrecall pool ls`"
        )
    return kinds


def head_size(fields: Fields) -> int:
    hidden = fields.number("hidden_size", "n_embd", "d_model")
    heads = fields.number("num_attention_heads", "n_head")
    named = fields.number("head_dim", "attention_head_dim", default=0)
    return named or hidden // max(1, heads)


def kv_heads(fields: Fields) -> int:
    heads = fields.number("num_attention_heads", "n_head")
    return fields.number("num_key_value_heads", "num_kv_heads", default=heads) or heads


def _attention(fields: Fields, kind: str, dtype: str) -> list[LayerCache]:
    each = DTYPE_BYTES[dtype]
    scales = 2 * _SCALE_BYTES if dtype.endswith("_per_token_head") else 0
    if latent := fields.number("kv_lora_rank", default=0):
        width = latent + fields.number("qk_rope_head_dim", default=0)
        index = fields.number("index_head_dim", default=0) if fields.has("index_topk") else 0
        packed = _SPARSE_FP8_BYTES if index and dtype.startswith("fp8") else width * each + scales
        if not index:
            return [LayerCache(CacheKind.FULL, head_bytes=packed, heads=1, is_latent=True)]
        key = index + -(-index // _INDEX_QUANT) * _SCALE_BYTES
        chosen = fields.number("index_topk")
        return [
            LayerCache(CacheKind.FULL, head_bytes=packed, heads=1, is_latent=True, attends=chosen),
            LayerCache(CacheKind.FULL, head_bytes=key, heads=1, is_latent=True, attends=1),
        ]
    size, heads = head_size(fields), kv_heads(fields)
    if kind in _WINDOW:
        reach = fields.number("sliding_window", default=0)
        made = CacheKind.WINDOW if reach else CacheKind.FULL
    elif kind in _CHUNK:
        made, reach = CacheKind.CHUNK, max(1, fields.number("attention_chunk_size"))
    else:
        made, reach = CacheKind.FULL, 0
        size = fields.number("global_head_dim", default=0) or size
        heads = fields.number("num_global_key_value_heads", default=0) or heads
    return [LayerCache(made, reach, 2 * size * each + scales, heads)]


def _attention_params(fields: Fields, kind: str) -> int:
    hidden = fields.number("hidden_size", "n_embd", "d_model")
    heads = fields.number("num_attention_heads", "n_head")
    head = head_size(fields)
    if latent := fields.number("kv_lora_rank", default=0):
        nope = fields.number("qk_nope_head_dim", default=head)
        rope = fields.number("qk_rope_head_dim", default=0)
        value = fields.number("v_head_dim", default=head)
        query_rank = fields.number("q_lora_rank", default=0)
        into = query_rank * (hidden + heads * (nope + rope)) or hidden * heads * (nope + rope)
        params = into + hidden * (latent + rope) + latent * heads * (nope + value)
        return params + heads * value * hidden
    return 2 * hidden * head * (heads + kv_heads(fields))


def _state(fields: Fields, kind: str, dtype: str) -> tuple[RecurrentState, int]:
    """The state of a recurrent layer, and the parameters that compute it."""
    hidden = fields.number("hidden_size", "n_embd", "d_model")
    each = DTYPE_BYTES.get(dtype, 2)
    if kind == "kda":
        linear = fields.part("linear_attn_config")
        heads, size = linear.number("num_heads"), linear.number("head_dim")
        inputs = linear.number("short_conv_kernel_size", default=4) - 1
        wide = heads * size
        state = RecurrentState(3 * wide, inputs, wide * size, each, 4)  # its memory is float32
        return state, 4 * hidden * wide + 2 * size * (hidden + wide)
    if kind == "conv":
        wide = fields.number("conv_dim", default=hidden)
        return RecurrentState(
            wide, fields.number("conv_L_cache", default=3) - 1, 0, each, 0
        ), 4 * hidden**2
    if fields.has("linear_num_value_heads"):
        keys = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
        heads = fields.number("linear_num_value_heads")
        values = heads * fields.number("linear_value_head_dim")
        named = fields.text("mamba_ssm_dtype") if fields.model_type.startswith("qwen3_5") else ""
        memory = values * fields.number("linear_key_head_dim")
        state = RecurrentState(
            2 * keys + values, fields.number("linear_conv_kernel_dim") - 1, memory, each,
            DTYPE_BYTES.get(named, each),
        )  # fmt: skip
        return state, hidden * (2 * keys + 3 * values + 2 * heads)
    if fields.model_type == "jamba":
        wide = fields.number("mamba_expand") * hidden
        size = fields.number("mamba_d_state")
        inputs = fields.number("mamba_d_conv") - 1
        steps = -(-hidden // 16)
        params = 3 * hidden * wide + wide * (2 * steps + 2 * size)
        return RecurrentState(wide, inputs, wide * size, each, each), params
    return _mamba2(fields, hidden, each)


def _mamba2(fields: Fields, hidden: int, each: int) -> tuple[RecurrentState, int]:
    heads = fields.number("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    expanded = fields.number("mamba_expand", "expand", default=2) * hidden
    wide = fields.number("mamba_d_ssm", default=0) or expanded
    size = fields.number("mamba_d_head", "mamba_head_dim", "mamba_headdim", default=0)
    size = size or wide // max(1, heads)
    wide = heads * size
    groups = fields.number("mamba_n_groups", "n_groups", "mamba_ngroups")
    states = fields.number("mamba_d_state", "ssm_state_size")
    inputs = fields.number("mamba_d_conv", "conv_kernel") - 1
    memory_bytes = DTYPE_BYTES.get(fields.text("mamba_ssm_cache_dtype"), each)
    state = RecurrentState(
        wide + 2 * groups * states, inputs, wide * states, each, memory_bytes,
        per_group=2 * states, groups=groups,
    )  # fmt: skip
    return state, hidden * (3 * wide + 2 * groups * states + heads)


def _ffn(fields: Fields, place: int, kind: str) -> Ffn:
    if fields.text("hybrid_override_pattern") or fields.list("layers_block_type"):
        if kind in _EXPERTS or kind in _DENSE:
            return Ffn.EXPERTS if kind in _EXPERTS else Ffn.DENSE
        if fields.model_type == "nemotron_h":
            return Ffn.NONE
    if not experts_of(fields):
        return Ffn.DENSE
    period = fields.number("expert_layer_period", "decoder_sparse_step", default=1) or 1
    offset = fields.number("expert_layer_offset", default=period - 1)
    if step := fields.number("interleave_moe_layer_step", default=0):
        period, offset = step, step - 1
    is_dense = place < fields.number("first_k_dense_replace", default=0)
    is_dense |= place % period != offset or place in fields.list("mlp_only_layers")
    return Ffn.DENSE if is_dense else Ffn.EXPERTS


def experts_of(fields: Fields) -> int:
    """Experts of a layer that has some, without those that all tokens use."""
    return fields.number("n_routed_experts", "num_local_experts", "num_experts", default=0)
