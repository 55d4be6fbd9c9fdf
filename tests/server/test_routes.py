"""The routes over a generator without an engine: forms of requests, replies, streams, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvrecall.engines.base import Fault, Finish, GenerateError, RecallSplit, ServeSpec
from kvrecall.server.application import attach_all
from kvrecall.server.plan import Plan
from server.fake import SPLIT, FakeEngine, ask
from server.live import OWN

PLAN = Plan(ServeSpec("m", "127.0.0.1", 1, {}), max_body_bytes=1000)
Json = dict[str, Any]


def application(generator: FakeEngine, plan: Plan = PLAN) -> FastAPI:
    app = FastAPI()
    attach_all(app, generator, plan=plan)
    return app


def post(generator: FakeEngine, path: str, body: object) -> httpx.Response:
    return ask(application(generator), path, "POST", body)


def events(reply: httpx.Response) -> list[Json]:
    assert reply.headers["content-type"].startswith("text/event-stream")
    parts = reply.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part[6:]) for part in parts]


@pytest.mark.parametrize("path", ["/generate", "/"])
def test_plain_reply(path: str) -> None:
    reply = post(FakeEngine(), path, {"inputs": "Hi"})
    assert reply.status_code == 200
    assert reply.json() == {"generated_text": "Hello, 世界"}
    assert reply.headers["x-kvrecall"] == "device=128;host=256;disk=384;remote=0;computed=5"


def test_details() -> None:
    body = {"inputs": "Hi", "parameters": {"details": True, "seed": 7}}
    details = post(FakeEngine(), "/generate", body).json()["details"]
    assert details["prompt_tokens"] == 773
    assert details["recall"] == SPLIT.as_dict()
    assert sum(details["recall"].values()) == details["prompt_tokens"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", 4)
    assert (details["seed"], details["prefill"]) == (7, [])
    assert details["tokens"][2] == {"id": 2, "text": " 世", "logprob": -1.0, "special": False}


@pytest.mark.parametrize(
    ("path", "extra"),
    [("/generate_stream", {}), ("/generate", {"stream": True}), ("/", {"stream": True})],
)
def test_stream(path: str, extra: Json) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True}} | extra
    told = events(post(FakeEngine(), path, body))
    assert [event["token"]["text"] for event in told] == ["Hello", ",", " 世", "界"]
    for event in told[:-1]:
        assert (event["generated_text"], event["details"]) == (None, None)
    assert told[-1]["generated_text"] == "Hello, 世界"
    assert told[-1]["details"]["recall"] == SPLIT.as_dict()
    assert told[-1]["details"]["generated_tokens"] == 4


@pytest.mark.parametrize(("finish", "name"), [(f, f.value) for f in Finish])
def test_finish_reasons(finish: Finish, name: str) -> None:
    body = {"inputs": "Hi", "parameters": {"details": True}}
    reply = post(FakeEngine(finish=finish), "/generate", body)
    assert reply.json()["details"]["finish_reason"] == name


def test_full_text() -> None:
    body = {"inputs": "Hi. ", "parameters": {"return_full_text": True}}
    assert post(FakeEngine(), "/generate", body).json()["generated_text"] == "Hi. Hello, 世界"
    told = events(post(FakeEngine(), "/generate_stream", body))
    assert told[-1]["generated_text"] == "Hi. Hello, 世界"


SAMPLING: list[tuple[Json, Json]] = [
    ({}, {"max_tokens": 20, "temperature": 0.0, "top_k": None, "stop": ()}),
    ({"max_new_tokens": 5}, {"max_tokens": 5}),
    ({"do_sample": True}, {"temperature": 1.0}),
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"top_k": 3}, {"temperature": 1.0, "top_k": 3}),
    ({"do_sample": False, "top_k": 3, "temperature": 0.5}, {"temperature": 0.0, "top_k": None}),
    ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"stop": "a"}, {"stop": ("a",)}),
    ({"repetition_penalty": 1.1, "seed": 3}, {"repetition_penalty": 1.1, "seed": 3}),
    ({"decoder_input_details": True}, {"prompt_logprobs": True}),
    (dict.fromkeys(("max_new_tokens", "top_k", "stop", "seed")), {"max_tokens": 20}),
]


@pytest.mark.parametrize(("given", "sampling"), SAMPLING)
def test_sampling(given: Json, sampling: Json) -> None:
    generator = FakeEngine()
    assert post(generator, "/generate", {"inputs": "x", "parameters": given}).status_code == 200
    (request,) = generator.requests
    for name, value in sampling.items():
        assert getattr(request.sampling, name) == value


def test_truncate_and_adapter() -> None:
    generator = FakeEngine()
    parameters = {"truncate": 9, "adapter_id": "a", "priority": 2}
    post(generator, "/generate", {"inputs": "x", "parameters": parameters})
    (request,) = generator.requests
    assert (request.truncate, request.adapter, request.priority) == (9, "a", -3)


BAD: list[tuple[object, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\xff", "not readable"),
    (b"[" * 900, "not"),
    ([], "must be a JSON object"),
    ({}, "inputs"),
    ({"inputs": None, "prompt": None}, "inputs"),
    ({"inputs": ""}, "inputs"),
    ({"inputs": 5}, "inputs"),
    ({"inputs": [1]}, "inputs"),
    ({"inputs": "x", "parameters": []}, "parameters"),
    ({"inputs": "x", "parameters": {"max_new_tokens": 0}}, "parameters.max_new_tokens"),
    ({"inputs": "x", "parameters": {"max_new_tokens": "5"}}, "parameters.max_new_tokens"),
    ({"inputs": "x", "parameters": {"temperature": 0}}, "parameters.temperature"),
    ({"inputs": "x", "parameters": {"top_p": 1.5}}, "parameters.top_p"),
    ({"inputs": "x", "parameters": {"top_k": -1}}, "parameters.top_k"),
    ({"inputs": "x", "parameters": {"temperature": float("nan")}}, "parameters.temperature"),
    ({"inputs": "x", "parameters": {"stop": [""]}}, "parameters.stop"),
    ({"inputs": "x", "\ud800": 1}, "unicode"),
    ({"inputs": "x", "parameters": {"seed": 2**64}}, "parameters.seed"),
    ({"inputs": "x", "parameters": {"topk": 1}}, "parameters.topk: unknown field"),
    ({"inputs": "x", "parameters": {"best_of": 2}}, "best_of needs sampling"),
    ({"inputs": "x", "stream": "yes"}, "stream"),
    ({"prompt": ["x"]}, "prompt"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "use_beam_search": True, "stream": True}, "cannot be streamed"),
    ({"prompt": "x", "n": 2, "best_of": 3, "use_beam_search": True}, "are mutually exclusive"),
    ({"prompt": "x", "n": 3, "best_of": 2}, "less than n"),
    ({"prompt": "x", "n": 2, "temperature": 0}, "temperature is 0"),
    ({"prompt": "x", "n": 2, "best_of": 3, "stream": True}, "best_of above n"),
    ({"prompt": "x", "n": 8193}, "n: "),
    ({"inputs": "x", "parameters": {"best_of": 8193, "do_sample": True}}, "parameters.best_of"),
]


@pytest.mark.parametrize(("body", "said"), BAD, ids=lambda v: str(v)[:40])
def test_bad_bodies(body: object, said: str) -> None:
    generator = FakeEngine()
    reply = post(generator, "/generate", body)
    assert reply.status_code == 422
    assert reply.json()["error_type"] == "Input Validation Error"
    assert said in reply.json()["error"]
    assert generator.requests == []


FAULTS = [
    (Fault.INPUT, 422, "Input Validation Error"),
    (Fault.UNKNOWN, 404, "NotFoundError"),
    (Fault.BUSY, 503, "Service Unavailable"),
    (Fault.TIMEOUT, 500, "Incomplete Generation"),
    (Fault.ENGINE, 424, "Generation Error"),
]


@pytest.mark.parametrize(("fault", "status", "kind"), FAULTS)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_failures_before_the_first_token(fault: Fault, status: int, kind: str, path: str) -> None:
    reply = post(FakeEngine(failure=GenerateError(fault, "why")), path, {"inputs": "x"})
    assert reply.status_code == status
    assert reply.json() == {"error": "why", "error_type": kind}


def test_failure_in_a_stream() -> None:
    generator = FakeEngine(failure=GenerateError(Fault.TIMEOUT, "late"), fail_after=2)
    told = events(post(generator, "/generate_stream", {"inputs": "x"}))
    assert [event["token"]["text"] for event in told[:2]] == ["Hello", ","]
    assert told[2:] == [{"error": "late", "error_type": "Incomplete Generation"}]


def test_unknown_path_and_method() -> None:
    reply = post(FakeEngine(), "/nowhere", {})
    assert (reply.status_code, reply.json()["error_type"]) == (404, "NotFoundError")
    assert "/nowhere" in reply.json()["error"]
    reply = post(FakeEngine(), "/docs", {})
    assert (reply.status_code, reply.json()["error_type"]) == (405, "Method Not Allowed")


@pytest.mark.parametrize("path", ["/generate", "/parsed"])
def test_body_too_large_without_a_length(path: str) -> None:
    """And with one. Also where FastAPI reads the body, as on vLLM's routes."""

    app = application(FakeEngine())

    @app.post("/parsed")
    async def parsed(body: dict[str, str]) -> None: ...

    async def send() -> httpx.Response:
        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 100

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, content=chunks(), headers=OWN)

    for reply in (asyncio.run(send()), ask(app, path, "POST", {"inputs": "x" * 1000})):
        assert (reply.status_code, reply.json()["error_type"]) == (413, "Payload Too Large")
        assert "larger than" in reply.json()["error"]


def test_prompt_form() -> None:
    generator = FakeEngine()
    body = {"prompt": "Hi. ", "max_tokens": 9, "temperature": 0, "stop": "x", "n": 1}
    assert post(generator, "/generate", body).json() == {"text": ["Hi. Hello, 世界"]}
    (request,) = generator.requests
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0)
    reply = post(generator, "/generate", body | {"stream": True})
    chunks = [json.loads(part) for part in reply.text.split("\0")[:-1]]
    assert chunks[0] == {"text": ["Hi. Hello"]}
    assert chunks[-1] == {"text": ["Hi. Hello, 世界"]}


def test_split() -> None:
    report = {"device": 128, "host": 0, "disk": 256, "remote": 0, "computed": 16, "later": 1}
    split = RecallSplit.of_report(report, 400, 384, pooled=True)
    assert split.as_dict() == {"device": 128, "host": 0, "disk": 256, "remote": 0, "computed": 16}
    assert RecallSplit.of_report(None, 400, 384, pooled=False).device == 384
    unnamed = RecallSplit.of_report(None, 400, 384, pooled=True)
    assert (unnamed.device, unnamed.unspecified, unnamed.computed) == (0, 384, 16)
    assert unnamed.as_dict()["unspecified"] == 384
