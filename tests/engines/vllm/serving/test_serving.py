"""The parts of vLLM's server room that need vLLM but no engine."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import selectors
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from server.live import all_gone
from support.warm import CONTEXT

from kvrecall.engines.base import Limits, ServeSpec
from kvrecall.engines.vllm.compat import waits
from kvrecall.environment import WITH_PARENT

pytestmark = pytest.mark.engine


def outputs(*delays: float, seen: list[str]) -> Any:
    async def generate(self: object, *_: Any, **__: Any) -> AsyncGenerator[int, None]:
        try:
            for index, delay in enumerate(delays):
                await asyncio.sleep(delay)
                yield index
        finally:
            seen.append("closed")

    return generate


class Leaps(selectors.SelectSelector):
    """Leaps over every wait for a timer; otherwise the time stands still."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(timeout and 0.0)


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time does not depend on the machine's load."""

    def __init__(self) -> None:
        self._leaps = Leaps()
        super().__init__(self._leaps)

    def time(self) -> float:
        return self._leaps.now


@pytest.mark.parametrize(
    ("limits", "delays", "got", "said"),
    [
        (Limits(), (0, 3), [0, 1], ""),
        (Limits(token_timeout_s=2), (0, 1, 1, 1), [0, 1, 2, 3], ""),
        (Limits(token_timeout_s=2), (0, 90), [0], "tokenTimeout"),
        (Limits(total_timeout_s=2), (0, 1, 90), [0, 1], "e2eTimeout"),
        (Limits(token_timeout_s=1, total_timeout_s=90), (90,), [], "tokenTimeout"),
    ],
)
def test_timeouts(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, delays: Any, got: list[int], said: str
) -> None:
    from vllm.sampling_params import SamplingParams

    from kvrecall.engines.vllm.serving.served_llm import AsyncLLM, RequestTimeoutError, ServedLLM

    seen: list[str] = []
    monkeypatch.setattr(AsyncLLM, "generate", outputs(*delays, seen=seen))

    class Engine(ServedLLM):
        def __del__(self) -> None:
            """There is nothing to shut down."""

    class NoLog:
        """The outputs here are numbers, of which there is nothing to note."""

        def watch(self, request_id: str, outputs: Any, engine_id: Any) -> Any:
            return outputs

    engine = object.__new__(Engine)
    engine.limits = limits
    engine.request_log = NoLog()

    async def run(told: list[Any]) -> None:
        async for output in engine.generate("prompt", SamplingParams(), "r"):
            told.append(output)

    told: list[Any] = []
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        if said:
            with pytest.raises(RequestTimeoutError, match=said):
                runner.run(run(told))
        else:
            runner.run(run(told))
    assert told == got
    assert seen == ["closed"]


@pytest.mark.parametrize(
    ("text", "decoded", "special", "parts"),
    [
        ("ab", ["a", "b"], "..", ["a", "b"]),
        ("ab", ["a", "b", "<e>"], "..s", ["a", "b", "<e>"]),
        ("ab", ["a", "b", " stop"], "...", ["a", "b", ""]),
        ("a世", ["a", "", "", "世"], "....", ["a", "", "", "世"]),
        ("\x1f�mx", ["\x1f", "", "m", "x"], "....", ["\x1f", "", "�m", "x"]),
        ("a�", ["a", ""], "..", ["a", "�"]),
        ("", ["<e>"], "s", ["<e>"]),
        ("", [], "", []),
    ],
)
def test_text_over_tokens(text: str, decoded: list[str], special: str, parts: list[str]) -> None:
    from kvrecall.engines.vllm.serving.engine import _spread

    flags = [char == "s" for char in special]
    assert _spread(text, decoded, flags) == parts
    assert "".join(p for p, flag in zip(parts, flags, strict=True) if not flag) == text


def test_ledger_adds_prompts_and_counts_sequences_once() -> None:
    from kvrecall.engines.vllm.serving.openai_handlers import Ledger

    def output(key: str, prompt: int, cached: int, report: object = None, index: int = 0) -> Any:
        return SimpleNamespace(
            request_id=key,
            prompt_token_ids=[0] * prompt,
            num_cached_tokens=cached,
            kv_transfer_params=report and {"kvrecall": report},
            outputs=[SimpleNamespace(index=index)],
        )

    ledger = Ledger(True)
    assert ledger.split() is None
    ledger.note(output("a", 300, 0))
    ledger.note(output("a", 300, 256, {"device": 0, "host": 128, "computed": 172}))
    ledger.note(output("a", 300, 256, {"device": 0, "host": 0, "computed": 300}))  # a failed load
    ledger.note(output("a", 300, 256, {"device": 256, "computed": 44}, index=1))
    ledger.note(output("b", 200, 128))
    split = ledger.split()
    assert split is not None
    assert split.as_dict() == {
        "device": 0, "host": 0, "disk": 0, "remote": 0, "computed": 372, "unspecified": 128
    }  # fmt: skip


