"""Real engines with partially offloaded sequences, while disk, memory, pool or process fail: the
tokens are correct or recomputed, and nothing hangs or leaks; also with schedulers that are a step
ahead of their workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.attention.test_engine import activity, spent
from engines.vllm.attention.test_offload import BLOCK_BYTES, DIGEST_BYTES, settings
from engines.vllm.engine import Engine, EngineFailed, prompt_of
from engines.vllm.exactness import push_out_of_host
from kvrecall.pool.slots import slot_bytes_of
from kvrecall_lab.chaos.faults import stored_blocks

pytestmark = [pytest.mark.engine, pytest.mark.long]

KV_BYTES = 4 * 2 * BLOCK_BYTES
"""Of a block; its digests follow, and their checksums."""
SLOT = slot_bytes_of(KV_BYTES + DIGEST_BYTES)
HOST_BLOCKS = 48
DEVICE_BLOCKS = 90
PREFILL = 6
"""Steps of a prompt of 3,000 tokens, the last of which samples the first token."""


@pytest.fixture(scope="module")
def setup(
    setup: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, ahead: bool
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("faults")
    return {
        **setup,
        **({"prelude": "engines.vllm.attention.ahead"} if ahead else {}),
        "pool": {
            "host_size": HOST_BLOCKS * SLOT,
            "disk_path": str(folder / "disk"),
            "disk_size": "256MiB",
            "load_or_compute": "load",
        },
        "module": "unreachable",
        "env": {**settings(2048), "KVRECALL_TEST_FAIL": str(folder / "fail")},
    }


@pytest.fixture(scope="module")
def offloaded(start: Callable[..., Engine], setup: dict[str, Any], ahead: bool) -> Engine:
    engine = start(**setup)
    assert engine.is_ahead() == ahead
    return engine


def clean(engine: Engine, prompt: list[int], tokens: int) -> dict[str, Any]:
    """The answer without a fault, for blocks that no other request shares."""
    reply: dict[str, Any] = engine.ask(prompt, salts=["clean"], max_tokens=tokens)
    return reply


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Prefills that are cut differently round differently, in the fifth digit."""
    assert got["tokens"] == want["tokens"]
    for step, other in zip(got["logprobs"], want["logprobs"], strict=True):
        for (token, logprob), (wanted, expected) in zip(step, other, strict=True):
            assert token == wanted
            assert logprob == pytest.approx(expected, abs=1e-4)


def settled(engine: Engine) -> None:
    """All device blocks and leases were given back."""
    assert engine.free_blocks() == DEVICE_BLOCKS - 1
    stats = engine.pool_stats()
    assert (stats["leases"], stats["reserved"]) == (0, 0)


def test_a_full_disk(offloaded: Engine, ahead: bool) -> None:
    """Blocks are offloaded all the same: they are leased in the host while needed."""
    prompts = [prompt_of(3000, 1), prompt_of(3100, 2), prompt_of(3200, 3)]
    want = [clean(offloaded, prompt, 40) for prompt in prompts]
    assert offloaded.flush()
    before, shed = activity(offloaded), offloaded.pool_stats()["tiers"]["disk"]["dropped"]
    offloaded.trouble(name="disk_full")
    got = [offloaded.ask(prompt, max_tokens=40) for prompt in prompts]
    again = offloaded.ask(prompts[0], max_tokens=40)
    assert offloaded.flush()
    offloaded.trouble(name="disk_well")
    for one, other in zip([*got, again], [*want, want[0]], strict=True):
        same(one, other)
    did = spent(offloaded, before)
    late = 3 if did["blocks_left"] else 4  # what begins off the device does not leave it
    assert did["sequences_offloaded"] == 4 * 39 - late * ahead
    tier = offloaded.pool_stats()["tiers"]["disk"]
    assert tier["dropped"] + tier["errors"] > shed
    settled(offloaded)


