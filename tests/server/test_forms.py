"""MindIE's own and Triton's forms over an engine that answers with given words."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvrecall.engines.base import Finish, GenerateRequest, Sampling, Update
from kvrecall.pool.hints import Hint
from server.fake import SPLIT, FakeEngine, ask
from server.test_routes import application, events, post

Json = dict[str, Any]
TENSOR: Json = {"name": "input0", "shape": [1, 3], "datatype": "UINT32", "data": [5, 6, 7]}
V2 = "/v2/models/tiny"


def request_of(path: str, body: Json) -> Any:
    engine = FakeEngine()
    reply = post(engine, path, body)
    assert reply.status_code == 200, reply.text
    (request,) = engine.requests
    return request


def test_infer() -> None:
    assert post(FakeEngine(), "/infer", {"inputs": "Hi"}).json() == {
        "generated_text": "Hello, 世界"
    }
    body = {"inputs": "Hi", "parameters": {"details": True, "seed": 4}}
    reply = post(FakeEngine(), "/infer", body).json()
    assert reply["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 4,
        "generated_token_ids": [0, 1, 2, 3],
        "seed": 4,
        "prompt_tokens": 773,
        "recall": SPLIT.as_dict(),
    }


@pytest.mark.parametrize("path", ["/infer", "/infer_token"])
def test_infer_with_token_ids(path: str) -> None:
    request = request_of(path, {"input_id": [3, 4], "parameters": {"max_new_tokens": 2}})
    assert (request.prompt, request.sampling.max_tokens) == ((3, 4), 2)


def test_infer_stream() -> None:
    body = {"inputs": "Hi", "stream": True, "parameters": {"details": True}}
    told = events(post(FakeEngine(), "/infer", body))
    assert [event["token"] for event in told[:2]] == [
        {"id": [0], "text": "Hello"},
        {"id": [1], "text": ","},
    ]
    assert told[0]["prefill_time"] >= 0
    assert told[0]["decode_time"] is None
    assert all(e["prefill_time"] is None and e["decode_time"] >= 0 for e in told[1:])
    assert all("generated_text" not in event for event in told[:-1])
    assert told[-1]["generated_text"] == "Hello, 世界"
    assert told[-1]["details"]["generated_tokens"] == 4
    assert events(post(FakeEngine(), "/infer", body | {"parameters": {}}))[-1]["details"] is None


def test_the_pieces_of_an_infer_stream_are_the_text() -> None:
    """An end without text of its own is told with null, as in MindIE."""
    engine = FakeEngine(words=("Hello", ",", ""))
    told = events(post(engine, "/infer", {"inputs": "Hi", "stream": True}))
    assert [event["token"]["text"] for event in told] == ["Hello", ",", None]
    assert told[-1]["generated_text"] == "Hello,"


BAD_INFER: list[tuple[str, object, str]] = [
    ("/infer", {}, "either inputs"),
    ("/infer", {"inputs": "x", "input_id": [1]}, "either inputs"),
    ("/infer", {"inputs": ""}, "inputs"),
    ("/infer", {"input_id": []}, "input_id"),
    ("/infer", {"input_id": [-1]}, "input_id.0"),
    ("/infer", {"input_id": [2**31]}, "input_id.0"),
    ("/infer", {"inputs": "x", "parameters": {"priority": 6}}, "parameters.priority"),
    ("/infer", {"inputs": "x", "parameters": {"timeout": 0}}, "parameters.timeout"),
    ("/infer_token", {"inputs": "x"}, "input_id"),
    ("/v1/tokenizer", {}, "inputs: required"),
    ("/v1/tokenizer", {"inputs": 1}, "inputs"),
    (f"{V2}/generate", {}, "text_input: required"),
    (f"{V2}/generate", {"text_input": "x", "id": "a b"}, "id"),
    (f"{V2}/infer", {"inputs": []}, "inputs"),
    (f"{V2}/infer", {"inputs": [TENSOR, TENSOR]}, "inputs"),
    (f"{V2}/infer", {"inputs": [TENSOR | {"shape": [1, 4]}]}, "shape is [1, 4]"),
    (f"{V2}/infer", {"inputs": [TENSOR | {"shape": [2, 3]}]}, "shape is [2, 3]"),
    (f"{V2}/infer", {"inputs": [TENSOR | {"datatype": "FP32"}]}, "datatype"),
    (f"{V2}/infer", {"inputs": [TENSOR | {"data": [[1, 2, 3], [4, 5, 6]]}]}, "data"),
    (f"{V2}/infer", {"inputs": [TENSOR | {"parameters": {"seed": 1}}], "parameters": {"seed": 1}},
     "not both"),
    (f"{V2}/infer", {"inputs": [TENSOR | {"parameters": {"seeds": 1}}]}, "seeds: unknown field"),
    (f"{V2}/stopInfer", {}, "id: required"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "said"), BAD_INFER, ids=lambda v: str(v)[:40])
def test_bad_bodies(path: str, body: object, said: str) -> None:
    engine = FakeEngine()
    reply = post(engine, path, body)
    assert (reply.status_code, reply.json()["error_type"]) == (422, "Input Validation Error")
    assert said in reply.json()["error"]
    assert engine.requests == []


@pytest.mark.parametrize("at", ["/v2/models/other", "/v2/models/other/versions/1"])
@pytest.mark.parametrize("what", ["generate", "generate_stream", "infer", "stopInfer"])
def test_unknown_models(at: str, what: str) -> None:
    reply = post(FakeEngine(), f"{at}/{what}", {"id": "a", "text_input": "x"})
    assert (reply.status_code, reply.json()["error_type"]) == (404, "NotFoundError")
    assert "served: tiny" in reply.json()["error"]


@pytest.mark.parametrize("at", [V2, f"{V2}/versions/1"])
def test_triton_generate(at: str) -> None:
    body = {"id": "a", "text_input": "Hi", "parameters": {"details": True}}
    reply = post(FakeEngine(), f"{at}/generate", body).json()
    details = reply.pop("details")
    text = {"id": "a", "model_name": "tiny", "model_version": None}
    assert reply == text | {"text_output": "Hello, 世界"}
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", 4)
    told = events(post(FakeEngine(), f"{at}/generate_stream", body))
    assert [event["text_output"] for event in told] == ["Hello", ",", " 世", "界"]
    assert [e["details"]["generated_tokens"] for e in told] == [1, 2, 3, 4]
    assert told[0]["prefill_time"] >= 0
    assert told[0]["decode_time"] is None
    assert all(e["prefill_time"] is None and e["decode_time"] >= 0 for e in told[1:])
    assert ["finish_reason" in e["details"] for e in told] == [False, False, False, True]
    assert told[-1]["details"]["finish_reason"] == "eos_token"


PACE = ("batch_size", "queue_wait_time")


def test_batches_and_waits_are_told() -> None:
    """Of a whole answer in lists, of an event in numbers; the wait is that before the first."""
    body = {"text_input": "Hi", "parameters": {"details": True}}
    details = post(FakeEngine(), f"{V2}/generate", body).json()["details"]
    assert [details[name] for name in PACE] == [[1, 2, 3, 4], [250_000]]
    tensors = {"inputs": [TENSOR], "parameters": {"details": True}}
    details = post(FakeEngine(), f"{V2}/infer", tensors).json()["parameters"]
    assert [details[name] for name in PACE] == [[1, 2, 3, 4], [250_000]]
    told = events(post(FakeEngine(), f"{V2}/generate_stream", body))
    assert [[event["details"][name] for name in PACE] for event in told] == [
        [1, 250_000],
        [2, None],
        [3, None],
        [4, None],
    ]


def test_what_an_engine_does_not_tell_is_null() -> None:
    class Silent(FakeEngine):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Update, None]:
            async for update in super().generate(replace(request, paced=False)):
                yield update

    body = {"text_input": "Hi", "parameters": {"details": True}}
    details = [post(Silent(), f"{V2}/generate", body).json()["details"]]
    details += [e["details"] for e in events(post(Silent(), f"{V2}/generate_stream", body))]
    assert {each[name] for each in details for name in PACE} == {None}


@pytest.mark.parametrize("path", ["generate", "infer"])
def test_a_request_without_a_name_is_given_one(path: str) -> None:
    engine = FakeEngine()
    body: Json = {"text_input": "x"} if path == "generate" else {"inputs": [TENSOR]}
    reply = post(engine, f"{V2}/{path}", body).json()
    assert reply["id"] == engine.requests[0].request_id


@pytest.mark.parametrize("data", [[5, 6, 7], [[5, 6, 7]]])
def test_triton_infer(data: Any) -> None:
    body = {"id": "a", "inputs": [TENSOR | {"data": data}], "outputs": [{"name": "out"}]}
    reply = post(FakeEngine(), f"{V2}/infer", body).json()
    ids = [0, 1, 2, 3]
    assert reply == {
        "id": "a",
        "outputs": [{"name": "out", "shape": [1, 4], "datatype": "UINT32", "data": ids}],
    }
    assert request_of(f"{V2}/infer", body).prompt == (5, 6, 7)


@pytest.mark.parametrize("within", [True, False])
def test_parameters_of_a_token_request(within: bool) -> None:
    """Beside inputs, as MindIE's documents have it, or within its one input, as its source."""
    wanted = {"parameters": {"max_new_tokens": 7}}
    body = {"inputs": [TENSOR | wanted]} if within else {"inputs": [TENSOR]} | wanted
    assert request_of(f"{V2}/infer", body).sampling.max_tokens == 7


