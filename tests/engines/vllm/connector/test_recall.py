"""One Qwen3 engine with host and disk: what is recalled, and that it is right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import (
    BLOCK,
    hits,
    nothing_held,
    push_out_of_host,
    same_bits_from_every_tier,
)

pytestmark = pytest.mark.engine

BLOCK_BYTES = 4 * 2 * 2 * 64 * BLOCK * 4  # layers, K and V, KV heads, head size, float32
DEVICE_BLOCKS = 38  # four prompts of nine blocks, the null block, and one to quarrel about
HOST_BLOCKS = 24


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def setup(model_folder: Callable[..., Path], disk: Path) -> dict[str, Any]:
    pool = {
        "host_size": HOST_BLOCKS * BLOCK_BYTES,
        "policy": "lru",  # what was pushed out is out; hazard learns from one test for the next
        "disk_path": str(disk),
        "disk_size": "256MiB",
        "async_write": False,
        "load_or_compute": "load",
    }
    return {
        "model": str(model_folder("qwen3")),
        "dtype": "float32",
        "pool": pool,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "module": "failing",
        "connector": "FailingConnector",
        "env": {"KVRECALL_TEST_FAIL": str(disk.parent / "fail-loads")},
    }


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], setup: dict[str, Any]) -> Engine:
    return start(**setup)


def test_nothing_is_traced_without_an_endpoint(engine: Engine) -> None:
    found = engine.traced_midway(prompt=prompt_of(200, 77))
    assert found == {"request": False, "headers": None, "threads": []}


def test_every_worker_maps_the_arena_before_the_first_request(engine: Engine) -> None:
    """Where it is page-locked, too, which takes long. The pool has mapped it as well."""
    process = psutil.Process(engine.process.pid)
    mapped = 0
    for one in (process, *process.children(recursive=True)):
        for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines():
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            mapped += end - begin if "memfd:kvrecall-arena" in line else 0
    assert mapped >= 2 * HOST_BLOCKS * BLOCK_BYTES


def test_same_bits_from_every_tier(engine: Engine) -> None:
    same_bits_from_every_tier(engine, 1)
    nothing_held(engine)


def test_whole_blocks_only(engine: Engine) -> None:
    """Seed 003: of a common prefix of 164 tokens, 128 are recalled."""
    common = prompt_of(164, 2)
    engine.ask(common + prompt_of(20, 3))
    assert hits(engine.ask_anew(common + prompt_of(30, 4))) == (0, BLOCK, 0)
    assert hits(engine.ask_anew(common[:127] + prompt_of(60, 5))) == (0, 0, 0)


def test_device_before_pool(engine: Engine) -> None:
    """Seed 000: what the device still has is not loaded from the pool."""
    prompt = prompt_of(3 * BLOCK + 5, 7)
    engine.ask(prompt)
    longer = prompt + prompt_of(2 * BLOCK, 8)
    engine.ask(longer)
    assert hits(engine.ask(longer)) == (5 * BLOCK, 0, 0)
    assert hits(engine.ask_anew(prompt)) == (0, 3 * BLOCK, 0)
    assert hits(engine.ask(longer)) == (3 * BLOCK, 2 * BLOCK, 0)


def test_only_computed_tokens_are_recalled_however_an_answer_ends(engine: Engine) -> None:
    """The last token of an answer was sampled and never computed. Lengths around a block's end, by
    the most tokens, a stop token and several samples."""

    def goes_on(prompt: list[int], seed: int, **sampling: Any) -> None:
        answer = engine.ask(prompt, **sampling)["tokens"]
        assert engine.forget_device()
        turn = prompt + answer + prompt_of(2, seed)
        whole = (len(prompt) + len(answer) - 1) // BLOCK * BLOCK
        recalled = engine.ask(turn)
        assert sum(hits(recalled)) == whole
        assert recalled["tokens"] == engine.ask(turn, salts=["computed"])["tokens"]

    for at, (tokens, most) in enumerate([(-2, 1), (-2, 2), (-2, 3), (-1, 1), (-1, 2), (0, 1)]):
        goes_on(prompt_of(2 * BLOCK + tokens, 800 + at), 850, max_tokens=most, ignore_eos=True)
    prompt = prompt_of(2 * BLOCK - 2, 860)
    stop = engine.ask(prompt, salts=["told"], max_tokens=2)["tokens"][-1:]
    goes_on(prompt, 861, max_tokens=9, stop_token_ids=stop)
    goes_on(prompt_of(2 * BLOCK - 3, 862), 863, max_tokens=3, n=2, temperature=0.8)


def test_tenants_share_nothing(engine: Engine) -> None:
    prompt = prompt_of(3 * BLOCK + 1, 11)
    engine.ask(prompt, salts=["red"])
    assert hits(engine.ask_anew(prompt, salts=["blue"])) == (0, 0, 0)
    assert hits(engine.ask(prompt)) == (0, 0, 0)
    assert hits(engine.ask_anew(prompt, salts=["red"])) == (0, 3 * BLOCK, 0)


def test_a_probe_across_salts_finds_nothing_to_measure(engine: Engine) -> None:
    """The pool does the same work for another tenant's prompt, in the host or on disk, as for an
    unknown one: nothing is found, read, promoted or leased, so timing reveals nothing."""
    known = prompt_of(6 * BLOCK + 9, 400)

    def worked(tokens: list[int], salt: str) -> dict[str, Any]:
        engine.flush()
        before = engine.pool_stats()["tiers"]
        reply = engine.ask(tokens, salts=[salt], max_tokens=1)
        after = engine.pool_stats()["tiers"]
        names = ("hits", "reads", "read_bytes", "errors", "corrupt")
        work = {(t, n): after[t][n] - before[t][n] for t in after for n in names}
        assert engine.forget_device()
        return {"hits": hits(reply), **work}

    engine.ask(known, salts=["red"], max_tokens=1)
    in_host, unseen = worked(known, "blue"), worked(prompt_of(6 * BLOCK + 9, 401), "green")
    assert in_host == unseen
    push_out_of_host(engine, 402)
    on_disk, unseen = worked(known, "yellow"), worked(prompt_of(6 * BLOCK + 9, 403), "white")
    assert on_disk == unseen
    assert sum(unseen["hits"]) == 0
    own = worked(known, "red")
    assert own != on_disk, "the tenant's own hit is seen in these counts"
    assert sum(own["hits"]) == 6 * BLOCK


def test_several_samples_and_beams(engine: Engine) -> None:
    prompt = prompt_of(2 * BLOCK + 9, 12)
    sampling = {"n": 3, "temperature": 0.8, "seed": 5, "max_tokens": 12}
    engine.ask(prompt, **sampling)
    on_device = engine.ask(prompt, **sampling)
    beams = engine.beam(prompt=prompt, width=3, max_tokens=6)
    recalled = engine.ask_anew(prompt, **sampling)
    assert recalled["all"] == on_device["all"]
    assert len({tuple(one["tokens"]) for one in recalled["all"]}) > 1
    assert engine.forget_device()
    assert engine.beam(prompt=prompt, width=3, max_tokens=6) == beams
    nothing_held(engine)


def test_a_seed_gives_the_same_tokens_however_the_prefill_is_cut(engine: Engine) -> None:
    """Computed in three steps, recalled but for the last block, and beside another prompt. It
    ended vLLM's CPU engine."""
    prompt, sampling = prompt_of(9 * BLOCK + 9, 71), {"temperature": 0.8, "seed": 3}
    computed = engine.ask(prompt, **sampling)["tokens"]
    recalled = engine.ask_anew(prompt, **sampling)
    assert sum(hits(recalled)) == 9 * BLOCK  # the host is full: one of them may have gone to disk
    assert recalled["tokens"] == computed
    assert engine.forget_all()
    beside = engine.generate(prompts=[prompt_of(3 * BLOCK + 50, 72), prompt], **sampling)
    assert beside[1]["tokens"] == computed
    assert engine.ask(prompt, temperature=0.8, seed=4)["tokens"] != computed


