"""Retrieval in the latent space (MLA): vLLM's decode kernel over selected blocks, against the
plain-torch oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engines.vllm.attention.sequences import attended
from kvrecall.attention.kernels.oracle import attention
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import AttentionParameters, KernelShape
from kvrecall.engines.vllm.attention.latent import LatentKernel
from kvrecall.engines.vllm.attention.step import BatchRow, Freshness, StepPlanner

BLOCK, WIDTH, VALUES, HEADS = 16, 576, 512, 5
"""Of vLLM's kernel, and query heads."""
SETTINGS = RetrievalSettings(
    init_tokens=32,
    local_tokens=50,
    dense_boundary=0,
    offload_boundary=10**6,
    gate=False,
    least_blocks=1,
)


@pytest.mark.parametrize("share", [0.02, 0.2, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_oracle(dtype: torch.dtype, share: float) -> None:
    """Sequences of one batch, of awkward lengths, whose blocks are scattered."""
    torch.manual_seed(3)
    settings = replace(SETTINGS, topk_share=share)
    shape = KernelShape(HEADS, 1, WIDTH, BLOCK, dtype, "", latent=True)
    kernel, activity = LatentKernel(shape), Activity()
    planner = StepPlanner(settings, kernel, Freshness(), activity)
    layer = kernel.layer("layer", settings, activity)
    lengths = [1000, 1024, 2047, 333]
    cache = torch.full((400, BLOCK, WIDTH), 3.0, dtype=dtype)
    free = torch.randperm(399) + 1
    latents = [torch.randn(length, WIDTH).to(dtype) for length in lengths]
    table = torch.zeros(len(lengths), 128, dtype=torch.int32)
    for row, latent in zip(table, latents, strict=True):
        ids, free = free[: -(-len(latent) // BLOCK)], free[-(-len(latent) // BLOCK) :]
        row[: len(ids)] = ids
        at = torch.arange(len(latent))
        cache[ids[at // BLOCK], at % BLOCK] = latent
    query = (2 * torch.randn(len(lengths), HEADS, WIDTH)).to(dtype)
    step = planner.plan([BatchRow(1, length, False) for length in lengths], table)
    assert step is not None
    layer.digest(cache, step.stale)
    output = torch.full((len(lengths), HEADS, VALUES), float("nan"), dtype=dtype)
    layer.attend(query, cache, step, AttentionParameters(WIDTH**-0.5), output)
    for got, one, latent in zip(output, query, latents, strict=True):
        keys = latent[:, None]
        want = attention(one, keys, keys, attended(one, keys, BLOCK, settings))[:, :VALUES]
        close = 2e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), want, atol=close, rtol=close)
    assert (activity.blocks_selected < activity.blocks_considered) == (share < 1)
