"""What ``make models`` judges by: the bytes a hit needs, and what is wrong with a row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_commands import lab

from kvrecall_lab.bench.misses import differing
from kvrecall_lab.engines.engine import Answer, Question
from kvrecall_lab.engines.kv import joined
from kvrecall_lab.shapes.cases import cases_of
from kvrecall_lab.shapes.ranks import Saved, unequal
from kvrecall_lab.shapes.row import difference, is_rounded, needed_bytes
from kvrecall_lab.shapes.shapes import SHAPES


def group(kind: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "block_size": 32, "layers": [10, 20], "window": 0, "chunk": 0, **more}


@pytest.mark.parametrize(
    ("of", "loads", "blocks"),
    [
        (group("FullAttentionSpec"), [(0, 640)], 20),
        (group("FullAttentionSpec"), [(64, 640)], 18),
        (group("SlidingWindowSpec", window=256), [(0, 640)], 8),  # tokens 385 to 639
        (group("SlidingWindowSpec", window=258), [(0, 640)], 9),  # tokens 383 to 639
        (group("SlidingWindowSpec", window=256), [(576, 640)], 2),
        (group("SlidingWindowSpec", window=256), [(0, 64), (0, 96)], 5),
        (group("ChunkedLocalAttentionSpec", chunk=256), [(0, 608)], 3),
        (group("ChunkedLocalAttentionSpec", chunk=256), [(0, 512)], 0),
        (group("MambaSpec"), [(0, 640)], 1),
        (group("MambaSpec"), [(320, 640), (0, 32)], 2),
    ],
)
def test_each_kind_of_group_needs_what_later_tokens_attend_to(
    of: dict[str, Any], loads: list[tuple[int, int]], blocks: int
) -> None:
    assert needed_bytes([of], loads) == blocks * 30


def test_the_first_difference_is_named() -> None:
    def answer(tokens: tuple[int, ...], *scores: float) -> Answer:
        return Answer("on", tokens, "length", {}, (), (), 0.0, scores)

    right = answer((1, 2, 3), -0.1, -0.2, -0.3)
    assert difference([right, right], [right, right]) == ""
    assert difference([answer((1, 2, 4), -0.1, -0.2, -0.3)], [right]) == "on from token 2 on"
    assert is_rounded([answer((1, 2, 3), -0.1, -0.2, -0.30001)], [right])
    assert not is_rounded([answer((1, 2, 3), -0.1, -0.2, -0.31)], [right])
    assert not is_rounded([answer((1, 2, 4), -0.1, -0.2, -0.3)], [right])
    assert difference([answer((1, 2, 3), -0.1, -0.2000001, -0.3)], [right]) == "on from token 1 on"
    assert difference([answer((1, 2), -0.1, -0.2)], [right]) == "on: 2 tokens, not 3"


def test_kv_of_other_ranks_is_compared_head_for_head() -> None:
    kv = {"layer.0": {32: ["k", "v"], 64: ["m", "n"]}, "layer.1": {64: ["o", "p"]}}
    ranks = [
        {name: {end: [heads[rank]] for end, heads in blocks.items()} for name, blocks in kv.items()}
        for rank in (0, 1)
    ]
    written = Saved(Question("on", (1,), 1), kv)
    assert joined(ranks) == kv
    assert unequal(written, joined(ranks), 64) == ""
    swapped = joined(ranks[::-1])
    assert unequal(written, swapped, 64) == "on: KV of layer.0 before token 32 is not the writer's"
    assert unequal(written, {**kv, "layer.1": swapped["layer.1"]}, 63) == "on: no KV of layer.1"
    assert unequal(written, {"layer.0": kv["layer.0"]}, 64) == "on: other layers"


def test_prompts_end_on_a_boundary_and_beside_it_and_fit() -> None:
    larger = (replace(shape, boundary=288) for shape in SHAPES if shape.boundary > 32)
    for shape in (*SHAPES, *larger):
        cases = {case.name: case for case in cases_of(shape, "disk")}
        on, off = (len(question.prompt) for question in cases["hit"].asked)
        assert on % shape.boundary == 0
        assert off % shape.boundary
        (tail,) = cases["chunked"].asked
        (base,) = cases["chunked"].saved
        assert len(tail.prompt) - len(base.prompt) > 2 * shape.chunk
        longest = max(len(q.prompt) + q.max_tokens for case in cases.values() for q in case.asked)
        assert longest <= 1280


@pytest.mark.parametrize(("has_amx", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_the_processor_is_asked(
    has_amx: bool, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For latent attention's dtype, and whether engines of two dtypes differ in the kernel."""
    for name in ("_is_amx_tile_supported", "_init_amx"):
        monkeypatch.setattr(torch.cpu, name, lambda: has_amx)
    (latent,) = (shape for shape in SHAPES if shape.name == "deepseek")
    model = latent.write(tmp_path)
    assert latent.arguments(model, tmp_path)["dtype"] == dtype
    assert json.loads((model / "config.json").read_text())["torch_dtype"] == dtype
    assert ("kernel" in differing("dtype")) is has_amx
    assert "kernel" not in differing("weights") + differing("settings")


@pytest.mark.engine
@pytest.mark.longest
def test_the_command_ends_with_its_rows() -> None:
    done = lab("shapes", "--model", "gpt-oss", "--tier", "disk")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["ok"]
    assert {row["case"] for row in line["rows"]} == {"hit", "chunked", "samples", "preempted"}
    assert all(row["bytes_moved"] == row["bytes_needed"] > 0 for row in line["rows"])
