"""The reference policies, by the contract of all and by golden hit rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrecall.pool.eviction import KeyedPolicy
from kvrecall.simulate.trace import read_trace
from kvrecall.testing.policy_contract import PolicyContract
from kvrecall_lab.eviction import REFERENCES, main, rates
from kvrecall_lab.workload import WORKLOADS


class TestFifo(PolicyContract):
    def make(self) -> KeyedPolicy:
        return REFERENCES["fifo"](self.CAPACITY)

    def test_held_blocks_come_back_where_they_were(self) -> None:
        """It holds none."""


class TestLfu(PolicyContract):
    def make(self) -> KeyedPolicy:
        return REFERENCES["lfu"](self.CAPACITY)

    def test_held_blocks_come_back_where_they_were(self) -> None:
        """It holds none."""


def test_golden_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of chat between batch jobs that scan, an hour's first half."""
    path = tmp_path / "mixed.jsonl"
    with path.open("w") as file:
        for now, ids in WORKLOADS["scan"](1):
            if now < 1800:
                file.write(json.dumps({"timestamp": now * 1000, "hash_ids": ids}) + "\n")
    found = rates(read_trace(path), 1_000)
    assert {name: round(found[name], 4) for name in ("lru", "fifo", "lfu")} == {
        "lru": 0.1571,
        "fifo": 0.1564,
        "lfu": 0.1341,
    }
    main(str(path), "1000")
    assert "fifo 0.1564" in capsys.readouterr().out
