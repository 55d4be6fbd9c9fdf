"""The pool on a simulated machine that fails; and that the simulation finds what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from kvrecall_lab.faults.mutants import MUTANTS
from kvrecall_lab.faults.schedule import KINDS


def faults(*words: str) -> dict[str, Any]:
    """The figures of a run."""
    command = [sys.executable, "-m", "kvrecall_lab.faults", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode == 0) == (not any(map(bool, _broken(figures).values()))), done.stderr
    return figures | {"said": done.stdout}


def _broken(figures: dict[str, Any]) -> dict[str, Any]:
    names = ("wrong", "lost_acknowledged", "leaks", "stuck", "miscounted", "died", "survived")
    return {name: figures[name] for name in names if name in figures}


def test_no_fault_breaks_a_promise() -> None:
    """`make faults` runs thousands."""
    figures = faults("--seeds", str(14 * len(KINDS)))
    assert not any(_broken(figures).values()), figures["said"]
    assert min(figures["cuts"], figures["faults"]) > 200
    assert figures["acknowledged"] > 500
    assert not any(any(_broken(faults("--seed", one)).values()) for one in ("6169", "6516", "7225"))


def test_nothing_is_kept_of_machines_that_are_dead() -> None:
    count = """
import gc
from kvrecall_lab.faults.machine import Machine
from kvrecall_lab.faults.run import schedules
schedules(range(32))
print(sum(isinstance(one, Machine) for one in gc.get_objects()))
"""
    command = [sys.executable, "-c", count]
    kept = int(subprocess.run(command, capture_output=True, check=True).stdout)
    assert kept <= 1, "the last one may be on its way; without the cure 64 are"


def test_faults_planted_in_the_pool_are_found() -> None:
    figures = faults("--mutants", "--seeds", "150")
    assert figures["survived"] == [], figures["said"]
    assert figures["mutants"] == len(MUTANTS)
