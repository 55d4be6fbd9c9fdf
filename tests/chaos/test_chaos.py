"""The chaos run's own parts: each fault it claims not to have seen, it would have seen."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.block import BlockKey
from kvrecall.lab.chaos import leftovers
from kvrecall.lab.chaos.crew import Asked, Crew, Seat
from kvrecall.lab.chaos.damage import Vandal, stored
from kvrecall.lab.chaos.library import Library, Turn, sure_part
from kvrecall.lab.chaos.tally import FAULTS, FIGURES, Tally
from kvrecall.lab.chaos.witness import Witness
from kvrecall.lab.engines.engine import Answer, Question
from kvrecall.lab.engines.service import ServiceProcess
from kvrecall.lab.processes import as_child
from kvrecall.pool.service.client import ServiceClient
from kvrecall.testing.blocks import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine

NAMESPACE = namespace("chaos")
BLOCK = 20_000
MIB = 1 << 20


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    service = ServiceProcess(tmp_path / "s", 8 * MIB, 64 * MIB)
    service.start()
    yield service
    service.kill()


def save(service: ServiceProcess, count: int, name: str = "") -> list[BlockKey]:
    client = ServiceClient(service.socket, 5.0)
    client.register(NAMESPACE, BLOCK)
    engine = Engine(client, BLOCK)
    keys = chain(NAMESPACE, count, name)
    engine.save(keys)
    assert client.flush(keys, 60.0)
    engine.close()
    client.close()
    return keys


def answer(tokens: tuple[int, ...], gaps: tuple[float, ...] = ()) -> Answer:
    return Answer("a", tokens, "length", {}, (), gaps, 0.0)


def test_the_line_of_json_begins_with_what_was_promised() -> None:
    tally = Tally()
    assert not tally.is_clean, "nothing asked proves nothing"
    tally.add("requests", 3)
    tally.add("more")
    assert tally.is_clean
    assert list(json.loads(tally.line(seed=1)))[:9] == [*FIGURES, *FAULTS]
    tally.fault("lost_committed", "a block")
    assert not tally.is_clean


def test_an_answer_is_sure_up_to_its_first_ambiguous_token() -> None:
    assert sure_part(answer((1, 2, 3), (0.5, 0.001, 0.5))) == (1,)
    assert sure_part(answer((1, 2), (0.5, 0.2))) == (1, 2)


def test_a_conversation_goes_on_with_its_answers() -> None:
    """The library is the same for the same dice, and every turn begins with the one before."""

    def ask(questions: list[Question]) -> list[Answer]:
        return [answer((sum(q.prompt) % 250, 7, 9), (1.0, 1.0, 0.0)) for q in questions]

    one, two = (Library.written(random.Random(5), 4, 3, ask) for _ in range(2))
    assert one.turns == two.turns
    for turns in one.turns:
        for before, after in itertools.pairwise(turns):
            assert after.prompt[: len(before.prompt) + 2] == (*before.prompt, *before.answer)
            assert len(before.answer) == 2


def test_a_wrong_token_is_seen(tmp_path: Path) -> None:
    turn = Turn((1, 2, 3), (4, 5, 6))
    tally = Tally()
    crew = Crew(
        1, lambda *_: pytest.fail("no engine"), Library([[turn]]), tally, random.Random(1),
        lambda keys: None, lambda: 0.0,
    )  # fmt: skip
    crew.drain()
    for tokens in ((4, 5), (4, 6)):
        seat = Seat(0, doomed=True, under_way={"a": Asked(Question("a", (1, 2, 3), 2), turn, 0.0)})
        crew._judge(seat, answer(tokens))
    assert (tally["requests"], tally["wrong"]) == (2, 1)
    assert "[4, 6] instead of [4, 5]" in tally.faults[0]


def test_damage_hits_the_blocks_it_names_and_no_others(service: ServiceProcess) -> None:
    keys = save(service, 60)
    dice = random.Random(3)
    named: set[BlockKey] = set()
    vandal = Vandal(service.disk, dice, rough=0.0)
    for _ in range(12):
        blow = vandal.strike(in_use=True)
        assert blow is not None
        named |= blow.keys
    assert 0 < len(named) < len(keys)
    client = ServiceClient(service.socket, 5.0)
    client.register(NAMESPACE, BLOCK)
    service.kill()
    service.start()
    wait_until(lambda: client.is_connected)
    client.find(keys)
    engine = Engine(client, BLOCK)
    read = {key for key in keys if client.find([key]).blocks and engine.recall([key])}
    assert read == set(keys) - named
    engine.close()
    client.close()


def test_a_slab_that_is_cut_costs_its_blocks(service: ServiceProcess) -> None:
    keys = save(service, 60)
    blow = Vandal(service.disk, random.Random(1), rough=1.0).strike(in_use=True)
    assert blow is not None
    assert (blow.keys, blow.count) == (set(keys), 1)
    service.kill()
    service.start()
    client = ServiceClient(service.socket, 5.0)
    assert client.find(keys).blocks == 0
    client.close()


def test_the_witness_misses_what_is_gone(service: ServiceProcess) -> None:
    witness = Witness(service.socket)
    keys = save(service, 20)
    witness.saw(keys)
    wait_until(lambda: witness.durable == 20)
    service.kill()
    service.start()
    assert witness.wait_joined()
    assert witness.missing() == []
    service.kill()
    (slab,) = service.disk.glob("slab-*.kv")
    slab.unlink()
    service.start()
    assert witness.wait_joined()
    assert set(witness.missing()) == set(keys)
    witness.excuse(keys[:5])
    assert set(witness.missing()) == set(keys[5:])
    witness.settle()


def test_leftovers_are_found(service: ServiceProcess, tmp_path: Path) -> None:
    save(service, 5)
    client = ServiceClient(service.socket, 5.0)
    client.register(NAMESPACE, BLOCK)
    arena = client.arena_handle()
    assert [pid for _, pid in leftovers.arenas_held([arena])] == [service.pid]
    client.reserve(chain(NAMESPACE, 2, "never committed"))
    held, who = leftovers.slots_held(service, 0.0)
    assert (held, who) == (2, "0 leases, 2 slots being filled")
    client.close()
    assert leftovers.slots_held(service) == (0, "")
    assert service.stop()
    assert leftovers.arenas_held([arena]) == []
    assert leftovers.strays(service) == []
    rows = {row.slab for row in stored(service.disk, in_use=False)}
    assert rows == {0}
    for stray in (service.folder / "dump", service.disk / "slab-000077.kv"):
        stray.write_bytes(b"x" * 10)
    assert sorted(n for _, n in leftovers.strays(service)) == [10, 10]
    assert leftovers.over_the_limit(service, 64 * MIB) == 0
    assert leftovers.over_the_limit(service, MIB) > 0


SHORT = """
import sys
from functools import partial
from kvrecall.lab.chaos import __main__ as chaos
from kvrecall.lab.chaos.troubles import Pace
chaos.Scenery = partial(
    chaos.Scenery, conversations=6, turns=2, device_blocks=20,
    pace=Pace(service_s=3.0, engine_s=600.0, damage_s=1.0),
)
chaos.app(sys.argv[1:])
"""
"""``python -m kvrecall.lab.chaos`` with less to say and more trouble."""


@pytest.mark.long
@pytest.mark.engine
def test_a_short_run_is_clean() -> None:
    """One engine, twelve seconds; ``make chaos`` runs longer, with more of everything."""
    words = ["--seconds", "12", "--seed", "4", "--engines", "1"]
    command = as_child(sys.executable, "-c", SHORT, *words)
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    tally = json.loads(done.stdout.splitlines()[-1])
    assert (tally["seed"], tally["seconds"]) == (4, 12.0)
    assert not any(tally[name] for name in FAULTS)
    assert tally["service_starts"] >= 1
    assert tally["corruptions"] >= 1
    assert tally.get("host_tokens", 0) + tally.get("disk_tokens", 0) > 0, "the pool never acted"
