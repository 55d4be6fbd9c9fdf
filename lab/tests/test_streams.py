"""Copies in every order that the device may make them: random schedules of an engine on a simulated
device, and each wait that they need."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvrecall.block import TierName
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.compat.scheduler import reschedule_lost
from kvrecall.engines.vllm.connector import copier
from kvrecall.engines.vllm.device.base import Batch
from kvrecall.engines.vllm.wire import StepReport
from kvrecall.pool import Pool
from kvrecall_lab.models import write_model
from kvrecall_lab.streams.device import CELL, DeadlockError, Machine, Style
from kvrecall_lab.streams.engine import BLOCK, LAYERS, PAGE, RECOVERS, TOKEN_S, Engine, config, on
from kvrecall_lab.streams.late import META, LateDevice, LateTensor, Queueing, late_device
from kvrecall_lab.streams.run import ALL, check

SCHEDULES = dict(zip(ALL, (40, 16, 12), strict=True))


def test_no_order_of_copies_goes_wrong_and_each_wait_is_needed(tmp_path: Path) -> None:
    """`make streams` runs thousands, and there all mutants must be caught."""
    model = write_model(tmp_path / "model", weights=False)
    found = check(model, 0, SCHEDULES, quick=True)
    assert (found["wrong"], found["early_reads"], found["deadlocks"]) == (0, 0, 0)
    assert found["schedules"] == sum(SCHEDULES.values())
    assert found["mutants"] == found["mutants_caught"] >= 15
    # This thread waits for the device where blocks are taken from a request, and at the end.
    ends = ("RecallWorker.before_overwrite", "RecallWorker.close")
    assert all(site.endswith(ends) for site in found["host_waits"])
    kinds = found["kinds"]
    common = ("loads", "stores", "preempted", "zeroing", "abort", "sleep", "from the tier")
    for kind in ALL:
        for what in common:
            assert kinds[kind]["did"][what] > 0, (kind, what)
    assert kinds["one group"]["did"]["shut down"] > 0
    off = "graphs off the device", "with dense layers"
    for what in ("fetches", *off, "departures", "arrivals"):
        assert kinds["offload"]["did"][what] > 0, what
    # PyTorch makes no host wait for the device either.
    assert not kinds["offload"]["did"].get("torch's waits")
    assert (kinds["one group"]["did"].get("fail", 0) > 0) == RECOVERS


@pytest.mark.parametrize("overlapping", [False, True])
def test_the_engine_learns_the_rates_of_its_device(tmp_path: Path, overlapping: bool) -> None:
    """Of steps that overlap, too, and of copies beside them. The host's clock tells neither."""
    chance = random.Random(0)
    machine = Machine(chance, Style(0.3, 3, False, (1.0, 0.3), 0.5))
    settings = RecallSettings.from_mapping({"host_size": "400KiB"})
    model = config(write_model(tmp_path / "model", weights=False), overlapping, False)
    prompts = [[chance.randrange(256) for _ in range(150)] for _ in range(3)]
    with on(machine), Pool.open(settings.pool) as pool:
        engine = Engine(model, machine, pool, 2, 40, True, False)
        for turn in range(2):
            for number, prompt in enumerate(prompts):
                engine.add(f"{turn}-{number}", prompt, 3, 0)
            while engine.is_busy:
                engine.step()
            assert engine.preempt_all()
        engine.close()
    costs = engine.side.costs
    # A step that ends a prompt decodes others, too.
    assert costs.compute_seconds(3) == pytest.approx(BLOCK * TOKEN_S, rel=0.05)
    rank_s = LAYERS * PAGE * machine.byte_s
    assert costs.load_seconds(TierName.HOST) == pytest.approx(rank_s, rel=0.01)


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("aborted", [False, True], ids=["finishes", "aborted"])
def test_a_load_that_never_ends_costs_a_wait_and_a_recomputation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlapping: bool, ranks: int, aborted: bool
) -> None:
    """And when it ends after all, it writes blocks that no request has."""
    reschedule_lost(StepReport)
    machine = Machine(random.Random(0), Style(0.0, 3, True, (1.0,)))
    clock = SimpleNamespace(monotonic=lambda: machine.now, sleep=time.sleep)
    monkeypatch.setattr(copier, "time", clock)
    settings = RecallSettings.from_mapping({"host_size": "400KiB"})
    model = config(write_model(tmp_path / "model", weights=False), overlapping, False)
    chance = random.Random(1)
    prompts = [[chance.randrange(256) for _ in range(90)] for _ in range(3)]
    with on(machine), Pool.open(settings.pool) as pool:
        engine = Engine(model, machine, pool, ranks, 30, True, False)

        def steps(count: int = 1 << 30) -> None:
            while engine.is_busy and count:
                engine.step()
                count -= 1

        for number, prompt in enumerate(prompts):
            engine.add(f"first-{number}", prompt, 2, 0)
        steps()
        assert engine.preempt_all()
        late = [stream for stream in machine.streams if stream.name == "loads"][-1]  # of one rank
        late.is_stuck = True
        engine.add("again", prompts[0], 20, 0)
        steps(5)
        assert "again" in engine.names
        assert engine.scheduler.requests["again"].num_computed_tokens == 80
        if aborted:
            engine.abort("again")
        machine.now += copier.LONGEST_S + 1
        engine.add("other", prompts[1], 20, 0)
        requests = dict(engine.scheduler.requests)
        steps(60)
        assert {name: one.num_output_tokens for name, one in requests.items()} == {
            "again": 0 if aborted else 20,
            "other": 20,
        }
        assert engine.wrong == []
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
        assert free() == 29 - 2 * 5, "what both loads may write"
        late.is_stuck = False
        engine.add("third", prompts[2], 20, 0)
        steps()
        assert engine.wrong == machine.faults == []
        assert free() == 29
        assert pool.stats().leases == 0
        engine.close()


