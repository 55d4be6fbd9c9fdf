"""Copies between device memory and the pinned arena: every byte, on awkward rows, in both layouts,
while the device is busy."""

from __future__ import annotations

import random
import time

import numpy as np
import torch

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm.connector.copier import Copier
from kvrecall.engines.vllm.connector.pages import Copy, GroupPages, Pages
from kvrecall.engines.vllm.device import device_of
from kvrecall.lab.gpu_check.outcome import CheckError
from kvrecall.pool.arena import Arena

LAYOUTS = ("layers", "blocks")
"""A tensor a layer, or all layers of a block side by side."""

_LAYERS = 3
_ROUNDS = 6


def check_copies(device: torch.device, blocks: int = 64, page_bytes: int = 1 << 16) -> int:
    """Blocks return unchanged, and nothing beside them is written. Returns the bytes moved.

    Raises CheckError naming layout and round.
    """
    moved = 0
    for layout in LAYOUTS:
        memory = _arena(2 * blocks * _LAYERS * page_bytes)
        pages = _pages(device, layout, blocks, page_bytes)
        copier = Copier(memory, [GroupPages(pages)])
        for number in range(_ROUNDS):
            moved += _round(copier, pages, memory, f"{layout}, round {number}", number)
        copier.close()
    return moved


def check_order(device: torch.device, page_bytes: int = 1 << 20) -> None:
    """A store copies the data after all work queued before it, not as of its submission. Raises
    CheckError."""
    memory = _arena(page_bytes)
    pages = _pages(device, "layers", 1, page_bytes, layers=1)
    copier = Copier(memory, [GroupPages(pages)])
    size = 2048 if device.type != "cpu" else 256
    work = torch.randn(size, size, device=device)
    for value in range(1, 9):
        for _ in range(20):
            work = torch.tanh(work @ work)
        pages[0].rows[1].fill_(value)
        copier.store(Copy((1,), (0,)))
        copier.drain()
        if not bool((memory[:page_bytes] == value).all()):
            raise CheckError(f"a store overtook the work queued before it (round {value})")
    copier.close()


def check_fetches(device: torch.device, blocks: int = 64, page_bytes: int = 1 << 14) -> None:
    """A kernel fetches parts of blocks by address from the pinned arena, and writes
    nothing beside them. Raises CheckError."""
    chance = random.Random(0)
    memory = _arena(2 * blocks * page_bytes)
    (pages,) = _pages(device, "layers", blocks, page_bytes, layers=1)
    copier = Copier(memory, [GroupPages((pages,))])
    held = memory[: 2 * blocks * page_bytes].view(2 * blocks, page_bytes)
    held.copy_(torch.randint(0, 256, held.shape, dtype=torch.uint8))
    slots = chance.sample(range(2 * blocks), blocks // 2)
    rows = chance.sample(range(1, blocks + 1), blocks // 2)
    piece = Piece(2, page_bytes // 4, page_bytes // 2)
    want = torch.zeros(blocks + 1, 2, page_bytes // 2, dtype=torch.uint8)
    want[rows, :, : piece.nbytes] = held.view(-1, 2, page_bytes // 2)[slots, :, : piece.nbytes]
    sources = held.data_ptr() + np.array(slots) * page_bytes
    targets = pages.rows.data_ptr() + np.array(rows) * pages.rows.stride(0)
    device_of(device).wait_locked()
    device_of(device).move(sources, targets, piece)
    _synchronize(device)
    copier.close()
    if not torch.equal(pages.rows.cpu(), want.view(blocks + 1, page_bytes)):
        raise CheckError("a kernel fetched other bytes than the arena contains")


def _round(
    copier: Copier, pages: tuple[Pages, ...], memory: torch.Tensor, name: str, seed: int
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


def _pages(
    device: torch.device, layout: str, blocks: int, page_bytes: int, layers: int = _LAYERS
) -> tuple[Pages, ...]:
    """Pages of ``blocks`` blocks and the null block."""
    if layout == "blocks":
        whole = torch.zeros(blocks + 1, layers, page_bytes, dtype=torch.uint8, device=device)
        return tuple(Pages(f"layer{i}", whole[:, i], layout) for i in range(layers))
    return tuple(
        Pages(
            f"layer{i}",
            torch.zeros(blocks + 1, page_bytes, dtype=torch.uint8, device=device),
            layout,
        )
        for i in range(layers)
    )


def _arena(nbytes: int) -> torch.Tensor:
    """Touched shared memory, as the pool's."""
    arena = Arena.create(nbytes)
    while arena.ready_bytes < arena.nbytes:
        time.sleep(0.01)
    return torch.frombuffer(arena.memory, dtype=torch.uint8)[:nbytes]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
