"""The example models: complete, loadable, reproducible, and sensitive to every token of a
prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrecall_lab.models import FAMILIES, write_model

ARCHITECTURES = list(FAMILIES)
TEXT = "The principal wants to quickly resolve this, instructing recess aides to be vigilant. " * 4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), request.param, dtype="float32")


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


def greedy(model: Any, tokens: list[int], count: int = 16) -> list[int]:
    prompt = torch.tensor([tokens])
    with torch.no_grad():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False
        )
    return out[0, len(tokens) :].tolist()


def test_transformers_finds_every_tensor_and_no_other(folder: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert (
        type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    )


def test_output_depends_on_early_middle_and_late_tokens(folder: Path) -> None:
    model = load(folder)
    tokens = AutoTokenizer.from_pretrained(folder).encode(TEXT)
    plain = logits(model, tokens)
    for place in (3, len(tokens) // 2, len(tokens) - 1):
        changed = list(tokens)
        changed[place] = tokens[place] ^ 1
        assert (logits(model, changed) - plain).abs().max() > 0.05


def test_greedy_output_varies_and_never_stops_early(folder: Path) -> None:
    model = load(folder)
    tokens = AutoTokenizer.from_pretrained(folder).encode(TEXT)
    answers = [greedy(model, tokens[:n]) for n in (50, 120, 200)]
    assert all(len(answer) == 16 for answer in answers)
    assert all(max(answer) < 256 for answer in answers)
    assert all(len(set(answer)) > 4 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == len(answers)