class Bench:
    """Two streams and some memory."""

    def __init__(self, eager: float = 0.0, only_needed: bool = True) -> None:
        style = Style(eager, 10**9, only_needed, (1.0,))
        self.machine = Machine(random.Random(0), style)
        self.device = LateDevice(self.machine)
        self.copies = self.machine.stream("copies")
        self.computing = self.machine.computing
        self.done: list[str] = []

    def write(self, cell: int, name: str = "kernel") -> None:
        self.computing.launch(lambda: self.done.append(name), set(), {cell}, name)

    def read(self, cell: int) -> None:
        self.copies.launch(lambda: self.done.append("copy"), {cell}, {cell + 100}, "copy")


def test_the_simulation_notices_what_nothing_orders() -> None:
    bench = Bench()
    bench.write(1)
    bench.read(1)
    assert bench.machine.faults == ["copy reads what compute is still to write"]
    bench.write(1)
    assert bench.machine.faults[1:] == ["kernel overwrites what copies still reads"]
    bench.read(7)
    assert bench.machine.faults[2:] == ["copy reads what was never written"]


def test_work_that_waits_comes_after_and_late() -> None:
    bench = Bench()
    bench.write(1)
    bench.copies.wait(bench.computing.record())
    bench.read(1)
    end = bench.copies.record()
    assert not end.is_reached()
    assert bench.done == []
    bench.write(2, "later")
    end.wait()
    assert bench.done == ["kernel", "copy"]
    bench.write(1)  # this thread knows that the copy is made
    assert bench.machine.faults == []


def test_an_engine_that_computes_at_once_waits_at_once() -> None:
    """A real one on a CPU queues nothing: what its stream waits for must be done before it goes on,
    or it overwrites blocks that are still to be stored."""
    device = late_device()
    stored, block = torch.zeros(64), torch.ones(64)
    stream = device.stream("stores")
    places = (np.array([one]) for one in (block.data_ptr(), stored.data_ptr(), block.nbytes))
    stream.copy(Batch(*places))
    device.current().wait(stream.record())
    block.zero_()
    assert stored.sum() == 64


def test_what_waits_for_itself_is_a_deadlock() -> None:
    for only_needed in (True, False):
        bench = Bench(only_needed=only_needed)
        end = bench.copies.record()
        end.number = 5
        bench.computing.wait(end)
        with pytest.raises(DeadlockError):
            bench.computing.record().wait()


def test_unmapping_under_a_copy_is_noticed() -> None:
    bench = Bench()
    memory = torch.zeros(4 * CELL, dtype=torch.uint8)
    bench.device.lock(memory, memory.numel)
    first = -(-memory.data_ptr() // CELL)
    bench.write(first)
    bench.device.unlock(memory)
    assert bench.machine.faults == ["unmapping overwrites what compute is still to write"]


def test_what_torch_does_on_the_device_is_late() -> None:
    machine = Machine(random.Random(0), Style(0.0, 10**9, True, (1.0,)))
    device = LateDevice(machine, meta=True)
    with Queueing(machine):
        rows = torch.zeros(4, 3, device=META)
        assert isinstance(rows, LateTensor)
        at = device.send(torch.tensor([2, 0]))
        rows[at] = device.send(torch.ones(2, 3))
        sums = rows.sum(1)
        assert rows.plain.sum() == 0, "nothing is done yet"
        assert sums.told().tolist() == [3, 0, 3, 0], "it follows from what was sent"
        here, event = device.fetch(sums)
        assert here.plain.view(torch.uint8)[0] == 0xEE
        here.tolist()
        assert machine.faults == [
            "the host, of a fetched tensor, reads what compute is still to write"
        ]
        event.wait()
        assert here[1:].tolist() == [0, 3, 0]
        assert len(machine.faults) == 1
        with pytest.raises(AssertionError, match="the host reads device memory"):
            sums.tolist()


def test_rows_that_another_stream_reads_are_told_apart() -> None:
    machine = Machine(random.Random(0), Style(0.0, 10**9, True, (1.0,)))
    device, copies = LateDevice(machine, meta=True), machine.stream("copies")
    with Queueing(machine):
        rows = torch.zeros(4, 8, dtype=torch.uint8, device=META)
        machine.watch(rows.data_ptr(), rows.nbytes, 8)
        rows[device.send(torch.tensor([1]))] = 7
        second = set(machine.cells(rows.data_ptr() + 8, 8))
        copies.launch(lambda: None, second, set(), "copy")
        assert machine.faults == ["copy reads what compute is still to write"]
        rows[device.send(torch.tensor([2]))] = 7
        assert len(machine.faults) == 1, "another row"
        rows[device.send(torch.tensor([1]))] = 8
        assert machine.faults[1:] == ["torch's operations overwrites what copies still reads"]