def test_preempted_requests_are_right(engine: Engine) -> None:
    """Four sequences that outgrow the device together: some are preempted, and come back from
    the pool. In float32, where a batch and a request alone choose the same tokens."""
    prompts = [prompt_of(9 * BLOCK - 10, 20 + i) for i in range(4)]
    alone = [engine.ask(prompt, max_tokens=40)["tokens"] for prompt in prompts]
    before = engine.preemptions()
    assert engine.forget_device()
    together = engine.generate(prompts=prompts, max_tokens=40)
    assert engine.preemptions() > before
    assert [reply["tokens"] for reply in together] == alone
    nothing_held(engine)


@pytest.mark.parametrize("steps", [1, 2, 3, 12])
def test_abort_leaves_nothing_behind(engine: Engine, steps: int) -> None:
    prompt = prompt_of(10 * BLOCK, 30)
    assert engine.abort_midway(prompt=prompt, after_steps=steps, max_tokens=50) == 0
    nothing_held(engine)
    assert engine.forget_device()


def test_abort_while_loading(engine: Engine) -> None:
    prompt = prompt_of(10 * BLOCK, 31)
    first = engine.ask(prompt)
    push_out_of_host(engine, 31)
    for steps in (1, 2):
        assert engine.abort_midway(prompt=prompt, after_steps=steps, max_tokens=5) == 0
        nothing_held(engine)
        assert engine.forget_device()
    assert engine.ask(prompt)["tokens"] == first["tokens"]


