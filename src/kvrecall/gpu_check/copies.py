"""Copies between device memory and the pinned arena: every byte, in every layout in which vLLM's
backends keep KV caches. Nothing here needs vLLM."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm.compat.config import LayerPlacement
from kvrecall.engines.vllm.connector.copier import Copier
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages, pages_of
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.gpu_check import CheckError
from kvrecall.pool.arena import Arena

_ROUNDS = 6

Views = tuple[torch.Tensor, ...]
"""Of each layer: int16 ``[blocks, ...]``, as its kernel sees it."""

NUMBERS = 1 << 16
"""Of contents that differ."""

_MIX = (6364136223846793005, 1442695040888963407, 3935559000370003845)


@dataclass(frozen=True, slots=True)
class Size:
    """Of a KV cache."""

    blocks: int
    layers: int
    tokens: int
    heads: int
    dim: int

    @property
    def block_bytes(self) -> int:
        """Of keys and values in 16 bits, in all layers."""
        return self.layers * self.tokens * self.heads * 2 * self.dim * 2


def _each(size: Size, device: torch.device, *shape: int) -> Views:
    """Layers of their own."""
    return tuple(torch.zeros(shape, dtype=torch.int16, device=device) for _ in range(size.layers))


def _nhd(size: Size, device: torch.device) -> Views:
    """Token by token (FlashAttention)."""
    return _each(size, device, size.blocks, size.tokens, size.heads, 2 * size.dim)


def _hnd(size: Size, device: torch.device) -> Views:
    """Head by head, seen by the kernel token by token (FlashInfer)."""
    layers = _each(size, device, size.blocks, size.heads, size.tokens, 2 * size.dim)
    return tuple(layer.transpose(1, 2) for layer in layers)


def _mla(size: Size, device: torch.device) -> Views:
    """A latent and a rotary part for each token, without heads."""
    return _each(size, device, size.blocks, size.tokens, 9 * size.heads * size.dim // 4)


def _split(size: Size, device: torch.device) -> Views:
    """Each block is four of the kernel's."""
    shape = size.tokens // 4, size.heads, 2 * size.dim
    layers = _each(size, device, 4 * size.blocks, *shape)
    return tuple(layer.view(size.blocks, 4, *shape) for layer in layers)


def _together(size: Size, device: torch.device) -> Views:
    """All layers of a block together (vLLM's ``BL`` layouts)."""
    shape = size.blocks, size.layers, size.tokens, size.heads, 2 * size.dim
    return torch.zeros(shape, dtype=torch.int16, device=device).unbind(1)


LAYOUTS: Mapping[str, Callable[[Size, torch.device], Views]] = {
    "NHD": _nhd,
    "HND": _hnd,
    "MLA": _mla,
    "kernel blocks": _split,
    "layers together": _together,
}


class Cache:
    """A KV cache in one of these layouts. Its methods queue work on the current stream, and
    neither wait for it nor copy from the host, for which torch would wait."""

    def __init__(self, layout: str, size: Size, device: torch.device) -> None:
        self.device = device
        self._layers = LAYOUTS[layout](size, device)
        tensors = {f"layer{n}": view for n, view in enumerate(self._layers)}
        if layout == "kernel blocks":  # which the connector is given as they are
            tensors = {name: view.flatten(0, 1) for name, view in tensors.items()}
        placements = {
            name: LayerPlacement(view[0].numel() * 2, view.stride(0) * 2)
            for name, view in zip(tensors, self._layers, strict=True)
        }
        self._iota = torch.arange(NUMBERS, device=device)
        self.group = GroupPages(pages_of(tensors, placements, size.blocks))

    @property
    def record_bytes(self) -> int:
        """Of a block, in all layers."""
        return self.group.end

    def write(self, blocks: Sequence[int], numbers: Sequence[int]) -> None:
        """What a forward pass does: writes content that follows from each block's number, place by
        place."""
        at, of_block = self.on_device(blocks), self.on_device(numbers)
        for depth, view in enumerate(self._layers):
            view[at] = _content(of_block, view[0].numel(), depth).view(-1, *view.shape[1:])

    def sums(self, blocks: Sequence[int]) -> torch.Tensor:
        """A checksum of each of these blocks, over all layers as their kernels see them: int64
        ``[blocks]`` on the device. Depends on where every value lies."""
        at = self.on_device(blocks)
        total = torch.zeros(len(blocks), dtype=torch.int64, device=self.device)
        for depth, view in enumerate(self._layers):
            values = view[at].flatten(1).to(torch.int64)
            weights = _mixed(torch.arange(values.shape[1], device=self.device) + depth * _MIX[1])
            total += (values * weights).sum(1)
        return total

    def on_device(self, numbers: Sequence[int]) -> torch.Tensor:
        """These numbers below ``NUMBERS``, at least one: int64."""
        return torch.stack([self._iota[number] for number in numbers])


