"""``bench generate``: what whole engines decode a second from long sequences, and what
device memory they take: dense, dense with a pool, by retrieval on the device and off it, and in the
mode that openGauss's document describes.

Each engine takes turns with a dense one that is up beside it, a few steps each, so that other load
on the machine affects both.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from kvrecall.attention.settings import PREFIX, RETRIEVALKV, RetrievalSettings
from kvrecall.bench.model import BLOCK, BenchModel
from kvrecall.bench.report import Report, Times, names_in, progress
from kvrecall.environment import PLUGINS
from kvrecall.errors import ConfigError, EngineError
from kvrecall.plan.model import ModelShape, read_shape
from kvrecall.processes.child import server_environment
from kvrecall_lab.bench.lengths import lengths_in
from kvrecall_lab.bench.tables import generate_table
from kvrecall_lab.engines.engine import START_S, EngineProcess

SHAPES = {
    "small": BenchModel(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=64),
    "large": BenchModel(hidden=1280, layers=24, heads=8, kv_heads=2, head_dim=64),
}
"""Models of random weights, of 4 and 394 million parameters. Of a dense step of the latter over
65,536 tokens attention is about two thirds."""

_EXTENSION = "kvrecall.engines.vllm.attention.backend.ActivityExtension"
_PROCESS_BYTES = 1 << 30
"""Of an engine, beside its weights, device cache and pool."""

TWO_THIRDS = 2 / 3
"""Share of attention in a dense step for which the gain is also computed, since it depends on the
machine."""

_SPARE_TOKENS = 64
"""That a sequence may decode beside those of the turns: until all have begun."""


@dataclass(frozen=True, slots=True)
class Mode:
    """How an engine serves. ``pool``: with a pool, where the prompts are; else they are in the
    device cache. ``device_share``: about what of its sequences the device holds."""

    text: str
    pool: bool
    retrieval: bool = True
    device_share: float = 1.0

    def variables(self, name: str, context: int, share: float) -> dict[str, str]:
        """Its environment. Up to 32,768 tokens RetrievalKV's lengths are scaled to the context."""
        if not self.retrieval:
            return {}
        plain = RetrievalSettings()
        found = scaled(context) if context < plain.dense_boundary else {}
        if name == RETRIEVALKV:
            kept = ("INIT_TOKENS_NUM", "LOCAL_TOKENS_NUM", "DENSE_BOUNDARY", "OFFLOAD_BOUNDARY")
            found = {key: text for key, text in found.items() if key.removeprefix(PREFIX) in kept}
            found[PREFIX + "MODE"] = RETRIEVALKV
        elif self.pool:
            found[PREFIX + "OFFLOAD_BOUNDARY"] = str(min(context, plain.offload_boundary))
        return {**found, PREFIX + "TOPK_PERCENT": str(share), PLUGINS: "retrieval,waits"}


DENSE = "dense"
MODES: Mapping[str, Mode] = {
    DENSE: Mode("vLLM alone", pool=False, retrieval=False),
    "dense-pool": Mode("vLLM with the pool", pool=True, retrieval=False),
    "retrieval": Mode("by retrieval, on the device", pool=False),
    "offloaded": Mode("by retrieval, off the device", pool=True, device_share=0.5),
    RETRIEVALKV: Mode("VLLM_RETRIEVAL_MODE=retrievalkv, with the pool", pool=True),
}


def scaled(context: int) -> dict[str, str]:
    """RetrievalKV's settings scaled from 65,536 tokens to the context, as variables."""
    plain = RetrievalSettings()
    lengths = {
        "INIT_TOKENS_NUM": plain.init_tokens,
        "LOCAL_TOKENS_NUM": plain.local_tokens,
        "DENSE_BOUNDARY": plain.dense_boundary,
        "OFFLOAD_BOUNDARY": plain.offload_boundary,
        "LEAST_BLOCKS": plain.fewest_blocks,
    }
    share = context / plain.offload_boundary
    shares = {PREFIX + name: str(max(1, int(of * share))) for name, of in lengths.items()}
    return {**shares, PREFIX + "DENSE_LAYERS": "1"}  # of the few that small models have


