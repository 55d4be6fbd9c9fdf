"""KV quantised per token and head, in vLLM's own pages: scales lie in a block's record, come back
with it, and are read when a hit is audited. vLLM's kernels for it need a GPU; its specs, its views
of a page and its set-up of the scales do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    KVQuantMode,
    create_kv_cache_views,
)

from kvrecall.engines.vllm.compat.config import Scaled, layer_placements, settle_scales
from kvrecall.engines.vllm.connector.compare import deviation
from kvrecall.engines.vllm.connector.copier import Copier
from kvrecall.engines.vllm.connector.pages import GroupPages, pages_of
from kvrecall.engines.vllm.device.base import Copy

BLOCKS, TOKENS, HEADS, SIZE = 6, 16, 2, 64
MODES = {KVQuantMode.INT8_PER_TOKEN_HEAD: torch.int8, KVQuantMode.FP8_PER_TOKEN_HEAD: torch.uint8}
NAME = "model.layers.0.self_attn.attn"


class Device:
    """One layer's KV cache, allocated and viewed by vLLM."""

    def __init__(self, mode: KVQuantMode, layout: KVCacheLayout) -> None:
        plain = FullAttentionSpec(
            block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=MODES[mode],
            kv_quant_mode=mode,
        )  # fmt: skip
        spec = TritonAttentionBackend.customize_spec(plain)
        page = spec.page_size_bytes
        assert page == TOKENS * HEADS * 2 * (SIZE + 4), "with its scales"
        place = KVCacheTensor(BLOCKS * page, [NAME], BLOCKS * page, page)
        raw = torch.zeros(BLOCKS * page, dtype=torch.int8)
        (self.cache,) = create_kv_cache_views(raw, spec, BLOCKS, layout, place)
        groups = [KVCacheGroupSpec([NAME], spec)]
        config: Any = KVCacheConfig(
            num_blocks=BLOCKS, kv_cache_tensors=[place], kv_cache_groups=groups
        )
        (placed,) = layer_placements(config)
        self.pages = GroupPages(pages_of({NAME: self.cache}, placed, BLOCKS))
        self.implementation: Any = object.__new__(TritonAttentionImpl)
        self.implementation._is_per_token_head_quant = True
        layers = {NAME: SimpleNamespace(impl=self.implementation)}
        compilation = SimpleNamespace(static_forward_context=layers)
        self.vllm_config = SimpleNamespace(compilation_config=compilation)

    def write(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """As vLLM's kernel does: ``[heads, tokens, size]``, quantised by token and head."""
        impl = self.implementation
        for half, scales, data in (
            (0, impl._k_scale_cache, keys), (1, impl._v_scale_cache, values),
        ):  # fmt: skip
            scale = data.abs().amax(dim=-1, keepdim=True) / 127
            scales[block] = scale.squeeze(-1).T
            room = self.cache[block, :, :, half * (SIZE + 4) : half * (SIZE + 4) + SIZE]
            if self.cache.dtype is torch.int8:
                room.copy_((data / scale).round().to(torch.int8))
            else:
                room.copy_((data / scale).to(torch.float8_e4m3fn).view(torch.uint8))

    def scales(self, block: int) -> torch.Tensor:
        impl = self.implementation
        return torch.stack((impl._k_scale_cache[block], impl._v_scale_cache[block])).clone()


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request: pytest.FixtureRequest) -> KVQuantMode:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[KVCacheLayout.LBHNC, KVCacheLayout.LBNHC], ids=lambda each: each.name)
def device(request: pytest.FixtureRequest, mode: KVQuantMode) -> Device:
    return Device(mode, request.param)


def drawn(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, HEADS, TOKENS, SIZE, generator=generator)
    return keys, values


def test_a_block_comes_back_with_its_scales(device: Device) -> None:
    settle_scales(device.vllm_config, {NAME: device.cache})
    device.write(2, *drawn(1))
    whole, scales = device.cache[2].clone(), device.scales(2)
    assert bool((scales != 1).all())
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    copier = Copier(arena, [device.pages])
    assert copier.store(Copy((2,), (4096,))) == device.cache[2].numel()
    device.cache.zero_()
    copier.load(Copy((5,), (4096,)))
    assert torch.equal(device.cache[5], whole)
    assert torch.equal(device.scales(5), scales)


def test_the_first_step_of_an_engine_leaves_loaded_scales(device: Device) -> None:
    """vLLM sets all scales to 1 when a layer first runs: before blocks are loaded, not after."""
    page, placed = 2, device.cache
    settle_scales(device.vllm_config, {NAME: placed})
    device.write(page, *drawn(2))
    before = device.scales(page)
    device.implementation._ensure_scale_caches(placed)  # by the layer's first forward pass
    assert torch.equal(device.scales(page), before)


def test_layers_of_other_backends_are_left_alone() -> None:
    layers = {NAME: SimpleNamespace(impl=SimpleNamespace()), "other": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    settle_scales(config, {NAME: torch.zeros(1), "unknown": torch.zeros(1)})


def test_an_audit_compares_values_and_not_bytes(device: Device, mode: KVQuantMode) -> None:
    """Keys that differ by rounding have other scales, whose bytes say nothing by themselves."""
    settle_scales(device.vllm_config, {NAME: device.cache})
    (page,) = device.pages.pages
    dtype = {torch.int8: torch.int8, torch.uint8: torch.float8_e4m3fn}[MODES[mode]]
    assert page.scaled == Scaled(SIZE, dtype)
    keys, values = drawn(3)
    device.write(1, keys, values)
    noise = 1 + 1e-3 * torch.randn(keys.shape, generator=torch.Generator().manual_seed(4))
    device.write(2, keys * noise, values * noise)
    device.write(3, *drawn(5))
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    copier = Copier(arena, [device.pages])
    copier.store(Copy((1,), (0,)))
    same, rounded, other = (
        deviation(device.pages, arena, [block], [0], torch.bfloat16, False) for block in (1, 2, 3)
    )
    assert (same.unequal, rounded.unequal, other.unequal) == (0, 1, 1)
    assert rounded.within
    assert rounded.relative < 0.05
    assert not other.within
    assert other.relative > 1