def test_no_room_in_the_host(offloaded: Engine) -> None:
    """Nothing is offloaded until there is room."""
    prompt = prompt_of(3000, 10)
    want = clean(offloaded, prompt, 100)
    for seed in (11, 12, 13):
        offloaded.ask(prompt_of(3000, seed), max_tokens=1)
    assert offloaded.forget_device()
    offloaded.trouble(name="hog")
    before, refused = activity(offloaded), offloaded.pool_stats()["refused"]
    same(
        offloaded.ask(prompt, max_tokens=40, salts=["none"]),
        {k: v[:40] for k, v in want.items() if k in ("tokens", "logprobs")},
    )
    assert spent(offloaded, before)["blocks_offloaded"] == 0
    assert offloaded.pool_stats()["refused"] > refused
    midway = {"name": "release"}
    (got,) = offloaded.decode_through(
        prompts=[prompt], after_steps=PREFILL + 9, trouble=midway, max_tokens=100, salt="some"
    )
    same(got, want)
    did = spent(offloaded, before)
    assert did["blocks_offloaded"] > 15
    assert 20 < did["sequences_offloaded"] < 50
    settled(offloaded)


@pytest.mark.parametrize("trouble", ["clear", "drop", "shrink"])
def test_the_pool_lets_go_while_a_sequence_decodes(
    offloaded: Engine, trouble: str, ahead: bool
) -> None:
    """Blocks that a sequence reads are not evicted."""
    prompt = prompt_of(3000, 20)
    salt = trouble
    want = clean(offloaded, prompt, 60)
    before = activity(offloaded)
    (got,) = offloaded.decode_through(
        prompts=[prompt],
        after_steps=PREFILL + 15,
        trouble={"name": trouble},
        max_tokens=60,
        salt=salt,
    )
    same(got, want)
    assert spent(offloaded, before)["sequences_offloaded"] == 59 - ahead
    settled(offloaded)
    same(offloaded.ask_anew(prompt, max_tokens=60, salts=[salt]), want)
    settled(offloaded)


@pytest.mark.parametrize("tokens", [3000, 1500])
def test_digests_damaged_in_memory_are_computed_anew(offloaded: Engine, tokens: int) -> None:
    """For a prefix whose middle stays in the pool, and one that is loaded whole."""
    prompt = prompt_of(tokens, 30 + tokens)
    want = clean(offloaded, prompt, 40)
    offloaded.ask(prompt, max_tokens=1)
    assert offloaded.forget_device()
    offloaded.trouble(name="damage_memory", first=KV_BYTES)
    before = activity(offloaded)
    got = offloaded.ask(prompt, max_tokens=40)
    did = spent(offloaded, before)
    same(got, want)
    blocks = tokens // 128
    assert got["from"]["host"] == blocks * 128
    assert did["digests_mended"] == 3 * blocks
    assert (did["blocks_left"] > 0) == (tokens > 2048)
    settled(offloaded)


def test_blocks_damaged_on_disk_after_they_left(offloaded: Engine, setup: dict[str, Any]) -> None:
    """In their digests, and in their keys. The running sequence reads them in the host; later ones
    detect the damage and compute them."""
    prompt = prompt_of(3000, 40)
    want = clean(offloaded, prompt, 40)
    (got,) = offloaded.decode_through(
        prompts=[prompt], after_steps=PREFILL + 15, trouble={"name": "disk_well"}, max_tokens=40
    )
    same(got, want)
    for part in (KV_BYTES, 0):
        push_out_of_host(offloaded, 40 + part, prompts=6)
        corrupt = offloaded.pool_stats()["tiers"]["disk"]["corrupt"]
        damage(Path(setup["pool"]["disk_path"]), part)
        again = offloaded.ask(prompt, max_tokens=40)
        same(again, want)
        assert again["from"]["disk"] == 0
        assert offloaded.pool_stats()["tiers"]["disk"]["corrupt"] > corrupt
        settled(offloaded)