@dataclass(frozen=True, slots=True)
class Load:
    """Up to ``sequences`` prompts of ``context`` tokens that decode ``decoded`` tokens each, on a
    device cache of ``fits`` whole sequences. ``pool``: the engine has one that holds all of them.
    ``threads``: of its worker. ``options``: further options of vLLM."""

    context: int
    sequences: int
    decoded: int
    fits: int
    pool: bool
    threads: int
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def sequence_blocks(self) -> int:
        return -(-(self.context + self.decoded) // BLOCK)

    @property
    def device_blocks(self) -> int:
        return self.sequence_blocks * self.fits

    def host_bytes(self, token_bytes: int) -> int:
        """Host memory that holds all sequences."""
        return self.sequences * self.sequence_blocks * BLOCK * token_bytes * 5 // 4


@contextmanager
def engine_of(
    load: Load, model: Path, token_bytes: int, variables: Mapping[str, str]
) -> Iterator[EngineProcess]:
    """An engine for the load. Raises EngineError, with the end of its output, if it does not
    start."""
    kept = {k: v for k, v in server_environment().items() if not k.startswith(PREFIX)}
    kept.pop(PLUGINS, None)
    kept |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(load.threads)}
    cache_bytes = (load.device_blocks + 1) * BLOCK * token_bytes
    kept["VLLM_CPU_KVCACHE_SPACE"] = str(math.ceil(cache_bytes / 2**30))
    setup = {
        "model": str(model),
        "block_size": BLOCK,
        "max_model_len": load.context + load.decoded,
        "max_num_seqs": load.sequences,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": load.device_blocks + 1,
        "enable_prefix_caching": True,
        "worker_extension_cls": _EXTENSION,
        **load.options,
    }
    if load.pool:
        size = load.host_bytes(token_bytes)
        setup["pool"] = {"host_size": size, "load_or_compute": "load", "audit": "off"}
    with tempfile.TemporaryDirectory(prefix="kvrecall-generate-") as folder:
        environment = {**kept, **variables}
        log = Path(folder) / "engine.log"
        engine = EngineProcess("the engine", setup, log, environment=environment)
        try:
            engine.wait_ready()
            yield engine
        finally:
            engine.end()


def _asked(engine: EngineProcess, order: str, **options: Any) -> Any:
    engine.send({"do": order, **options})
    return engine.await_reply(order, START_S)


# -- the benchmark ---------------------------------------------------------------------------


def measure_generate(
    model: Annotated[
        str,
        typer.Option(help="small or large: shapes of random weights; or a model's folder."),
    ] = "large",
    contexts: Annotated[
        str,
        typer.Option("--contexts", "--context", help="Tokens of the prompts, comma-separated."),
    ] = "64K",
    sequences: Annotated[
        str, typer.Option(help="Sequences that decode at once, comma-separated.")
    ] = "1",
    modes: Annotated[str, typer.Option(help="Of the engines, comma-separated.")] = ",".join(MODES),
    share: Annotated[float, typer.Option(help="Share of the middle blocks selected.")] = 0.2,
    fits: Annotated[
        int,
        typer.Option(min=0, help="Whole sequences that the device cache holds; 0: all of them."),
    ] = 0,
    rounds: Times = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 6,
    threads: Annotated[int, typer.Option(min=1, help="Threads of an engine's worker.")] = 1,
) -> Report:
    """Tokens a second and device memory of whole engines with long sequences: dense, dense with a
    pool, by retrieval on the device and off it, and in RetrievalKV's own mode. The prompts' KV is
    made up. Each engine takes turns with the dense one. Fails if one did not do what its mode says.
    """
    known = _modes(modes)
    lengths, counts = lengths_in(contexts), _counts(sequences)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvrecall-generate-") as folder:
        path = Path(model)
        if model in SHAPES:
            most = max(lengths) + rounds * steps + _SPARE_TOKENS
            path = SHAPES[model].write(Path(folder) / model, most)
        shape = read_shape(path, name=Path(model).name)
        for context in lengths:
            turns = _Turns(shape, path, context, share, fits, rounds, steps, threads)
            rows += turns.measure(counts, known, left_out)
    if not rows:
        raise ConfigError("; ".join(left_out))
    figures = {
        "params": shape.params,
        "kv_bytes_a_token": shape.kv_bytes_per_token,
        "share": share,
        "fits": fits,
        "threads": threads,
        "rounds": rounds,
        "steps": steps,
        "rows": rows,
        "left_out": left_out,
        **_first(rows),
    }
    notes = (
        f"{shape.name}: {shape.params / 1e6:.0f} million parameters, "
        f"{shape.kv_bytes_per_token / 1024:.0f} KiB of KV a token, made up; {threads} threads",
        "to dense: tokens a second, in multiples of the dense engine's, which took turns; in "
        "brackets tokens a second of processor time",
        "at 2/3: the same, computed for a model in which attention is two thirds of a dense step",
        "attention: its share of a step; blocks read: of a sequence's, a layer and KV head; "
        "device: in use at most, digests included, of the cache",
        *(f"left out: {text}" for text in left_out),
    )
    return Report("generate", *generate_table(rows), figures, notes)


