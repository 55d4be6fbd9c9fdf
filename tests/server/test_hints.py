"""Hints from strangers to a live server: nonsense is refused with the field's name or ignored, no
hint changes a token, and neither liars nor pins take anything from others."""

from __future__ import annotations

import itertools
import json
import random
import re
import string
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from server.live import LiveServer, until

pytestmark = [pytest.mark.engine, pytest.mark.long]

Json = dict[str, Any]
RNG = random.Random(7)
TEXT = "".join(RNG.choices(string.ascii_letters, k=300))  # tokens are bytes: two blocks, and 44
EPHEMERAL: Json = {"type": "ephemeral"}
NESTED = "[" * 5000 + "]" * 5000
NUMBERS = itertools.count()

OPENAI: dict[str, Json] = {
    "/v1/completions": {"model": "tiny", "prompt": TEXT, "max_tokens": 4, "temperature": 0},
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 4,
        "temperature": 0,
    },
    "/v1/messages": {
        "model": "tiny",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 4,
        "temperature": 0,
    },
}
OWN: dict[str, Json] = {
    "/generate": {"inputs": TEXT, "parameters": {"max_new_tokens": 4}},
    "/generate_stream": {"inputs": TEXT, "parameters": {"max_new_tokens": 4}},
    "/infer": {"inputs": TEXT, "parameters": {"max_new_tokens": 4}},
    "/infer_token": {"input_id": [5, 6, 7] * 100, "parameters": {"max_new_tokens": 4}},
    "/v2/models/tiny/generate": {"text_input": TEXT, "parameters": {"max_new_tokens": 4}},
    "/v2/models/tiny/infer": {
        "inputs": [{"name": "input0", "shape": [1, 300], "datatype": "UINT32", "data": [5] * 300}],
        "outputs": [{"name": "output0"}],
    },
}
ROUTES = OPENAI | OWN

NO_HINTS = [
    *("true", "false", "0", "-1", "1e308", '"x"', '""', "[]", "[1]", "NaN", "-Infinity"),
    *('{"returns":1}', '{"returns":"yes"}', '{"returns":{"a":{"b":[1]}}}', '{"hint":{}}'),
    *('{"in_s":true}', '{"in_s":-1}', '{"in_s":86400.1}', '{"in_s":NaN}', '{"in_s":1e999}'),
    *('{"pin_s":"5m"}', '{"pin_s":[]}', '{"pin_s":{}}', '{"pin_s":-Infinity}'),
    *('{"in_s":1%s}' % ("0" * 400), '{"%s":1}' % ("x" * 5000), '{"漢字\\n":1}', '{"\\ud800":1}'),
    *('{"returns":false,"pin_s":0}', '{"returns":true,"returns":false,"in_s":1}'),
]
"""Values of ``hint``, as they stand in a body."""

EMPTY_HINTS = ["null"]
HINTS = ["{}", '{"returns":null}', '{"in_s":0}', '{"pin_s":-0.0}', '{"in_s":86400,"pin_s":1e-9}']
NO_TTL = {**EPHEMERAL, "ttl": "abc"}


@pytest.fixture(autouse=True)
def alive(tiny: LiveServer) -> Iterator[None]:
    """The engine lives, and nothing has failed in its process."""
    before = len(tiny.log)
    yield
    assert tiny.client.get("/health").status_code == 200
    assert not re.search("EngineCore.*(ERROR|Traceback)", tiny.log[before:])


def send(server: LiveServer, path: str, body: Json, **raw: str) -> httpx.Response:
    """Posts a body with further fields, which are JSON."""
    more = "".join(f", {json.dumps(name)}: {value}" for name, value in raw.items())
    content = (json.dumps(body)[:-1] + more + "}").encode()
    reply = server.client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code < 500, (path, raw, reply.text[:500])
    return reply


def complete(server: LiveServer, prompt: str | list[str], salt: str, **more: Any) -> Json:
    """The recall split of a completion."""
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt, **more}
    reply = send(server, "/v1/completions", OPENAI["/v1/completions"] | body)
    assert reply.status_code == 200, reply.text
    split: Json = reply.json()["usage"]["prompt_tokens_details"]["recall"]
    return split


def answer(reply: httpx.Response) -> str:
    """What a reply says, without ids, times, and where its tokens came from."""
    assert reply.status_code == 200, reply.text
    text = re.sub(r'"(usage|details)": ?\{.*?\}(, ?"|\})', r"\2", reply.text)
    found = re.findall(
        r'"(?:text|generated_text|text_output|content|token|data)": ?("[^"]*"|[\[\d][\d,]*)', text
    )
    assert found, reply.text
    return "".join(found)


def fresh(length: int) -> str:
    """A prompt that no other one begins like."""
    return "".join(RNG.choices(string.ascii_letters, k=length))