def _content(numbers: torch.Tensor, count: int, depth: int) -> torch.Tensor:
    """``count`` values for each of these numbers: int16 ``[numbers, count]``."""
    places = torch.arange(count, device=numbers.device)
    mixed = _mixed(numbers[:, None] * _MIX[2] + places + depth * _MIX[1])
    return (mixed >> 20 & 0x7FFF).to(torch.int16)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """A hash of int64, which wraps around."""
    numbers = numbers * _MIX[0]
    numbers = (numbers ^ numbers >> 29) * _MIX[1]
    return numbers ^ numbers >> 32


def check_copies(device: torch.device, size: Size) -> int:
    """Blocks return unchanged, and nothing beside them is written, in every layout. Returns the
    bytes moved.

    Raises CheckError naming layout and round.
    """
    moved = 0
    for layout in LAYOUTS:
        cache = Cache(layout, size, device)
        memory = arena(2 * size.blocks * cache.record_bytes)
        with closing(Copier(memory, [cache.group])) as copier:  # memory is unlocked, then unmapped
            for number in range(_ROUNDS):
                pages = cache.group.pages
                moved += _round(copier, pages, memory, f"{layout}, round {number}", number)
    return moved


def check_fetches(device: torch.device, blocks: int = 64, page_bytes: int = 1 << 14) -> None:
    """A kernel fetches parts of blocks by address from the pinned arena, and writes
    nothing beside them. Raises CheckError."""
    chance = random.Random(0)
    memory = arena(2 * blocks * page_bytes)
    rows = torch.zeros(blocks + 1, page_bytes, dtype=torch.uint8, device=device)
    pages = LayerPages("layer", rows, "")
    held = memory[: 2 * blocks * page_bytes].view(2 * blocks, page_bytes)
    held.copy_(torch.randint(0, 256, held.shape, dtype=torch.uint8))
    slots = chance.sample(range(2 * blocks), blocks // 2)
    into = chance.sample(range(1, blocks + 1), blocks // 2)
    piece = Piece(2, page_bytes // 4, page_bytes // 2)
    want = torch.zeros(blocks + 1, 2, page_bytes // 2, dtype=torch.uint8)
    want[into, :, : piece.nbytes] = held.view(-1, 2, page_bytes // 2)[slots, :, : piece.nbytes]
    sources = held.data_ptr() + np.array(slots) * page_bytes
    targets = pages.rows.data_ptr() + np.array(into) * pages.rows.stride(0)
    with closing(Copier(memory, [GroupPages((pages,))])):
        device_of(device).wait_locked()
        device_of(device).move(sources, targets, piece)
        _synchronize(device)
    if not torch.equal(pages.rows.cpu(), want.view(blocks + 1, page_bytes)):
        raise CheckError("a kernel fetched other bytes than the arena contains")


def _round(
    copier: Copier, pages: tuple[LayerPages, ...], memory: torch.Tensor, name: str, seed: int
) -> int:
    chance = random.Random(seed)
    blocks = pages[0].rows.shape[0]
    record = sum(page.page_bytes for page in pages)
    some = chance.sample(range(1, blocks), blocks // 2)
    if seed % 2:  # consecutive runs, as a prompt's blocks mostly are
        some = sorted(some)
    slots = chance.sample(range(memory.numel() // record), len(some))
    offsets = tuple(slot * record for slot in slots)
    for page in pages:
        page.rows.copy_(torch.randint(0, 256, page.rows.shape, dtype=torch.uint8))
    want = [page.rows[some].cpu() for page in pages]
    memory.fill_(255)
    _synchronize(pages[0].rows.device)
    moved = copier.store(Copy(tuple(some), offsets))
    copier.drain()
    untouched = [s for s in range(memory.numel() // record) if s not in slots]
    if not bool((memory.view(-1, record)[untouched] == 255).all()):
        raise CheckError(f"a store wrote outside its slots ({name})")
    others = chance.sample(some, len(some))
    for page in pages:
        page.rows.zero_()
    _synchronize(pages[0].rows.device)
    moved += copier.load(Copy(tuple(others), offsets))
    copier.drain()
    for page, expected in zip(pages, want, strict=True):
        if not torch.equal(page.rows[others].cpu(), expected):
            raise CheckError(f"a block came back with other bytes ({name})")
        rest = [b for b in range(blocks) if b not in some]
        if not bool((page.rows[rest] == 0).all()):
            raise CheckError(f"a load wrote outside its blocks ({name})")
    return moved


def arena(nbytes: int) -> torch.Tensor:
    """Touched shared memory, as the pool's."""
    arena = Arena.create(nbytes)
    while arena.ready_bytes < arena.nbytes:
        time.sleep(0.01)
    return torch.frombuffer(arena.memory, dtype=torch.uint8)[:nbytes]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
