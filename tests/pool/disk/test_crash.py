from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.crash import run_and_kill, survivors

MIB = 1 << 20


def test_what_was_committed_survives_kill_9_and_nothing_else(tmp_path: Path) -> None:
    dice = random.Random(20_26)
    folder, oracle = tmp_path / "disk", tmp_path / "oracle"
    must = 0
    for life in range(6):
        run_and_kill(folder, oracle, life, dice, 1024 * MIB)
        must, lost, strange = survivors(folder, oracle, 1024 * MIB)
        assert (lost, strange) == (0, 0)
    assert must > 60, "the children were killed too early to prove anything"


@pytest.mark.parametrize("seed", [1])
def test_kill_9_while_evicting_never_gives_wrong_bytes(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    folder, oracle = tmp_path / "disk", tmp_path / "oracle"
    kept = 0
    for life in range(4):
        run_and_kill(folder, oracle, life, dice, 12 * MIB)
        must, lost, strange = survivors(folder, oracle, 12 * MIB)
        assert strange == 0
        kept = must - lost
    assert kept > 0
