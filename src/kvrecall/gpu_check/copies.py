"""Copies between device memory and the pinned arena: every byte, in every layout."""

from __future__ import annotations

import random
import time
from contextlib import closing

import numpy as np
import torch

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm.connector.copier import Copier
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.gpu_check.layouts import LAYOUTS, Cache, Size
from kvrecall.gpu_check.outcome import CheckError
from kvrecall.pool.arena import Arena

_ROUNDS = 6


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
