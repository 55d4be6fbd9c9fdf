"""Programs of kernels in another order than the interpreter's; and a part of a kernel as a kernel
of its own, the choice of blocks by logits that a test gives."""

from __future__ import annotations

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_builder

from kvrecall.attention.kernels import device
from kvrecall.attention.kernels.device import DeviceResidency, DeviceStep
from kvrecall.attention.kernels.triton_kernels import choose_row


@pytest.fixture(autouse=True)
def programs_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch has another one."""
    random = np.random.default_rng(1)
    set_size, set_place = interpreter_builder.set_grid_dim, interpreter_builder.set_grid_idx
    sizes, order = (), np.empty(0)

    def begin(*size: int) -> None:
        nonlocal sizes, order
        sizes, order = size, random.permutation(np.prod(size))
        set_size(*size)

    def go_on(*place: int) -> None:
        other = np.unravel_index(order[np.ravel_multi_index(place, sizes)], sizes)
        set_place(*map(int, other))

    monkeypatch.setattr(interpreter_builder, "set_grid_dim", begin)
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", go_on)


@triton.jit
def choose_alone(  # type: ignore[no-untyped-def]
    facts, blocks, names, logits, scores, table, slots, missed, place, state, counts,
    kv_heads, width, most, most_slots, numbers, state_part, state_head,
    GROUP: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, SEARCH: tl.constexpr,
    RECALLS: tl.constexpr,
):  # fmt: skip
    choose_row(
        tl.program_id(0).to(tl.int64),
        facts, blocks, names, logits, scores, table, slots, missed, place, state, counts,
        kv_heads, width, most, most_slots, numbers, state_part, state_head,
        GROUP, HEADS, CHUNK, SEARCH, RECALLS,
    )  # fmt: skip


def choose(step: DeviceStep, residency: DeviceResidency | None = None) -> None:
    """What ``device.choose_by_triton`` does once the step's logits are there."""
    kept = (step.missed,) * 3, 0, (0, 0, 1)
    if residency is not None:
        parts = residency.place, residency.state, residency.counts
        kept = parts, residency.place.stride(0), residency.state.stride()
    tensors, numbers, (part, head, _) = kept
    chunk = device.blocks_at_once(step.group)
    choose_alone[(step.rows,)](
        step.facts, step.blocks, step.names, step.logits, step.scores, step.table, step.slots,
        step.missed, *tensors, step.kv_heads, step.blocks.stride(0), step.table.shape[1],
        step.slots.shape[1], numbers, part, head,
        GROUP=step.group, HEADS=device.next_power(step.group), CHUNK=chunk,
        SEARCH=device.SEARCHED * chunk, RECALLS=residency is not None,
    )  # fmt: skip
