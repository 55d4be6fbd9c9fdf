"""Many schedules, by processes, and what they found together."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from kvrecall_lab.faults import service
from kvrecall_lab.faults.medium import Fault
from kvrecall_lab.faults.schedule import KINDS, Outcome, run
from kvrecall_lab.faults.sqlite import SimulatedVfs

_AT_ONCE = 50
_MEMORY = Path("/dev/shm")
_ORDERED = "PYTHONHASHSEED"
_vfs: SimulatedVfs | None = None


def schedules(
    seeds: Iterable[int],
    until: Callable[[Outcome], bool] | None = None,
    faults: Sequence[Fault] = (),
) -> list[Outcome]:
    """Runs them in this process, one after the other, up to the first of which ``until`` is
    true. ``faults``: see ``run``."""
    global _vfs
    if _vfs is None:
        _vfs = SimulatedVfs()
        gc.collect()
        gc.freeze()
    outcomes = []
    gc.disable()  # so that what it closes does not depend on what was run before
    try:
        with tempfile.TemporaryDirectory(prefix="faults-of-a-pool-", dir=_MEMORY) as folder:
            for seed in seeds:
                root = Path(folder) / "disk"
                if KINDS[seed % len(KINDS)] == "service":
                    outcomes.append(service.run(seed, root, _vfs))
                else:
                    outcomes.append(run(seed, root, _vfs, faults))
                if until is not None and until(outcomes[-1]):
                    break
    finally:
        gc.enable()
    gc.collect()
    return outcomes


def in_processes(seeds: range, jobs: int) -> Iterator[list[Outcome]]:
    """The outcomes of all, some at a time, in the order of their seeds."""
    parts = [seeds[at : at + _AT_ONCE] for at in range(0, len(seeds), _AT_ONCE)]
    # None is renewed: in place of one that ended, CPython 3.11 may start none, and all would wait.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as workers:
        yield from workers.map(schedules, parts)


def is_ordered() -> bool:
    """Whether sets have the same order in every process, so that a seed is a schedule."""
    return os.environ.get(_ORDERED) == "0"


def ordered(words: list[str]) -> int:
    """Runs this package's command in a process with ordered sets; returns its exit status."""
    environment = {**os.environ, _ORDERED: "0"}
    command = [sys.executable, "-m", "kvrecall_lab.faults", *words]
    return subprocess.run(command, env=environment, check=False).returncode


def summed(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """The figures of the last line."""
    every = list(outcomes)
    told = {
        "schedules": len(every),
        "cuts": sum(one.cuts for one in every),
        "kills": sum(one.kills for one in every),
        "faults": sum(one.faults for one in every),
        "calls": sum(one.calls for one in every),
        "acknowledged": sum(one.acknowledged for one in every),
        "recalled": sum(one.recalled for one in every),
    }
    names = {"lost": "lost_acknowledged"}
    for name in ("wrong", "lost", "leaks", "stuck", "miscounted", "died"):
        told[names.get(name, name)] = sum(bool(getattr(one.verdicts, name)) for one in every)
    return told
