"""The walk of a hit through the scheduler process: how many modules serve it, and that none of the
connector's is entered again by one that it called."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvrecall
from engines.vllm.connector.test_scheduler import BLOCK, Bench
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.connector.hit import HitFinder
from kvrecall.engines.vllm.connector.scheduler import RecallScheduler
from kvrecall.pool import Pool
from kvrecall.testing import wait_until

SOURCE = Path(kvrecall.__file__).parent
TOKENS = 32 * BLOCK
BESIDE = (
    *("pool/eviction/", "pool/write"),  # what the policies note of it
    *("pool/base.py", "pool/tier.py", "pool/arena.py", "engines/vllm/wire.py", "block.py"),
    "engines/vllm/connector/metrics.py",
)
"""Beginnings of modules that have no part in a hit's way, and of what they call: policies, values,
observers."""


class Recorder:
    """Records the functions of the product that are called in this thread, by module, and the
    modules that are entered again from what they called."""

    def __init__(self) -> None:
        self.called: set[tuple[str, str]] = set()
        self.entered_again: set[str] = set()
        self._stack: list[str] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self._stack.clear()
        sys.setprofile(self._note)
        try:
            return function(*args)
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(SOURCE):
            return
        module = path.relative_to(SOURCE).as_posix()
        if module == "nicety.py":  # a decorator: what it calls is called by its caller
            return
        if event == "return":
            if self._stack:
                self._stack.pop()
            return
        if module in self._stack and self._stack[-1] != module:
            self.entered_again.add(module)
        self._stack.append(module)
        if not any(one.startswith(BESIDE) for one in self._stack):
            self.called.add((module, frame.f_code.co_qualname))


def walk(pool: Pool, first: int, tokens: int) -> Recorder:
    """A request from the lookup until its load is reported."""
    record = Recorder()
    bench = Bench(pool, explain_misses="off")
    request = bench.request("again", TOKENS, first)
    while (found := record(bench.side.match, request, 0)[0]) is None:
        wait_until(lambda: pool.stats().queued_reads == 0)
    assert found == tokens
    record(bench.side.allocated, request, (bench.blocks["again"],), found)
    orders = record(bench.idle)
    loaded = {load.request_id for load in orders.loads}
    record(bench.side.reported, None, loaded, set())
    assert bool(loaded) == bool(tokens)
    return record


def test_the_walk_of_a_hit_on_disk(tmp_path: Path) -> None:
    """The code that runs for a hit and not for a miss."""
    raw = {"host_size": "1MiB", "disk_path": str(tmp_path), "disk_size": "64MiB"}
    settings = RecallSettings.from_mapping(raw).pool
    with Pool.open(settings) as pool:
        bench = Bench(pool)
        bench.report(bench.step(bench.request("first", TOKENS), TOKENS))
        wait_until(lambda: pool.stats().queued_writes == 0)
    with Pool.open(settings) as pool:  # whose host tier is empty
        miss, hit = walk(pool, 50_000, 0), walk(pool, 0, TOKENS - BLOCK)
    serving = {module for module, _ in hit.called - miss.called}
    connector = {one for one in serving if one.startswith("engines/")}
    assert {"engines/vllm/connector/load.py", "pool/pool.py"} < serving
    assert len(connector) <= 6, sorted(connector)
    assert len(serving) <= 15, sorted(serving)
    assert not {one for one in hit.entered_again if one.startswith("engines/")}


def branches(function: Callable[..., Any]) -> int:
    """Decisions in a function: ``if``, ``and``, ``or``, loops, cases."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    found = 0
    for node in ast.walk(tree):
        found += isinstance(node, ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler)
        found += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        found += len(node.ifs) + 1 if isinstance(node, ast.comprehension) else 0
        found += isinstance(node, ast.match_case)
    return found


@pytest.mark.parametrize(
    "function",
    [RecallScheduler.match, RecallScheduler.finished, RecallScheduler.orders, HitFinder.find],
    ids=lambda one: one.__name__,
)
def test_what_vllm_calls_decides_little(function: Callable[..., Any]) -> None:
    assert branches(function) <= 10
