"""The needle bench: its texts, its questions, its counting; and on a real engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.errors import KvrecallError
from kvrecall_lab.bench.needle.evaluate import (
    DENSE,
    Record,
    Results,
    Variant,
    report_of,
    require_active,
)
from kvrecall_lab.bench.needle.tasks import (
    TASKS,
    Dataset,
    Document,
    PromptStyle,
    approximate_tokens,
    is_right,
)

DATASET = Dataset((2048,), samples=12, seed=5)
RETRIEVAL = Variant("retrieval", RetrievalSettings())


def made(dataset: Dataset = DATASET, length: int = 2048) -> list[Document]:
    return list(dataset.at(length, 136, approximate_tokens))


def test_every_task_is_asked_so_often_and_texts_have_their_length() -> None:
    tasks = Counter(question.task for document in made() for question in document.questions)
    assert tasks == dict.fromkeys(TASKS, 12)
    assert [1800 < approximate_tokens(document.text) < 1960 for document in made()] == [True] * 2


def test_answers_can_be_verified_in_the_text() -> None:
    """Parsed independently of the generator: every sentence that states a fact, by its form."""
    for document in made():
        stated: dict[str, list[str]] = {}
        for relation, subject, value in re.findall(
            r"The (code|owner) of ([a-z]+ [a-z]+) is ([a-z]+ [a-z]+|\d{3})\.", document.text
        ):
            stated.setdefault(f"{relation} {subject}", []).append(value)
        for question in document.questions:
            keys = re.findall(
                r"(?:of|has|and|,) ((?!the )[a-z]+ [a-z]+)(?=[,?]| and)", question.text
            )
            if question.task == "chain":
                keys = [stated[f"owner {keys[-1]}"][0]]
            values = [value for key in keys for value in stated[f"code {key}"]]
            if question.task == "values":
                assert sorted(question.expected) == sorted(values)
            else:
                assert list(question.expected) == values


@pytest.mark.parametrize("style", PromptStyle)
def test_the_right_reply_is_right_and_another_is_not(style: PromptStyle) -> None:
    for question in (question for document in made() for question in document.questions):
        assert is_right(style, question, f" {question.reply}")
        assert not is_right(style, question, " The code of nobody is 42.")
        assert not is_right(style, question, "")
        if question.task in ("values", "several"):
            short = question.reply.replace(question.expected[0], "something")
            assert not is_right(style, question, short)


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("333, 111 and 222", True),
        ("111 and 222", False),
        ("111, 222, 333 and 444", False),
        ("<think>perhaps 444?</think>111, 222, 333", True),
    ],
)
def test_plain_replies_are_understood(reply: str, right: bool) -> None:
    question = next(q for document in made() for q in document.questions if q.task == "values")
    asked = replace(question, expected=("111", "222", "333"))
    assert is_right(PromptStyle.INSTRUCT, asked, reply) is right


def test_a_report_compares_and_says_whether_retrieval_acted() -> None:
    records = [Record(2048, "single", "?", ("1",), (True, False), ("", ""))] * 3
    found = Results((DENSE, RETRIEVAL), records, Counter(retrieval=7))
    require_active(found)
    report = report_of(found, "m", replace(DATASET, tasks=("single",)), {})
    figures: Any = report.figures
    assert figures["active"] is True
    assert figures["dense"]["2048"]["single"]["percent"] == 100.0
    assert figures["retrieval"]["2048"]["single"] == {
        "percent": 0.0, "right": 0, "asked": 3, "low": 0.0, "high": 56.2, "lost": 3, "gained": 0
    }  # fmt: skip
    assert report.rows[0][1:] == ("single (3)", "100.0 [44-100]", "0.0 [0-56]", "3, 0")
    found.selected.clear()
    with pytest.raises(KvrecallError, match="did not act"):
        require_active(found)


@pytest.mark.engine
@pytest.mark.long
def test_one_engine_dense_and_by_retrieval(tmp_path: Path) -> None:
    """With all blocks selected the answers are the dense ones; with very few they are not."""
    command = [sys.executable, "-m", "kvrecall_lab.bench", "needle", "--lengths", "1K", "--json"]
    command += "--samples 8 --tasks single,chain --shares 1,0.01 --digest mean".split()
    command += "--digest-tokens 128 --least 1 --reference --records all.jsonl".split()
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert figures["active"] is True
    assert figures["dense"]["1024"]["single"]["right"] >= 7
    whole, few, reference_whole, reference_few = figures["arms"]
    # With these options the default mode is the reference's, so the arms are equal.
    assert reference_few["name"] == "retrievalkv 0.01"
    assert reference_few["blocks_selected"] == few["blocks_selected"]
    assert reference_few["results"] == few["results"]
    assert reference_whole["blocks_selected"] == whole["blocks_selected"]
    assert (figures["share"], whole["share"], few["share"]) == (1.0, 1.0, 0.01)
    assert whole["blocks_selected"] > 2 * few["blocks_selected"] > 0
    records = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(records) == figures["questions"] == 16
    same = [record["replies"][0] == record["replies"][1] for record in records]
    assert sum(same) >= 14, "bfloat16, in batches as requests come: a near tie may fall either way"
    assert few["results"]["1024"]["all"]["lost"] > 0
