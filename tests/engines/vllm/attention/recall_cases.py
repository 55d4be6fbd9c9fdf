"""Run by test_kernels.py in a process of its own: Triton decides when it is first imported whether
kernels are interpreted. What a device recalls into its slots, against a model in Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from engines.vllm.attention.alone import choose
from kvrecall.attention.kernels import device
from kvrecall.attention.kernels.device import (
    BlockNumbers,
    DeviceResidency,
    DeviceStep,
    LeftTables,
    SequenceFacts,
    fetch_by_triton,
)
from kvrecall.attention.kernels.oracle import table_plainly

HEADS, GROUP, TOKENS, WIDTH = 2, 3, 4, 8
CACHE, PAGE_AT = 400, 3
"""Blocks of the cache; where in a record the layer's page begins, in words."""


@dataclass
class Offloaded:
    """A sequence whose first ``gone`` of ``middle`` blocks are off the device. ``table``: its
    blocks, where these are named by their numbers. ``kept``: of each head, the number that each
    slot has; ``used``: in which step, ``now``, a head's slot was last used."""

    init: int
    middle: int
    chosen: int
    gone: int
    slots: torch.Tensor
    numbers: np.ndarray
    table: torch.Tensor
    held: int = 0
    kept: list[dict[int, int]] = field(default_factory=list)
    used: dict[tuple[int, int], int] = field(default_factory=dict)
    now: int = 0

    @property
    def facts(self) -> tuple[int, ...]:
        blocks = len(self.table)
        length = blocks - self.middle + self.chosen
        sizes = self.init, self.middle, self.chosen, blocks, length, len(self.slots)
        return *sizes, -1, 0, self.gone, self.held

    def admit(self, head: int, asked: list[int]) -> tuple[int, list[int]]:
        """How many of these numbers have a slot, and the slots of all: an LRU cache, in which the
        first of equally long unused slots is given away first."""
        place = {number: slot for slot, number in self.kept[head].items()}
        hits = [number for number in asked if number in place]
        for number in hits:
            self.used[head, place[number]] = self.now
        missing = [number for number in asked if number not in place]
        oldest = sorted(self.slots.tolist(), key=lambda slot: self.used.get((head, slot), 0))
        given = set(oldest[: len(missing)])
        into = [slot for slot in self.slots.tolist() if slot in given]
        for number, slot in zip(missing, into, strict=True):
            self.kept[head][slot] = number
            self.used[head, slot], place[number] = self.now, slot
        return len(hits), [place[number] for number in asked]


class Machine:
    """A cache, records in host memory, and sequences with slots. A block's words are its number
    and head, in the cache and in its record; the cache's other words are -1."""

    def __init__(self, tokens_first: bool) -> None:
        cache = torch.full((CACHE, HEADS, TOKENS, WIDTH), -1, dtype=torch.int32)
        if tokens_first:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        self.cache = cache
        self.page = self.cache[0].numel()
        self.numbers = BlockNumbers(torch.device("cpu"), CACHE)
        self.left = LeftTables(torch.device("cpu"), 8, CACHE)
        self.records: dict[int, torch.Tensor] = {}
        self.residency = DeviceResidency(HEADS, CACHE, CACHE, torch.zeros(2, dtype=torch.int64))
        self.residency.page_at.fill_(4 * PAGE_AT)
        self._free = (torch.randperm(CACHE - 1) + 1).to(torch.int32)

    def take(self, count: int) -> torch.Tensor:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def begin(self, init: int, middle: int, chosen: int, gone: int, slots: int) -> Offloaded:
        numbers = self.numbers.take(gone)
        for number in numbers.tolist():
            words = 1000 * number + torch.arange(HEADS, dtype=torch.int32)[:, None, None]
            page = torch.empty(PAGE_AT + self.page, dtype=torch.int32)
            like = page.as_strided(self.cache.shape[1:], self.cache.stride()[1:], PAGE_AT)
            like.copy_(words.expand(like.shape))
            self.records[number] = page
            self.numbers.addresses[number] = page.data_ptr()
        table = self.take(init + middle + 2)
        table[init : init + gone] = torch.from_numpy(-1 - numbers)
        made = Offloaded(init, middle, chosen, gone, self.take(slots), numbers, table)
        made.kept = [{} for _ in range(HEADS)]
        made.held = self.left.take()
        self.left.write(made.held, 0, torch.from_numpy(numbers).to(torch.int32), made.slots)
        self.residency.begin(torch.from_numpy(numbers), made.slots.to(torch.int64))
        return made

    def end(self, one: Offloaded) -> None:
        """Its slots and blocks are free again; what was in them stays."""
        self.numbers.give(one.numbers)
        self.left.give(one.held)
        table = one.table[one.table > 0]
        self._free = torch.cat([one.slots, table, self._free])

    def step(self, sequences: list[Offloaded], here: list[Offloaded]) -> DeviceStep:
        """Of sequences that recall and others, whose blocks are all on the device."""
        both = [*sequences, *here]
        facts = [SequenceFacts(at, *one.facts) for at, one in enumerate(both)]
        tables = torch.nn.utils.rnn.pad_sequence([one.table for one in both], batch_first=True)
        step = DeviceStep.of(facts, tables, HEADS, GROUP, left=self.left)
        step.logits.normal_(0, 3)
        return step


