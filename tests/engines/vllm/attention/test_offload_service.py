"""A real engine that offloads long sequences to the node's pool service, against one with an
embedded pool; and the loss of the service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pool.service.service import MIB, Service

from engines.vllm.attention.test_engine import activity, spent
from engines.vllm.attention.test_offload import settings
from engines.vllm.attention.test_offload_faults import PREFILL, same
from engines.vllm.engine import Engine, prompt_of
from kvrecall.pool.service.link import mappers_of
from kvrecall.testing import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

HOST = 96 * MIB


@pytest.fixture(scope="module")
def setup(setup: dict[str, Any]) -> dict[str, Any]:
    return {**setup, "env": settings(2048)}


@pytest.fixture(scope="module")
def embedded(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    return start(**setup, pool={"host_size": HOST, "load_or_compute": "load"})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("service"), HOST) as service:
        yield service


@pytest.fixture(scope="module")
def served(start: Callable[..., Engine], setup: dict[str, Any], service: Service) -> Engine:
    pool = {
        "backend": "service",
        "socket": str(service.socket),
        "call_timeout": 10,
        "load_or_compute": "load",
    }
    return start(**setup, pool=pool)


def settled(engine: Engine) -> None:
    """All device blocks and leases were given back."""
    assert engine.free_blocks() == 89
    # An engine asks a service for statistics twice a second, and keeps them.
    wait_until(lambda: (s := engine.pool_stats()) and (s["leases"], s["reserved"]) == (0, 0))


def test_the_same_tokens_as_with_a_pool_of_its_own(embedded: Engine, served: Engine) -> None:
    """Of blocks that leave, and of a prefix that stays in the pool."""
    prompts = [prompt_of(tokens, tokens) for tokens in (3000, 3500, 2010)]
    before, preempted = activity(served), served.preemptions()
    replies = []
    for engine in (embedded, served):
        first = engine.generate(prompts=prompts, max_tokens=60)
        assert engine.forget_device()
        replies.append(first + engine.generate(prompts=prompts, max_tokens=60))
    for got, want in zip(replies[1], replies[0], strict=True):
        assert got["tokens"] == want["tokens"]
        assert got["logprobs"] == want["logprobs"]
    did = spent(served, before)
    assert did["blocks_offloaded"] > 30
    assert did["blocks_left"] > 30
    assert did["sequences_offloaded"] > 4 * 59
    assert served.preemptions() == preempted
    settled(served)


@pytest.mark.parametrize("anew", [False, True])
def test_the_service_dies_while_sequences_decode(
    embedded: Engine, served: Engine, service: Service, tmp_path: Path, anew: bool
) -> None:
    """One is offloaded, and keeps reading the dead service's arena. The other grows past the
    boundary afterwards: it stays, or is offloaded to the next service's arena. Finally no process
    holds the memory of the dead one."""
    prompts = [prompt_of(3000, 10 + anew), prompt_of(2000, 20 + anew)]
    want = embedded.generate(prompts=prompts, max_tokens=160)
    before, preempted = activity(served), served.preemptions()
    client = service.client()
    inode = client.arena_handle().inode

    def kill() -> None:
        assert served.process.pid in mappers_of(inode)
        wait_until(lambda: client.stats().queued_writes == 0)
        service.kill()
        if anew:
            service.start()

    got = meanwhile(served, prompts, tmp_path / "here", kill, anew=anew)
    for one, other in zip(got, want, strict=True):
        same(one, other)
    did = spent(served, before)
    assert served.preemptions() == preempted
    middle = [(3000 - 256) // 128 - 1, (2048 - 256) // 128 - 1]
    assert did["blocks_offloaded"] == (sum(middle) if anew else middle[0])
    assert (did["sequences_offloaded"] > 159) == anew
    client.close()
    wait_until(lambda: not mappers_of(inode))
    if not anew:
        service.start()
    settled(served)


def test_the_service_stalls_while_a_sequence_decodes(
    embedded: Engine, served: Engine, service: Service, tmp_path: Path
) -> None:
    prompt = prompt_of(3000, 30)
    (want,) = embedded.generate(prompts=[prompt], max_tokens=160)
    wait_until(lambda: served.service() is not None)
    (got,) = meanwhile(served, [prompt], tmp_path / "here", service.pause)
    service.resume()
    same(got, want)
    wait_until(lambda: served.service() is not None)
    settled(served)
    same(served.ask_anew(prompt, max_tokens=160), want)


def meanwhile(
    engine: Engine,
    prompts: list[list[int]],
    place: Path,
    act: Callable[[], None],
    anew: bool = False,
    after_steps: int = PREFILL + 15,
    max_tokens: int = 160,
) -> list[dict[str, Any]]:
    """Decodes, and calls ``act`` midway."""
    replies: list[dict[str, Any]] = []
    trouble = {"name": "meet", "place": str(place), "anew": anew}
    order = {"prompts": prompts, "after_steps": after_steps, "max_tokens": max_tokens}
    thread = threading.Thread(
        target=lambda: replies.extend(engine.decode_through(**order, trouble=trouble))
    )
    thread.start()
    wait_until(place.exists)
    act()
    place.unlink()
    thread.join()
    return replies
