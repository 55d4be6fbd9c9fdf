"""``bench long``: decoding behind up to a million tokens whose KV is made up: in host memory, with
the device's cache a few percent of it, from disk after a restart, and densely on the device."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.bench.model import BLOCK, BenchModel, Texts
from kvrecall.bench.report import Report, Times, progress
from kvrecall.environment import PLUGINS
from kvrecall.errors import KvrecallError
from kvrecall_lab.bench.decode import lengths_in
from kvrecall_lab.engines import host
from kvrecall_lab.engines.engine import ONE_THREAD, Answer, EngineProcess, Engines, Question

_TAIL = 16  # tokens of a prompt that are computed
_PATIENCE_S = 3600.0
_COUNTS, _ON_DISK = "kvrecall_retrieval_", "kvrecall_tier_blocks:disk"


def measure_long(
    contexts: Annotated[str, typer.Option(help="Tokens of the sequence: 128K,1024K.")] = "128K",
    answer: Annotated[int, typer.Option(min=2, help="Tokens decoded.")] = 64,
    layers: Times = 8,
    kv_heads: Times = 1,
    device: Annotated[float, typer.Option(help="Cache, as a share of the sequence.")] = 0.028,
    disk: Annotated[bool, typer.Option(help="Also by an engine that finds all on disk.")] = True,
    dense: Annotated[bool, typer.Option(help="Also by dense attention on the device.")] = True,
    **settings: str,
) -> Report:
    """Processor's milliseconds of a decoded token, and memory, by length; a line of JSON for
    each as it is done. Fails if the KV was not found where it should be, or stayed on the
    device. ``settings``: of retrieval, by variable."""
    model = BenchModel(512, layers, 8, kv_heads, 64, "bfloat16")
    found = []
    for context in lengths_in(contexts):
        with tempfile.TemporaryDirectory(prefix="kvrecall-long-", dir="/var/tmp") as folder:
            case = _Case(Path(folder), model, context, answer)
            figures = case.off_device(int(device * context / BLOCK), disk, settings)
            if dense:
                figures |= case.dense()
                figures["times_dense"] = round(figures["dense_ms"] / figures["ms"], 3)
        progress(json.dumps(figures))
        found.append(figures)
    names = ("context", "device_share", "tokens_read", "ms", "dense_ms", "first_s", "disk_first_s")
    rows = tuple(tuple(str(one.get(name, "")) for name in names) for one in found)
    shape = f"{layers} layers, {kv_heads} KV heads of 64: {model.token_bytes} bytes of KV a token"
    return Report("long", names, rows, {**found[-1], "all": found}, (f"{shape}; one thread",))


class _Case:
    """One length."""

    def __init__(self, folder: Path, model: BenchModel, context: int, answer: int) -> None:
        self._folder, self._context, self._model = folder, context, model
        self._engines = Engines(folder)
        sampling = {"detokenize": False, "ignore_eos": True}
        prompt = Texts().tokens(context + _TAIL)
        self._question = Question("long", prompt, answer, sampling=sampling)
        self._longest = -(-(context + _TAIL + answer) // BLOCK) * BLOCK

    def off_device(self, blocks: int, disk: bool, settings: Mapping[str, str]) -> dict[str, Any]:
        """``blocks``: of the device's cache."""
        figures: dict[str, Any] = {"context": self._context}
        figures["device_share"] = round(blocks * BLOCK / self._context, 4)
        environment = {PLUGINS: "retrieval", **settings}
        with self._started("off the device", blocks, disk, environment, figures) as engine:
            self._fill(engine)
            figures |= self._figures(engine, "host")
            counts = engine.metrics()
            did = {name: counts[f"{_COUNTS}{name}_total"] for name in _READ}
            if not did["sequences_offloaded"]:
                raise KvrecallError("the sequence did not decode off the device")
            attended = did["blocks_attended"] / did["layers_sparse"] / self._model.kv_heads
            figures["tokens_read"] = round(BLOCK * attended)
            figures["loaded_mib"] = round(counts["kvrecall_loaded_bytes_total"] / 2**20, 2)
        progress(json.dumps(figures))
        if disk:
            found: dict[str, Any] = {}
            with self._started("from disk", blocks, disk, environment, found) as engine:
                # Blocks of a large folder are found in the background; steps tell how many.
                while engine.metrics().get(_ON_DISK, 0) < self._context // BLOCK:
                    engine.answers([Question("any", (1, 2, 3), 2)])
                found |= self._figures(engine, "disk")
            figures |= {f"disk_{name}": value for name, value in found.items()}
        return figures

    def dense(self) -> dict[str, Any]:
        """Loaded to the device, and attended to there."""
        figures: dict[str, Any] = {}
        with self._started("dense", self._longest // BLOCK + 2, False, {}, figures) as engine:
            self._fill(engine)
            figures |= self._figures(engine, "host")
        return {f"dense_{name}": value for name, value in figures.items()}

    @contextmanager
    def _started(
        self,
        name: str,
        blocks: int,
        disk: bool,
        environment: Mapping[str, str],
        figures: dict[str, Any],
    ) -> Iterator[EngineProcess]:
        """Adds the seconds that its start takes to ``figures``."""
        size = int(1.07 * self._longest * self._model.token_bytes) + (64 << 20)  # with digests
        pool: dict[str, Any] = {"host_size": size, "load_or_compute": "load", "load_deadline": 600}
        pool["audit"] = "off"
        if disk:
            pool |= {"disk_path": str(self._folder / "disk"), "disk_size": size + size // 4}
        options = {
            "model": str(self._model.write(self._folder / "model", self._longest, weights=False)),
            "dtype": self._model.dtype,
            "load_format": "dummy",
            "max_model_len": self._longest,
            "max_num_seqs": 1,
            "num_gpu_blocks_override": blocks,
            "pool": pool,
            "env": {**ONE_THREAD, **environment},
        }
        progress(f"{self._context:,} tokens, {name}: an engine starts")
        began = time.monotonic()
        with self._engines.running(name, options, module=__name__) as engine:
            figures["start_s"] = round(time.monotonic() - began, 1)
            yield engine

    def _fill(self, engine: EngineProcess) -> None:
        engine.send({"do": "fill", "prompts": [self._question.prompt], "drawn": True})
        engine.await_reply("fill", _PATIENCE_S)

    def _figures(self, engine: EngineProcess, tier: str) -> dict[str, float]:
        """Of the answer: ``ms`` of the processors and of the clock between its tokens. Raises
        KvrecallError if the prompt was not found in the tier."""
        (answer,) = engine.answers([self._question], _PATIENCE_S)
        if answer.sources.get(tier, 0) < self._context:
            raise KvrecallError(f"meant from {tier}: {dict(answer.sources)}")
        return {**_paces(answer), **_memory(engine)}


_READ = ("sequences_offloaded", "blocks_attended", "layers_sparse")


def _paces(answer: Answer) -> dict[str, float]:
    steps = len(answer.tokens) - 1
    spent = {"ms": answer.decode_cpu_s, "wall_ms": answer.decode_s}
    paces = {name: round(1e3 * seconds / steps, 3) for name, seconds in spent.items()}
    return {"first_s": round(answer.ttft_s, 3), **paces}


def _memory(engine: EngineProcess) -> dict[str, float]:
    """MiB that the engine has: its own, and shared memory, which is the arena as often as it is
    mapped."""
    status = Path(f"/proc/{engine.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    names = {"own_mib": "RssAnon", "shared_mib": "RssShmem"}
    return {name: int(fields[field].split()[0]) >> 10 for name, field in names.items()}


def _admit_any_length() -> None:
    """vLLM refuses a cache that the longest sequence does not fit, as a prompt is computed on the
    device; here all prompts are found in the pool."""
    from vllm.v1.core import kv_cache_utils

    vars(kv_cache_utils)["_check_enough_kv_cache_memory"] = lambda *_: None


if __name__ == "__main__":
    host.main(before_engine=_admit_any_length)
