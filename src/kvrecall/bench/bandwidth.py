"""The bandwidth of copies between arena and device, beside a plain copy."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvrecall.engines.vllm.connector.copier import Copier
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages
from kvrecall.engines.vllm.device import device_of
from kvrecall.engines.vllm.device.accelerator import CHUNK_BYTES
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.pool.arena import Arena

_ROUNDS = 45
_PAUSE_S = 0.02  # after an operation of torch its threads keep processors busy for milliseconds


def measure_bandwidth(
    blocks: int, layers: int, block_bytes: int, device: torch.device | None = None
) -> dict[str, Any]:
    """Bandwidth from the arena to the device: ``blocks`` of ``block_bytes`` over ``layers``, GB/s,
    medians; ``restore_to_plain`` is the median of the rounds' ratios, because a shared machine's
    bandwidth changes from one second to the next. ``device``: the accelerator, or the CPU if
    there is none.

    The plain copy is ``copy_`` between two tensors of the same size, taken in turns with the
    restore in the same process and with the same threads. Device blocks are consecutive and so
    are slots, as they are for a prompt restored in an engine with room; ``scattered_gb_s`` is
    the opposite case, neither of them in order.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or torch.device("cpu")
    nbytes = blocks * block_bytes
    size = (blocks + 1, block_bytes // layers)
    pages = tuple(
        LayerPages(f"layer{layer}", torch.zeros(size, dtype=torch.uint8, device=device), "")
        for layer in range(layers)
    )
    arena = Arena.create(nbytes)
    arena.wait_ready()
    memory = torch.frombuffer(arena.memory, dtype=torch.uint8)
    memory.fill_(1)
    copier = Copier(memory, [GroupPages(pages)])
    device_of(device).wait_locked()
    target = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    ids, offsets = range(1, blocks + 1), [place * block_bytes for place in range(blocks)]
    in_order = Copy(tuple(ids), tuple(offsets))
    random.Random(0).shuffle(offsets)
    scattered = Copy(tuple(sorted(ids, key=lambda b: (b * 7919) % (blocks + 1))), tuple(offsets))
    work: dict[str, Callable[[], object]] = {
        "restore_gb_s": lambda: copier.load(in_order),
        "scattered_gb_s": lambda: copier.load(scattered),
        "store_gb_s": lambda: copier.store(in_order),
        "plain_copy_gb_s": lambda: _plain_copy(target, memory),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(_ROUNDS + 1):
        for name, copy in work.items():
            time.sleep(_PAUSE_S)
            begin = time.perf_counter()
            copy()
            copier.drain()
            if turn:  # the first touches the memory
                seconds[name].append(time.perf_counter() - begin)
    copier.close()
    rates = {name: nbytes / statistics.median(values) / 1e9 for name, values in seconds.items()}
    pairs = zip(seconds["plain_copy_gb_s"], seconds["restore_gb_s"], strict=True)
    first, ratio, third = statistics.quantiles((plain / restore for plain, restore in pairs), n=4)
    return {
        **{name: round(rate, 2) for name, rate in rates.items()},
        "restore_to_plain": round(ratio, 3),
        "restore_to_plain_quartiles": [round(first, 3), round(third, 3)],
    }


def _plain_copy(target: torch.Tensor, memory: torch.Tensor) -> None:
    """Copies bytes from the arena to the device, and waits for them. A piece for each range that is
    page-locked in one call: CUDA copies none that lies in two."""
    for begin in range(0, len(target), CHUNK_BYTES):
        piece = slice(begin, min(begin + CHUNK_BYTES, len(target)))
        target[piece].copy_(memory[piece])
