"""A real engine of a model with three KV groups on Mooncake, and every way in which Mooncake
fails it: what it has is recalled, what it has not is computed, and no token is another."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvrecall.processes.command import kvrecall
from kvrecall_lab.engines.engine import Answer, EngineProcess
from kvrecall_lab.shapes.cases import ask, on_and_off, trust
from kvrecall_lab.shapes.node import Node, node
from kvrecall_lab.shapes.ranks import Saved, recalled, saved_by
from kvrecall_lab.shapes.shapes import SHAPES, environment
from pool.remote.mooncake import needs_mooncake

pytestmark = [needs_mooncake, pytest.mark.engine, pytest.mark.long]

SHAPE = next(shape for shape in SHAPES if shape.name == "gemma3")
PAIRS = 10


@dataclass
class Place:
    """``saved``: prompts in the pool service and in Mooncake, each to be recalled once."""

    node: Node
    reader: EngineProcess
    saved: list[Saved]
    right: Mapping[tuple[int, ...], Answer]
    listed: list[dict[str, Any]]

    def next(self) -> Saved:
        return self.saved.pop()

    def ask(self, *prompts: Saved) -> list[Answer]:
        """Asks for prompts together; every answer has the right tokens."""
        self.reader.forget_device()
        questions = [
            replace(one.question, id=f"{at} {one.question.id}") for at, one in enumerate(prompts)
        ]
        answers = ask(self.reader, *questions)
        for one, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == self.right[one.question.prompt].tokens
        return answers


def command(node: Node, *words: str) -> str:
    """Output of ``kvrecall pool WORDS`` on the service."""
    whole = kvrecall("pool", *words, "--socket", str(node.service.socket))
    return subprocess.run(whole, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One engine saves through a pool service and is killed; the other has a pool of its own."""
    folder = tmp_path_factory.mktemp("place")
    arguments = SHAPE.arguments(SHAPE.write(folder), folder / "cache")
    prompts = [one for at in range(PAIRS) for one in on_and_off(SHAPE, f"pair {at}")]
    with ExitStack() as stack:
        there = stack.enter_context(node(folder / "node", mooncake=True))

        def start(name: str, pool: Mapping[str, Any]) -> EngineProcess:
            setup = {**arguments, "pool": pool}
            engine = EngineProcess(name, setup, folder / f"{name}.log", environment=environment())
            stack.callback(engine.bury)
            engine.wait_ready()
            return engine

        writer = start("writer", there.joined)
        saved = saved_by(writer, prompts)
        right = {one.prompt: ask(writer, one)[0] for one in prompts}
        assert "kvrecall_flushes_missed_total" not in writer.metrics()
        writer.kill()
        listed = json.loads(command(there, "ls", "--json"))["rows"]
        reader = start("reader", there.apart)
        trust(reader, SHAPE, saved.pop().question)  # later tests ask for what was written before it
        yield Place(there, reader, saved[::-1], right, listed)


def test_the_service_lists_the_blocks_of_every_group(place: Place) -> None:
    blocks = {row["group"]: row["host_blocks"] for row in place.listed}
    assert blocks.keys() == {"0: window of 256 tokens", "1: window of 256 tokens", "2: full"}
    assert 0 < blocks["0: window of 256 tokens"] < blocks["2: full"]


def test_what_an_engine_saved_is_recalled_after_its_end(place: Place) -> None:
    row = recalled(
        place.reader, SHAPE, [place.next(), place.next()], "mooncake", (1, 1), restarted=True
    )
    assert row.faults() == []
    assert row.groups == 3


def test_a_master_that_hangs_is_a_miss_until_it_goes_on(place: Place) -> None:
    assert place.node.master is not None
    place.node.master.freeze()
    (answer,) = place.ask(place.next())
    assert answer.sources["remote"] == 0
    place.node.master.thaw()
    until_recalled(place)


def test_blocks_of_a_host_that_dies_are_misses(place: Place) -> None:
    """The service has the memory that Mooncake's blocks are in."""
    prompts = [place.next() for _ in range(4)]
    for at, one in enumerate(prompts):
        place.reader.ask(replace(one.question, id=str(at)), logprobs=True)
    time.sleep(0.05)
    place.node.service.kill()
    for one, answer in zip(prompts, answers_of(place.reader, len(prompts)), strict=True):
        assert answer.tokens == place.right[one.question.prompt].tokens
    place.ask(place.next())


def test_a_master_that_dies_is_a_miss(place: Place) -> None:
    assert place.node.master is not None
    one = place.next()
    place.reader.forget_device()
    place.reader.ask(one.question, logprobs=True)
    place.node.master.kill()
    (answer,) = answers_of(place.reader, 1)
    assert answer.tokens == place.right[one.question.prompt].tokens
    (answer,) = place.ask(place.next())
    assert answer.sources["remote"] == 0


def answers_of(engine: EngineProcess, count: int) -> list[Answer]:
    """The next ``count`` answers, by their numbers."""
    until = time.monotonic() + 120
    found: list[Answer] = []
    while len(found) < count:
        line = engine.next_line(until)
        if "id" in line:
            found.append(Answer.read(line))
    return sorted(found, key=lambda answer: answer.id)


def until_recalled(place: Place) -> None:
    """Asks until a prompt comes from Mooncake."""
    while True:
        (answer,) = place.ask(place.next())
        if answer.sources["remote"]:
            return
        time.sleep(2.0)
