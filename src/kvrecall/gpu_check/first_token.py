"""Seconds to the first token in whole servers, by where a prompt's prefix comes from, beside other
connectors. The server tells where: a prefix that it computed instead of loading fails the check.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvrecall.bench.model import BLOCK, TAIL, BenchModel, Texts
from kvrecall.bench.report import percentiles
from kvrecall.gpu_check import CheckError, Finding, Say
from kvrecall.gpu_check.servers import own_options
from kvrecall.processes.server import ServerProcess

OURS = "kvrecall"
_COUNTERS = {
    "device": "vllm:prefix_cache_hits_total",
    "host": "vllm:external_prefix_cache_hits_total",
}
"""Recalled tokens, as vLLM counts them: other connectors do not tell by prompt."""

TOGETHER = 4
"""Prompts that come at once, of the middle one of the lengths: together no longer than the longest
of 8K, 32K and 128K tokens."""


@dataclass
class FirstTokens:
    """Measures prefixes of each of ``contexts``, whole blocks, one server at a time. The device's
    cache has room for the longest, host memory for one of each. The weights are random and
    generated in place, the same for all. ``pool``: settings of kvrecall's pool."""

    shape: BenchModel
    contexts: Sequence[int]
    repetitions: int
    folder: Path
    say: Say
    device_bytes: int = 18 << 30
    host_bytes: int = 24 << 30
    pool: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds: dict[str, dict[int, dict[str, list[float]]]] = defaultdict(dict)
        """By connector, context and source."""
        self.elsewhere: list[str] = []
        self.shape.write(self.folder / "model", max(self.contexts) + 1024, "llama", weights=False)

    def measure(self, connectors: Sequence[str]) -> Finding:
        """Computed, from the device, and from host memory after the device's cache was emptied;
        there also of some that come at once. Raises CheckError, after all, if a prefix did not come
        from where it should."""
        for name in connectors:
            self.say(f"{name}: starting")
            with self.server(name) as server:
                texts = Texts()
                first = texts.document(4 * BLOCK + TAIL)
                for _ in range(2):  # kernels are compiled, and kvrecall audits its first hit
                    server.ask(first, 2)
                    server.settle()
                    server.forget_device()
                for context in self.contexts:
                    for _ in range(self.repetitions):
                        document = texts.document(context + TAIL)
                        self.ask(server, name, context, "computed", document)
                        self.ask(server, name, context, "device", document)
                        server.settle()
                        server.forget_device()
                        self.ask(server, name, context, "host", document)
                        server.forget_device()
                    found = self.seconds[name][context]
                    self.say(f"{name}, {context} tokens: {found}", seconds=found)
                context = self.contexts[len(self.contexts) // 2]
                documents = [texts.document(context + TAIL) for _ in range(TOGETHER)]
                for document in documents:
                    server.ask(document, 2)
                server.settle()
                server.forget_device()
                self.ask(server, name, context, "host", *documents)
                found = self.seconds[name][context]
                self.say(f"{name}, {TOGETHER} at once of {context} tokens: {found}", seconds=found)
        return self.finding()

    def finding(self) -> Finding:
        """What was measured so far."""
        if self.elsewhere:
            raise CheckError("; ".join(self.elsewhere))
        found: dict[str, dict[str, Any]] = {name: {} for name in self.seconds}
        for name, of in self.seconds.items():
            for context, times in of.items():
                found[name][str(context)] = {at: percentiles(some) for at, some in times.items()}
        host = {name: [one["host"]["p50"] for one in of.values()] for name, of in found.items()}
        return f"from host memory, seconds by length: {host}", {"seconds": found}

    def ask(
        self, server: ServerProcess, name: str, context: int, source: str, *documents: str
    ) -> None:
        """Times a prompt whose prefix should come from ``source``, or some that come together."""
        before = {tier: server.metric(counter) for tier, counter in _COUNTERS.items()}
        with ThreadPoolExecutor(len(documents)) as threads:
            answers = list(threads.map(lambda document: server.ask(document, 2), documents))
        hits = {tier: server.metric(_COUNTERS[tier]) - before[tier] for tier in before}
        shares = {tier: count / len(documents) for tier, count in hits.items()}
        found = [
            dict(one.recalled)
            if name == OURS
            else {**shares, "computed": one.prompt_tokens - sum(shares.values())}
            for one in answers
        ]
        times = self.seconds[name].setdefault(context, {})
        if min(one.get(source, 0) for one in found) < context:
            meant = f"{len(documents)} of {context} tokens meant from {source}"
            self.elsewhere.append(f"{name}: {meant}: {found}")
            return
        kind = source if len(documents) == 1 else "together"
        times.setdefault(kind, []).extend(one.ttft_s for one in answers)

    def server(self, name: str, *options: str) -> ServerProcess:
        """With this connector, "" without any. ``options``: more of ``kvrecall serve``."""
        device = str(torch.accelerator.current_accelerator() or "cpu")
        pool = self.folder / "pool.json"
        pool.write_text(json.dumps(dict(self.pool)))
        words = [str(self.folder / "model"), "--max-model-len", str(max(self.contexts) + 512)]
        words += ["--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(self.device_bytes)]
        ours = ["--pool-config", str(pool), "--host-size", str(self.host_bytes), *options]
        words += [*(ours if name == OURS else ["--no-pool"]), *own_options(device)]
        if name not in (OURS, ""):
            room = {"cpu_bytes_to_use": self.host_bytes}
            theirs = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": room}
            words += ["--kv-transfer-config", json.dumps(theirs)]
        return ServerProcess(words, self.folder / f"{name or 'plain'}.log", self.say)
