"""Real engines on a service that is killed and started again, and of any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines.vllm.engine import Engine, prompt_of

from kvrecall.testing import wait_until
from kvrecall_lab.engines.engine import EngineProcess
from kvrecall_lab.models import write_model
from kvrecall_lab.shapes.cases import on_and_off
from kvrecall_lab.shapes.node import node
from kvrecall_lab.shapes.ranks import Saved, recalled, saved_by
from kvrecall_lab.shapes.shapes import SHAPES, environment
from pool.service.service import MIB, Service

BLOCK = 128


@pytest.mark.engine
def test_an_engine_loses_its_service_and_rejoins(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "llama")
    with Service(tmp_path / "service", 256 * MIB) as service:
        engine = Engine(
            tmp_path / "log",
            model=str(tmp_path / "model"),
            max_model_len=4096,
            max_num_batched_tokens=512,
            pool={
                "backend": "service",
                "socket": str(service.socket),
                "call_timeout": 10,
                "load_deadline": 60,
                "load_or_compute": "load",
            },
        )
        try:
            lose_and_rejoin(engine, service)
        finally:
            engine.close()


def lose_and_rejoin(engine: Engine, service: Service) -> None:
    prompt = prompt_of(7 * BLOCK + 30, 5)
    computed = engine.ask(prompt)
    device = engine.ask(prompt)
    engine.forget_device()
    host = engine.ask(prompt)
    assert host["from"]["host"] == 7 * BLOCK
    assert engine.flush()
    replies = [device, host]
    for idle in (False, True):
        before = engine.service()
        service.kill()
        if not idle:
            engine.forget_device()
            lost = engine.ask(prompt)
            assert lost["from"]["computed"] == len(prompt)
            assert lost["tokens"] == computed["tokens"]
        service.start()
        wait_until(lambda old=before: engine.service() not in (None, old))  # type: ignore[misc]
        engine.forget_device()
        replies.append(engine.ask(prompt))
        assert replies[-1]["from"]["disk"] == 7 * BLOCK
    for reply in replies:
        assert reply["tokens"] == computed["tokens"]
        assert reply["logprobs"] == device["logprobs"]
    # An engine asks a service for statistics twice a second, and keeps them.
    wait_until(lambda: (s := engine.pool_stats()) and (s["leases"], s["reserved"]) == (0, 0))


@pytest.mark.engine
@pytest.mark.long
def test_one_service_for_engines_of_any_number_of_ranks(tmp_path: Path) -> None:
    """One after the other, each killed before the next one starts; at the same time, and with
    several KV groups: ``make models``."""
    shape = next(shape for shape in SHAPES if shape.name == "qwen3")
    arguments = shape.arguments(shape.write(tmp_path), tmp_path / "cache")
    written: list[Saved] = []
    with node(tmp_path / "node", mooncake=False) as place:
        for turn, ranks in enumerate((1, 2, 1)):
            setup = {**arguments, "pool": place.joined, "tensor_parallel_size": ranks}
            log = tmp_path / f"{turn}.log"
            engine = EngineProcess(f"{ranks} ranks", setup, log, environment=environment())
            try:
                engine.wait_ready()
                if written:
                    row = recalled(engine, shape, written, "service", (3 - ranks, ranks), True)
                    assert row.faults() == []
                written = saved_by(engine, on_and_off(shape, f"turn {turn}"))
                engine.kill()
            finally:
                engine.bury()
