"""Bodies and headers that clients may send to our own routes: anything."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.requests import Request
from support.hostile import bounded, fuzz, hostile, outcome

from kvrecall.engines.base import GenerateRequest
from kvrecall.server.forms.base import Body, parsed
from kvrecall.server.forms.generate import PromptBody, TgiBody
from kvrecall.server.guard import _authority, _is_json, _is_local, _password, _Values
from kvrecall.server.replies import ReplyError, json_object

TGI = {
    "inputs": "a", "stream": False, "hint": {"returns": True, "in_s": 5},
    "parameters": {"best_of": 2, "do_sample": True, "stop": ["x"], "temperature": 0.5, "seed": 1},
}  # fmt: skip
PROMPT = {"prompt": "a", "max_tokens": 5, "n": 2, "best_of": 3, "stop": ["a", "b"], "top_p": 0.5}
FORMS: dict[type[Body], dict[str, Any]] = {TgiBody: TGI, PromptBody: PROMPT}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


def body_of(content: bytes) -> dict[str, Any]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    return asyncio.run(json_object(Request({"type": "http", "headers": []}, receive)))


@pytest.mark.parametrize("form", FORMS)
@fuzz(150)
@given(data=st.data())
def test_a_request_is_one_or_422(form: type[Body], data: st.DataObject) -> None:
    content = data.draw(hostile(json.dumps(FORMS[form]).encode()))
    raw = outcome(body_of, content, ReplyError)
    if isinstance(raw, dict):
        name = data.draw(st.sampled_from([*FORMS[form], "parameters", "hint", "x"]))
        raw = {**raw, name: data.draw(VALUES)}
        raw = outcome(
            lambda _: parsed(form, raw).to_request(False), content, ReplyError, ValueError
        )
    if isinstance(raw, ReplyError):
        assert raw.status_code == 422
        json.dumps(raw.body(), ensure_ascii=False).encode()
    else:
        assert isinstance(raw, GenerateRequest)


def marks_of(value: Any) -> int:
    """Brackets that open, and commas, of a value's JSON."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(0, len(value) - 1) + sum(map(marks_of, inner))


@fuzz()
@given(VALUES, st.lists(st.integers(1, 30), max_size=9), st.booleans())
@example({'a\\"': ['[,{"\\', "]"]}, [1, 2], True)
def test_values_are_counted_however_a_body_is_cut(
    value: Any, cuts: list[int], ascii_only: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "replace")
    counted, at = _Values(), 0
    for size in (*cuts, len(text)):
        counted.add(text[at : at + size])
        at += size
    assert counted._opened + counted._commas == marks_of(value)


@fuzz(200)
@given(hostile(b'{"a": [1, "b\\"", {}]}'), st.integers(0, 50))
def test_counting_takes_any_bytes(content: bytes, cut: int) -> None:
    counted = _Values()

    def count(data: bytes) -> None:
        counted.add(data[:cut])
        counted.add(data[cut:])
        counted.check(data)

    outcome(count, content, ReplyError)


@fuzz(200)
@given(hostile(b"http://a:1", b"application/json; charset=utf-8", b"dXNlcjprZXk="))
def test_headers_may_say_anything(given_header: bytes) -> None:
    text = given_header.decode("latin-1")
    with bounded(len(text)):
        assert isinstance(_password(text), bytes)
        assert _authority(text) == _authority(text).lower()
        assert _is_json(text) in (True, False)
        assert not _is_local({"client": (text, 1)}, Headers({"forwarded": "for=1"}))