def get(path: str) -> httpx.Response:
    return ask(application(FakeEngine()), path)


def test_server_and_model_are_described() -> None:
    assert get("/v2").json() == {
        "name": "kvrecall",
        "version": "0",
        "extensions": {
            "max_iter_times": 4096,
            "prefill_policy_type": 0,
            "decode_policy_type": 0,
            "max_prefill_batch_size": 8,
            "max_prefill_tokens": 8192,
        },
    }
    one = {"datatype": "UINT32", "shape": [-1]}
    assert get(V2).json() == {
        "name": "tiny",
        "platform": "kvrecall",
        "inputs": [{"name": "input0", **one}],
        "outputs": [{"name": "output0", **one}],
    }
    for path in (f"{V2}/config", f"{V2}/versions/1/config"):
        config = get(path).json()
        assert (config["model_name"], config["max_seq_len"]) == ("tiny", 4096)
        assert (config["npu_mem_size"], config["cpu_mem_size"]) == (-1, 0)


def test_one_model_of_the_openai_routes() -> None:
    assert get("/v1/models/tiny").json() == {"id": "tiny", "object": "model"}
    other = get("/v1/models/some/other")
    assert (other.status_code, other.json()["error"]["code"]) == (404, 404)
    assert other.json()["error"]["message"] == "no model 'some/other' is served"


