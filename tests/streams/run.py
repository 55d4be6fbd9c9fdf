"""Random schedules of an engine on a simulated device, and what they find; then the same with each
wait of kvrecall's taken out, which they must find, too.

``make streams`` runs this; the last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.v1.core.kv_cache_manager import KVCacheManager

from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.connector.saver import Saver
from kvrecall.engines.vllm.connector.scheduler import RecallScheduler
from kvrecall.lab.models import write_model
from kvrecall.pool import Pool
from kvrecall.pool.arena import Arena
from kvrecall.pool.tier import NullTier

from .device import DeadlockError, Machine, Style
from .engine import BLOCK, LONGEST, RECOVERS, Engine, config, on
from .retrieval import RetrievalEngine, drawn_settings, retrieving
from .tier import LateTier

_MOST_STEPS = 2000
_LENGTH = 30
_SLOTS = (8, 40, 100)
"""Blocks of 4 KiB that the pool has room for."""


def _freed_at_once() -> Any:
    finished = RecallScheduler.finished

    def forget(side: Any, request: Any, *args: Any) -> Any:
        hold, told = finished(side, request, *args)
        if hold:
            side._releases.remove(request.request_id)
        return False, told

    return patch.object(RecallScheduler, "finished", forget)


def _released_at_once() -> Any:
    allocated = RecallScheduler.allocated

    def forget(side: Any, request: Any, *args: Any) -> None:
        allocated(side, request, *args)
        if request.request_id in side._loading:
            side._loading[request.request_id].release()

    return patch.object(RecallScheduler, "allocated", forget)


def _committed_by_the_first_rank() -> Any:
    made = Saver.made

    def forget(saver: Any, ranks: Any, failed: Any) -> None:
        made(saver, {store_id: 99 for store_id in ranks if store_id in saver._open}, failed)

    return patch.object(Saver, "made", forget)


def _failed_steps_believed() -> Any:
    return patch.object(Saver, "doubt", lambda *_: None)


def _failed_steps_cached() -> Any:
    return patch.object(KVCacheManager, "evict_blocks", lambda *_: None)


RULES: dict[str, Callable[[], Any]] = {
    "rule: device blocks of a request that ended are held for its stores": _freed_at_once,
    "rule: blocks are committed when all ranks have stored them": _committed_by_the_first_rank,
    "rule: slots are leased until their load is complete": _released_at_once,
}
"""Waits of the scheduler side, which no event names; each with what takes it out."""

_ACTIONS: dict[str, float] = {"add": 8, "abort": 1, "preempt": 1, "sleep": 0.2, "step": 8}
if RECOVERS:
    RULES["rule: blocks of a step that failed are not committed"] = _failed_steps_believed
    RULES["rule: they leave vLLM's prefix cache"] = _failed_steps_cached
    _ACTIONS["fail"] = 0.5


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
    settings = RecallSettings.from_mapping({"host_size": f"{4 * chance.choice(_SLOTS)}KiB"})
    outcome = Outcome(sites=machine.sites)
    offloads = kind == "offload"
    tier = LateTier(machine, chance) if chance.random() < 0.5 else None
    arena = Arena.create(settings.pool.host_bytes)
    with ExitStack() as stack:
        stack.enter_context(on(machine))
        pool = stack.enter_context(Pool(arena, tier or NullTier(), settings.pool.policy))
        make: Callable[..., Engine] = Engine
        told = config(model, overlapping, by_priority)
        if offloads:
            retrieval = drawn_settings(chance)
            stack.enter_context(retrieving(machine, retrieval, chance.choice((2, 8, 64))))
            make = functools.partial(RetrievalEngine, chance, retrieval)
            told = config(
                model, overlapping, by_priority, "RecallConnector", "streams.retrieval"
            )
        engine = make(
            told,
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
    outcome.did["from the tier"] = tier.loaded if tier is not None else 0
    return outcome


def _drive(engine: Engine, chance: random.Random, outcome: Outcome) -> None:
    """Requests come, are aborted, and all is preempted or put to sleep; then all end."""
    prompts = [[chance.randrange(256) for _ in range(LONGEST)] for _ in range(4)]
    did = outcome.did
    steps = 0
    for number in range(_LENGTH):
        action = chance.choices([*_ACTIONS], [*_ACTIONS.values()])
        did[action[0]] = did.get(action[0], 0) + 1
        if action == ["add"] and len(engine.names) < 8:
            most = chance.choice((1, 2, 9, 30))
            prompt = chance.choice(prompts)[: chance.randrange(BLOCK, LONGEST - most - 1)]
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
        if not _is_right(engine):
            return
    if chance.random() < 0.3:
        did["shut down"] = 1  # in the middle of its work
        return
    while engine.is_busy and steps < _MOST_STEPS:
        engine.step()
        steps += 1
        if not _is_right(engine):
            return
    did["steps"] = steps
    if engine.is_busy:
        raise DeadlockError(f"{', '.join(engine.names) or 'a request that ended'} never ends")


def _is_right(engine: Engine) -> bool:
    return not (engine.wrong or engine.machine.faults)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", weights=False)
        result = check(model, given.seed, given.schedules)
    print(json.dumps(result))


def check(model: Path, first: int, schedules: int) -> dict[str, object]:
    """Runs so many schedules, then each mutant until one finds it."""
    began = time.monotonic()
    outcomes = {seed: run(model, seed) for seed in range(first, first + schedules)}
    bad = {seed: one for seed, one in outcomes.items() if not one.is_good}
    for seed, one in list(bad.items())[:5]:
        print(f"schedule {seed}: {one.text}")
    sites = [*sorted(set().union(*(one.sites for one in outcomes.values()))), *RULES]
    caught = {site: caught_at(model, site, outcomes) for site in sites}
    for site, seed in caught.items():
        print(f"{'caught by ' + str(seed) if seed is not None else 'NOT CAUGHT':>16}  {site}")
    did: dict[str, int] = {}
    for one in outcomes.values():
        for name, count in one.did.items():
            did[name] = did.get(name, 0) + count
    return {
        "schedules": schedules,
        "wrong": sum(bool(one.wrong) for one in bad.values()),
        "early_reads": sum(bool(one.races) for one in bad.values()),
        "deadlocks": sum(bool(one.deadlock) for one in bad.values()),
        "mutants": len(sites),
        "mutants_caught": sum(seed is not None for seed in caught.values()),
        "host_waits": [site for site in sites if site.startswith(("wait", "join"))],
        "did": did,
        "seconds": round(time.monotonic() - began),
    }


def caught_at(model: Path, site: str, outcomes: dict[int, Outcome]) -> int | None:
    """The first of these schedules that goes wrong without the wait at that site, or the rule of
    that name; None if none does."""
    for seed, one in outcomes.items():
        if not one.is_good or not (site in RULES or site in one.sites):
            continue
        with RULES.get(site, nullcontext)():
            if not run(model, seed, frozenset({site})).is_good:
                return seed
    return None


if __name__ == "__main__":
    main()
