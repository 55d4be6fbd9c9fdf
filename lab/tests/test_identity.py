"""The parts of the identity run: it detects every fault whose absence it reports."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from lab_commands import lab

from kvrecall.bench.model import WEIGHTS
from kvrecall_lab.engines.engine import Answer
from kvrecall_lab.identity.engines import Life, Reply
from kvrecall_lab.identity.pairs import EQUAL, OTHER, PAIRS, Kv
from kvrecall_lab.identity.setups import BLOCK, KNOWN, Prompts
from kvrecall_lab.identity.trial import Reference, Verdict, _judge, _unfairness
from kvrecall_lab.models import write_model
from kvrecall_lab.models.variants import write_changed, write_over

TINY = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32}


def answer(
    tokens: tuple[int, ...] = (1, 2, 3),
    scores: tuple[float, ...] = (-0.1, -0.2, -0.3),
    gaps: tuple[float, ...] = (1.0, 1.0, 1.0),
    **sources: int,
) -> Answer:
    return Answer("a", tokens, "length", sources, (), gaps, 0.0, scores)


def reference(truth: Answer | None = None, noise: float = 0.0) -> Reference:
    return Reference({"known-1": truth or answer()}, noise)


def reply(answer: Answer, own: int = 0) -> Reply:
    return Reply("known-1", answer, own)


def test_a_wrong_token_and_a_wrong_score_are_seen() -> None:
    truth = reference()
    assert truth.fault(reply(answer())) == ""
    assert "[1, 2, 9]" in truth.fault(reply(answer((1, 2, 9))))
    assert truth.fault(reply(answer(scores=(-0.1, -0.2, -0.30001)))) == ""
    assert "off by" in truth.fault(reply(answer(scores=(-0.1, -0.2, -0.301))))


def test_the_contrast_of_two_engines_is_theirs_without_a_pool() -> None:
    moved = reference(answer(scores=(-0.1, -0.25, -0.3)))
    assert reference().contrast(moved)["known-1"] == pytest.approx(0.05)
    assert reference().contrast(reference(answer((9, 2, 3))))["known-1"] == math.inf
    same, apart = {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": math.inf}
    assert _unfairness(EQUAL[0], same, 0.1) == ""
    assert "replies to b are not" in _unfairness(EQUAL[0], apart, 0.1)
    assert "replies to a do not show it" in _unfairness(OTHER[0], apart, 0.1)
    assert _unfairness(replace(OTHER[0], tells=False), same, 0.1) == ""


def test_only_what_another_engine_saved_is_foreign() -> None:
    prompts = Prompts.of(3)
    assert prompts.shared_tokens("known-1", [], BLOCK) == 0
    assert prompts.shared_tokens("known-1", ["known-1"], BLOCK) == 3 * BLOCK
    assert prompts.shared_tokens("branch-1", ["known-2", "known-1"], BLOCK) == 3 * BLOCK
    assert prompts.shared_tokens("branch-2", ["known-2"], BLOCK) == 2 * BLOCK
    assert prompts.shared_tokens("twig-1", KNOWN, BLOCK) == 0
    assert max(len(text) for text in prompts.texts.values()) < 3 * BLOCK + 100
    recalled = answer(device=9, host=2 * BLOCK, disk=BLOCK, computed=5)
    assert reply(recalled).foreign == 3 * BLOCK
    assert reply(recalled, 3 * BLOCK).foreign == 0
    assert reply(recalled, 2 * BLOCK).foreign == BLOCK


def test_a_recall_of_other_kv_is_wrong_even_if_the_reply_is_right() -> None:
    other, equal = (Verdict(next(p for p in PAIRS if p.kv is kv)) for kv in (Kv.OTHER, Kv.EQUAL))
    for verdict in (other, equal):
        _judge("B", Life([reply(answer(disk=BLOCK))]), reference(), verdict)
    assert "128 tokens of the other's KV" in other.wrong[0]
    assert not equal.wrong


def test_a_folder_is_overwritten_without_a_trace_in_size_and_time(tmp_path: Path) -> None:
    first = write_model(tmp_path / "first", **TINY)
    second = write_model(tmp_path / "second", seed=1, **TINY)
    place = write_changed(tmp_path / "place", first)
    before = (place / WEIGHTS).stat()
    write_over(place, second)
    after = (place / WEIGHTS).stat()
    assert (before.st_size, before.st_mtime_ns, before.st_ino) == (
        after.st_size,
        after.st_mtime_ns,
        after.st_ino,
    )
    assert (place / WEIGHTS).read_bytes() == (second / WEIGHTS).read_bytes()


@pytest.mark.engine
@pytest.mark.longest
def test_one_pair_of_each_kind() -> None:
    """The same engine twice shares blocks; without identity, the audit detects another matrix."""
    done = lab("identity", "--only", "restart", "--only", "audit-matrix")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert list(line)[:3] == ["pairs", "wrong", "shared_where_equal"]
    assert (line["pairs"], line["wrong"], line["shared_where_equal"]) == (2, 0, 1)
    assert (line["audited"], line["caught_by_audit"]) == (1, 1)
