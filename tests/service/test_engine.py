"""A real engine on a service that is killed and started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine.engine import Engine, prompt_of

from kvrecall.lab.models import write_model
from kvrecall.testing.blocks import wait_until

from .service import MIB, Service

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
