"""`vllm serve` with the connector, by the command lines that the pages give."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docs.pages import ROOT, commands
from server.live import LiveServer

from kvrecall.demo.cli import TRAINED
from kvrecall.processes.ports import free_port

pytestmark = pytest.mark.engine

VLLM = Path(sys.executable).parent / "vllm"
PAGE = "docs/getting-started.md"
TEXT = "The owner of the amber falcon keeps a garden behind the old mill. " * 40


def documented(page: str, folder: Path, port: int) -> list[str]:
    """What the page has after ``vllm serve``, small enough for a test."""
    (command,) = (each for each in commands(ROOT / page) if each.shape == "vllm serve")
    line = command.line.replace("8GiB", "64MiB").replace("100GiB", "128MiB")
    line = line.replace("/var/cache/kv", str(folder / "kv"))
    # Whatever is found is loaded: on a busy machine computing may look faster.
    line = line.replace('"host_size"', '"load_or_compute": "load", "host_size"')
    _, _, model, *words = type(command)(command.page, "", line).words
    small = f"--port {port} --served-model-name tiny --dtype float32 --max-model-len 8192"
    more = "--enforce-eager --max-num-seqs 8 --kv-cache-memory-bytes 67108864"
    assert model == "MODEL"
    return [str(TRAINED), *words, *small.split(), *more.split()]


def from_host(server: LiveServer) -> float:
    """Prompt tokens that came from the pool's memory, as the server's metrics count them."""
    text = server.client.get("/metrics").text
    found = re.findall(
        r'^kvrecall_prompt_tokens_total{.*source="host".*} (\S+)', text, re.MULTILINE
    )
    return sum(map(float, found))


def split_of_a_reply(page: str, port: int) -> dict[str, int]:
    """What the page's request prints: prompt tokens by where they came from."""
    (command,) = (each for each in commands(ROOT / page) if each.shape == "curl")
    line = command.line.replace("8000", str(port)).replace("MODEL", "tiny")
    said = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True).stdout
    return dict(json.loads(f"{{{said}}}")["kvrecall"])


@pytest.mark.parametrize(
    "warm", [True, pytest.param(False, marks=pytest.mark.long)], ids=["forked", "the command"]
)
def test_the_documented_lines_serve_and_recall(tmp_path: Path, warm: bool) -> None:
    port = free_port()
    words = documented(PAGE, tmp_path, port)
    url = f"http://127.0.0.1:{port}"
    server = LiveServer(tmp_path, words, url, program=(VLLM, "serve"), warm=warm)
    asked = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "temperature": 0}
    try:
        server.wait_ready()
        until, texts = time.monotonic() + 120, set()
        while from_host(server) == 0:
            assert time.monotonic() < until, server.log[-4000:]
            reply = server.client.post("/v1/completions", json=asked)
            assert reply.status_code == 200, reply.text
            texts.add(reply.json()["choices"][0]["text"])
            server.client.post("/reset_prefix_cache")
        assert len(texts) == 1
        assert "disk tier: 0 blocks in" in server.log, "the pool's own lines are in vLLM's log"
        first, again = (split_of_a_reply(PAGE, port) for _ in range(2))
        assert first["computed"] == sum(first.values()), "a text that was not asked before"
        assert again["device"] > again["computed"]
        assert sum(again.values()) == sum(first.values())
    finally:
        server.close()
