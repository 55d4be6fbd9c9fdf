"""The decoder, in plain torch, with the parameter names of Hugging Face's Qwen3.

A state dict of `Decoder` is a Qwen3ForCausalLM checkpoint (embeddings tied). Here, and not
transformers' class, because training wants logits at a few places only, free positions
and, for emulated length, a weight for each key.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the decoder; the names are those of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e8
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131072

    def to_hf(self) -> dict[str, object]:
        """The contents of config.json."""
        return {
            **asdict(self),
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rotation(shape: Shape, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of `positions` [B, T], each [B, 1, T, head_dim]."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angle = positions.double()[..., None] * shape.rope_theta**-half
    angle = torch.cat([angle, angle], -1)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.dim = shape.head_dim
        width, d = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(width, self.heads * d, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * d, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * d, bias=False)
        self.o_proj = nn.Linear(self.heads * d, width, bias=False)
        self.q_norm = RMSNorm(d, shape.rms_norm_eps)
        self.k_norm = RMSNorm(d, shape.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, D], keys and values [B, KV, T, D], rotated."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=shape.hidden_size**-0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.data.mul_(0.05)
        self._copy()
        self._look_back()

    @torch.no_grad()
    def _copy(self) -> None:
        """Start the heads above layer 0 out copying: what they attend to becomes likelier."""
        for layer in self.model.layers[1:]:
            attention = layer.self_attn
            values = attention.v_proj.weight.view(-1, self.shape.head_dim, self.shape.hidden_size)
            values = values.repeat_interleave(attention.heads // attention.kv_heads, 0)
            attention.o_proj.weight.copy_(0.05 * values.flatten(0, 1).T)

    @torch.no_grad()
    def _look_back(self) -> None:
        """Start the heads of layer 0 out looking 1, 2, 3, ... tokens back.

        All embeddings share a component; queries and keys are made mostly of its image,
        spread over the fast channels, the query turned by the head's distance. Recall by
        key rests on such heads, and left alone they take thousands of steps to appear.
        """
        shape, attention = self.shape, self.model.layers[0].self_attn
        shared = F.normalize(torch.randn(shape.hidden_size), dim=0)
        self.model.embed_tokens.weight.add_(shared * 0.7)
        half = shape.head_dim // 2
        speed = shape.rope_theta ** -(torch.arange(half) / half)
        strength = torch.where(speed > 0.08, speed.sqrt(), 0.0)
        strength = strength / strength.norm()
        heads = attention.q_proj.weight.view(-1, shape.head_dim, shape.hidden_size)
        keys = attention.k_proj.weight.view(-1, shape.head_dim, shape.hidden_size)
        for weight in (heads, keys):
            weight.mul_(0.3)
        for n in range(shape.num_attention_heads):
            turn = -speed * (n + 1)
            image = torch.cat([strength * turn.cos(), strength * turn.sin()])
            heads[n] += 2.5 * image[:, None] * shared
        for n in range(shape.num_key_value_heads):
            keys[n] += 2.5 * torch.cat([strength, torch.zeros(half)])[:, None] * shared
        attention.q_norm.weight.fill_(2.0)
        attention.k_norm.weight.fill_(2.0)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor:  # fmt: skip
        """Final hidden states [B, T, hidden] of `tokens` [B, T], not yet turned into logits."""
        x = self.model.embed_tokens(tokens).to(dtype)
        cos, sin = rotation(self.shape, positions, dtype)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            for layer in self.model.layers:
                x = layer(x, cos, sin, mask)
            return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] in fp32 for hidden states [..., hidden]."""
        with torch.autocast("cpu", torch.bfloat16, enabled=hidden.dtype == torch.bfloat16):
            return F.linear(hidden, self.model.embed_tokens.weight).float()