def host_blocks(server: LiveServer) -> int:
    """Blocks that the host has room for."""
    used, blocks, room = (
        server.metric(f"kvrecall_tier_{name}", tier="host")
        for name in ("used_bytes", "blocks", "capacity_bytes")
    )
    return round(room / (used / blocks))


def counted(server: LiveServer, name: str) -> float:
    return server.metric(f"kvrecall_{name}_total")


def settled(server: LiveServer, name: str, value: float) -> bool:
    """Whether a counter reaches a value: metrics follow the steps of the engine."""
    return until(lambda: counted(server, name) == value)


@pytest.mark.parametrize("path", ROUTES)
def test_what_is_no_hint_is_refused_on_every_route(tiny: LiveServer, path: str) -> None:
    """With the name of the field and what is allowed; the next request is served."""
    given, invalid = counted(tiny, "hints"), counted(tiny, "hints_invalid")
    for hint in NO_HINTS:
        reply = send(tiny, path, ROUTES[path], hint=hint)
        assert reply.status_code == (400 if path in OPENAI else 422), (hint[:80], reply.text[:300])
        said = re.search("hint: .*(must be|known: |leave out|half of a surrogate pair)", reply.text)
        assert said, (hint[:80], reply.text[:300])
        assert len(reply.text) < 1000, reply.text
    assert send(tiny, path, ROUTES[path], hint=NESTED).status_code in (400, 422)
    assert (given, invalid) == (counted(tiny, "hints"), counted(tiny, "hints_invalid"))
    assert send(tiny, path, ROUTES[path]).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_what_is_nested_deep_is_no_failure(tiny: LiveServer, path: str) -> None:
    """Near the depth at which JSON can no longer be read, which Python's own limit is."""
    for depth in range(790, 1000, 10):
        deep = "[" * depth + "]" * depth
        for raw in ({"hint": deep}, {"hint": f'["\\ud800", {deep}]'}, {"cache_control": deep}):
            assert send(tiny, path, ROUTES[path], **raw).status_code in (200, 400, 422)
        if path != "/generate":  # the engine died of it, in the pickle for its workers
            send(tiny, path, ROUTES[path], kv_transfer_params=f'{{"kvrecall_hint": {deep}}}')
    assert send(tiny, path, ROUTES[path]).status_code == 200


@pytest.mark.parametrize("path", ROUTES)
def test_a_hint_changes_no_token(tiny: LiveServer, path: str) -> None:
    """And is counted once, on every route, if it says anything."""
    for _ in range(2):  # the second hits the first, as those with hints do
        plain = answer(send(tiny, path, ROUTES[path]))
    for hint in EMPTY_HINTS:
        assert answer(send(tiny, path, ROUTES[path], hint=hint)) == plain, hint
    given = counted(tiny, "hints")
    for number, hint in enumerate(HINTS, 1):
        assert answer(send(tiny, path, ROUTES[path], hint=hint)) == plain, hint
        assert settled(tiny, "hints", given + number), hint


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_nonsense_for_the_connector_is_ignored_and_counted(tiny: LiveServer, path: str) -> None:
    for _ in range(2):
        plain = answer(send(tiny, path, ROUTES[path]))
    given, invalid = counted(tiny, "hints"), counted(tiny, "hints_invalid")
    wrong = [hint for hint in NO_HINTS if "ud800" not in hint and "000000" not in hint]
    for hint in wrong:
        params = f'{{"kvrecall_hint": {hint}, "kvrecall_handover": {hint}}}'
        assert answer(send(tiny, path, ROUTES[path], kv_transfer_params=params)) == plain, hint
    assert settled(tiny, "hints_invalid", invalid + len(wrong))
    assert counted(tiny, "hints") == given


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("name", ["kv_transfer_params", "session_id", "cache_salt", "odd"])
def test_half_a_surrogate_pair_is_refused(tiny: LiveServer, path: str, name: str) -> None:
    """The engine's process cannot be sent it."""
    value = '"a\\uD800"' if name != "kv_transfer_params" else '{"kvrecall_hint": {"\\udfff": 1}}'
    reply = send(tiny, path, ROUTES[path], **{name: value})
    assert reply.status_code == 400
    assert re.search(rf"{name}(: has '|.*unicode)", reply.text), reply.text
    whole = '"\\ud83d\\ude00"' if name != "kv_transfer_params" else '{"\\ud83d\\ude00": 1}'
    assert send(tiny, path, ROUTES[path], **{name: whole}).status_code == 200


