"""``kvrecall bench needle`` on real engines: a local one, switched, and servers of others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvrecall.processes.child import server_environment
from kvrecall.processes.server import ServerProcess
from kvrecall.server.launch import default_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

KVRECALL = Path(sys.executable).parent / "kvrecall"
NEEDLE = ["bench", "needle", "--lengths", "1K"]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """The line of JSON the command ends with."""
    command = [str(KVRECALL), *NEEDLE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_one_engine_dense_and_by_retrieval(tmp_path: Path) -> None:
    """With all blocks selected the answers are the dense ones; with very few they are not."""
    figures = run(
        tmp_path, "--samples", "8", "--tasks", "single,chain", "--share", "1,0.01",
        "--digest", "mean", "--digest-tokens", "128", "--least", "1", "--reference",
        "--records", "all.jsonl", "--json",
    )  # fmt: skip
    assert figures["active"] is True
    assert figures["dense"]["1024"]["single"]["right"] >= 7
    whole, few, reference_whole, reference_few = figures["arms"]
    # With these options the default mode is the reference's, so the arms are equal.
    assert reference_few["name"] == "retrievalkv 0.01"
    assert reference_few["blocks_selected"] == few["blocks_selected"]
    assert reference_few["results"] == few["results"]
    assert reference_whole["blocks_selected"] == whole["blocks_selected"]
    assert (figures["share"], whole["share"], few["share"]) == (1.0, 1.0, 0.01)
    assert whole["blocks_selected"] > 2 * few["blocks_selected"] > 0
    records = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert len(records) == figures["questions"] == 16
    same = [record["replies"][0] == record["replies"][1] for record in records]
    assert sum(same) >= 14, "bfloat16, in batches as requests come: a near tie may fall either way"
    assert few["against_dense"]["1024"]["all"]["lost"] > 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As an operator would run it: a pool, and retrieval switched on by variables."""
    log = tmp_path_factory.mktemp("needle") / "log"
    arguments = [default_model(), "--host-size", "64MiB", "--max-model-len", "2048"]
    arguments += ["--kv-cache-memory-bytes", "64MiB", "--served-model-name", "recall-tiny"]
    arguments += ["--dtype", "float32"]
    settings = {
        "VLLM_PLUGINS": "retrieval",
        "VLLM_RETRIEVAL_INIT_TOKENS_NUM": "128",
        "VLLM_RETRIEVAL_LOCAL_TOKENS_NUM": "128",
        "VLLM_RETRIEVAL_DENSE_BOUNDARY": "512",
        "VLLM_RETRIEVAL_GATE": "0",
        "VLLM_RETRIEVAL_LEAST_BLOCKS": "1",
    }
    environment = {**server_environment(), **settings}
    with ServerProcess(arguments, log, lambda _: None, environment) as live:
        yield live


def test_an_endpoint_alone(server: ServerProcess, tmp_path: Path) -> None:
    figures = run(tmp_path, "--samples", "4", "--tasks", "single", "--endpoint", server.url)
    assert (figures["model"], figures["asked_as"]) == ("recall-tiny", "recall")
    assert figures["active"] is True
    assert figures["dense"] == {}
    assert figures["retrieval"]["1024"]["single"]["right"] >= 3


def test_two_endpoints_asked_as_a_chat(server: ServerProcess, tmp_path: Path) -> None:
    """The same server as both sides: then nothing may differ, right or wrong."""
    url = f"{server.url}/v1"
    figures = run(
        tmp_path, "--samples", "2", "--tasks", "values", "--ask", "instruct",
        "--endpoint", url, "--dense-endpoint", url, "--records", "all.jsonl",
    )  # fmt: skip
    assert figures["asked_as"] == "instruct"
    records = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [len(set(record["replies"])) for record in records] == [1, 1]
