"""What a rank says of the weights that it has now, and what ranks that disagree have together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvrecall.engines.fingerprint import Memory
from kvrecall.engines.vllm.identity.changes import (
    Look,
    RankWeights,
    adapters_of,
    digest_of,
    together,
)


def written(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    return folder


@pytest.fixture
def rank() -> RankWeights:
    return RankWeights(Memory(None))


def loaded(
    rank: RankWeights,
    folder: Path,
    number: int = 1,
    name: str = "style",
    load: Callable[[], None] = lambda: None,
) -> Look:
    request = SimpleNamespace(lora_int_id=number, lora_name=name)
    rank.load_adapter(request, str(folder), load)
    return rank.news()


def test_an_adapter_whose_files_change_while_it_is_loaded_is_unknown(
    rank: RankWeights, tmp_path: Path
) -> None:
    folder = written(tmp_path / "a", b"one")
    told = loaded(rank, folder, load=lambda: written(folder, b"other") and None)
    assert told.adapters == {1: (1, "")}
    assert loaded(rank, folder).swapped == {1}, "what it had is not known, so it may be another"


def test_an_adapter_of_another_content_is_told(rank: RankWeights, tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", b"one"), written(tmp_path / "b", b"other")
    first = loaded(rank, one)
    assert (first.swapped, loaded(rank, one).swapped) == (frozenset(), frozenset())
    told = loaded(rank, other)
    assert told.swapped == {1}
    assert told.adapters[1] == (3, told.adapters[1][1])
    assert told.adapters[1][1] not in ("", first.adapters[1][1])
    assert loaded(rank, one, number=2).swapped == {2}, "vLLM hashes its name"
    assert loaded(rank, one, number=3, name="another").swapped == frozenset()


def test_weights_that_a_deep_sleep_took_are_others_when_it_ends(rank: RankWeights) -> None:
    rank.slept(1)
    rank.woke()
    assert not rank.news().is_reloaded
    rank.slept(2)
    assert not rank.news().is_reloaded, "nothing is there yet"
    rank.woke()
    assert rank.news().is_reloaded
    assert not rank.news().is_reloaded


def test_names_dtypes_and_shapes_count_beside_bytes() -> None:
    def model(name: str, tensor: torch.Tensor) -> nn.Module:
        module = nn.Module()
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        return module

    zeros = torch.zeros(4)
    models = (
        model("a", zeros),
        model("b", zeros),
        model("a", zeros.reshape(2, 2)),
        model("a", zeros.to(torch.int32)),
        model("a", torch.ones(4)),
    )
    assert len({digest_of([one]) for one in models}) == len(models)
    assert digest_of([model("a", torch.zeros(4))]) == digest_of([models[0]])
    assert not digest_of([models[0]])[1]
    assert digest_of([model("a", torch.zeros(0))])[1], "a kernel has its own form of it"
    assert digest_of([model("a", torch.zeros(4, device="meta"))])[0] is None
    one = digest_of([model("a", torch.ones(1))])
    assert digest_of([model("a", torch.tensor(1.0).expand(1))]) == one, "a scale of one"


def test_ranks_that_disagree_know_nothing() -> None:
    assert together([Look("a"), Look("b")]).tensors == "a b"
    assert together([Look("a"), Look()]).tensors is None
    assert adapters_of([{1: (1, "x")}, {1: (1, "x")}]) == {1: (1, "x")}
    assert adapters_of([{1: (1, "x")}, {1: (1, "y")}]) == {1: (1, "")}
    assert adapters_of([{1: (1, "x")}, {1: (2, "y")}, {1: (1, "x")}]) == {1: (2, "y")}
    whole = Look(is_whole=True)
    assert (together([whole, whole]).is_whole, together([whole, Look()]).is_whole) == (True, False)
    assert together([Look(), Look(sleeps=True, is_reloaded=True)]).is_reloaded
