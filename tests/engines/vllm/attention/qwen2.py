"""Qwen2 in plain torch, decoding as openGauss's document describes it: no code of kvrecall's or
vLLM's. float32, one sequence."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

BLOCK = 128


def in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """Vectors rounded to whole multiples of a 127th of their largest coordinate."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


@dataclass(frozen=True)
class Retrieval:
    """Lengths in tokens, as of the document's variables. ``coded``: vectors and queries in eight
    bits, which is kvrecall's and not the document's."""

    init: int
    local: int
    share: float
    coded: bool

    def attended(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The places attended to, for each KV head. ``query``: ``[kv_heads, group, dim]``;
        ``keys``: ``[kv_heads, tokens, dim]``.

        The first and the last tokens, rounded up to blocks; of the blocks between them the share
        whose vectors, the means of their keys, have the largest inner products with the query. What
        several query heads of a KV head make of that the document does not say: here the mean of
        their softmaxed products.
        """
        tokens = keys.shape[1]
        first = -(-self.init // BLOCK)
        last = max((tokens - self.local) // BLOCK, first)
        vectors = keys[:, first * BLOCK : last * BLOCK].unflatten(1, (-1, BLOCK)).mean(2)
        if self.coded:
            vectors, query = in_eight_bits(vectors), in_eight_bits(query)
        products = query @ vectors.mT * query.shape[-1] ** -0.5
        count = -(-(last - first) * self.share // 1)
        best = products.softmax(-1).mean(1).topk(int(count)).indices + first
        rows = []
        for chosen in best.sort(-1).values.tolist():
            blocks = [*range(first), *chosen, *range(last, -(-tokens // BLOCK))]
            places = torch.cat([torch.arange(b * BLOCK, (b + 1) * BLOCK) for b in blocks])
            rows.append(places[places < tokens])
        return torch.stack(rows)


class Qwen2:
    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.layers: int = self.config["num_hidden_layers"]
        self.heads: int = self.config["num_attention_heads"]
        self.kv_heads: int = self.config["num_key_value_heads"]
        self.dim: int = self.config["head_dim"]
        self._computed: dict[tuple[int, ...], tuple[torch.Tensor, list[Any]]] = {}
        """Logits and KV of each prompt: the same whatever decodes after it."""

    @torch.inference_mode()
    def logprobs(
        self, prompt: list[int], answer: list[int], retrieval: Retrieval | None
    ) -> list[float]:
        """Of each token of the answer, given those before it. Every token after the first is
        decoded: ``retrieval`` says how; None: densely."""
        if tuple(prompt) not in self._computed:
            self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []
            self._computed[tuple(prompt)] = self._step(prompt, None), self.cache
        first, computed = self._computed[tuple(prompt)]
        self.cache = [*computed]
        logits = [first]
        logits += [self._step([token], retrieval) for token in answer[:-1]]
        return [
            float(row.log_softmax(-1)[token]) for row, token in zip(logits, answer, strict=True)
        ]

    def _step(self, tokens: list[int], retrieval: Retrieval | None) -> torch.Tensor:
        """Logits of the next token."""
        done = self.cache[0][0].shape[1] if self.cache else 0
        x = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self._linear(h, f"{name}.self_attn.{part}_proj").unflatten(-1, (-1, self.dim))
                for part in "qkv"
            )
            q, k = self._rotated(q, done), self._rotated(k, done)
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            if done:
                before = self.cache[layer]
                k, v = torch.cat([before[0], k], 1), torch.cat([before[1], v], 1)
                self.cache[layer] = (k, v)
            else:
                self.cache.append((k, v))
            x = x + self._linear(self._attend(q, k, v, retrieval), f"{name}.self_attn.o_proj")
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(h, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")
        return self._linear(self._norm(x[-1], "model.norm"), "lm_head")

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, retrieval: Retrieval | None
    ) -> torch.Tensor:
        q = q.transpose(0, 1).unflatten(0, (self.kv_heads, -1))  # [kv_heads, group, tokens, dim]
        if retrieval is not None:
            places = retrieval.attended(q[:, :, 0], k)[..., None].expand(-1, -1, self.dim)
            k, v = k.gather(1, places), v.gather(1, places)
        causal = q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k[:, None], v[:, None], is_causal=causal)
        return out.flatten(0, 1).transpose(0, 1).flatten(1)

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rotated(self, x: torch.Tensor, done: int) -> torch.Tensor:
        """``[tokens, heads, dim]`` after rotary embedding."""
        powers = torch.arange(0, self.dim, 2) / self.dim
        angles = torch.arange(done, done + len(x))[:, None] / self.config["rope_theta"] ** powers
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        one, other = x.chunk(2, -1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
