"""Greedy replies to many questions about one document, whose KV is computed once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from .model import Attention, Decoder, Shape, rotation


def load(folder: Path, dtype: torch.dtype) -> Decoder:
    """The model of an exported folder, weights in `dtype`."""
    config = json.loads((folder / "config.json").read_text())
    config.update(config.pop("rope_parameters", {}))
    shape = Shape(**{name: config[name] for name in Shape.__slots__})
    model = Decoder(shape)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model.to(dtype).eval()


@dataclass(slots=True)
class Suffix:
    """KV of what follows the document, per layer [Q, KV, S, D], and which slots are in use."""

    keys: list[Tensor]
    values: list[Tensor]
    used: Tensor


class Reader:
    """Holds one document's KV; answers questions about it. One question never sees another."""

    def __init__(self, model: Decoder, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.length = 0

    @torch.inference_mode()
    def read(self, document: list[int]) -> None:
        """Replace the document; dense causal prefill over all its tokens at once."""
        self._keys, self._values, self.length = [], [], len(document)
        positions = torch.arange(self.length)[None]
        cos, sin = rotation(self.model.shape, positions, self.dtype)
        x = self.model.model.embed_tokens(torch.tensor([document]))
        for layer in self.model.model.layers:
            attention: Attention = layer.self_attn
            q, k, v = attention.project(layer.input_layernorm(x), cos, sin)
            self._keys.append(k[0])
            self._values.append(v[0])
            group = attention.heads // attention.kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], stops: set[int], most: int = 48) -> list[list[int]]:
        """The greedy continuation of document + prompt for each, without the stop token."""
        count, width = len(prompts), max(map(len, prompts))
        config = self.model.shape
        room = torch.zeros(
            count, config.num_key_value_heads, width + most, config.head_dim, dtype=self.dtype
        )
        used = torch.zeros(count, width + most, dtype=torch.bool)
        keys = [room.clone() for _ in self._keys]
        suffix = Suffix(keys, [room.clone() for _ in self._keys], used)
        tokens = torch.zeros(count, width, dtype=torch.long)
        offset = torch.tensor([width - len(p) for p in prompts])[:, None]
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            used[row, width - len(prompt) : width] = True
        replies: list[list[int]] = [[] for _ in prompts]
        running = set(range(count))
        at = 0
        for _ in range(most):
            slots = torch.arange(at, at + tokens.shape[1])
            used[:, slots[-1]] = True
            hidden = self._forward(tokens, slots, self.length + slots[None] - offset, suffix)
            at = int(slots[-1]) + 1
            tokens = self.model.logits(hidden[:, -1]).argmax(-1)[:, None]
            for row in list(running):
                token = int(tokens[row, 0])
                if token in stops:
                    running.discard(row)
                else:
                    replies[row].append(token)
            if not running:
                break
        return replies

    def _forward(self, tokens: Tensor, slots: Tensor, positions: Tensor, suffix: Suffix) -> Tensor:
        cos, sin = rotation(self.model.shape, positions.clamp(min=0), self.dtype)
        x = self.model.model.embed_tokens(tokens)
        end = int(slots[-1]) + 1
        causal = torch.arange(end)[None] <= slots[:, None]
        seen = suffix.used[:, None, :end] & causal
        for n, layer in enumerate(self.model.model.layers):
            attention: Attention = layer.self_attn
            q, k, v = attention.project(layer.input_layernorm(x), cos, sin)
            suffix.keys[n][:, :, slots], suffix.values[n][:, :, slots] = k, v
            out = self._attend(n, q, suffix.keys[n][:, :, :end], suffix.values[n][:, :, :end], seen)
            x = x + attention.o_proj(out)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.model.norm(x)

    def _attend(self, n: int, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """Attention of q [Q, H, T, D] to the document and to its own suffix, softmax in fp32."""
        count, heads, t, d = q.shape
        kv = keys.shape[1]
        q = q.view(count, kv, heads // kv, t, d)
        shared = torch.einsum("ckgtd,knd->ckgtn", q, self._keys[n]).float()
        own = torch.einsum("ckgtd,cksd->ckgts", q, keys).float()
        own = own.masked_fill(~seen[:, None, None], -torch.inf)
        weights = (torch.cat([shared, own], -1) * d**-0.5).softmax(-1).to(q.dtype)
        out = torch.einsum("ckgtn,knd->ckgtd", weights[..., : self.length], self._values[n])
        out = out + torch.einsum("ckgts,cksd->ckgtd", weights[..., self.length :], values)
        return out.reshape(count, heads, t, d).transpose(1, 2).flatten(2)
