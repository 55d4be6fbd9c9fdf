"""The worker follows its orders from arena to arena, and lets go of one whose owner has died."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvrecall.attention.kernels.device import Piece
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.connector.copier import ArenaMapping
from kvrecall.engines.vllm.connector.pages import GroupPages, LayerPages
from kvrecall.engines.vllm.device.base import Copy
from kvrecall.pool.base import NO_ARENA, ArenaHandle
from kvrecall.pool.service.link import mappers_of
from kvrecall.testing import wait_until
from kvrecall_lab.streams.late import LateDevice, late_device
from pool.service.service import Service

PAGE = 4096


@pytest.fixture
def device() -> torch.Tensor:
    return torch.zeros((8, PAGE), dtype=torch.uint8)


@pytest.fixture
def mapping(device: torch.Tensor) -> Iterator[ArenaMapping]:
    mapping = ArenaMapping([GroupPages((LayerPages("layer", device, ""),))])
    yield mapping
    mapping.close()


def test_offsets_belong_to_the_arena_of_their_orders(
    tmp_path: Path, device: torch.Tensor, mapping: ArenaMapping
) -> None:
    with Service(tmp_path / "a") as first, Service(tmp_path / "b") as second:
        one, two = first.client(), second.client()
        for number, client in enumerate((one, two), start=1):
            device[number] = number
            assert mapping.store(client.arena_handle(), Copy((number,), (0,)))
        for number, client in enumerate((one, two), start=1):
            device[0:1] = 0
            assert mapping.load(client.arena_handle(), Copy((3,), (0,)))
            assert (device[3] == number).all()
        loads, stores = mapping.completed()
        assert [moved.nbytes for moved in (*loads, *stores)] == [PAGE] * 4
        assert mapping.completed() == ([], [])


def test_arena_of_a_dead_service_is_let_go_and_takes_nothing(
    tmp_path: Path, device: torch.Tensor, mapping: ArenaMapping
) -> None:
    with Service(tmp_path) as service:
        client = service.client()
        handle = client.arena_handle()
        assert mapping.store(handle, Copy((1,), (0,)))
        assert mappers_of(handle.inode)
        service.kill()
        wait_until(lambda: not mappers_of(handle.inode))
        assert not mapping.load(handle, Copy((1,), (0,)))
        assert not mapping.store(handle, Copy((1,), (0,)))
        service.start()
        wait_until(lambda: client.arena_handle() != handle)
        assert mapping.load(client.arena_handle(), Copy((1,), (0,)))
        assert not np.asarray(device[1]).any()


def test_another_arena_under_the_same_numbers_is_not_taken_for_it(
    tmp_path: Path, mapping: ArenaMapping
) -> None:
    with Service(tmp_path) as service:
        client = service.client()
        handle = client.arena_handle()
        stale: ArenaHandle = replace(handle, inode=handle.inode + 1)
        assert stale != handle
        assert not mapping.load(stale, Copy((1,), (0,)))
        assert mapping.load(handle, Copy((1,), (0,)))


def test_an_arena_that_attention_reads_outlives_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locked for the device until queued reads of it are done, and then let go."""
    monkeypatch.setitem(devices.FORMS, "cpu", late_device)
    devices.device_of.cache_clear()
    device = torch.zeros((8, PAGE), dtype=torch.uint8)
    late = devices.device_of(device.device)
    assert isinstance(late, LateDevice)
    mapping = ArenaMapping([GroupPages((LayerPages("layer", device, ""),))])
    with Service(tmp_path) as service:
        client = service.client()
        handle = client.arena_handle()
        late.machine.host(
            set(), set(late.machine.cells(device.data_ptr(), device.numel())), "this test"
        )
        assert mapping.store(handle, Copy((1,), (0,)))
        memory = mapping.memory(handle)
        assert memory is not None
        source = np.array([memory.ctypes.data])
        mapping.keep(frozenset({handle}))
        service.kill()
        service.start()
        wait_until(lambda: client.arena_handle() not in (handle, NO_ARENA))
        assert mapping.memory(client.arena_handle()) is not None
        assert source[0] in late.locked
        late.move(source, np.array([device.data_ptr() + 3 * PAGE]), Piece(1, PAGE, 0))
        del memory
        assert mappers_of(handle.inode)
        mapping.keep(frozenset())
        wait_until(lambda: not mappers_of(handle.inode))
        assert source[0] not in late.locked
        assert late.machine.faults == []
        mapping.close()
    devices.device_of.cache_clear()