def _first(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the first length and number of sequences: tokens a second, and by mode the most bytes of
    the device in use and the most sequences that decoded at once."""
    first = rows[0]["context"], rows[0]["sequences"]
    of = {row["mode"]: row for row in rows if (row["context"], row["sequences"]) == first}
    named = {DENSE: "dense", "retrieval": "retrieval", "offloaded": "offload"}
    return {
        **{f"{named[mode]}_tokens_s": of[mode]["tokens_per_s"] for mode in named if mode in of},
        "device_bytes": {mode: row["peak_device_bytes"] for mode, row in of.items()},
        "sequences_at_once": {mode: row["at_once"] for mode, row in of.items()},
    }


def _modes(text: str) -> tuple[str, ...]:
    """With the dense one, first. Raises ConfigError."""
    names = names_in(text)
    for name in names:
        if name not in MODES:
            raise ConfigError(f"--modes: {name!r} is not one of {', '.join(MODES)}")
    return (DENSE, *(name for name in names if name != DENSE))


def _counts(text: str) -> list[int]:
    """Raises ConfigError."""
    for name in names_in(text):
        if not name.isdigit() or int(name) < 1:
            raise ConfigError(f"--sequences: {name!r} is not a number of sequences; write 1,4")
    return sorted(int(name) for name in names_in(text))


_Rounds = list[list[Mapping[str, Any]]]
"""Steps of an engine's turns, one list a turn."""


@dataclass(frozen=True, slots=True)
class _Turns:
    """Engines for sequences of one length, each of which takes turns with the dense one. ``fits``:
    sequences that a device cache holds; 0: all."""

    shape: ModelShape
    path: Path
    context: int
    share: float
    fits: int
    rounds: int
    steps: int
    threads: int

    @property
    def _decoded(self) -> int:
        """The most tokens that a sequence decodes."""
        return self.rounds * self.steps + _SPARE_TOKENS

    def measure(
        self, counts: Sequence[int], modes: Sequence[str], left_out: list[str]
    ) -> list[dict[str, Any]]:
        """A row for each number of sequences and each mode, the first of which is dense. What
        memory has no room for is ``left_out``."""
        others = modes[1:]
        room = psutil.virtual_memory().available
        kept = []
        for count in counts:
            need = max(self._bytes(count, {DENSE, name}) for name in modes)
            if need <= room:
                kept.append(count)
                continue
            left_out.append(
                f"{count} sequences of {self.context:,} tokens: two engines need "
                f"{need / 2**30:.1f} GiB, {room / 2**30:.1f} GiB are free"
            )
        if not kept:
            return []
        found: dict[int, list[dict[str, Any]]] = {count: [] for count in kept}
        progress(f"{DENSE}: an engine starts")
        with self._engine(DENSE, max(kept)) as plain:
            for name in others or (DENSE,):
                if others:
                    progress(f"{name}: an engine starts")
                with self._engine(name, max(kept)) if others else nullcontext(plain) as engine:
                    for count in kept:
                        progress(f"{name}: {count} sequences of {self.context:,} tokens")
                        dense, one = self._both(plain, engine, name, count)
                        if not found[count]:
                            found[count].append(dense)
                        if others:
                            found[count].append(one)
                        progress(f"  {one['tokens_per_s']} tokens/s, {one['times_dense']} of dense")
        return [row for count in kept for row in found[count]]

    def _bytes(self, count: int, modes: set[str]) -> float:
        """What engines of these modes take."""
        nbytes = 0.0
        for name in modes:
            sequence = self.context * self.shape.kv_bytes_per_token
            nbytes += self.shape.weight_bytes + _PROCESS_BYTES
            nbytes += sequence * min(count, self.fits or count) * MODES[name].device_share
            nbytes += sequence * count * 1.1 * MODES[name].pool
        return nbytes

    def _engine(self, name: str, count: int) -> AbstractContextManager[EngineProcess]:
        mode = MODES[name]
        decoded = self._decoded
        options = {"hf_overrides": {"max_position_embeddings": self.context + decoded}}
        load = Load(
            self.context,
            count,
            decoded,
            self.fits or count,
            pool=mode.pool,
            threads=self.threads,
            options=options,
        )
        variables = mode.variables(name, self.context, self.share)
        return engine_of(load, self.path, self.shape.kv_bytes_per_token, variables)

    def _both(
        self, plain: EngineProcess, engine: EngineProcess, name: str, count: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The rows of the dense engine and of the other one, which may be the same."""
        engines = {DENSE: plain, name: engine}
        told = {"sequences": count, "context": self.context, "decoded": self._decoded}
        for mode, one in engines.items():
            source = "pool" if MODES[mode].pool else "device"
            _asked(one, "generate", source=source, **told)
        turns: dict[str, _Rounds] = {mode: [] for mode in engines}
        for _ in range(self.rounds):
            for mode, one in engines.items():
                turns[mode].append(_asked(one, "steps", count=self.steps))
        totals = {mode: _asked(one, "end_generation") for mode, one in engines.items()}
        _check(name, totals[name]["activity"])
        dense = self._row(DENSE, count, totals[DENSE], turns[DENSE], turns[DENSE])
        return dense, self._row(name, count, totals[name], turns[name], turns[DENSE])

    def _row(
        self, name: str, count: int, totals: Mapping[str, Any], turns: _Rounds, dense: _Rounds
    ) -> dict[str, Any]:
        did, steps = totals["activity"], [step for turn in turns for step in turn]
        return {
            "model": self.shape.name,
            "context": self.context,
            "sequences": count,
            "mode": name,
            "at_once": totals["at_once"],
            "tokens_a_step": round(statistics.mean(float(step["tokens"]) for step in steps), 3),
            "tokens_per_s": round(_rate(steps, "seconds"), 3),
            "ms_a_token": round(statistics.median(step["seconds"] for step in steps) * 1e3, 3),
            "cpu_ms_a_step": round(
                statistics.median(step["cpu_seconds"] for step in steps) * 1e3, 3
            ),
            "attention_share": _attention_share(steps),
            "times_dense": _times(turns, dense, "seconds"),
            "times_dense_cpu": _times(turns, dense, "cpu_seconds"),
            "times_dense_at_two_thirds": _times_at(TWO_THIRDS, turns, dense),
            "blocks_read_share": round(totals["read_share"], 4),
            "device_cache_bytes": totals["cache_bytes"],
            "peak_device_bytes": totals["device_bytes"],
            "loaded_bytes": totals["loaded_bytes"],
            "blocks_in_place": did["blocks_in_place"],
            "gated": did["sequences_gated"] > 0,
            "preemptions": totals["preemptions"],
        }


def _check(name: str, did: Mapping[str, int]) -> None:
    """Raises EngineError if the figures are meaningless."""
    if name == "offloaded" and not did["blocks_in_place"]:
        raise EngineError("offload did not act: no block was read in the arena; nothing is shown")
    if MODES[name].retrieval and not did["blocks_selected"] + did["sequences_gated"]:
        raise EngineError(f"{name}: retrieval did not act; the figures are meaningless")


def _rate(steps: Sequence[Mapping[str, Any]], seconds: str) -> float:
    """Tokens a second of a median step."""
    tokens = statistics.mean(float(step["tokens"]) for step in steps)
    return tokens / statistics.median(float(step[seconds]) for step in steps)


def _times(turns: _Rounds, dense: _Rounds, seconds: str) -> float:
    """Tokens a second, in multiples of the dense engine's: the median of the rounds."""
    pairs = zip(turns, dense, strict=True)
    return round(statistics.median(_rate(a, seconds) / _rate(b, seconds) for a, b in pairs), 3)


def _times_at(share: float, turns: _Rounds, dense: _Rounds) -> float | None:
    """``_times``, computed for a model in which attention is that share of a dense step: the
    engine's attention and the rest of its step each take as long, in multiples of the dense one's,
    as here. None where attention is not measured."""
    found: list[float] = []
    for round_, plain in zip(turns, dense, strict=True):
        parts, plainly = _parts(round_), _parts(plain)
        if parts is None or plainly is None:
            return None
        attention, rest = (one / other for one, other in zip(parts, plainly, strict=True))
        tokens = statistics.mean(step["tokens"] for step in round_)
        tokens /= statistics.mean(step["tokens"] for step in plain)
        found.append(tokens / (share * attention + (1 - share) * rest))
    return round(statistics.median(found), 3)


def _parts(steps: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Seconds of attention, and of all else, in a median step; None where they are not measured."""
    if any(step["attention_seconds"] is None for step in steps):
        return None
    attention = statistics.median(step["attention_seconds"] for step in steps)
    return attention, statistics.median(step["seconds"] for step in steps) - attention


def _attention_share(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the median step's time; None where it is not measured."""
    shares = [
        step["attention_seconds"] / step["seconds"]
        for step in steps
        if step["attention_seconds"] is not None
    ]
    return round(statistics.median(shares), 4) if shares else None
