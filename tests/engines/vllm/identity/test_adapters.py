"""An adapter is what was loaded, whatever its files are when a request comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.engine import Engine, prompt_of
from engines.vllm.exactness import BLOCK, hits
from kvrecall_lab.models.variants import write_lora

pytestmark = pytest.mark.engine

WHOLE = (0, 3 * BLOCK, 0)
NONE = (0, 0, 0)


@pytest.fixture(scope="module")
def base(model_folder: Callable[..., Path]) -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine], base: Path) -> Engine:
    return start(
        model=str(base),
        dtype="float32",
        pool={"host_size": "64MiB", "load_or_compute": "load"},
        num_gpu_blocks_override=38,
        enable_lora=True,
        max_lora_rank=8,
    )


def written(path: Path, base: Path, seed: int) -> None:
    """Another adapter in the place of the one that is there."""
    for file in path.iterdir() if path.exists() else ():
        file.unlink()
    write_lora(path, base, rank=8, seed=seed)


def test_files_that_change_after_loading_do_not_count(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    lora: list[Any] = ["style", 1, str(tmp_path / "style")]
    prompt = prompt_of(3 * BLOCK + 5, 1)

    def asked(**expected: tuple[int, int, int]) -> dict[str, Any]:
        reply = engine.ask_anew(prompt, lora=lora)
        assert hits(reply) == expected["hits"]
        return reply

    written(tmp_path / "style", base, 1)
    assert engine.add_lora(lora=lora)
    written(tmp_path / "style", base, 2)
    first = asked(hits=NONE)
    assert asked(hits=WHOLE)["tokens"] == first["tokens"], "of what was loaded, from the start on"
    assert engine.add_lora(lora=lora, load_inplace=True)
    second = asked(hits=NONE)
    assert second["logprobs"] != first["logprobs"]
    assert asked(hits=WHOLE)["tokens"] == second["tokens"]
    written(tmp_path / "style", base, 1)
    assert engine.add_lora(lora=lora, load_inplace=True)
    assert asked(hits=NONE)["tokens"] == first["tokens"], "found again, and compared first"
    assert asked(hits=WHOLE)["tokens"] == first["tokens"]


def test_the_first_request_tells_what_it_had_loaded(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    lora: list[Any] = ["other", 2, str(tmp_path / "other")]
    prompt = prompt_of(3 * BLOCK + 5, 2)
    written(tmp_path / "other", base, 3)
    first = engine.ask(prompt, lora=lora)
    written(tmp_path / "other", base, 4)
    again = engine.ask_anew(prompt, lora=lora)
    assert hits(again) == WHOLE
    assert again["tokens"] == first["tokens"]


def test_a_request_under_an_adapter_that_is_replaced_is_not_saved(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    """Neither under the name of the old one, nor for requests of the new one to build on."""
    lora: list[Any] = ["third", 3, str(tmp_path / "third")]
    prompt = prompt_of(3 * BLOCK + 5, 3)
    written(tmp_path / "third", base, 5)
    assert engine.add_lora(lora=lora)
    written(tmp_path / "third", base, 6)
    plain = engine.ask(prompt)
    (mixed,) = engine.decode_through(
        prompts=[prompt],
        after_steps=3,
        trouble={"name": "load_adapter", "lora": lora},
        max_tokens=2 * BLOCK,
        lora=lora,
    )
    longer = [*prompt, *mixed["tokens"]]
    assert hits(engine.ask(longer, lora=lora)) == NONE
    written(tmp_path / "third", base, 5)
    assert engine.add_lora(lora=lora, load_inplace=True)
    assert sum(hits(engine.ask(prompt, lora=lora))) == 0, "its writer is to be proved again"
    assert hits(engine.ask_anew(longer, lora=lora)) == WHOLE, "what was computed before is right"
    engine.ask(prompt)  # the base model's blocks stay; their writer is proved again
    again = engine.ask_anew(prompt)
    assert hits(again) == WHOLE
    assert again["tokens"] == plain["tokens"]


def test_an_adapter_that_leaves_and_comes_back_as_another_is_seen(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    """By the step that loads it, whose requests have loaded blocks of the old one: they begin
    anew."""
    lora: list[Any] = ["fourth", 4, str(tmp_path / "fourth")]
    prompt = prompt_of(3 * BLOCK + 5, 4)
    written(tmp_path / "fourth", base, 7)
    first = engine.ask(prompt, lora=lora)
    written(tmp_path / "fourth", base, 8)
    engine.rpc(method="remove_lora", lora_id=4)
    second = engine.ask_anew(prompt, lora=lora)
    assert second["from"]["host"] == 0
    engine.ask_anew(prompt, lora=lora)
    again = engine.ask_anew(prompt, lora=lora)
    assert hits(again) == WHOLE
    assert again["tokens"] == second["tokens"] != first["tokens"]


def test_a_request_without_an_adapter_is_the_base_models_beside_others(
    engine: Engine, base: Path, tmp_path: Path
) -> None:
    """vLLM on a CPU would add the adapter in the last place, and its KV be pooled as the base's."""
    lora: list[Any] = ["fifth", 5, str(tmp_path / "fifth")]
    written(tmp_path / "fifth", base, 9)
    assert engine.add_lora(lora=lora)
    alone, beside = prompt_of(3 * BLOCK + 5, 5), prompt_of(3 * BLOCK + 5, 6)
    plain = engine.ask(alone)
    assert engine.forget_all()
    mixed, _ = engine.generate(prompts=[alone, beside], loras=[None, lora])
    assert sum(hits(mixed)) == 0
    assert mixed["tokens"] == plain["tokens"]
