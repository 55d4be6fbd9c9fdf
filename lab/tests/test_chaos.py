"""The parts of the chaos run: it detects every fault whose absence it reports."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrecall.block import BlockKey
from kvrecall.pool.disk.folder import own_bytes
from kvrecall.pool.service.client import ServiceClient
from kvrecall.processes.command import as_child
from kvrecall.processes.service import ServiceProcess
from kvrecall.testing import chain, namespace, wait_until
from kvrecall.testing.pool_contract import Engine
from kvrecall_lab.chaos import run
from kvrecall_lab.chaos.faults import DiskFaults, stored_blocks
from kvrecall_lab.chaos.oracle import FAULTS, Conversations, DurabilityOracle, Turn
from kvrecall_lab.engines.engine import Answer, Question

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
    client = ServiceClient(service.socket, 60.0)
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


def test_an_answer_is_sure_up_to_its_first_ambiguous_token() -> None:
    assert answer((1, 2, 3), (0.5, 0.001, 0.5)).sure(0.01) == 1
    assert answer((1, 2), (0.5, 0.2)).sure(0.01) == 2


def test_a_conversation_goes_on_with_its_answers() -> None:
    """The same dice give the same turns, and every turn begins with the one before."""

    def ask(questions: list[Question]) -> list[Answer]:
        return [answer((sum(q.prompt) % 250, 7, 9), (1.0, 1.0, 0.0)) for q in questions]

    one, two = (Conversations.played(random.Random(5), 4, 3, ask) for _ in range(2))
    assert one.turns == two.turns
    for turns in one.turns:
        for before, after in itertools.pairwise(turns):
            assert after.prompt[: len(before.prompt) + 2] == (*before.prompt, *before.answer)
            assert len(before.answer) == 2


def test_a_wrong_token_and_a_broken_answer_are_seen() -> None:
    turn, asked = Turn((1, 2, 3), (4, 5, 6)), Question("a", (1, 2, 3), 2)
    assert turn.fault(asked, answer((4, 5))) is None
    assert turn.fault(asked, answer((4, 6))) == ("wrong", "[4, 6] instead of [4, 5]")
    aborted = dataclasses.replace(answer((4, 5)), finish="abort")
    assert turn.fault(asked, aborted) == ("failed", "ended with 'abort'")


def test_damage_hits_the_blocks_it_names_and_no_others(service: ServiceProcess) -> None:
    keys = save(service, 60)
    dice = random.Random(3)
    named: set[BlockKey] = set()
    faults = DiskFaults(service.disk, dice, slab_share=0.0)
    for _ in range(12):
        damage = faults.inject()
        assert damage is not None
        named |= damage.keys
    assert 0 < len(named) < len(keys)
    client = ServiceClient(service.socket, 60.0)
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
    damage = DiskFaults(service.disk, random.Random(1), slab_share=1.0).inject()
    assert damage is not None
    assert (damage.keys, damage.count) == (set(keys), 1)
    service.kill()
    service.start()
    client = ServiceClient(service.socket, 60.0)
    assert client.find(keys).blocks == 0
    client.close()


def test_the_oracle_misses_what_is_gone(service: ServiceProcess) -> None:
    oracle = DurabilityOracle(service.socket)
    keys = save(service, 20)
    oracle.saved(keys)
    wait_until(lambda: oracle.durable == 20)
    service.kill()
    service.start()
    assert oracle.wait_joined()
    assert oracle.missing() == []
    service.kill()
    (slab,) = service.disk.glob("slab-*.kv")
    slab.unlink()
    service.start()
    assert oracle.wait_joined()
    assert set(oracle.missing()) == set(keys)
    oracle.damaged(keys[:5])
    assert set(oracle.missing()) == set(keys[5:])
    oracle.close()


def test_leaks_are_found(service: ServiceProcess, tmp_path: Path) -> None:
    save(service, 5)
    client = ServiceClient(service.socket, 60.0)
    client.register(NAMESPACE, BLOCK)
    arena = client.arena_handle()
    assert [pid for _, pid in run.arenas_held([arena])] == [service.pid]
    client.reserve(chain(NAMESPACE, 2, "never committed"))
    held, who = run.slots_held(service, 0.0)
    assert (held, who) == (2, "0 leases, 2 slots being filled")
    client.close()
    assert run.slots_held(service) == (0, "")
    assert service.stop()
    assert run.arenas_held([arena]) == []
    assert run.stray_files(service) == []
    rows = {row.slab for row in stored_blocks(service.disk)}
    assert rows == {"slab-000000.kv"}
    for stray in (service.folder / "dump", service.disk / "slab-000077.kv"):
        stray.write_bytes(b"x" * 10)
    assert sorted(n for _, n in run.stray_files(service)) == [10, 10]
    assert MIB < own_bytes(service.disk) <= 64 * MIB


SHORT = """
import json, sys
from pathlib import Path
from kvrecall_lab.chaos.run import INTERVALS, ChaosRun, Settings
settings = Settings(
    300.0, 4, engines=1, conversations=6, turns=2, cache_bytes=20 * 196_608,
    intervals={**INTERVALS, "service": 3.0, "engine": 600.0, "disk": 1.0},
    enough=lambda report: report["service_starts"] and report["corruptions"]
    and report["host_tokens"] + report["disk_tokens"],
)
print(json.dumps(ChaosRun(settings, Path(sys.argv[1]), print).run().figures()))
"""
"""One engine, few questions, and faults until there was one of each kind and a recall."""


@pytest.mark.long
@pytest.mark.engine
def test_a_short_run_is_clean() -> None:
    """``make chaos`` runs longer, with more of everything."""
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        command = as_child(sys.executable, "-c", SHORT, folder)
        done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert {name: report[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert min(report["requests"], report["service_starts"], report["corruptions"]) > 0
    assert report["host_tokens"] + report["disk_tokens"] > 0, "the pool never acted"