def damage(folder: Path, first: int) -> None:
    """Flips a bit of every block on disk, at its byte ``first``."""
    for row in stored_blocks(folder):
        with (folder / row.slab).open("r+b") as slab:
            slab.seek(row.offset + first)
            byte = slab.read(1)[0]
            slab.seek(row.offset + first)
            slab.write(bytes([byte ^ 4]))


def test_aborted_while_its_blocks_come_from_disk(offloaded: Engine) -> None:
    prompt = prompt_of(3000, 50)
    want = clean(offloaded, prompt, 20)
    offloaded.ask(prompt, max_tokens=1)
    for steps in (1, 3, 9):
        push_out_of_host(offloaded, 50 + steps, prompts=6)
        offloaded.trouble(name="disk_slow", seconds=0.05)
        assert offloaded.abort_midway(prompt=prompt, after_steps=steps, max_tokens=50) == 0
        offloaded.trouble(name="disk_well")
        settled(offloaded)
        assert offloaded.forget_device()
    same(offloaded.ask(prompt, max_tokens=20), want)
    settled(offloaded)


def test_a_prefix_that_arrives_and_whose_load_fails(
    offloaded: Engine, setup: dict[str, Any]
) -> None:
    """Its middle would have stayed in the pool; it is computed."""
    prompt = prompt_of(3000, 60)
    want = clean(offloaded, prompt, 20)
    offloaded.ask(prompt, max_tokens=1)
    assert offloaded.forget_device()
    flag = Path(setup["env"]["KVRECALL_TEST_FAIL"])
    flag.touch()
    got = offloaded.ask(prompt, max_tokens=20)
    flag.unlink()
    same(got, want)
    assert got["from"]["computed"] == 3000
    settled(offloaded)


KILLED = prompt_of(3000, 70)


@pytest.fixture(scope="module")
def restarted(
    start: Callable[..., Engine], setup: dict[str, Any], offloaded: Engine
) -> tuple[Engine, dict[str, Any]]:
    """An engine on the folder of one that was killed while decoding, and the answer expected of the
    latter."""
    want = clean(offloaded, KILLED, 60)
    with pytest.raises(EngineFailed, match="died"):
        offloaded.decode_through(
            prompts=[KILLED], after_steps=PREFILL + 30, trouble={"name": "die"}, max_tokens=60
        )
    offloaded.process.join()
    pool = {**setup["pool"], "audit": "off"}  # its first hit is to be recalled
    return start(**{**setup, "pool": pool}), want


def test_killed_while_it_decodes(restarted: tuple[Engine, dict[str, Any]]) -> None:
    engine, want = restarted
    before = activity(engine)
    got = engine.ask(KILLED, max_tokens=60)
    same(got, want)
    assert got["from"]["disk"] >= 20 * 128
    did = spent(engine, before)
    assert did["blocks_left"] > 10
    assert did["sequences_offloaded"] == 59
    settled(engine)


def test_the_arena_cannot_be_reached(
    restarted: tuple[Engine, dict[str, Any]], setup: dict[str, Any], ahead: bool
) -> None:
    """When blocks arrive and when they depart: recomputed, as after a preemption before that step.
    Afterwards sequences stay on the device."""
    steps = PREFILL + 1 + 2 * ahead  # they depart a step later, and one's result is dropped
    engine, want = restarted
    assert engine.forget_device()
    prompt = prompt_of(3000, 80)
    ask = {"prompts": [prompt], "after_steps": steps, "max_tokens": 40}
    preempted = engine.preempt_midway(**ask, salt="clean")
    flag = Path(setup["env"]["KVRECALL_TEST_FAIL"] + ".offload")
    flag.touch()
    before = activity(engine)
    (got,) = engine.generate(prompts=[prompt], max_tokens=40, ignore_eos=True)
    arriving = engine.ask(KILLED, max_tokens=60)
    flag.unlink()
    assert [got["tokens"]] == preempted
    assert engine.metrics()["kvrecall_sequences_lost_total"] == 1
    same(arriving, want)
    assert spent(engine, before)["sequences_offloaded"] == 0
    assert "stay on the device" in engine.log.read_text()
    settled(engine)
