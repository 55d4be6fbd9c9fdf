"""Give two idle pairs of heads a start at not saying the same value twice.

To list several values of one key the model must rule out those already listed. That takes
a head that reads the reply so far and *lowers* what it reads; from heads that copy it did
not grow within a thousand steps. So, once in the course of training, the last KV group of
layers 2 and 3 is set to attend from where a value is due to the nearest tokens that look
like values, and to subtract them. Everything is trained on from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import Batch
from .model import Decoder, rotation

LAYERS = (2, 3)
SPEEDS = (0.002, 0.03)  # rotation per token of the channels used: near within ~100 tokens


@torch.no_grad()
def _inputs(model: Decoder, batch: Batch, index: int) -> Tensor:
    """What the attention of layer `index` is fed, [N, hidden], fp32."""
    x = model.model.embed_tokens(batch.tokens)
    cos, sin = rotation(model.shape, batch.positions, x.dtype)
    for layer in model.model.layers[:index]:
        x = layer(x, cos, sin, None)
    return model.model.layers[index].input_layernorm(x).flatten(0, 1)


@torch.no_grad()
def start_suppression(model: Decoder, batch: Batch, values: Tensor, strength: float) -> None:
    """Set the heads. `batch` must hold lists of values; `values` are the value tokens [V]."""
    for layer in LAYERS:
        _aim(model, batch, values, layer)
        _subtract(model, values, layer, strength)


def _aim(model: Decoder, batch: Batch, values: Tensor, index: int) -> None:
    """Let the last KV group of layer `index` look from dues to the nearest values."""
    shape, attention = model.shape, model.model.layers[index].self_attn
    dim, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
    inputs = _inputs(model, batch, index)
    is_value = torch.isin(batch.tokens.flatten(), values)
    is_due = torch.zeros_like(is_value)
    is_due[batch.places] = torch.tensor([bool(k) and "/" not in k for k in batch.kinds])
    half = dim // 2
    speed = shape.rope_theta ** -(torch.arange(half) / half)
    channels = ((speed > SPEEDS[0]) & (speed < SPEEDS[1])).float()
    image = torch.cat([channels, torch.zeros(half)])
    image = 3 * image / image.norm()
    keys = attention.k_proj.weight[-dim:]
    keys.mul_(0.1).add_(image[:, None] * _direction(inputs, is_value))
    queries = attention.q_proj.weight[-group * dim :]
    queries.mul_(0.1).add_(image.repeat(group)[:, None] * _direction(inputs, is_due))


def _direction(inputs: Tensor, chosen: Tensor) -> Tensor:
    """Vector on which the chosen inputs stand out, scaled so that their mean reads 1."""
    difference = inputs[chosen].mean(0) - inputs.mean(0)
    return difference / difference.square().sum()


def _subtract(model: Decoder, values: Tensor, index: int, strength: float) -> None:
    """Let the last KV group of layer `index` write the opposite of the value it reads."""
    shape, layer = model.shape, model.model.layers[index]
    dim, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
    embedding = model.model.embed_tokens.weight[values]
    subspace = torch.pca_lowrank(embedding, dim, niter=4)[2].T
    layer.self_attn.v_proj.weight[-dim:] = subspace / layer.input_layernorm.weight
    out = -strength / group * subspace.T
    layer.self_attn.o_proj.weight[:, -group * dim :] = out.repeat(1, group)