def test_splits_that_travel_with_statistics_are_found_by_the_names_of_the_engine() -> None:
    from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter

    from kvrecall.engines.vllm.serving.insight import ConnectorReports

    reports = ConnectorReports(remembered=2)
    logger = PerEngineStatLoggerAdapter(None, [0], reports.stat_logger)
    step = {"cmpl-a-0-0123abcd": {"host": 1}, "1_cmpl-b-89abcdef": {"host": 2}}
    logger.record(SimpleNamespace(kv_connector_stats={"counts": {}, "splits": step}), None)
    logger.record(None, None)
    logger.log()
    reports.take({"splits": {"0_cmpl-b-89abcdef": {"host": 3}, "cmpl-b-01234567": {"host": 9}}})
    assert reports.split_of("cmpl-b-01234567") == {"host": 9}, "of the same name"
    assert reports.split_of("cmpl-a-0-0123abcd") is None, "the oldest is forgotten"
    reports = ConnectorReports()
    reports.take({"splits": step})
    reports.take({"splits": {"0_cmpl-b-89abcdef": {"host": 3}}})
    assert reports.split_of("cmpl-b-89abcdef") == {"host": 2}, "of several samples the first counts"
    new, failed = ({"reason": reason, "from": 0, "tokens": 9} for reason in ("new", "failed"))
    reports.take({"splits": {}, "misses": {"0_cmpl-b-89abcdef": new}})
    assert reports.miss_of("cmpl-b-89abcdef") == new
    reports.take({"misses": {"1_cmpl-b-89abcdef": {**new, "tokens": 1}}})
    assert reports.miss_of("cmpl-b-89abcdef") == new, "the first sample's"
    reports.take({"misses": {"0_cmpl-b-89abcdef": failed}})
    assert reports.miss_of("cmpl-b-89abcdef") == failed, "its load failed later"
    assert reports.heat.heat() is None


def test_a_request_is_not_shorter_than_the_wait_for_its_first_token() -> None:
    """vLLM counts it from the arrival, which precedes the tokenization of a long prompt."""
    from kvrecall.engines.vllm.serving.insight import ConnectorReports, RequestLog

    arrived = time.time() - 5
    stats = SimpleNamespace(arrival_time=arrived, num_generation_tokens=1, first_token_latency=5.0)
    output: Any = SimpleNamespace(
        metrics=stats, kv_transfer_params=None, prompt_token_ids=[1, 2], num_cached_tokens=0,
        outputs=[],
    )  # fmt: skip

    async def outputs() -> AsyncGenerator[Any, None]:
        yield output

    async def run() -> None:
        async for _ in requests.watch("r", outputs(), lambda: "r-0123abcd"):
            pass

    requests = RequestLog(ConnectorReports())
    asyncio.run(run())
    (view,) = requests.ended(0)
    assert view.began == arrived
    assert view.ended - view.began >= view.ttft_s


def test_command_line() -> None:
    from kvrecall.engines.vllm.serving.app import command_line, connector_config, parse_args

    options = {"a": 1, "b": True, "c": False, "d": None, "e": {"x": 1}, "f": ["y", "z"]}
    words = "--a 1 --b --no-c --e".split()
    assert command_line(options) == [*words, '{"x": 1}', "--f", "y", "z"]
    spec = ServeSpec(
        "model", "127.0.0.1", 1234, {"max-model-len": 99}, ("--max-model-len", "77"), {"a": 1}
    )
    args = parse_args(spec)
    assert (args.model, args.host, args.port, args.max_model_len) == (
        "model", "127.0.0.1", 1234, 77
    )  # fmt: skip
    assert args.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert connector_config({"a": 1})["kv_connector_extra_config"] == {"a": 1}


