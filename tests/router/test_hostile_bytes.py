"""What clients and instances may send to the router: anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import bounded, fuzz, hostile, outcome

from kvrecall.errors import ConfigError
from kvrecall.router import bodies
from kvrecall.router.addresses import address
from kvrecall.router.bodies import Body, fields_of, value_of
from kvrecall.router.fleet import Address, Instance
from kvrecall.router.prefixes import Prompt, prompt_of, question_of
from kvrecall.router.upstream import (
    _END,
    InstanceFailedError,
    InstanceReply,
    Upstream,
    _all_events,
    _error_of,
)
from kvrecall.server.replies import ReplyError

CHAT = [{"role": "user", "content": [{"type": "text", "text": "line " * 99}]}]
BODIES = [
    json.dumps(one).encode()
    for one in (
        {"model": "m", "prompt": "text " * 99, "cache_salt": "a", "stream": True},
        {"model": "m", "prompt": list(range(300)), "max_tokens": 5, "tools": [{"a": {}}]},
        {"model": "m", "prompt": [[1, 2, 3]], "truncate_prompt_tokens": None},
        {"messages": CHAT, "chat_template_kwargs": {"x": [1.5, None]}},
    )
]


def of_a_client(content: bytes) -> Prompt | None:
    body = Body.read(content)
    prompt = prompt_of(body)
    question = prompt and question_of(body)
    assert question is None or fields_of(question)
    for name in ("model", "stream", "max_tokens"):
        body.get(name)
    assert body.encoded() == content
    return prompt


@fuzz()
@given(hostile(*BODIES))
def test_a_client_s_body_is_read_or_refused(content: bytes) -> None:
    read = outcome(of_a_client, content, ReplyError)
    if isinstance(read, ReplyError):
        assert read.status_code == 400
    elif read is not None:
        assert read.ids is None
        assert read.given is None or len(read.given) == read.tokens
        assert 256 * len(read.prefixes) <= read.most_tokens <= len(content)


def test_a_body_of_many_fields_is_not_kept() -> None:
    """It took 13 bytes of memory for each of its own until an instance had answered."""
    content = b"{" + b",".join(b'"%x":0' % number for number in range(5000)) + b"}"
    with pytest.raises(ReplyError, match="more than 1024 fields"):
        Body.read(content)


def fields(content: bytes) -> dict[str, bytes] | None:
    try:
        return {name: bytes(raw) for name, raw in Body.read(content).fields.items()}
    except ReplyError:
        return None


PARTS = ["many words ", '"', "\\", "\n", "é", '": {', "}, [", "]"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)
VALUES = TEXTS | st.lists(TEXTS, max_size=3) | st.dictionaries(TEXTS, TEXTS, max_size=2)


@pytest.mark.parametrize("texts", ["any", "whole"])
@fuzz()
@given(st.data())
def test_fields_are_the_same_whether_long_texts_are_parsed(texts: str, data: st.DataObject) -> None:
    """``whole``: a damage that no text hides is seen either way, and a name that comes twice."""
    drawn = data.draw(st.lists(st.tuples(TEXTS, VALUES), max_size=4))
    pairs = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in drawn]
    content = ("{" + ", ".join(pairs) + "}").encode()
    if texts == "whole":
        content = content.replace(b"\\", b"")
        at = data.draw(st.integers(0, len(content)))
        put = data.draw(st.sampled_from([b"", b'"', b"{", b"]", b":", b",", b'"a"']))
        content = content[:at] + put + content[at + data.draw(st.integers(0, 2)) :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_LONG", len(content) + 1)
        parsed = fields(content)
        patch.setattr(bodies, "_LONG", data.draw(st.sampled_from([1, 3])))
        assert fields(content) == parsed


REPLIES = [
    b'{"data": [{"id": "a", "parent": null}, {"id": "b", "parent": "a"}], "object": "list"}',
    b'{"tokens": [1, 2, 3], "count": 3}',
]
PROMPT = Prompt(1, ())


class Told(Upstream):
    """Answers of an instance, without it."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def get(self, *_: Any) -> InstanceReply:
        return InstanceReply(200, self._content, [])

    ask = get


@fuzz()
@given(hostile(*REPLIES))
def test_an_instance_s_answers_are_read_or_nothing(content: bytes) -> None:
    told, instance = Told(content), Instance(Address("http://a:1"), "engine", 1)  # type: ignore[arg-type]

    async def read() -> tuple[Any, Any]:
        models = await told.models(instance, None)
        return models, await told.tokens(instance, Body.read(BODIES[0]), PROMPT, {})

    with bounded(len(content)):
        (every, own), ids = asyncio.run(read())
    assert own <= every
    assert ids is None or all(type(one) is int for one in ids)
    assert value_of(fields_of(content).get("object"), str) in (None, "list") or b"object" in content


EVENTS = [
    b'event: a\r\ndata: {"usage": {}}\r\n\r\ndata: 1\n\r\n',
    b'data: {"error": {"code": 400, "message": "no"}}\n\n',
    b'data: {"choices": []}\n\ndata: [DONE]\n\n',
]


@fuzz()
@given(st.lists(hostile(*EVENTS), max_size=4))
def test_a_stream_is_cut_into_events_that_are_it(chunks: list[bytes]) -> None:
    async def raw() -> AsyncIterator[bytes]:
        for chunk in filter(None, chunks):
            yield chunk

    async def read() -> list[bytes]:
        response = SimpleNamespace(chunks=raw, headers=[])
        try:
            return [one async for one in _all_events(None, response, 9.0)]  # type: ignore[arg-type]
        except InstanceFailedError:
            return []

    with bounded(sum(map(len, chunks))):
        events = asyncio.run(read())
        for event in events:
            _error_of(event)
    assert b"".join(events) == b"".join(chunks)
    ends = [[found.end() for found in _END.finditer(one)] for one in events]
    assert all(found == [len(one)] for found, one in zip(ends[:-1], events[:-1], strict=True))


@fuzz()
@given(hostile(b"http://10.0.0.5:8000?events=5557&pool=5559", b"[::1]:8000?events=1:2,host:3"))
def test_an_address_is_one_or_refused_in_a_line(text: bytes) -> None:
    read = outcome(lambda data: address(data.decode("latin-1"), "--engine"), text, ConfigError)
    assert isinstance(read, Address) or "\n" not in str(read)
