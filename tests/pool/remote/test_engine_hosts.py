"""Real engines on two hosts, Mooncake's master on a third: one recalls what the other computed."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

import pytest

from kvrecall.processes.master import Master
from kvrecall_lab.engines.engine import Answer, EngineProcess, Question
from kvrecall_lab.models import write_model
from pool.remote.mooncake import needs_mooncake
from pool.remote.network import FIRST, SECOND, Network
from pool.remote.test_hosts import settings_of

pytestmark = [needs_mooncake, pytest.mark.engine, pytest.mark.long]

BLOCK = 128
PROMPT = 8 * BLOCK + 5
WHOLE = 8 * BLOCK
_numbers = itertools.count()


@pytest.fixture(scope="module")
def engines(
    network: Network,
    master: Master,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    folder = tmp_path_factory.mktemp("engines")
    shape = {"hidden": 128, "layers": 3, "heads": 4, "kv_heads": 1}
    model = write_model(folder / "model", dtype="float32", max_position=4096, **shape)
    made = []
    for host in (FIRST, SECOND):
        setup = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 2048,
            "kv_cache_memory_bytes": 64 << 20,
            "pool": {**settings_of(network, master, host), "load_or_compute": "load"},
        }
        log = folder / f"engine{host}.log"
        made.append(EngineProcess(f"engine{host}", setup, log, prefix=network.prefix(host)))
    try:
        for engine in made:
            engine.wait_ready()
        yield made[0], made[1]
    finally:
        network.mend(SECOND)
        for engine in made:
            engine.end()


def new_question() -> Question:
    number = next(_numbers)
    draw = random.Random(number)
    return Question(f"q{number}", tuple(draw.choices(range(5, 250), k=PROMPT)), 6)


def ask(engine: EngineProcess, question: Question) -> Answer:
    (answer,) = engine.answers([question], 120)
    return answer


def until_recalled(one: EngineProcess, other: EngineProcess) -> None:
    """Asks one engine new questions, and then the other, until it recalls from the store. Each
    pair of answers is the same, recalled or computed."""
    while True:
        question = new_question()
        first = ask(one, question)
        time.sleep(1.0)  # its blocks are on their way to the store
        second = ask(other, question)
        assert second.tokens == first.tokens
        if second.sources["remote"] == WHOLE:
            assert first.sources["computed"] == PROMPT
            return


def test_an_engine_recalls_what_another_host_computed(
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    first, second = engines
    until_recalled(first, second)
    until_recalled(second, first)


def test_engines_go_on_while_the_link_is_cut_and_share_again_afterwards(
    network: Network,
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    first, second = engines
    until_recalled(first, second)
    question = new_question()
    alone = ask(first, question)
    time.sleep(1.0)
    network.cut(SECOND)
    cut_off = ask(second, question)
    assert cut_off.tokens == alone.tokens
    assert cut_off.sources["remote"] == 0
    network.mend(SECOND)
    until_recalled(first, second)


def test_an_engine_goes_on_when_the_other_host_dies(
    network: Network,
    engines: tuple[EngineProcess, EngineProcess],
) -> None:
    first, second = engines
    question = new_question()
    answer = ask(first, question)
    time.sleep(1.0)
    network.cut(FIRST)
    first.kill("group")
    for again in (question, new_question(), question):
        reply = ask(second, again)
        assert reply.finish == "length"
        if again is question:
            assert reply.tokens == answer.tokens
