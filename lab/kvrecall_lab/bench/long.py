"""``bench long``: decoding behind up to a million tokens whose KV is made up: in host memory, with
the device's cache a few percent of it; on the device, by retrieval and densely; from disk after a
restart."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
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
_BATCH = 256  # tokens of a step, so that a start tries no more
_PATIENCE_S = 3600.0
_COUNTS, _ON_DISK = "kvrecall_retrieval_", "kvrecall_tier_blocks:disk"


def measure_long(
    contexts: Annotated[str, typer.Option(help="Tokens of the sequence: 128K,1024K.")] = "128K",
    answer: Annotated[int, typer.Option(min=2, help="Tokens decoded.")] = 64,
    layers: Times = 8,
    hidden: Times = 512,
    heads: Times = 8,
    kv_heads: Times = 1,
    head_dim: Times = 64,
    sequences: Annotated[int, typer.Option(min=1, help="Asked at once.")] = 1,
    turns: Annotated[int, typer.Option(min=1, help="Each engine answers in each.")] = 1,
    device: Annotated[float, typer.Option(help="Cache, as a share of the sequence.")] = 0.028,
    disk: Annotated[bool, typer.Option(help="Also by an engine that finds all on disk.")] = True,
    dense: Annotated[bool, typer.Option(help="Also by dense attention on the device.")] = True,
    here: Annotated[bool, typer.Option(help="Also by retrieval on the device.")] = False,
    **settings: str,
) -> Report:
    """Processor's milliseconds of a decoded token, and memory, by length; a line of JSON for
    each as it is done. Fails if the KV was not found where it should be, or stayed on the
    device. ``settings``: of retrieval, by variable."""
    model = BenchModel(hidden, layers, heads, kv_heads, head_dim, "bfloat16")
    retrieval = {PLUGINS: "retrieval", **settings}
    found = []
    for context in lengths_in(contexts):
        with tempfile.TemporaryDirectory(prefix="kvrecall-long-", dir="/var/tmp") as folder:
            case = LongCase(Path(folder), model, context, answer, sequences, disk)
            blocks = int(device * context / BLOCK)
            beside: dict[str, Mapping[str, str]] = {"here": retrieval} if here else {}
            beside |= {"dense": {}} if dense else {}
            figures = case.measure(blocks, retrieval, beside, turns)
            if disk:
                figures |= case.from_disk(blocks, retrieval)
        progress(json.dumps(figures))
        found.append(figures)
    names = ("context", "tokens_read", "ms", "here_ms", "dense_ms", "times_dense", "off_over_on")
    rows = tuple(tuple(str(one.get(name, "")) for name in names) for one in found)
    shape = f"{layers} layers of {hidden}, {kv_heads} KV heads of {head_dim}"
    notes = (f"{shape}: {model.token_bytes} bytes of KV a token; one thread; medians",)
    return Report("long", names, rows, {**found[-1], "all": found}, notes)


class LongCase:
    """One length. ``more``: options of the engines."""

    def __init__(
        self,
        folder: Path,
        model: BenchModel,
        context: int,
        answer: int,
        sequences: int,
        disk: bool,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._folder, self._context, self._model, self._disk = folder, context, model, disk
        self._engines, self._texts, self._more = Engines(folder), Texts(), more
        self._answer, self._sequences = answer, sequences
        self._questions = self._asked()
        self._short = self._question("short", _TAIL)
        self._longest = -(-(context + _TAIL + answer) // BLOCK) * BLOCK

    def _asked(self, heat: float = 0.0) -> list[Question]:
        """Others each time. ``heat``: the temperature at which their answers' tokens are drawn."""
        tokens = self._context + _TAIL
        return [self._question(str(at), tokens, heat) for at in range(self._sequences)]

    def _question(self, name: str, tokens: int, heat: float = 0.0) -> Question:
        sampling = {"detokenize": False, "ignore_eos": True, "temperature": heat}
        return Question(name, self._texts.tokens(tokens), self._answer, sampling=sampling)

    def by_spread(
        self, blocks: int, retrieval: Mapping[str, str], spreads: Sequence[float]
    ) -> Iterator[dict[str, Any]]:
        """Off the device, whose cache has so many ``blocks``, by one engine, behind KV of each of
        these ``spreads`` (``kv.store_drawn``)."""
        with self._started("off", blocks, retrieval, {}) as engine:
            for spread in spreads:
                self._questions = self._asked(1.0)  # queries, too, differ from step to step
                self._fill(engine, spread)
                before = engine.metrics()
                yield {"spread": spread, **self._paces(engine), **self._read(engine, before)}

    def _fill(self, engine: EngineProcess, spread: float = 0.0) -> None:
        prompts = [one.prompt for one in self._questions]
        engine.send({"do": "fill", "prompts": prompts, "drawn": True, "spread": spread})
        engine.await_reply("fill", _PATIENCE_S)

    def measure(
        self,
        blocks: int,
        retrieval: Mapping[str, str],
        beside: Mapping[str, Mapping[str, str]],
        turns: int,
    ) -> dict[str, Any]:
        """Off the device, whose cache has so many ``blocks``; by turns with engines ``beside`` it,
        which have all on the device, by their environments."""
        figures: dict[str, Any] = {"context": self._context}
        figures["device_share"] = round(blocks * BLOCK / self._context, 4)
        whole = max(blocks, self._longest // BLOCK + 2)
        with ExitStack() as stack:
            off = stack.enter_context(self._started("off", blocks, retrieval, figures))
            self._fill(off)
            engines = {"": off}
            for name, environment in beside.items():
                start = self._started(name, whole, environment, {}, host.MADE_UP)
                engines[f"{name}_"] = stack.enter_context(start)
            each = [{name: self._paces(one) for name, one in engines.items()} for _ in range(turns)]
            for name, engine in engines.items():
                some = [turn[name] for turn in each]
                figures |= {f"{name}{key}": _middle([one[key] for one in some]) for key in some[0]}
                figures |= {f"{name}{key}": value for key, value in _memory(engine).items()}
                figures[f"{name}ms_of_turns"] = [one["ms"] for one in some]
            figures |= self._read(off)
            ms = [{name: one["ms"] for name, one in turn.items()} for turn in each]
            if "dense_" in engines:
                (short,) = engines["dense_"].answers([self._short])
                rest = 1e3 * short.decode_cpu_s / (len(short.tokens) - 1)
                figures["attention_share"] = round(1 - rest / figures["dense_ms"], 3)
                figures["times_dense"] = _middle([one["dense_"] / one[""] for one in ms])
            if "here_" in engines:
                figures["off_over_on"] = _middle([one[""] / one["here_"] for one in ms])
        return figures

    def from_disk(self, blocks: int, retrieval: Mapping[str, str]) -> dict[str, Any]:
        """Off the device again, by an engine that finds all on disk."""
        found: dict[str, Any] = {}
        with self._started("from disk", blocks, retrieval, found) as engine:
            # Blocks of a large folder are found in the background; steps tell how many.
            while engine.metrics().get(_ON_DISK, 0) < self._context // BLOCK:
                engine.answers([Question("any", (1, 2, 3), 2)])
            found |= {**self._paces(engine, "disk"), **_memory(engine)}
        return {f"disk_{name}": value for name, value in found.items()}

    @contextmanager
    def _started(
        self,
        name: str,
        blocks: int,
        environment: Mapping[str, str],
        figures: dict[str, Any],
        module: str = "",
    ) -> Iterator[EngineProcess]:
        """Adds the seconds that its start takes to ``figures``. ``module``: of a connector without
        a pool."""
        sequence = int(1.08 * self._longest * self._model.token_bytes)  # with digests
        size = len(self._questions) * sequence + (64 << 20)
        pool: dict[str, Any] = {"host_size": size, "load_or_compute": "load", "load_deadline": 600}
        pool["audit"] = "off"
        if self._disk:
            pool |= {"disk_path": str(self._folder / "disk"), "disk_size": size + size // 4}
        options = {
            "model": str(self._model.write(self._folder / "model", self._longest, weights=False)),
            "dtype": self._model.dtype,
            "load_format": "dummy",
            "max_model_len": self._longest,
            "max_num_seqs": len(self._questions),
            "max_num_batched_tokens": _BATCH,
            "num_gpu_blocks_override": blocks,
            "pool": {} if module else pool,
            "env": {**ONE_THREAD, **environment},
            **({"module": module} if module else {}),
            **self._more,
        }
        progress(f"{self._context:,} tokens, {name}: an engine starts")
        began = time.monotonic()
        with self._engines.running(name, options, module=__name__) as engine:
            figures["start_s"] = round(time.monotonic() - began, 1)
            yield engine

    def _paces(self, engine: EngineProcess, tier: str = "host") -> dict[str, float]:
        """``ms`` of the processors and of the clock between tokens, and how many sequences decoded
        ``at_once``. Raises KvrecallError if a prompt was not found in the tier."""
        answers = engine.answers(self._questions, _PATIENCE_S)
        for one in answers:
            found = sum(one.sources.get(name, 0) for name in ("device", tier)) or one.cached
            if found < self._context:
                raise KvrecallError(f"meant from {tier}: {dict(one.sources)}")
        (first, *_), steps = answers, len(answers[0].tokens) - 1
        spent = {"ms": first.decode_cpu_s, "wall_ms": first.decode_s}
        paces = {name: round(1e3 * seconds / steps, 3) for name, seconds in spent.items()}
        return {"first_s": round(first.ttft_s, 3), **paces, "at_once": _most_at_once(answers)}

    def _read(
        self, engine: EngineProcess, before: Mapping[str, float] = MappingProxyType({})
    ) -> dict[str, float]:
        """What sparse layers have read since, what came to the device, and which share of the
        chosen blocks off it was in slots: 1 where it reads the others in place."""
        counts = {name: count - before.get(name, 0) for name, count in engine.metrics().items()}
        did = {name: counts.get(f"{_COUNTS}{name}_total", 0) for name in _READ}
        if not did["sequences_offloaded"]:
            raise KvrecallError("the sequence did not decode off the device")
        attended = did["blocks_attended"] / did["layers_sparse"] / self._model.kv_heads
        loaded = counts["kvrecall_loaded_bytes_total"] / 2**20
        share = 1 - did["blocks_loaded"] / max(1, did["blocks_hit"] + did["blocks_loaded"])
        own = {"tokens_read": round(BLOCK * attended), "loaded_mib": round(loaded, 2)}
        own["in_slots"] = round(share, 4)
        return own | {"preempted": counts.get("vllm:num_preemptions_total", 0)}


_READ = ("sequences_offloaded", "blocks_attended", "layers_sparse", "blocks_hit", "blocks_loaded")


def _middle(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _most_at_once(answers: list[Answer]) -> int:
    """How many decode at the same time, at most, of requests that came together."""
    spans = [(one.ttft_s, one.ttft_s + one.decode_s) for one in answers]
    return max(sum(first <= at < end for first, end in spans) for at, _ in spans)


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