@pytest.mark.parametrize("word", ["--gpu-memory-utilization", "--gpu_memory_utilization=0.3"])
def test_a_memory_factor_is_no_default_of_ours(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """On a CPU kvrecall bounds the cache by bytes, which would win over the factor."""
    from vllm.platforms import current_platform

    from kvrecall.engines.vllm.serving.app import parse_args

    if not current_platform.is_cpu():
        pytest.skip("elsewhere kvrecall sets no size")
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    plain = ServeSpec(model="m", host="127.0.0.1", port=1, options={})
    words = (word,) if "=" in word else (word, "0.3")
    assert parse_args(plain).kv_cache_memory_bytes > 0
    lowered = parse_args(replace(plain, extra_args=words))
    assert lowered.kv_cache_memory_bytes is None
    assert lowered.gpu_memory_utilization == 0.3


def test_an_engine_core_ends_with_its_parent() -> None:
    """A server that is killed takes the engine core with it in which vLLM has loaded plug-ins."""
    told, tell = CONTEXT.Pipe(duplex=False)
    parent = CONTEXT.Process(target=_parent, args=(tell,))
    parent.start()
    core = psutil.Process(told.recv())
    parent.kill()
    parent.join()
    assert all_gone([core])


def _parent(tell: Connection) -> None:
    core = multiprocessing.get_context("fork").Process(
        target=_core, args=(tell,), name="EngineCore"
    )
    core.start()
    core.join()


def _core(tell: Connection) -> None:
    os.environ[WITH_PARENT] = "1"
    waits.register()
    tell.send(os.getpid())
    time.sleep(600)


SCHEMA: dict[str, Any] = {"type": "array", "minItems": 3, "maxItems": 10**9}
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
UNSERVED: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"json": json.dumps(SCHEMA)},
    {"json": json.dumps(SCHEMA).replace("maxItems", r"max\u0049tems")},
    {"json": {"properties": {"minItems": {"anyOf": [SCHEMA, True]}}}},
    {"json": {"prefixItems": [{"type": "array", "minItems": 60_000}] * 2}},
    {"json": {"minItems": float("inf")}},
    {"structural_tag": json.dumps(TAG)},
    {"grammar": 'start: %json {"type": "array", "minItems" : 1e9}'},
    {"grammar": r'start: %json {"type": "array", "m\u0069nItems":1000000000}'},
]
SERVED: list[dict[str, Any]] = [
    {"json": {"type": "array", "minItems": 1, "maxItems": 1000}},
    {"json": {"properties": {"minItems": {"type": "integer"}}}},
    {"json": {"minItems": "many", "maxItems": True}},
    {"json": "["},
    {"regex": "a{1,1000000}"},
    {"grammar": 'start: "minItems: 1000000000"'},
]


def structured(wanted: dict[str, Any]) -> Any:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams

    return SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))


@pytest.mark.parametrize("wanted", UNSERVED, ids=lambda v: str(v)[:60])
def test_schemas_that_would_take_all_memory_are_refused(wanted: dict[str, Any]) -> None:
    from vllm.exceptions import VLLMValidationError

    from kvrecall.engines.vllm.serving import sampling

    with pytest.raises(VLLMValidationError, match="100000 items together"):
        sampling.check(structured(wanted))


@pytest.mark.parametrize("wanted", SERVED, ids=lambda v: str(v)[:60])
def test_other_schemas_are_left_to_vllm(wanted: dict[str, Any]) -> None:
    from kvrecall.engines.vllm.serving import sampling

    sampling.check(structured(wanted))


def test_a_body_is_refused_at_its_first_wrong_item() -> None:
    """Pydantic would list each error of each item for each form that it might have."""
    from fastapi import FastAPI
    from fastapi.testclient import TestClient
    from pydantic import BaseModel
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    from kvrecall.engines.vllm.compat.serving import stop_at_first_error

    class Inner(BaseModel):
        numbers: list[int]

    class Asked(BaseModel):
        items: list[Inner | list[int]]

    def asked(body: Any) -> int:
        return len(getattr(body, "items", ()))

    def responses(body: Any) -> int:
        return 0

    app = FastAPI()
    for path, route, form in (
        ("/asked", asked, Asked),
        ("/v1/responses", responses, ResponsesRequest),
    ):
        route.__annotations__ = {"body": form}
        app.post(path)(route)
    client = TestClient(app)

    def errors(path: str, body: object) -> int:
        return len(client.post(path, json=body).json()["detail"])

    many: Any = {"items": ["x"] * 1000}
    assert errors("/asked", many) == 2000
    stop_at_first_error(app)
    assert errors("/asked", many) == 2
    assert errors("/asked", {"items": [{"numbers": ["x"] * 1000}]}) == 2
    assert client.post("/asked", json={"items": [[1, 2], {"numbers": [3]}]}).json() == 2
    one = errors("/v1/responses", {"input": [{}]})
    assert errors("/v1/responses", {"input": [{}] * 1000}) == one
    assert client.post("/v1/responses", json={"model": "m", "input": "x"}).json() == 0
