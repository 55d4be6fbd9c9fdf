"""What an engine can do without ends no engine, no step and no request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace as Made
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.collector import by_grpc
from vllm.v1.request import RequestStatus

from engines.vllm.clumsy import clumsy
from engines.vllm.connector.test_scheduler import Bench
from engines.vllm.engine import Engine, prompt_of
from kvrecall.config import RecallSettings
from kvrecall.engines.vllm.connector.metrics import RecallStats
from kvrecall.engines.vllm.serving.insight import ConnectorReports, RequestLog, Steps
from kvrecall.engines.vllm.wire import StepReport
from kvrecall.nicety import niceties, nicety
from kvrecall.pool import Pool
from kvrecall.server.dashboard.history import History
from kvrecall.server.metrics import MindieMetrics

BLOCK = 128


def test_a_nicety_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    @nicety("the estimate of nothing", lambda share, of=1: share * of)
    def estimate(share: int, of: int = 1) -> float:
        return share / 0

    @niceties("the diary of a test")
    class Diary:
        def __init__(self) -> None:
            self.lines = 0

        def note(self, line: str) -> None:
            self.lines += 1
            self._keep(line)

        def _keep(self, line: str) -> None:
            raise KeyError(line)

    assert [estimate(3), estimate(3, of=2)] == [3, 6]
    diary = Diary()
    diary.note("one")
    diary.note("two")
    assert diary.lines == 2, "it is tried again"
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.args for record in told] == [
        ("the estimate of nothing",),
        ("the diary of a test",),
    ]
    assert all(record.exc_info and record.name == __name__ for record in told)


def test_a_server_whose_niceties_all_fail_answers_its_requests() -> None:
    """The parts of the API process that vLLM, uvicorn or a request call."""
    reports, steps, history = ConnectorReports(), Steps(), History(CollectorRegistry())
    metrics = MindieMetrics("m", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    registry = CollectorRegistry(auto_describe=False)

    async def outputs() -> AsyncGenerator[Any, None]:
        for text in ("a", "b"):
            yield Made(text=text)

    async def watched() -> list[str]:
        log = RequestLog(reports)
        return [one.text async for one in log.watch("id", outputs(), lambda: "id")]

    with clumsy() as names:
        assert len(names) > 40
        reader = reports.stat_logger(None)
        reader.record(Made(kv_connector_stats={"splits": 7}))
        steps.note(Made())
        history.take()
        assert asyncio.run(watched()) == ["a", "b"]
        registry.register(metrics)
        assert generate_latest(registry) == b""
        first = RecallStats.of({"requests": 1})
        assert first.aggregate(RecallStats.of({})) is first
        assert first.reduce() == {}


def test_a_scheduler_side_whose_niceties_all_fail_saves_and_recalls() -> None:
    settings = RecallSettings.from_mapping({"host_size": "1MiB"})
    with Pool.open(settings.pool) as pool, clumsy():
        bench = Bench(pool)
        first = bench.request("first", 40)
        orders = bench.step(first, 40)
        bench.report(orders)
        bench.end(first, RequestStatus.FINISHED_STOPPED)
        again = bench.request("again", 40)
        assert bench.side.match(again, 0) == (32, True), "all that was found, at no known cost"
        bench.side.allocated(again, (bench.blocks["again"],), 32)
        (load,) = bench.step(again, 8).loads
        bench.side.reported(StepReport(timed={1: 0.1}), {load.request_id}, set())
        assert pool.stats().leases == 0


@pytest.mark.engine
def test_an_engine_whose_niceties_all_fail_computes_and_recalls_as_before(
    start: Callable[..., Engine], model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    prompt = prompt_of(5 * BLOCK + 30, 1)
    common = {"model": str(model_folder("qwen3")), "dtype": "float32"}
    with by_grpc() as (endpoint, _):
        engine = start(
            **common,
            pool={"host_size": "64MiB", "disk_path": str(tmp_path), "disk_size": "256MiB"},
            otlp_traces_endpoint=endpoint,
            prelude="clumsy",
        )
        computed, device = engine.ask(prompt), engine.ask(prompt)
        recalled = engine.ask_anew(prompt)
        engine.ask(prompt_of(700, 2), prompt_logprobs=1)
    assert computed["tokens"] == device["tokens"] == recalled["tokens"]
    assert recalled["from"]["host"] == 5 * BLOCK
    log = engine.log.read_text()
    failed = [line for line in log.splitlines() if "failed and is left out" in line]
    assert len(failed) == len(set(failed)) > 8
    assert "is clumsy" in log
    plain = start(**common)
    assert plain.ask(prompt)["tokens"] == computed["tokens"]
