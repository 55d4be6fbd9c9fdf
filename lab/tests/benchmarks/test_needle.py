"""The needle bench without an engine: its texts, its questions, its counting."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.errors import KvrecallError
from kvrecall_lab.bench import cli
from kvrecall_lab.bench.needle.dataset import (
    Dataset,
    PromptStyle,
    Sample,
    is_answered,
)
from kvrecall_lab.bench.needle.score import (
    DENSE,
    Pairs,
    Record,
    Results,
    Score,
    Variant,
    report_of,
)
from kvrecall_lab.bench.needle.tasks import TASKS, approximate_tokens

DATASET = Dataset((2048,), samples=12, seed=5)
RETRIEVAL = Variant("retrieval", RetrievalSettings())


def made(dataset: Dataset = DATASET, length: int = 2048) -> list[Sample]:
    return list(dataset.at(length, 136, approximate_tokens))


def test_a_seed_gives_the_same_texts_on_every_machine() -> None:
    text = "".join(sample.document.text for sample in made())
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "7fa36cbbcf555b5c"
    assert text != "".join(p.document.text for p in made(replace(DATASET, seed=6)))


def test_every_task_is_asked_so_often_and_texts_have_their_length() -> None:
    found = made()
    tasks = [question.task for sample in found for question in sample.questions]
    assert {task: tasks.count(task) for task in TASKS} == dict.fromkeys(TASKS, 12)
    assert len(found) == DATASET.document_count(2048) == 2
    for sample in found:
        assert 1800 < approximate_tokens(sample.document.text) < 1960


def test_answers_can_be_verified_in_the_text() -> None:
    """Parsed independently of the generator: every sentence that states a fact, by its form."""
    for sample in made():
        stated: dict[str, list[str]] = {}
        for relation, subject, value in re.findall(
            r"The (code|owner) of ([a-z]+ [a-z]+) is ([a-z]+ [a-z]+|\d{3})\.", sample.document.text
        ):
            stated.setdefault(f"{relation} {subject}", []).append(value)
        for question in sample.questions:
            keys = re.findall(
                r"(?:of|has|and|,) ((?!the )[a-z]+ [a-z]+)(?=[,?]| and)", question.text
            )
            if question.task == "chain":
                keys = [stated[f"owner {keys[-1]}"][0]]
            values = [value for key in keys for value in stated[f"code {key}"]]
            if question.task == "count":
                assert question.expected == (f"makes {len(values)}.",)
            elif question.task == "values":
                assert sorted(question.expected) == sorted(values)
            else:
                assert list(question.expected) == values


@pytest.mark.parametrize("style", PromptStyle)
def test_the_right_reply_is_right_and_another_is_not(style: PromptStyle) -> None:
    for sample in made():
        for question in sample.questions:
            assert is_answered(style, question, f" {question.reply}")
            assert not is_answered(style, question, " The code of nobody is 42.")
            assert not is_answered(style, question, "")
            if question.task in ("values", "several"):
                short = question.reply.replace(question.expected[0], "something")
                assert not is_answered(style, question, short)


@pytest.mark.parametrize(
    ("task", "reply", "right"),
    [
        ("count", "It has three codes: 111, 222 and 333.", True),
        ("count", "111, 222, 333. That makes 3.", True),
        ("count", "111, 222. That makes 2.", False),
        ("values", "333, 111 and 222", True),
        ("values", "111 and 222", False),
        ("values", "111, 222, 333 and 444", False),
        ("values", "<think>perhaps 444?</think>111, 222, 333", True),
    ],
)
def test_plain_replies_are_understood(task: str, reply: str, right: bool) -> None:
    question = next(q for sample in made() for q in sample.questions if q.task == task)
    expected = ("makes 3.",) if task == "count" else ("111", "222", "333")
    assert is_answered(PromptStyle.INSTRUCT, replace(question, expected=expected), reply) is right


def test_wilson_interval_and_sign_test() -> None:
    assert Score(10, 10).interval == (72.2, 100.0)
    assert Score(5, 10).interval == (23.7, 76.3)
    assert Score(0, 0).interval == (0.0, 100.0)
    assert Pairs(0, 0).chance == 1.0
    assert Pairs(6, 0).chance == pytest.approx(2 / 64)
    assert Pairs(3, 3).chance == 1.0


def record(right: tuple[bool, ...], depth: float = 0.5, task: str = "single") -> Record:
    return Record(2048, task, depth, "?", ("1",), right, ("",) * len(right))


def test_a_report_compares_and_says_whether_retrieval_acted() -> None:
    found = Results((DENSE, RETRIEVAL), [record((True, False))] * 3, Counter(retrieval=7))
    figures: Any = report_of(found, "m", ["single"], {}).figures
    assert figures["active"] is True
    assert figures["dense"]["2048"]["single"]["percent"] == 100.0
    assert figures["retrieval"]["2048"]["single"]["percent"] == 0.0
    assert figures["arms"][0]["against_dense"]["2048"]["single"]["lost"] == 3
    assert figures["retrieval"]["2048"]["by_depth"] == [*[None] * 5, 0.0, *[None] * 4]


def test_retrieval_that_did_not_act_is_an_error() -> None:
    found = Results((DENSE, RETRIEVAL), [record((True, True))])
    assert not found.active
    with pytest.raises(KvrecallError, match="did not act"):
        found.require_active()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "single,poems"], "poems"),
        (["--lengths", "many"], "not a number of tokens"),
        (["--lengths", "100"], "at least 512"),
        (["--share", "20"], "not in (0, 1]"),
        (["--share", "x"], "not a number"),
        (["--digest-tokens", "24"], "does not divide"),
        (["--digest", "hash"], "one of mean, bounds"),
        (["--lengths", "1M"], "1M"),
        (["--lengths", "256K"], "max_position_embeddings 131072"),
        (["--dense-boundary", "100000"], "leaves all lengths dense"),
        (["--local", "9000", "--lengths", "8K"], "no blocks to select from"),
    ],
)
def test_bad_options_are_named_before_anything_starts(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(cli.app, ["needle", *arguments])
    assert done.exit_code == 2
    assert words in done.output
