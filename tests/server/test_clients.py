"""Third-party clients against a live server: openai, huggingface_hub and curl; hostile requests;
and requests within and outside the OpenAPI description."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import ran

from server.live import LiveServer

pytestmark = [pytest.mark.engine, pytest.mark.long]

Json = dict[str, Any]
PROMPT = "All work and no play makes Jack a dull boy. " * 8  # 352 tokens: 2 blocks and 96


@pytest.fixture(scope="module")
def openai(tiny: LiveServer) -> Any:
    module = pytest.importorskip("openai")
    with module.OpenAI(base_url=f"{tiny.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def hub(tiny: LiveServer) -> Iterator[Any]:
    """A client of this machine only, in a test run that is offline towards the hub."""
    module = pytest.importorskip("huggingface_hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield module.InferenceClient(model=tiny.url)


def test_openai_completions(openai: Any) -> None:
    asked: Json = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    openai.completions.create(**asked)
    done = openai.completions.create(**asked, logprobs=2)
    (choice,) = done.choices
    assert len(choice.logprobs.tokens) == done.usage.completion_tokens == 6
    assert done.usage.prompt_tokens_details.cached_tokens == 256
    assert done.usage.prompt_tokens_details.model_extra["recall"]["device"] == 256
    parts = list(
        openai.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(part.choices[0].text for part in parts if part.choices) == choice.text
    assert parts[-1].usage.prompt_tokens_details.cached_tokens == 256


SAMPLED: Json = {"model": "tiny", "prompt": "Once", "max_tokens": 6, "temperature": 1.0, "seed": 5}


def test_openai_samples(openai: Any) -> None:
    several = openai.completions.create(**SAMPLED, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.text for choice in several.choices}) > 1


def test_openai_best_of(openai: Any) -> None:
    """The best of 8, told with their probabilities, are the two best of the same 8."""

    def score(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs))

    everything = openai.completions.create(**SAMPLED, n=8, logprobs=0)
    scores = sorted(map(score, everything.choices), reverse=True)
    best = openai.completions.create(**SAMPLED, n=2, best_of=8, logprobs=0)
    assert [score(choice) for choice in best.choices] == pytest.approx(scores[:2], abs=1e-3)
    assert [choice.index for choice in best.choices] == [0, 1]
    plain = openai.completions.create(**SAMPLED, best_of=8)
    assert plain.choices[0].logprobs is None


MANY: list[tuple[str, Json]] = [
    ("/v1/completions", {"n": 129}),
    ("/v1/completions", {"best_of": 129}),
    ("/v1/completions", {"n": 129, "use_beam_search": True}),
    ("/v1/completions", {"vllm_xargs": {"kvrecall_best_of": 129}}),
    ("/v1/chat/completions", {"n": 129}),
    ("/generate", {"n": 129}),
    ("/generate", {"n": 129, "stream": True}),
    ("/generate", {"best_of": 129}),
    ("/generate", {"n": 129, "use_beam_search": True}),
    ("/", {"parameters": {"best_of": 129, "do_sample": True}}),
]


@pytest.mark.parametrize(("path", "what"), MANY, ids=str)
def test_too_many_sequences(tiny: LiveServer, path: str, what: Json) -> None:
    """One request cannot fill the server: more than maxN is refused before anything is computed."""
    prompt: Json = {"prompt": "x"}
    if path == "/":
        prompt = {"inputs": "x"}
    elif "chat" in path:
        prompt = {"messages": [{"role": "user", "content": "x"}]}
    reply = tiny.client.post(path, json=prompt | what)
    assert reply.status_code == (400 if path.startswith("/v1") else 422), reply.text
    assert "is 129; this server allows 128" in reply.text


def test_too_many_prompts(tiny: LiveServer) -> None:
    """Also in a list of prompts."""
    for prompts, more, wanted in (
        ([[1]] * 100, {"n": 100}, 10_000),
        (["x"] * 100, {"best_of": 30, "temperature": 1.0}, 3000),
    ):
        asked: Json = {"prompt": prompts, "max_tokens": 1} | more
        reply = tiny.client.post("/v1/completions", json=asked)
        assert reply.status_code == 400
        assert f"prompts ask for {wanted} sequences; one request may" in reply.text
    many: Json = {"prompt": ["x"] * 1025, "max_tokens": 1}  # vLLM's own bound
    assert tiny.client.post("/v1/completions", json=many).status_code == 400
    reply = tiny.client.post("/v1/completions", json={"prompt": ["x"] * 40, "max_tokens": 1})
    assert len(reply.json()["choices"]) == 40


def test_best_of_as_many_as_wanted_is_streamed(openai: Any) -> None:
    parts = list(openai.completions.create(**SAMPLED, n=2, best_of=2, stream=True))
    assert {part.choices[0].index for part in parts} == {0, 1}


def test_openai_refuses_best_of_it_cannot_serve(openai: Any) -> None:
    from openai import BadRequestError

    asked: Json = {"model": "tiny", "prompt": "Once", "max_tokens": 2}
    for bad in (
        {"n": 3, "best_of": 2},
        {"best_of": 2, "temperature": 0},
        {"best_of": 2, "stream": True},
        {"best_of": 0},
        {"best_of": 2, "extra_body": {"use_beam_search": True}},
    ):
        with pytest.raises(BadRequestError, match="best_of"):
            openai.completions.create(**asked, **bad)


def test_openai_chat(openai: Any) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    asked: Json = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0}
    openai.chat.completions.create(**asked)
    done = openai.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = done.choices
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.content) == 6
    assert done.usage.prompt_tokens_details.cached_tokens == 256
    parts = openai.chat.completions.create(**asked, stream=True)
    told = [part.choices[0].delta.content for part in parts]
    assert "".join(text or "" for text in told) == choice.message.content
    sampled: Json = asked | {"temperature": 1.0, "seed": 1}
    best = openai.chat.completions.create(**sampled, n=2, extra_body={"best_of": 4})
    assert len(best.choices) == 2


def test_openai_stop(openai: Any) -> None:
    asked: Json = {"model": "tiny", "prompt": "Stop", "max_tokens": 30, "temperature": 0}
    whole = openai.completions.create(**asked).choices[0].text
    stop = next(char for char in whole[2:] if char.isprintable() and char != "\ufffd")
    cut = openai.completions.create(**asked, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert stop not in cut.text
    assert whole.startswith(cut.text)


def test_openai_models(openai: Any) -> None:
    from openai import NotFoundError

    (listed,) = openai.models.list()
    assert listed.id == "tiny"
    assert openai.models.retrieve("tiny").max_model_len == listed.max_model_len
    with pytest.raises(NotFoundError, match="no model 'other' is served"):
        openai.models.retrieve("other")


def test_hub_text_generation(hub: Any) -> None:
    text = hub.text_generation("Once upon", max_new_tokens=8)
    whole = hub.text_generation("Once upon", max_new_tokens=8, details=True, seed=3)
    assert whole.generated_text == text
    assert whole.details.generated_tokens == len(whole.details.tokens) == 8
    assert whole.details.finish_reason == "length"
    parts = list(hub.text_generation("Once upon", max_new_tokens=8, stream=True))
    assert "".join(parts) == text
    told = list(hub.text_generation("Once upon", max_new_tokens=8, stream=True, details=True))
    assert [part.token.id for part in told] == [token.id for token in whole.details.tokens]
    assert told[-1].generated_text == text
    assert told[-1].details.finish_reason == "length"
    assert all(part.details is None for part in told[:-1])


def test_hub_parameters(hub: Any) -> None:
    sampled: Json = {"do_sample": True, "temperature": 1.2, "top_k": 50, "top_p": 0.9, "seed": 3}
    more: Json = {"repetition_penalty": 1.1, "truncate": 4, "return_full_text": True}
    one = hub.text_generation("Once upon", max_new_tokens=8, **sampled, **more)
    assert one == hub.text_generation("Once upon", max_new_tokens=8, **sampled, **more)
    assert one.startswith("Once upon")
    best = hub.text_generation("Once", max_new_tokens=4, details=True, best_of=3, **sampled)
    others = best.details.best_of_sequences
    assert len(others) == 2

    def score(tokens: Any) -> float:
        return float(sum(token.logprob for token in tokens))

    scores = [score(best.details.tokens), *(score(other.tokens) for other in others)]
    assert scores == sorted(scores, reverse=True)
    prefill = hub.text_generation("Once", details=True, decoder_input_details=True).details.prefill
    assert len(prefill) == 4


def test_hub_chat(hub: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    done = hub.chat_completion(messages, model="tiny", max_tokens=4)
    assert done.usage.completion_tokens == 4


def test_curl(tiny: LiveServer) -> None:
    body = json.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": 512}})
    command = ["curl", "-sS", f"{tiny.url}/generate", "-X", "POST", "-d", body]
    done = ran(*command, "-H", "Content-Type: application/json", timeout=120)
    assert json.loads(done.stdout)["generated_text"], done.stderr


JSON = {"content-type": "application/json"}
HOSTILE: list[tuple[str, Json]] = [
    ("/v1/completions", {"prompt": [2**40]}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"99999999": 1}}),
    ("/v1/completions", {"prompt": "x", "logprobs": 10**6}),
    ("/v1/completions", {"prompt": "x", "stop_token_ids": [-5, 10**12]}),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [-1]}),
    ("/v1/completions", {"prompt": "x", "bad_words": ["", "\u0000"]}),
    ("/v1/completions", {"prompt": "x", "n": 10**9}),
    ("/v1/completions", {"prompt": "x", "temperature": 1.0, "best_of": 10**9}),
    ("/v1/completions", {"prompt": "x", "vllm_xargs": {"kvrecall_best_of": 10**9}}),
    ("/v1/completions", {"prompt": "x", "vllm_xargs": {"kvrecall_timeout": -1}}),
    ("/v1/completions", {"prompt": "x", "min_tokens": 10**9}),
    ("/v1/completions", {"prompt": "x", "priority": 2**63 - 1}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "(((("}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": "{"}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "root ::= root"}}),
    # What vLLM validates and its engine, or the server itself, then fails on (guard.py).
    ("/v1/completions",
     {"prompt": "x", "structured_outputs": {"json": {"type": "array", "minItems": 10**9}}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a++"}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": r"\p{Greek}+"}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": r"[^\s\S]"}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": {"$ref": "#"}}}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "[0-9]"}, "stream": True}),
    ("/v1/completions", {"prompt": "x", "bad_words": ["\ud800"]}),
    ("/v1/completions", {"prompt": "x", "stop": ["\ud800"]}),
    ("/v1/completions", {"prompt": "x", "vllm_xargs": {"kv_transfer_params": "x"}}),
    ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"kvrecall_handover": "x"}}),
    ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"kvrecall_handover": {"a": []}}}),
    ("/v1/completions", {"prompt": "x", "logprobs": 1, "logprob_token_ids": [10**9]}),
    ("/v1/completions", {"prompt": "x", "allowed_token_ids": [5], "logit_bias": {"5": -100}}),
    ("/v1/completions", {"prompt": "x", "prompt_embeds": "AAAA"}),
    ("/v1/completions", {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True}}),
    ("/v1/chat/completions", {"messages": [{"role": "\ud800", "content": [{}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}),
    ("/generate", {"inputs": "x", "parameters": {"stop_token_ids": [-1, 2**70]}}),
    ("/generate", {"inputs": "\ud800"}),
    ("/generate", {"inputs": "x", "parameters": {"adapter_id": "../../etc"}}),
    ("/generate", {"prompt": "x", "temperature": 1e-300, "n": 4}),
    ("/generate", {"prompt": "x", "seed": 2**63 - 1, "n": 4, "temperature": 1.0}),
    ("/generate", {"prompt": "x", "top_k": 2**31 - 1, "repetition_penalty": 1e-300}),
    ("/infer_token", {"input_id": [0, 2**31 - 1]}),
    ("/infer_token", {"input_id": [1] * 5000}),
    ("/v1/tokenizer", {"inputs": "x" * 100_000}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), HOSTILE, ids=lambda v: str(v)[:50])
def test_hostile_requests_take_nobody_with_them(tiny: LiveServer, path: str, body: Json) -> None:
    """Every request gets an answer or an error; the server continues, and a concurrent request gets
    the same tokens as alone."""
    parameters = {"max_new_tokens": 40, "ignore_eos": True, "details": True}
    told: list[list[int]] = []

    def beside() -> None:
        asked = {"inputs": "beside", "parameters": parameters}
        reply = tiny.client.post("/generate", json=asked).json()
        told.append([token["id"] for token in reply["details"]["tokens"]])

    beside()
    running = threading.Thread(target=beside)
    running.start()
    reply = tiny.client.post(
        path, content=json.dumps({"model": "tiny"} | body if "/v1/c" in path else body)
    )
    running.join()
    assert reply.status_code < 500, reply.text
    assert reply.status_code == 200 or len(_said(reply)) > 10, reply.text
    alone, together = told
    assert alone == together
    assert tiny.client.get("/health").status_code == 200


def _said(reply: httpx.Response) -> str:
    """The message of an error, in any form."""
    error = reply.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def test_as_many_beams_as_asked_for(tiny: LiveServer) -> None:
    body: Json = {"prompt": "Once upon", "max_tokens": 5, "use_beam_search": True, "n": 4}
    texts = tiny.client.post("/generate", json=body).json()["text"]
    assert len(texts) == 4
    assert len(set(texts)) > 1  # not 4: bytes that are no text all look alike
    assert all(text.startswith("Once upon") for text in texts)


def test_tokenizer(tiny: LiveServer) -> None:
    told = tiny.client.post("/v1/tokenizer", json={"inputs": "Hello 世界"}).json()
    assert told["token_number"] == len(told["tokens"]) == 12
    assert "".join(told["tokens"]) == "Hello 世界"


BUSINESS = "generate|generate_stream|infer|infer_token|v1/[a-z/]+|v2.*|tokenize|detokenize"
MANAGEMENT = "health.*|info|metrics.*|version|load"
SKIPPED = "derender|v1/systemone"  # vLLM's own experiments


def description(tiny: LiveServer) -> str:
    """The server's OpenAPI description, with its own model in the paths."""
    told = tiny.client.get("/openapi.json").json()
    paths = {}
    for path, operations in told["paths"].items():
        for operation in operations.values():
            parameters = operation.get("parameters", [])
            operation["parameters"] = [p for p in parameters if p["name"] != "model"]
        paths[path.replace("{model}", "tiny")] = operations
    return json.dumps(told | {"paths": paths})


@pytest.mark.long
def test_the_description_leads_to_no_server_error(tiny: LiveServer) -> None:
    pytest.importorskip("schemathesis")
    command = Path(sys.executable).parent / "schemathesis"
    file = tiny.folder / "openapi.json"
    file.write_text(description(tiny))
    done = ran(
        command,
        "run",
        file,
        f"--url={tiny.url}",
        "--checks=not_a_server_error",
        f"--include-path-regex=^/({BUSINESS}|{MANAGEMENT})?$",
        f"--exclude-path-regex={SKIPPED}",
        "--phases=fuzzing",
        "--max-examples=3",
        "--seed=1",
        "--request-timeout=120",
        "--suppress-health-check=all",
        "--no-shrink",
        "--no-color",
        cwd=tiny.folder,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert cases, done.stdout[-2000:]
    assert int(cases[1]) > 20  # 3 for each operation that takes a request
    assert tiny.client.get("/health").status_code == 200
