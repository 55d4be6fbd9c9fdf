"""Whole servers on the device: the same tokens from every tier, and time to first token against
vLLM's own offloading connector in the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvrecall.lab.bench.model import Texts
from kvrecall.lab.bench.report import percentiles
from kvrecall.lab.engines.server import Answer, Progress, ServerProcess
from kvrecall.lab.gpu_check.models import SMALL, Shape, model_folder
from kvrecall.lab.gpu_check.outcome import CheckError

BLOCK = 128

FORMS: Mapping[str, Sequence[str]] = {
    "eager": ("--enforce-eager",),
    "graphs": ("--no-enforce-eager",),
    "piecewise": (
        "--no-enforce-eager",
        "--",
        "--compilation-config",
        '{"cudagraph_mode": "PIECEWISE"}',
    ),
    "fp8": ("--enforce-eager", "--kv-cache-dtype", "fp8"),
}
"""Ways to run a model, by options of ``kvrecall serve``."""


def check_form(name: str, progress: Progress, device_bytes: int = 256 << 20) -> dict[str, int]:
    """One way to run a model: an answer from host memory and, after a restart, from disk is token
    for token that from the device, which is vLLM's own prefix cache. Returns prompt tokens
    recalled by tier. To the computed answer none is compared: a hit and a computed prompt take
    other kernels, and random weights in 16 bits make other tokens of that, pool or not.

    Raises CheckError for another token or a tier that was not hit, EngineError for a server that
    does not start.
    """
    with model_folder(SMALL, 8192, weights=True) as (folder, path):
        words = [str(path), "--kv-cache-memory-bytes", str(device_bytes), "--host-size", "256MiB"]
        words += ["--disk-path", str(folder / "disk"), "--disk-size", "1GiB"]
        words += ["--pool-config", str(_pool(folder)), *FORMS[name]]
        texts = Texts()
        document, other = texts.document(20 * BLOCK + 16), texts.document(4 * BLOCK + 16)
        recalled = {}
        with ServerProcess(words, folder / "server.log", progress) as server:
            server.ask(other, 1)
            server.ask(document, 24)
            device = server.ask(document, 24)
            recalled["device"] = _found(device, "device")
            server.settle()
            server.forget_device()
            recalled["host"] = _same(device, server.ask(document, 24), "host")
            server.settle()
        with ServerProcess(words, folder / "again.log", progress) as server:
            server.ask(other, 1)  # the first hit after a start is audited
            recalled["disk"] = _same(device, server.ask(document, 24), "disk")
    return recalled


def _pool(folder: Path) -> Path:
    """Settings by which whatever is found is loaded: so small a model computes as fast."""
    file = folder / "pool.json"
    file.write_text(json.dumps({"load_or_compute": "load", "load_deadline": 60}))
    return file


def first_token(
    contexts: Sequence[int],
    shape: Shape,
    repetitions: int,
    progress: Progress,
    connectors: Sequence[str] = ("kvrecall", "OffloadingConnector"),
) -> dict[str, dict[str, dict[str, float]]]:
    """Median seconds to the first token of prompts of ``contexts`` tokens, by connector and source:
    computed, from the device, and from host memory after the device's cache was emptied. The
    weights are random and made in place, the same for both."""
    longest = max(contexts)
    host = 3 * longest * shape.token_bytes
    told = {}
    with model_folder(shape, longest + 1024, weights=False) as (folder, path):
        common = [str(path), "--max-model-len", str(longest + 512), "--block-size", str(BLOCK)]
        for name in connectors:
            progress(f"{name}: starting")
            with ServerProcess(
                [*common, *_connected(name, host)], folder / "server.log", progress
            ) as server:
                own = name == "kvrecall"
                told[name] = _first_tokens(server, contexts, repetitions, own, progress)
    return told


def _connected(connector: str, host_bytes: int) -> list[str]:
    """Options of ``kvrecall serve`` for host memory behind this connector."""
    dummy = ["--", "--load-format", "dummy"]
    if connector == "kvrecall":
        return ["--host-size", str(host_bytes), *dummy]
    theirs = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
    }
    return ["--no-pool", *dummy, "--kv-transfer-config", json.dumps(theirs)]


def _first_tokens(
    server: ServerProcess,
    contexts: Sequence[int],
    repetitions: int,
    settles: bool,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    texts = Texts()
    server.ask(texts.document(4 * BLOCK), 2)
    told = {}
    for context in contexts:
        times: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
        for _ in range(repetitions):
            document = texts.document(context)
            times["computed"].append(server.ask(document, 2).ttft_s)
            times["device"].append(server.ask(document, 2).ttft_s)
            if settles:
                server.settle()
            server.forget_device()
            times["host"].append(server.ask(document, 2).ttft_s)
            server.forget_device()
        told[str(context)] = {name: percentiles(seconds)["p50"] for name, seconds in times.items()}
        progress(f"  {context} tokens: {told[str(context)]}")
    return told


def _same(device: Answer, again: Answer, tier: str) -> int:
    if again.tokens != device.tokens:
        raise CheckError(f"other tokens from {tier}: {again.tokens} instead of {device.tokens}")
    return _found(again, tier)


def _found(answer: Answer, tier: str) -> int:
    found = answer.recalled.get(tier, 0)
    if found < 20 * BLOCK:
        raise CheckError(f"{found} of {20 * BLOCK} tokens came from {tier}: {answer.recalled}")
    return found
