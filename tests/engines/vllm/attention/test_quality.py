"""A model that recalls: with retrieval in every layer it still answers from a text's middle."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import ran
from tokenizers import Tokenizer

from engines.vllm.attention.test_engine import EXTENSION, activity, retrieval
from engines.vllm.engine import Engine

ROOT = Path(__file__).parents[4]
MODEL = ROOT / "models" / "recall-tiny"
TOKENS = 8192

QUESTIONS = """
import json, random
from kvrecall_lab.bench.needle import tasks
plan = tasks.Plan(singles=16, multikeys=16, groups=6, chains=8, several=8)
document = tasks.make_document(random.Random("777/{tokens}"), plan, {tokens})
print(json.dumps([
    [tasks.raw_prompt(document.text, question.text), question.expected]
    for question in document.questions if question.task in ("single", "multikey")
]))
"""

pytestmark = [
    pytest.mark.engine,
    pytest.mark.long,
    pytest.mark.skipif(not (MODEL / "model.safetensors").exists(), reason="no recall-tiny here"),
]


@pytest.fixture(scope="module")
def questions() -> list[tuple[str, list[str]]]:
    """Prompts, and the strings that a right reply contains."""
    program = QUESTIONS.format(tokens=TOKENS)
    done = ran(sys.executable, "-c", program, cwd=ROOT, check=True)
    return [tuple(item) for item in json.loads(done.stdout)]


def right(engine: Engine, questions: list[tuple[str, list[str]]]) -> int:
    """How many questions are answered rightly."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt, _ in questions]
    replies = engine.generate(prompts=prompts, max_tokens=14)
    texts = [tokenizer.decode(reply["tokens"]).split("\n")[0] for reply in replies]
    pairs = zip(texts, questions, strict=True)
    return sum(all(word in text for word in expected) for text, (_, expected) in pairs)


@pytest.mark.parametrize(
    ("share", "digest", "tokens", "least", "most"),
    [(0.2, "bounds", 16, 0.9, 1.0), (0.001, "mean", 128, 0.0, 0.5)],
    ids=["a fifth of the blocks", "hardly any, so that retrieval is seen to matter"],
)
def test_answers_from_chosen_blocks(
    start: Callable[..., Engine],
    questions: list[tuple[str, list[str]]],
    share: float,
    digest: str,
    tokens: int,
    least: float,
    most: float,
) -> None:
    env: dict[str, Any] = {
        **retrieval(share),
        "VLLM_RETRIEVAL_DENSE_LAYERS": "0",
        "VLLM_RETRIEVAL_DIGEST": digest,
        "VLLM_RETRIEVAL_DIGEST_TOKENS": str(tokens),
        "VLLM_RETRIEVAL_LEAST_BLOCKS": "1",
    }
    engine = start(
        model=str(MODEL),
        max_model_len=TOKENS + 1024,
        max_num_batched_tokens=2048,
        worker_extension_cls=EXTENSION,
        env=env,
    )
    share_right = right(engine, questions) / len(questions)
    assert activity(engine)["blocks_selected"] > 0
    engine.close()
    assert least <= share_right <= most