def test_tokenizer() -> None:
    reply = post(FakeEngine(), "/v1/tokenizer", {"inputs": "one two"}).json()
    assert reply == {"token_number": 2, "tokens": ["one", "two"]}
    counted = post(FakeEngine(), "/v1/tokenizer", {"inputs": "one two", "do_decode": False}).json()
    assert counted == {"token_number": 2, "tokens": []}
    assert post(FakeEngine(), "/v1/tokenizer", {"inputs": ""}).json()["token_number"] == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"typical_p": 0.5, "watermark": True}, "typical_p, watermark"),
        ({"typical_p": 1.0, "watermark": False}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "x"}),
        ("/generate_stream", {"inputs": "x"}),
        ("/infer", {"inputs": "x"}),
        (f"{V2}/generate", {"text_input": "x"}),
        (f"{V2}/infer", {"inputs": [TENSOR]}),
    ],
)
def test_what_has_no_effect_is_named(path: str, body: Json, given: Json, told: str | None) -> None:
    reply = post(FakeEngine(), path, body | {"parameters": given})
    assert reply.status_code == 200
    assert reply.headers.get("x-kvrecall-ignored") == told


@pytest.mark.parametrize(("given", "priority"), [(None, 0), (5, 0), (1, -4)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "x"}),
        ("/infer", {"inputs": "x"}),
        (f"{V2}/generate", {"text_input": "x"}),
    ],
)
def test_priority_and_timeout(path: str, body: Json, given: int | None, priority: int) -> None:
    request = request_of(path, body | {"parameters": {"priority": given, "timeout": 9}})
    assert (request.priority, request.timeout_s) == (priority, 9)


