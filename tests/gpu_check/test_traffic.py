"""The check of blocks under traffic: in every layout on the CPU; and on a simulated device, whose
streams run late, that it sees copies which race."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from kvrecall.engines.vllm.connector import copier
from kvrecall.gpu_check import CheckError
from kvrecall.gpu_check.copies import LAYOUTS, Cache, Size
from kvrecall.gpu_check.traffic import Traffic
from kvrecall_lab.streams.device import Machine, Style
from kvrecall_lab.streams.engine import on

CPU = torch.device("cpu")
SMALL = Size(blocks=17, layers=2, tokens=16, heads=2, dim=16)
STEPS = 60


def arena(cache: Cache, blocks: int = 10) -> torch.Tensor:
    return torch.zeros(cache.record_bytes * blocks, dtype=torch.uint8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_in_every_layout(layout: str) -> None:
    cache = Cache(layout, SMALL, CPU)
    traffic = Traffic(cache, arena(cache), 0)
    traffic.run(STEPS)
    assert traffic.loaded > 50
    assert traffic.preempted > 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_in_another_place_is_seen(layout: str) -> None:
    cache = Cache(layout, SMALL, CPU)
    cache.write([3, 4], [70, 71])
    right = cache.sums([3, 4])
    assert right[0] != right[1]
    for view in cache._layers:
        ours = view[3].flatten()
        values = ours[[0, 1]]
        assert values[0] != values[1]
        swapped = view[3].clone().flatten()
        swapped[[0, 1]] = values[[1, 0]]
        view[3] = swapped.view(view[3].shape)
        assert cache.sums([3])[0] != right[0]
        swapped[[0, 1]] = values
        view[3] = swapped.view(view[3].shape)
        assert cache.sums([3])[0] == right[0]


class LateTraffic(Traffic):
    """Whose forward passes are late, too."""

    machine: Machine

    def compute(
        self, work: Callable[[], None], reads: Sequence[int], writes: Sequence[int]
    ) -> None:
        sides = []
        for blocks in (reads, writes):
            rows = [page.rows[block] for page in self._cache.group.pages for block in blocks]
            sides.append(
                {cell for row in rows for cell in self.machine.cells(row.data_ptr(), row.numel())}
            )
        self.machine.computing.launch(work, *sides, "forward")


def late(seed: int, ignored: frozenset[str] = frozenset()) -> tuple[str, set[str]]:
    """What the check says of a schedule, and the waits that were asked for."""
    chance = random.Random(seed)
    machine = Machine(chance, Style.draw(chance), ignored)
    with on(machine):
        cache = Cache("NHD", SMALL, CPU)
        traffic = LateTraffic(cache, arena(cache), seed)
        traffic.machine = machine
        try:
            traffic.run(30)
        except CheckError as error:
            return str(error), machine.sites
    return "", machine.sites


def test_the_check_sees_every_wait_that_is_missing() -> None:
    sites: set[str] = set()
    for seed in range(9):
        said, asked = late(seed)
        assert said == ""
        sites |= {site for site in asked if copier.CopyQueue.__name__ in site}
    kinds = {site.split(":")[0] for site in sites}
    assert {"follow loads", "follow stores", "query loads", "query stores"} <= kinds
    missed = {
        site
        for site in sites
        if not any("other bytes" in late(seed, frozenset({site}))[0] for seed in range(60))
    }
    assert missed == set()
