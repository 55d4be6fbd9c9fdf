"""``bench launches``: what kvrecall asks of a device, counted without one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvrecall.attention.selection import DeviceSpeed, Gate
from kvrecall.attention.settings import RetrievalSettings
from kvrecall.bench.report import Report

if TYPE_CHECKING:
    from kvrecall_lab.engines.counting import Counts

BLOCK, LAYERS, BLOCKS = 128, 8, 4
_LONGEST = 1 << 20


def measure_launches(
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of one device.")] = 8,
    head_dim: Annotated[int, typer.Option(min=4, help="Coordinates of a head.")] = 128,
) -> Report:
    """What kvrecall asks of a device, counted without one: calls for an order to load or store
    blocks, operations in a sparse layer of a decode step, also with the blocks off the device, host
    waits; and the length from which retrieval's gate, by that count and an H100's speed, lets
    sequences decode sparsely."""
    import torch

    from kvrecall.engines.vllm.attention.base import KernelShape
    from kvrecall_lab.engines.counting import SparseSteps

    shape = KernelShape(heads, kv_heads, head_dim, BLOCK, torch.bfloat16, "")
    settings = RetrievalSettings()
    steps = SparseSteps(shape, settings, LAYERS)
    tokens = 2 * settings.offload_boundary
    filled, usual = steps.run(tokens), steps.run(tokens)
    recalling = steps.run(tokens, offloaded=True)
    order = _order(kv_heads * head_dim * 4 * BLOCK)
    layer = (len(filled.device) - 1) // LAYERS
    waits = sum(len(one.waits) for one in (filled, usual, recalling)) + order.host_waits
    speed = DeviceSpeed()
    overhead = speed.overhead_bytes(BLOCK)
    gate = Gate(settings, shape.token_bytes, overhead, narrows=False)
    figures = {
        "device_calls_an_order": order.calls // 2,
        "device_ops_a_sparse_layer": layer,
        "device_ops_in_most_steps": (len(usual.device) - 1) // LAYERS,
        "device_ops_off_the_device": (len(recalling.device) - 1) // LAYERS,
        "host_waits_a_step": waits,
        "sparse_from_tokens": gate.sparse_from(BLOCK, _LONGEST),
        "stated_us_a_launch": speed.launch_s * 1e6,
        "stated_bytes_per_s": speed.bandwidth,
        "layer_operations": filled.device[1 : 1 + layer],
    }
    rows = tuple((name.replace("_", " "), str(value)) for name, value in figures.items())
    return Report("launches", ("what", "count"), rows, figures)


def _order(page: int) -> Counts:
    """Of a load and a store of blocks with pages of so many bytes, until both are complete."""
    import torch

    from kvrecall.engines.vllm.connector.copier import Copier
    from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages
    from kvrecall.engines.vllm.device.base import Copy
    from kvrecall_lab.engines.counting import counted

    layers = [torch.zeros(BLOCKS + 1, page, dtype=torch.uint8) for _ in range(LAYERS)]
    pages = tuple(LayerPages(f"layer{at}", rows, "") for at, rows in enumerate(layers))
    record = LAYERS * page
    copy = Copy(tuple(range(1, BLOCKS + 1)), tuple(range(0, BLOCKS * record, record)))
    with counted(torch.device("cpu")) as counts:
        copier = Copier(torch.zeros(BLOCKS * record, dtype=torch.uint8), [GroupPages(pages)])
        copier.load(copy)
        copier.store(copy)
        done = 0
        while done < 2:
            done += len(copier.loads.completed()) + len(copier.stores.completed())
            time.sleep(0.001)
        copier.close()
    return counts
