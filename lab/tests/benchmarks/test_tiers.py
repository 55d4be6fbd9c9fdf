"""The benchmark of raw tiers: available libraries run, compared byte by byte; others are listed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvrecall_lab.bench.peers import find_peers
from kvrecall_lab.bench.stores import Copy, Space, Store, StoreError
from kvrecall_lab.bench.tiers import DISK, MEMORY, Candidates, Size, compare

SMALL = Size(block_bytes=64 << 10, request_blocks=4, requests=2, rounds=2)
PEERS = {"Mooncake client": "mooncake.store", "vLLM file system": "vllm", "LMCache CPU": "lmcache"}


def measured(candidates: Candidates, path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], compare(candidates, SMALL, path).figures)


def test_ours_and_the_limits_are_measured(tmp_path: Path) -> None:
    ours = {name: make for name, make in {**MEMORY, **DISK}.items() if name not in PEERS}
    found = measured(ours, tmp_path)
    assert found["absent"] == {}
    assert found["stores"].keys() == ours.keys()
    for name, one in found["stores"].items():
        assert {"put", "cold", "warm"} <= one.keys()
        assert ("durable" in one) == (name in DISK)
        waits = one["warm"]["request_ms"]
        assert 0 < waits["p50"] <= waits["p95"] <= waits["p99"]
        assert one["put"]["gb_s"] > 0
        assert one["warm"]["to_limit"] > 0
    assert found["stores"]["memory copy"]["put"]["to_limit"] == 1.0
    assert list(tmp_path.iterdir()) == [], "what was written is gone"


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_installed_runs(name: str, tmp_path: Path) -> None:
    find_peers()
    pytest.importorskip(PEERS[name])
    found = measured({name: {**MEMORY, **DISK}[name]}, tmp_path)
    assert found["absent"] == {}
    assert found["stores"][name]["cold"]["gb_s"] > 0


class Forgetful(Copy):
    """Claims to have loaded the blocks."""

    def get(self, names: Sequence[bytes], into: Sequence[memoryview]) -> None:
        return


def _refuse(space: Space) -> Store:
    raise StoreError("not on this machine")


def test_what_cannot_run_or_brings_other_bytes_is_listed_with_the_reason(tmp_path: Path) -> None:
    found = measured({"memory copy": Copy, "liar": Forgetful, "absent": _refuse}, tmp_path)
    assert found["stores"].keys() == {"memory copy"}
    assert found["absent"] == {
        "liar": "StoreError: a get returned other bytes than were put",
        "absent": "StoreError: not on this machine",
    }
