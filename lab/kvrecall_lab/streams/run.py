"""Random schedules of an engine on a simulated device, and what they find; then the same with each
wait of kvrecall's taken out, which they must find, too.

``make streams`` runs this; the last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvrecall.attention.kernels.device import DeviceResidency, LeftTables
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.attention.backend import RetrievalBuilder
from kvrecall.engines.vllm.attention.base import RetrievalLayer
from kvrecall.engines.vllm.attention.copies import KeptLayer
from kvrecall.engines.vllm.attention.cuda import TritonKernel
from kvrecall.engines.vllm.attention.group import RetrievalGroup
from kvrecall.engines.vllm.compat.offloadable import OffloadManager
from kvrecall.engines.vllm.connector.offload import OffloadPlanner
from kvrecall.engines.vllm.connector.saver import Saver
from kvrecall.engines.vllm.connector.scheduler import RecallScheduler
from kvrecall.engines.vllm.connector.worker import RecallWorker
from kvrecall.engines.vllm.wire import Arrival, EngineFacts
from kvrecall.errors import KvrecallError
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.tier import Done, NullTier
from kvrecall_lab.memory_tier import MemoryTier
from kvrecall_lab.models import write_model

from .device import Cells, DeadlockError, Machine, Style
from .engine import BLOCK, LONGEST, RECOVERS, Engine, config, on
from .late import LateDevice
from .retrieval import RetrievalEngine, drawn_settings, retrieving

_MOST_STEPS = 2000
_LENGTH = 30
_TELLS_S = 15.0  # between lines on how far it is
_ACTIONS: dict[str, float] = {"add": 8, "abort": 1, "preempt": 1, "sleep": 0.2, "step": 8}
_FAILS = 0.5  # how likely a step fails, beside those
_SLOTS = (8, 40, 100)
"""Blocks of 4 KiB that the pool has room for."""


ALL = ("one group", "several groups", "offload")
"""Kinds of schedules."""

GROUPS, OFFLOAD = ("several groups",), ("offload",)
RULES: dict[str, tuple[Callable[[], Any], Sequence[str]]] = {
    "rule: stores are waited for before what a window has freed is overwritten": (
        functools.partial(patch.object, EngineFacts, "frees_while_running", False),
        GROUPS,
    ),
    "rule: a step for which the host has work is not replayed": (
        functools.partial(patch.object, RetrievalGroup, "needs_host", False),
        OFFLOAD,
    ),
}
"""Waits and orders that no event names; each with what takes it out, and where it matters."""


def rule(text: str, owner: type, name: str, kinds: Sequence[str] = ALL) -> Callable[[Any], Any]:
    """The decorated function takes it out in place of that method, which it gets first."""

    def note(without: Callable[..., Any]) -> Any:
        real = getattr(owner, name)

        def method(*args: Any) -> Any:
            return without(real, *args)

        RULES[f"rule: {text}"] = functools.partial(patch.object, owner, name, method), kinds
        return without

    return note


@rule("device blocks of a request that ended are held for its stores", RecallScheduler, "finished")
def _(finished: Any, side: Any, request: Any, *args: Any) -> Any:
    hold, told = finished(side, request, *args)
    if hold:
        side._releases.remove(request.request_id)
    return False, told


@rule("slots are leased until their load is complete", RecallScheduler, "allocated")
def _(allocated: Any, side: Any, request: Any, *args: Any) -> None:
    allocated(side, request, *args)
    if request.request_id in side._loading:
        side._loading[request.request_id].release()


@rule("blocks are committed when all ranks have stored them", Saver, "made")
def _(made: Any, saver: Any, ranks: Any, failed: Any) -> None:
    made(saver, {store_id: 99 for store_id in ranks if store_id in saver._open}, failed)


def _unleased(move: Any, planner: Any, request_id: str, *args: Any) -> None:
    move(planner, request_id, *args)
    sequence = planner._sequences[request_id]
    for ticket in sequence.tickets:
        planner._pool.release(ticket)
    sequence.tickets.clear()


rule("blocks that left are leased", OffloadPlanner, "left", OFFLOAD)(_unleased)
rule("blocks that stay in the pool are leased", OffloadPlanner, "arrived", OFFLOAD)(_unleased)


@rule("slots are a sequence's until it ends", OffloadManager, "_add_slots", OFFLOAD)
def _(add: Any, manager: Any, request_id: str, count: int) -> list[int]:
    ids: list[int] = add(manager, request_id, count)
    held = manager._slots[request_id]
    manager.block_pool.free_blocks(held[len(held) - len(ids) :])
    del held[len(held) - len(ids) :]
    return ids


@rule("digests of written blocks are stale", RetrievalBuilder, "_note_written", OFFLOAD)
@rule("what held a number or slot before is forgotten", DeviceResidency, "begin", OFFLOAD)
def _(*_: Any) -> None:
    return


@rule("what leaves is copied for dense layers", KeptLayer, "leave", OFFLOAD)
def _(leave: Any, layer: Any, sequence: Any, added: int, cache: Any, ids: Any) -> None:
    leave(layer, sequence, added // 2, cache, None if ids is None else ids[-(added // 2) :])


@contextmanager
def _moved_after_the_step() -> Iterator[None]:
    carry_out, start_stores = RetrievalGroup._carry_out, RecallWorker.start_stores
    late: list[Any] = []

    def forget(group: Any, order: Any, records: Any) -> bool:
        if isinstance(order, Arrival) or order.request_id not in group._sequences:
            return carry_out(group, order, records)
        late.append(functools.partial(carry_out, group, order, records))
        return True

    def begin(worker: Any, orders: Any) -> None:
        while late:
            late.pop(0)()
        start_stores(worker, orders)

    with (
        patch.object(RetrievalGroup, "_carry_out", forget),
        patch.object(RecallWorker, "start_stores", begin),
    ):
        yield


RULES["rule: digests of leaving blocks are taken before the step writes"] = (
    _moved_after_the_step,
    OFFLOAD,
)


@rule("a step's facts are sent from memory that stays", LateDevice, "send", OFFLOAD)
def _(send: Any, device: Any, values: Any, into: Any = None) -> Any:
    if into is None:
        return send(device, values)
    here = vars(device).setdefault(into.data_ptr(), values.clone())
    here.copy_(values)
    into.known.copy_(values)
    device.current().launch(lambda: into.plain.copy_(here), set(), set(), "a step's facts")
    return into


@rule("what a sequence's blocks are named is sent in order", LeftTables, "write", OFFLOAD)
def _(write: Any, tables: Any, place: int, first: int, names: Any, slots: Any) -> None:
    write(tables, place, first, names, slots)
    tables.names.plain[place, first : first + len(names)] = names.told()
    tables.slots.plain[place, : len(slots)] = slots.told()


@rule("where records lie is told to the device", TritonKernel, "number", OFFLOAD)
def _(number: Any, kernel: Any, sequence: Any) -> None:
    kept = kernel.numbers.addresses
    kernel.numbers.addresses = kept.clone()
    number(kernel, sequence)
    kernel.numbers.addresses = kept


@rule("a graph reads what it must by an address that stays", TritonKernel, "number", OFFLOAD)
def _(number: Any, kernel: Any, sequence: Any) -> None:
    kernel.numbers.addresses = kernel.numbers.addresses.clone()
    number(kernel, sequence)


@rule("what a replay needs is digested before it", RetrievalGroup, "replay", OFFLOAD)
def _(replay: Any, group: Any, step: Any) -> None:
    late = vars(group).setdefault("late", [])
    late.append(step)
    if len(late) > 1:
        replay(group, late.pop(0))


@rule("blocks are digested also where no graph is replayed", RetrievalLayer, "digest_step", OFFLOAD)
def _(digest: Any, layer: Any, kv_cache: Any, step: Any) -> None:
    if step.is_graph:
        digest(layer, kv_cache, step)
    else:
        layer.digested += len(step.stale) + step.filled


if RECOVERS:

    @rule("blocks of a step that failed are not committed", Saver, "invalidate", ALL[:2])
    @rule("they leave vLLM's prefix cache", KVCacheManager, "evict_blocks", ALL[:2])
    def _(*_: Any) -> None:
        return


RARE = {
    "sent stores: CopyQueue.completed < CopyQueue.drain < Copier.drain < ArenaMapping._detach "
    "< ArenaMapping.close < RecallWorker.close",  # by one schedule in eighty with vLLM 0.33
    "rule: what a sequence's blocks are named is sent in order",
    "wait compute: ArenaMapping._release < ArenaMapping._end < ArenaMapping._detach "
    "< ArenaMapping.close < RecallWorker.close",
    "rule: blocks that stay in the pool are leased",
    "rule: what held a number or slot before is forgotten",
}
"""What a few schedules do not find."""


class LateTier(MemoryTier):
    """A tier below the host whose threads are late: what is queued is done in any order, some time.

    It works only when the engine's thread polls it, so that a schedule follows from its seed.
    ``cells_of``: by a slot's address in the pool's mapping of the arena, its cells in every
    worker's.
    """

    def __init__(self, machine: Machine, chance: random.Random) -> None:
        super().__init__()
        self.loaded = 0
        self.cells_of: Callable[[int], Cells] = lambda _: set()
        self._machine = machine
        self._chance = chance
        self._share = chance.choice((0.1, 0.5, 1.0))

    def poll(self, timeout_s: float = 0.0) -> list[Done]:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(timeout_s)
            return []
        return self._work()

    def _work(self) -> list[Done]:
        with self._lock:
            puts, gets = dict(self._puts), list(self._gets)
            self._chance.shuffle(gets)
            now = {key: put for key, put in puts.items() if self._is_due()}
            due = [get for get in gets if self._is_due()]
            self._puts, self._gets = dict(now), deque(due)
        for put, _ in now.values():
            self._machine.host(self._cells(put.data), set(), "the tier's writer")
        for get in due:
            self._machine.host(set(), self._cells(get.into), "the tier's reader")
        self.loaded += len(due)
        done = super()._work()
        with self._lock:
            self._puts |= {key: put for key, put in puts.items() if key not in now}
            self._gets.extend(get for get in gets if get not in due)
        return done

    def _is_due(self) -> bool:
        return self._closed or self._chance.random() < self._share

    def _cells(self, data: memoryview) -> Cells:
        return self.cells_of(np.frombuffer(data, np.uint8).ctypes.data)


@dataclass(slots=True)
class Outcome:
    """What a schedule found. ``sites``: its waits. ``did``: how often what happened."""

    wrong: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    deadlock: str = ""
    sites: set[str] = field(default_factory=set)
    did: dict[str, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.races or self.deadlock)

    @property
    def text(self) -> str:
        return "; ".join([*self.wrong[:2], *self.races[:2], self.deadlock])


def run(
    model: Path, seed: int, ignored: frozenset[str] = frozenset(), kind: str = "one group"
) -> Outcome:
    """One schedule, which follows from its seed."""
    chance = random.Random(seed)
    machine = Machine(chance, Style.draw(chance), ignored)
    overlapping, by_priority = chance.random() < 0.7, chance.random() < 0.5
    blocks = chance.choice((12, 16, 24))
    reaches: tuple[int, ...] = (0,)
    if kind == "several groups":
        reaches = chance.choice(((0, 40), (24, 0), (0, 24, 56), (40, 0, 16)))
        blocks += 12 * len(reaches) - 12
    offloads = kind == "offload"
    slots = chance.choice((12, 24, 60) if offloads else _SLOTS)
    settings = RecallSettings.from_mapping({"host_size": f"{4 * slots}KiB"})
    outcome = Outcome(sites=machine.sites)
    tier = LateTier(machine, chance) if chance.random() < (0.8 if offloads else 0.5) else None
    arena = Arena.create(settings.pool.host_bytes)
    with ExitStack() as stack:
        stack.enter_context(on(machine))
        pool = stack.enter_context(Pool(arena, tier or NullTier(), settings.pool.policy))
        make: Callable[..., Engine] = Engine
        if offloads:
            retrieval = drawn_settings(chance)
            patience, pages = chance.choice((2, 8, 64)), chance.choice((1, 0, 4))
            stack.enter_context(retrieving(machine, retrieval, patience, pages))
            make = functools.partial(RetrievalEngine, chance, retrieval)
        engine = make(
            config(model, overlapping, by_priority),
            machine,
            pool,
            chance.choice((1, 1, 2)),
            blocks,
            loads_first=chance.random() < 0.5,
            zeroes=chance.random() < 0.5,
            reaches=reaches,
        )
        if tier is not None:
            tier.cells_of = engine.slot_cells
        try:
            _drive(engine, chance, outcome)
        except DeadlockError as error:
            outcome.deadlock = str(error)
        finally:
            engine.close()
            machine.end()
            if tier is not None:  # the pool's last writes; no worker maps the arena any more
                tier.cells_of = lambda _: set()
    outcome.wrong, outcome.races = engine.wrong, machine.faults
    outcome.did |= machine.calls
    outcome.did["preempted"] = engine.preempted
    if isinstance(engine, RetrievalEngine):
        outcome.did |= engine.moved
    outcome.did["from the tier"] = tier.loaded if tier is not None else 0
    return outcome


def _drive(engine: Engine, chance: random.Random, outcome: Outcome) -> None:
    """Requests come, are aborted, and all is preempted or put to sleep; then all end."""
    prompts = [[chance.randrange(256) for _ in range(LONGEST)] for _ in range(4)]
    did = outcome.did
    steps = 0
    offloads = isinstance(engine, RetrievalEngine)
    fails = RECOVERS and not offloads
    actions = {**_ACTIONS, "fail": _FAILS} if fails else _ACTIONS
    for number in range(_LENGTH):
        action = chance.choices([*actions], [*actions.values()])
        did[action[0]] = did.get(action[0], 0) + 1
        if action == ["add"] and len(engine.names) < 8:
            most, least = chance.choice((1, 2, 9, 30)), BLOCK
            if offloads:
                most, least = chance.choice((2, 9, 30, 60)), 3 * BLOCK
            prompt = chance.choice(prompts)[: chance.randrange(least, LONGEST - most - 1)]
            engine.add(f"r{number}", prompt, most, chance.randrange(4))
        elif action == ["abort"] and engine.names:
            engine.abort(chance.choice(engine.names))
        elif action == ["preempt"]:
            engine.preempt_all()
        elif action == ["sleep"]:
            engine.sleep()
        elif action == ["fail"]:
            engine.fail()
        else:
            for _ in range(chance.choice((1, 2, 5))):
                engine.step()
                steps += 1
        if engine.wrong or engine.machine.faults:
            return
    if chance.random() < (0.5 if offloads else 0.3):
        did["shut down"] = 1  # in the middle of its work
        return
    while engine.is_busy and steps < _MOST_STEPS:
        engine.step()
        steps += 1
        if engine.wrong or engine.machine.faults:
            return
    did["steps"] = steps
    if engine.is_busy:
        raise DeadlockError(f"{', '.join(engine.names) or 'a request that ended'} never ends")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule of each kind")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # of the processes that run schedules
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", weights=False)
        processes = min(len(ALL), os.cpu_count() or 1)
        result = check(model, given.seed, divided(given.schedules), processes)
    print(json.dumps(result))


def divided(schedules: int) -> dict[str, int]:
    """How many of each kind: one of several groups takes twice as long, one that offloads twelve
    times."""
    offload, several = schedules // 25, schedules // 4
    return dict(zip(ALL, (schedules - several - offload, several, offload), strict=True))


def explored(
    model: Path, first: int, quick: bool, kind: str, schedules: int
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Runs so many schedules, then each mutant until one finds it: figures, and by mutant whether
    it was caught. ``quick``: not those that need many schedules."""
    outcomes: dict[int, Outcome] = {}
    told_at = time.monotonic()
    for seed in range(first, first + schedules):
        outcomes[seed] = run(model, seed, kind=kind)
        if time.monotonic() - told_at > _TELLS_S or len(outcomes) == schedules:
            told_at = time.monotonic()
            wrong = sum(not one.is_good for one in outcomes.values())
            print(f"{kind}: {len(outcomes)} of {schedules} schedules, {wrong} wrong", flush=True)
    bad = {seed: one for seed, one in outcomes.items() if not one.is_good}
    for seed, one in list(bad.items())[:5]:
        print(f"{kind}, schedule {seed}: {one.text}", flush=True)
    sites = sorted(set().union(*(one.sites for one in outcomes.values())))
    rules = [rule for rule, (_, where) in RULES.items() if kind in where]
    caught: dict[str, bool] = {}
    for site in [one for one in (*sites, *rules) if not (quick and one in RARE)]:
        seed_of = caught_at(model, site, outcomes, kind)
        further = range(first + schedules, first + 5 * schedules) if kind in OFFLOAD else ()
        for seed in further if site in RARE else ():
            if seed_of is None:
                seed_of = caught_at(model, site, {seed: run(model, seed, kind=kind)}, kind)
        caught[site] = seed_of is not None
        word = "not caught" if seed_of is None else f"caught by {seed_of}"
        print(f"{kind:>14} {word:>16}  {site}", flush=True)
    every = outcomes.values()
    told = {
        "schedules": schedules,
        "wrong": sum(bool(one.wrong) for one in every),
        "early_reads": sum(bool(one.races) for one in every),
        "deadlocks": sum(bool(one.deadlock) for one in every),
        "mutants": len(caught),
        "mutants_caught": sum(caught.values()),
        "did": dict(sum((Counter(one.did) for one in every), Counter())),
    }
    return told, caught