def test_best_of_and_beams_reach_the_engine() -> None:
    def sampling(body: Json) -> Sampling:
        found: Sampling = request_of("/generate", body).sampling
        return found

    prompt: Json = {"prompt": "x", "temperature": 1.0}
    assert (sampling(prompt).n, sampling(prompt).best_of) == (1, None)
    wide = sampling(prompt | {"n": 2, "best_of": 5})
    assert (wide.n, wide.best_of, wide.beam) == (2, 5, False)
    all_of_them = sampling(prompt | {"n": 2, "best_of": 2, "stream": True})
    assert (all_of_them.n, all_of_them.best_of) == (2, None)
    beams = sampling({"prompt": "x", "n": 3, "use_beam_search": True, "length_penalty": 0.5})
    assert (beams.n, beams.beam, beams.length_penalty, beams.temperature) == (3, True, 0.5, 0.0)
    ranked = sampling({"inputs": "x", "parameters": {"best_of": 3, "do_sample": True}})
    assert (ranked.n, ranked.best_of) == (3, 3)


def test_stop_infer() -> None:
    """A request is stopped by its id, and no other request is."""

    async def run() -> tuple[list[Json], httpx.Response, httpx.Response]:
        engine = FakeEngine(words=("a",) * 200, delay=0.01)
        transport = httpx.ASGITransport(application(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"text_input": "x", "parameters": {"details": True}}

            async def generate(path: str, name: str) -> httpx.Response:
                return await client.post(f"{V2}/{path}", json=body | {"id": name})

            asking = [
                asyncio.create_task(generate("generate", "one")),
                asyncio.create_task(generate("generate_stream", "one")),
                asyncio.create_task(generate("generate", "two")),
            ]
            while len(engine.requests) < 3:
                await asyncio.sleep(0.005)
            stopped = await client.post(f"{V2}/stopInfer", json={"id": "one"})
            replies = [await task for task in asking]
            again = await client.post(f"{V2}/stopInfer", json={"id": "one"})
        last = json.loads(replies[1].text.split("\n\n")[-2][6:])
        return [replies[0].json(), last, replies[2].json()], stopped, again

    replies, stopped, again = asyncio.run(run())
    finishes = [reply["details"]["finish_reason"] for reply in replies]
    assert finishes == [Finish.STOPPED, Finish.STOPPED, Finish.EOS]
    assert (stopped.status_code, stopped.json()) == (200, {"id": "one"})
    assert again.status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "Hi"}),
        ("/generate", {"prompt": "Hi"}),
        ("/infer", {"inputs": "Hi"}),
        (f"{V2}/generate", {"text_input": "Hi"}),
    ],
)
def test_hints(path: str, body: Json) -> None:
    request = request_of(path, body | {"hint": {"returns": True, "in_s": 45, "pin_s": 60}})
    assert request.hint == Hint(True, 45.0, 60.0)
    assert request_of(path, body).hint is None
    for wrong, why in (
        ({"returns": False, "in_s": 5}, "hint: returns is false; leave out in_s and pin_s"),
        ({"in_s": -1}, "hint: in_s is -1; it must be 0 to 86400 seconds"),
        ({"back": True}, "hint: 'back' is unknown; known: returns, in_s, pin_s"),
    ):
        reply = post(FakeEngine(), path, body | {"hint": wrong})
        assert reply.status_code == 422
        assert why in reply.text
