"""KV cache events of the pool's tiers, read by a subscriber as vLLM's own example is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import BLOCK, hits, push_out_of_host
from kvrecall.engines.vllm.compat.patches import PATCHES
from kvrecall.processes.ports import free_port
from kvrecall.testing import wait_until

pytestmark = pytest.mark.engine

BLOCK_BYTES = 4 * 2 * 2 * 64 * BLOCK * 4  # layers, K and V, KV heads, head size, float32


class Router:
    """What a router knows of an engine: the hashes of its blocks by medium."""

    def __init__(self, port: int, replay_port: int) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._decode = msgspec.msgpack.Decoder(type=KVEventBatch).decode
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.connect(f"tcp://127.0.0.1:{port}")
        self._sub.setsockopt_string(zmq.SUBSCRIBE, "")
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(f"tcp://127.0.0.1:{replay_port}")
        self.media: dict[str, set[int]] = {}
        self.events: list[Any] = []
        self._next = 0

    def read(self) -> None:
        """Reads what was published, until nothing comes for a moment."""
        while self._sub.poll(50):
            _, seq, payload = self._sub.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number > self._next:
                self.replay()
            if number == self._next:
                self._apply(payload)

    def read_until(self, knows: Callable[[], bool]) -> None:
        """Reads until it knows that: the engine publishes from a thread of its own. After a second
        of silence it asks for what was published before its subscription took effect."""

        def is_known() -> bool:
            self.read()
            if not knows() and not self._sub.poll(1000):
                self.replay()
            return knows()

        wait_until(is_known)

    def skip(self) -> None:
        """Loses what was published."""
        assert self._sub.poll(60_000)
        while self._sub.poll(200):
            self._sub.recv_multipart()

    def replay(self, from_the_oldest: bool = False) -> None:
        """Asks for what was lost, or for all that there is."""
        self._replay.send_multipart((b"", self._next.to_bytes(8, "big")))
        while True:
            assert self._replay.poll(20_000)
            *_, seq, payload = self._replay.recv_multipart()
            if not payload:
                return
            number = int.from_bytes(seq, "big")
            self._next = number if from_the_oldest else self._next
            from_the_oldest = False
            if number == self._next:
                self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        self._next += 1
        for event in self._decode(payload).events:
            self.events.append(event)
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.media.clear()
                continue
            hashes = set(event.block_hashes)
            known = self.media.setdefault(event.medium, set())
            if kind == "BlockStored":
                known |= hashes
            else:
                known -= hashes

    def known(self) -> dict[str, list[int]]:
        return {medium: sorted(hashes) for medium, hashes in self.media.items() if hashes}

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def setup(
    model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return {
        "model": str(model_folder("qwen3")),
        "dtype": "float32",
        "pool": {
            "host_size": 24 * BLOCK_BYTES,
            "policy": "lru",
            "disk_path": str(tmp_path_factory.mktemp("disk")),
            "disk_size": "256MiB",
            "load_or_compute": "load",
        },
        "num_gpu_blocks_override": 38,
    }


def events_at(port: int, replay_port: int) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay_port}",
    }


@pytest.fixture(scope="module")
def engine_and_router(
    start: Callable[..., Engine], setup: dict[str, Any]
) -> Iterator[tuple[Engine, Router]]:
    port, replay_port = free_port(), free_port()
    engine = start(**setup, kv_events_config=events_at(port, replay_port))
    router = Router(port, replay_port)
    yield engine, router
    router.close()


def settle(engine: Engine) -> None:
    """Steps in which events are published that came since the last."""
    assert engine.flush()
    engine.ask(prompt_of(10, 999), max_tokens=8)


def agrees(engine: Engine, router: Router) -> dict[str, list[int]]:
    settle(engine)
    held: dict[str, list[int]] = engine.held()
    want = {medium: hashes for medium, hashes in held.items() if hashes}
    router.read_until(lambda: router.known() == want)
    return held


def test_a_subscriber_knows_every_tier(engine_and_router: tuple[Engine, Router]) -> None:
    engine, router = engine_and_router
    prompt = prompt_of(7 * BLOCK + 30, 1)
    engine.ask(prompt)
    held = agrees(engine, router)
    assert {medium: len(hashes) for medium, hashes in held.items()} == {
        "GPU": 7,
        "CPU": 7,
        "STORAGE": 7,
    }
    assert held["GPU"] == held["CPU"] == held["STORAGE"]
    push_out_of_host(engine, 1)
    agrees(engine, router)
    assert not set(held["CPU"]) <= router.media["CPU"]
    assert set(held["STORAGE"]) <= router.media["STORAGE"]
    assert sum(hits(engine.ask(prompt))) == 7 * BLOCK
    agrees(engine, router)


def test_what_was_lost_is_replayed(engine_and_router: tuple[Engine, Router]) -> None:
    engine, router = engine_and_router
    engine.ask(prompt_of(3 * BLOCK, 2))
    settle(engine)
    router.skip()
    assert router.known() != {k: v for k, v in engine.held().items() if v}
    engine.ask(prompt_of(2 * BLOCK, 3))
    agrees(engine, router)


def test_a_clear_of_the_device_leaves_the_pool(engine_and_router: tuple[Engine, Router]) -> None:
    engine, router = engine_and_router
    engine.ask(prompt_of(3 * BLOCK, 4))
    assert engine.forget_device()
    held = agrees(engine, router)
    assert not held["GPU"]
    assert held["CPU"]
    assert held["STORAGE"]
    assert engine.forget_all()
    engine.ask(prompt_of(3 * BLOCK, 5))
    held = agrees(engine, router)
    assert {len(hashes) for hashes in held.values()} == {3}


def test_an_overflow_begins_again(engine_and_router: tuple[Engine, Router]) -> None:
    engine, router = engine_and_router
    agrees(engine, router)
    before = len(router.events)
    engine.log_changes(most=4)
    engine.ask(prompt_of(9 * BLOCK, 6))
    engine.log_changes(most=65_536)
    settle(engine)
    held = engine.held()

    def knows() -> bool:
        return all(sorted(router.media.get(tier, ())) == held[tier] for tier in ("CPU", "STORAGE"))

    router.read_until(knows)
    kinds = [type(event).__name__ for event in router.events[before:]]
    assert "AllBlocksCleared" in kinds
    assert router.media.get("GPU", set()) <= set(held["GPU"])


def test_what_is_replaced_of_vllms_is_in_the_table(
    engine_and_router: tuple[Engine, Router],
) -> None:
    """In an engine that publishes events, after all that the tests above did with it."""
    engine, _ = engine_and_router
    found = engine.replaced()
    targets = {name: patch.target for name, patch in PATCHES.items()}
    assert {place: name for place, name in found.items() if name is None} == {}
    for place, name in found.items():
        assert targets[name].rpartition(".")[2].rpartition(":")[2] == place.rpartition(".")[2]
    assert {"whole-replay", "reschedule", "aside", "fingerprint-early"} <= {*found.values()}
    planted = engine.replaced(planted="create_request_queue")
    assert planted.keys() - found.keys() == {"vllm.v1.core.sched.scheduler.create_request_queue"}
    assert planted["vllm.v1.core.sched.scheduler.create_request_queue"] is None


def test_a_reopened_folder_is_published(
    start: Callable[..., Engine], setup: dict[str, Any], tmp_path: Path
) -> None:
    setup = {**setup, "pool": {**setup["pool"], "disk_path": str(tmp_path)}}
    first = start(**setup)
    first.ask(prompt_of(5 * BLOCK, 7))
    assert first.flush()
    on_disk = first.held()["STORAGE"]
    assert on_disk
    first.close()
    port, replay_port = free_port(), free_port()
    second = start(**setup, kv_events_config=events_at(port, replay_port))
    router = Router(port, replay_port)
    settle(second)  # the namespace is known from the first request on
    router.read_until(lambda: router.known() == {"STORAGE": on_disk})
    router.close()


def latest(port: int, replay_port: int, held: dict[str, list[int]]) -> Router:
    """A router that has read all that can be replayed, once that is what is held: the engine
    publishes from a thread of its own."""
    made: list[Router] = []

    def is_up_to_date() -> bool:
        for old in made:
            old.close()
        made[:] = [Router(port, replay_port)]
        made[0].replay(from_the_oldest=True)
        return made[0].known() == held

    wait_until(is_up_to_date)
    return made[0]


@pytest.mark.long
def test_a_replay_from_the_oldest_names_all_that_is_held(
    start: Callable[..., Engine], setup: dict[str, Any], tmp_path: Path
) -> None:
    """Also what was stored in batches that are long gone; with the tokens of the device's."""
    setup = {**setup, "pool": {**setup["pool"], "disk_path": str(tmp_path)}}
    port, replay_port = free_port(), free_port()
    engine = start(**setup, kv_events_config={**events_at(port, replay_port), "buffer_steps": 3})
    prompt = prompt_of(3 * BLOCK, 100)
    engine.ask(prompt)
    for number in range(12):
        engine.ask(prompt_of(2 * BLOCK, 101 + number))
    for _ in range(2):
        settle(engine)
        held = {medium: hashes for medium, hashes in engine.held().items() if hashes}
        late = latest(port, replay_port, held)
        assert late.known() == held
        assert {"CPU", "STORAGE"} < set(held)
        told = [one for one in late.events if getattr(one, "medium", None) == "GPU"]
        assert all(
            len(one.token_ids) == BLOCK * len(one.block_hashes)
            for one in told
            if type(one).__name__ == "BlockStored"
        )
        late.close()
        assert engine.forget_device()
        for number in range(6):
            engine.ask(prompt_of(2 * BLOCK, 300 + number))
    engine.close()