SESSIONS = ["null", '""', '"%s"' % ("x" * 100_000), '"漢字"', '"a\\nb"', '"\\u0000"', '"5"']
NO_SESSIONS = ["5", "true", "[]", "{}", "1e999"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_any_session_is_a_hint_and_no_more(tiny: LiveServer, path: str) -> None:
    for _ in range(2):
        plain = answer(send(tiny, path, ROUTES[path]))
    given = counted(tiny, "hints")
    for session in SESSIONS:
        assert answer(send(tiny, path, ROUTES[path], session_id=session)) == plain
    assert settled(tiny, "hints", given + len(SESSIONS) - 2)
    for session in NO_SESSIONS:
        reply = send(tiny, path, ROUTES[path], session_id=session)
        assert reply.status_code == 400
        assert "session_id" in reply.text
    for header in ("", "one", "x" * 60_000, "a b"):
        reply = tiny.client.post(
            path, json=ROUTES[path] | {"session_id": "two"}, headers={"X-Session-ID": header}
        )
        assert answer(reply) == plain
    assert settled(tiny, "hints", given + len(SESSIONS) - 2 + 4)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_marks_of_a_cache_on_odd_messages(tiny: LiveServer, path: str) -> None:
    """Those of the last message count, and must be right; any others have no effect."""
    plain = {"role": "user", "content": TEXT}
    given = counted(tiny, "hints")
    for mark in (EPHEMERAL, {**EPHEMERAL, "ttl": "1h"}, {**EPHEMERAL, "ttl": None}):
        part = {"type": "text", "text": TEXT, "cache_control": mark}
        for last in ({**plain, "cache_control": mark}, {"role": "user", "content": [part]}):
            reply = send(tiny, path, ROUTES[path] | {"messages": [last]})
            assert reply.status_code == 200, reply.text
            given += 1
    assert settled(tiny, "hints", given)
    for mark in (0, "1h", [], {}, {"type": ["ephemeral"]}, {**EPHEMERAL, "ttl": "0s"}, NO_TTL):
        part = {"type": "text", "text": TEXT, "cache_control": mark}
        for last in ({**plain, "cache_control": mark}, {"role": "user", "content": [part]}):
            reply = send(tiny, path, ROUTES[path] | {"messages": [last]})
            assert reply.status_code == 400
            assert re.search("cache_control: .* must be ", reply.text), reply.text
        messages = [{"role": "system", "content": "x", "cache_control": mark}, plain]
        reply = send(tiny, path, ROUTES[path] | {"messages": messages})
        assert reply.status_code == 200, reply.text
    for content in ([], [[part]], [{"type": "odd", "cache_control": EPHEMERAL}], None, 3):
        last = {"role": "user", "content": content, "cache_control": EPHEMERAL}
        send(tiny, path, ROUTES[path] | {"messages": [last]})
    for messages in (None, [], "cache_control", {}, [None], [[]], [{"cache_control": 1}]):
        reply = send(tiny, path, ROUTES[path] | {"messages": messages, "cache_control": 1})
        assert reply.status_code == 400, (messages, reply.text)


def test_one_tenants_lies_are_not_anothers(tiny: LiveServer) -> None:
    """Both have the same prompt; each has a credit of its own."""
    honest, liar = f"honest {next(NUMBERS)}", f"liar {next(NUMBERS)}"
    prompt = fresh(300)
    complete(tiny, prompt, liar)
    told = complete(tiny, prompt, honest, hint={"returns": True})
    assert told["missed"]["reason"] == "new"
    for _ in range(20):
        complete(tiny, prompt, honest, hint={"returns": True})
        complete(tiny, prompt, liar, hint={"returns": False})
    believed = counted(tiny, "hints_believed")
    for number in range(1, 4):
        complete(tiny, prompt, liar, hint={"pin_s": 3600})
        complete(tiny, prompt, honest, hint={"returns": True})
        assert settled(tiny, "hints_believed", believed + number)


@pytest.mark.parametrize("is_believed", [False, True])
def test_who_pins_everything_takes_nothing_from_others(tiny: LiveServer, is_believed: bool) -> None:
    """Prompts for more than the host holds, all pinned for a day, by a tenant that was honest
    before or not: another one, whose prompts came back once, is served from the pool all the time.
    (What was used once may go before older blocks, hints or not, as the policy has learned.)"""
    ours, theirs = f"ours {next(NUMBERS)}", f"theirs {next(NUMBERS)}"
    prompt = fresh(300)
    for _ in range(20 if is_believed else 0):
        complete(tiny, prompt, theirs, hint={"returns": True})
    believed = counted(tiny, "hints_believed")
    kept, lost = [fresh(300) for _ in range(4)], []
    for prompt in kept * 2:
        complete(tiny, prompt, ours)
    blocks, sent = host_blocks(tiny), 0
    while sent < 1.2 * blocks:
        complete(tiny, [fresh(700) for _ in range(8)], theirs, hint={"pin_s": 86400})
        sent += 5 * 8
        tiny.forget_device()
        lost += [sent for prompt in kept if complete(tiny, prompt, ours)["host"] != 256]
    assert (counted(tiny, "hints_believed") > believed) == is_believed
    assert not lost, f"of {blocks} blocks, after {lost}"
    new = fresh(300)
    complete(tiny, new, ours)
    tiny.forget_device()
    assert complete(tiny, new, ours)["host"] == 256