def check(machine: Machine, sequences: list[Offloaded], here: list[Offloaded]) -> None:
    """One step: the device's slots are the host's, and hold the blocks."""
    step = machine.step(sequences, here)
    rows = step.logits.view(-1, HEADS, *step.logits.shape[1:])
    both = [*sequences, *here]
    logits = [rows[at, ..., : one.middle] for at, one in enumerate(both)]
    want = table_plainly(logits, step)
    before = machine.residency.counts.clone()
    choose(step, machine.residency)
    chosen = step.table.clone()
    fetch_by_triton(step, machine.residency, machine.numbers.addresses, machine.cache)
    hits = misses = 0
    assert torch.equal(step.table, chosen), "attention to others reads it meanwhile"
    tables = step.table.view(-1, HEADS, step.table.shape[1])
    named = torch.where(tables < 0, tables | device.LATE, tables)
    for at, one in enumerate(both):
        count = want[at].shape[1]
        assert torch.equal(named[at, :, :count], want[at])
        left = want[at] < 0
        assert torch.equal(tables[at, :, :count][~left], want[at][~left])
        if not len(one.slots):
            continue
        one.now += 1
        for head in range(HEADS):
            asked = (-1 - want[at][head][left[head]]).tolist()
            had, expected = one.admit(head, asked)
            hits += had
            misses += len(asked) - had
            late = tables[at, head, :count][left[head]] < -device.LATE
            assert int(late.sum()) == len(asked) - had
            ids = machine.residency.place[head, torch.tensor(asked, dtype=torch.int64)].long()
            assert ids.tolist() == expected
            words = 1000 * (-1 - want[at][head][left[head]]) + head
            held = machine.cache[ids, head].flatten(1)
            assert torch.equal(held, words[:, None].to(torch.int32).expand(held.shape))
            assert 0 not in ids
    told = machine.residency.counts - before
    assert told.tolist() == [hits, misses]


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("at_once", [16, 1024])
def test_a_device_keeps_its_slots_as_the_host_does(
    tokens_first: bool, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step by step, of a batch: some sequences all off the device, some in part, some not; and
    with more blocks and slots than a program takes at once."""
    monkeypatch.setattr(device, "_BLOCKS_AT_ONCE", at_once)
    torch.manual_seed(at_once)
    machine = Machine(tokens_first)
    sequences = [machine.begin(*sizes) for sizes in ((1, 30, 9, 30, 9), (2, 50, 20, 41, 33))]
    none = torch.empty(0, dtype=torch.int32)
    here = [Offloaded(1, 12, 5, 0, none, none.numpy(), machine.take(15))]
    for _ in range(6):
        check(machine, sequences, here)
    assert machine.residency.counts.min() > 0
    check(machine, sequences[1:], here)
    check(machine, sequences, here)


def test_one_step_may_be_taken_twice() -> None:
    """What the second time wants is not given away for it."""
    torch.manual_seed(1)
    machine = Machine(tokens_first=False)
    one = machine.begin(0, 20, 6, 20, 6)
    step = machine.step([one], [])
    for _ in range(3):
        step.logits.normal_(0, 3)
        choose(step, machine.residency)
        wanted = -1 - (step.table[:, :6] | device.LATE)
        fetch_by_triton(step, machine.residency, machine.numbers.addresses, machine.cache)
        for head in range(HEADS):
            slots = machine.residency.place[head, wanted[head].long()].long()
            held = machine.cache[slots, head, 0, 0]
            assert torch.equal(held, 1000 * wanted[head] + head)


def test_nothing_is_left_of_a_sequence_that_ended() -> None:
    """The next one has its numbers and slots, and finds none of its blocks."""
    torch.manual_seed(2)
    machine = Machine(tokens_first=False)
    others = [machine.begin(1, 30, 8, 30, 12)]
    for _ in range(4):
        one = machine.begin(1, 25, 10, 25, 12)
        before = machine.residency.counts.clone()
        check(machine, [one, *others], [])
        check(machine, [one, *others], [])
        assert (machine.residency.counts - before)[1] >= 2 * 10, "all were loaded at first"
        machine.end(one)
    assert machine.numbers.room == CACHE - 30
    machine.end(others[0])
    assert machine.numbers.room == CACHE
