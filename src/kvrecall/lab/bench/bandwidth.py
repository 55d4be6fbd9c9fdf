"""How fast blocks go from the arena to the device, against a plain copy of the same bytes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

from kvrecall.engines.vllm.connector.copier import make_copier
from kvrecall.engines.vllm.connector.pages import Pages
from kvrecall.engines.vllm.connector.wire import Copy
from kvrecall.pool.arena import Arena

ROUNDS = 15


def measure_bandwidth(blocks: int, layers: int, block_bytes: int) -> dict[str, float]:
    """Restores ``blocks`` of ``block_bytes`` over ``layers``; GB/s, medians of ``ROUNDS``.

    The plain copy is one ``copy_`` between two tensors of the same size, taken in turns with the
    restore in the same process and with the same threads. Device blocks are consecutive and so
    are slots, as they are for a prompt restored in an engine with room; ``scattered_gb_s`` is
    the opposite case, neither of them in order.
    """
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    page_bytes = block_bytes // layers
    pages = tuple(
        Pages(
            f"layer{i}", torch.zeros(blocks + 1, page_bytes, dtype=torch.uint8, device=device), ""
        )
        for i in range(layers)
    )
    arena = Arena.create(blocks * block_bytes)
    while arena.ready_bytes < arena.nbytes:
        time.sleep(0.01)
    memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
    memory.fill_(1)
    copier = make_copier(memory, pages, 0)
    target = torch.zeros(blocks * block_bytes, dtype=torch.uint8, device=device)
    in_order = Copy(tuple(range(1, blocks + 1)), tuple(i * block_bytes for i in range(blocks)))
    shuffled = list(zip(in_order.block_ids, in_order.offsets, strict=True))
    random.Random(0).shuffle(shuffled)
    scattered = Copy(
        tuple(sorted(in_order.block_ids, key=lambda b: (b * 7919) % (blocks + 1))),
        tuple(offset for _, offset in shuffled),
    )

    def restore(copy: Copy) -> None:
        copier.load(copy)
        copier.drain()

    def plain() -> None:
        target.copy_(memory[: blocks * block_bytes])
        copier.drain()

    works = (lambda: restore(in_order), lambda: restore(scattered), plain)
    seconds = [_median(times) for times in _in_turns(works)]
    rates = [blocks * block_bytes / value / 1e9 for value in seconds]
    return {
        "restore_gb_s": round(rates[0], 2),
        "scattered_gb_s": round(rates[1], 2),
        "plain_copy_gb_s": round(rates[2], 2),
        "restore_to_plain": round(rates[0] / rates[2], 3),
    }


def _in_turns(works: tuple[Callable[[], None], ...]) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in works]
    for turn in range(ROUNDS + 1):
        for place, work in enumerate(works):
            begin = time.perf_counter()
            work()
            if turn:  # the first touches the memory
                times[place].append(time.perf_counter() - begin)
    return times


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
