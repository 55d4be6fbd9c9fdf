"""What vLLM's own routes are sent, where kvrecall reads it before or beside vLLM: anything."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from support.hostile import fuzz, hostile, outcome

pytest.importorskip("vllm")

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from kvrecall.engines.vllm.serving.openai_handlers import _no_text, hint_of_messages
from kvrecall.engines.vllm.serving.sampling import _check_items, _counts
from kvrecall.pool.hints import MAX_SECONDS, Hint

MARK = {"type": "ephemeral", "ttl": "1h"}
CHATS = [
    {"messages": [{"role": "user", "content": "a", "cache_control": MARK}], "hint": {"in_s": 5}},
    {"messages": [{"content": [{"text": "a", "cache_control": {"type": "ephemeral"}}, 5]}]},
    {"messages": [{"content": "\ud800", "cache_control": None}]},
]
SCHEMA = {"type": "array", "maxItems": 5, "items": {"minItems": 3, "anyOf": [{"maxItems": 1e9}]}}


def hint(body: bytes) -> Any:
    return hint_of_messages(json.loads(body))


@fuzz()
@given(hostile(*(json.dumps(one).encode() for one in CHATS)))
@example(b'{"\\ud800": ' + b"[" * 900 + b"]" * 900 + b"}")
def test_a_body_is_no_text_or_has_a_hint_or_is_vllm_s_to_refuse(body: bytes) -> None:
    read = outcome(hint, body, ValueError, RecursionError)
    if isinstance(read, Hint):
        assert read.pin_s is not None
        assert 0 < read.pin_s <= MAX_SECONDS
    why = outcome(_no_text, body)
    assert why is None or why.isprintable()
    if why is None and b"\\ud" in body.lower() and not isinstance(read, Exception):
        json.dumps(json.loads(body), ensure_ascii=False).encode()


@fuzz()
@given(hostile(json.dumps(SCHEMA).encode(), b'root ::= "a"{3,99} b{1}'))
def test_bounds_in_schemas_are_numbers(text: bytes) -> None:
    given_text = text.decode("latin-1")
    for name in ("json", "grammar", "structural_tag"):
        wanted = StructuredOutputsParams(**{name: given_text or "x"})
        found = outcome(lambda _, wanted=wanted: list(_counts(wanted)), text)
        assert all(type(one) is float for one in found)


def test_a_count_that_is_no_number_hides_no_other() -> None:
    """A sum with it was no number either, and so not above the limit."""
    with pytest.raises(VLLMValidationError, match="items together"):
        _check_items(StructuredOutputsParams(json='{"maxItems": NaN, "minItems": 1e9}'))