def test_failed_loads_are_recomputed(engine: Engine, setup: dict[str, Any]) -> None:
    prompt = prompt_of(5 * BLOCK + 3, 35)
    first = engine.ask(prompt)
    assert engine.forget_device()
    flag = Path(setup["env"]["KVRECALL_TEST_FAIL"])
    flag.touch()
    again = engine.ask(prompt)
    flag.unlink()
    assert again["tokens"] == first["tokens"]
    assert hits(again) == (0, 0, 0)
    assert engine.metrics()["kvrecall_loads_failed_total"] == 1
    nothing_held(engine)
    assert hits(engine.ask_anew(prompt)) == (0, 5 * BLOCK, 0)


def test_metrics_tell_it(engine: Engine) -> None:
    found = engine.metrics()
    assert found["kvrecall_prompt_tokens_total:host"] > 0
    assert found["kvrecall_prompt_tokens_total:disk"] > 0
    assert found["kvrecall_loaded_bytes_total"] > BLOCK_BYTES
    assert found["kvrecall_tier_blocks:disk"] > HOST_BLOCKS
    assert found["kvrecall_tier_capacity_bytes:host"] >= HOST_BLOCKS * BLOCK_BYTES


def test_corrupted_blocks_are_recomputed(engine: Engine, disk: Path) -> None:
    prompt = prompt_of(7 * BLOCK + 30, 40)
    first = engine.ask(prompt)
    push_out_of_host(engine, 40)
    before = engine.pool_stats()["tiers"]["disk"]["corrupt"]
    for slab in disk.rglob("*"):
        if slab.is_file() and slab.stat().st_size >= BLOCK_BYTES and "index" not in slab.name:
            with slab.open("r+b") as file:
                for at in range(100, slab.stat().st_size, BLOCK_BYTES // 2):
                    file.seek(at)
                    file.write(b"\xff\x00\xff")
    again = engine.ask(prompt)
    assert again["tokens"] == first["tokens"]
    assert hits(again)[2] == 0
    assert engine.pool_stats()["tiers"]["disk"]["corrupt"] > before
    nothing_held(engine)


def test_replies_are_durable_survive_kill_9_and_a_reset_forgets_them(
    start: Callable[..., Engine], setup: dict[str, Any], engine: Engine
) -> None:
    """``async_write`` off: what a reply was sent for is on disk, whatever comes next."""
    engine.kill()  # it was reset, and its blocks have been private since
    first = start(**setup)
    prompts = [prompt_of(5 * BLOCK - 10, 60 + i) for i in range(3)]
    told = [first.ask(prompt, max_tokens=16) for prompt in prompts]
    first.kill()
    assert not [name for name in os.listdir("/dev/shm") if "kvrecall" in name]

    second = start(**setup)
    last = prompts[-1] + told[-1]["tokens"] + prompt_of(BLOCK, 98)
    assert hits(second.ask(last)) == (0, 0, 4 * BLOCK)  # the fifth proves what was written before
    assert second.forget_device()
    for prompt, reply in zip(prompts, told, strict=True):
        turn = prompt + reply["tokens"] + prompt_of(BLOCK, 99)
        assert sum(hits(second.ask(turn, max_tokens=1))) == 5 * BLOCK
        again = second.ask(prompt, max_tokens=16)
        assert again["tokens"] == reply["tokens"]
    assert hits(second.ask(prompt_of(4 * BLOCK, 90))) == (0, 0, 0)

    assert second.forget_all()
    assert hits(second.ask(prompts[0])) == (0, 0, 0)
    assert hits(second.ask_anew(prompts[0])) == (0, 4 * BLOCK, 0)