def check(
    model: Path,
    first: int,
    schedules: Mapping[str, int],
    processes: int = 1,
    quick: bool = False,
) -> dict[str, Any]:
    """Runs so many schedules of each kind. A mutant counts as caught if those of one kind do.
    ``quick``: as of ``explored``."""
    began = time.monotonic()
    with ProcessPoolExecutor(processes, get_context("spawn")) as several:
        apply = several.map if processes > 1 else map
        explore = functools.partial(explored, model, first, quick)
        found = dict(zip(schedules, apply(explore, schedules, schedules.values()), strict=True))
    caught: dict[str, bool] = {}
    for _, sites in found.values():
        for site, is_caught in sites.items():
            caught[site] = caught.get(site, False) or is_caught
    for site in [one for one, is_caught in caught.items() if not is_caught]:
        print(f"NOT CAUGHT: {site}")
    kinds = {kind: told for kind, (told, _) in found.items()}
    summed = ("schedules", "wrong", "early_reads", "deadlocks")
    return {
        **{name: sum(told[name] for told in kinds.values()) for name in summed},
        "mutants": len(caught),
        "mutants_caught": sum(caught.values()),
        "host_waits": [site for site in caught if site.startswith(("wait", "join"))],
        "kinds": kinds,
        "seconds": round(time.monotonic() - began),
    }


def caught_at(model: Path, site: str, outcomes: dict[int, Outcome], kind: str) -> int | None:
    """The first of these schedules that goes wrong without the wait at that site, or the rule of
    that name; None if none does."""
    for seed, one in outcomes.items():
        if not one.is_good or not (site in RULES or site in one.sites):
            continue
        with RULES[site][0]() if site in RULES else nullcontext():
            try:
                is_good = run(model, seed, frozenset({site}), kind).is_good
            except (RuntimeError, LookupError, KvrecallError):  # it asks for what is refused
                is_good = False
            if not is_good:
                return seed
    return None


if __name__ == "__main__":
    main()
