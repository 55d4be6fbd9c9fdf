"""``bench step``: what the connector adds to a step of vLLM's scheduler while sequences
decode."""

from __future__ import annotations

import gc
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kvrecall.bench.model import BenchModel, Texts
from kvrecall.bench.report import Report, cells, names_in, percentiles, progress
from kvrecall.errors import ConfigError, EngineError

GOALS_US = {64: 100.0, 256: 200.0}
_BATCH_TOKENS = 8192
_RECORD_BYTES = 4096
_FINGERPRINT_S = 60.0
_PARTS = ("build_connector_meta", "update_connector_output", "get_kv_connector_stats")


def measure_step(
    sequences: Annotated[
        str, typer.Option(help="Sequences that decode at once, comma-separated.")
    ] = "64,256",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps measured.")] = 320,
) -> Report:
    """What the connector costs a step of vLLM's scheduler while sequences decode.

    Scheduler, connector and pool are the real ones; the workers, whose time is not measured,
    report at once that they have copied what they were ordered to.
    """
    rows, measured = [], []
    for count in _counts(sequences):
        progress(f"{count} sequences")
        with tempfile.TemporaryDirectory(prefix="kvrecall-bench-") as name:
            spent, saved = _decode(Path(name), count, block_size, steps)
        whole = [sum(parts.values()) for parts in spent]
        figures: dict[str, object] = {
            "sequences": count,
            "blocks_saved": saved,
            "us_a_step": statistics.median(whole),
            "us": percentiles(whole),
            "parts_us": {
                part: statistics.mean(step[part] for step in spent) for part in sorted(spent[0])
            },
        }
        measured.append(figures)
        goal = GOALS_US.get(count)
        cells_us = cells(percentiles(whole), 0)
        rows.append((str(count), *cells_us, "" if goal is None else f"{goal:.0f}"))
    columns = ("sequences", "us a step, p10", "p50", "p90", "goal, p50")
    notes = tuple(
        f"{one['sequences']} sequences, mean us: "
        + ", ".join(f"{part} {us:.0f}" for part, us in one["parts_us"].items())  # type: ignore[attr-defined]
        for one in measured
    )
    last = measured[-1]
    figures = {**last, "block_size": block_size, "steps": steps, "all": measured}
    return Report("step", columns, tuple(rows), figures, notes)


def _counts(sequences: str) -> list[int]:
    """Raises ConfigError."""
    for name in names_in(sequences):
        if not name.isdigit() or int(name) < 1:
            raise ConfigError(f"--sequences: {name!r} is not a number of sequences; write 64,256")
    return [int(name) for name in names_in(sequences)]


def _decode(
    folder: Path, count: int, block_size: int, steps: int
) -> tuple[list[dict[str, float]], int]:
    """Microseconds of thread time that each part of the connector took, by step; how many blocks
    were saved meanwhile."""
    with _scheduler(folder, count, block_size, steps) as scheduler:
        spent: dict[str, float] = dict.fromkeys((*_PARTS, "pickle"), 0.0)
        for part in _PARTS:
            setattr(scheduler.connector, part, _watched(scheduler.connector, part, spent))
        _begin(scheduler, count, block_size, steps)
        while len(scheduler.running) < count or scheduler.waiting:
            _step(scheduler, spent)
        for _ in range(2):  # the last prompts become complete
            _step(scheduler, spent)
        gc.collect()
        gc.freeze()  # as vLLM's engine does when it is up
        found, saved = [], 0
        try:
            for _ in range(steps):
                spent.update(dict.fromkeys(spent, 0.0))
                saved += _step(scheduler, spent)
                found.append({part: 1e6 * seconds for part, seconds in spent.items()})
        finally:
            gc.unfreeze()
        assert len(scheduler.running) == count, "a sequence ended while it was measured"
        return found, saved


@contextmanager
def _scheduler(folder: Path, count: int, block_size: int, steps: int) -> Iterator[Any]:
    """vLLM's scheduler with the connector, for ``count`` sequences."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    longest = 4 * block_size + steps + 64
    model = BenchModel().write(folder / "model", longest)
    transfer = {
        "kv_connector": "RecallConnector",
        "kv_connector_module_path": "kvrecall.engines.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host_size": 4 * count * longest // block_size * 8192},
    }
    config = EngineArgs(
        model=str(model),
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=count,
        max_num_batched_tokens=_BATCH_TOKENS,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=transfer,
    ).create_engine_config()
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=64, dtype=config.model_config.dtype
    )
    blocks = count * (longest // block_size + 2)
    config.cache_config.num_gpu_blocks = blocks
    cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    outputs = StructuredOutputManager(config)
    scheduler = Scheduler(config, cache, outputs, block_size, log_stats=True)
    with ExitStack() as stack:
        stack.callback(scheduler.shutdown)
        scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): _shard()})
        if not scheduler.connector._started.wait(_FINGERPRINT_S):  # requests have no pool before
            raise EngineError("the fingerprint of the model's weights took too long")
        yield scheduler


def _shard() -> Any:
    """What a rank reports of its part of a block."""
    from kvrecall.engines.vllm.wire import Shard, ShardLayer

    layer = ShardLayer("layer", _RECORD_BYTES - 8, "bytes", heads=1)
    return Shard((layer,), "none", copies_in_step=True)


def _watched(connector: Any, part: str, spent: dict[str, float]) -> Callable[..., Any]:
    """A method of the connector that adds its thread time to ``spent``."""
    plain = getattr(connector, part)

    def call(*args: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return plain(*args, **options)
        finally:
            spent[part] += time.thread_time() - began

    return call


def _begin(scheduler: Any, count: int, block_size: int, steps: int) -> None:
    """Adds the sequences: prompts of different lengths, so that in each step equally many pass a
    block's end."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    hasher = get_request_block_hasher(block_size, sha256_cbor)
    texts = Texts()
    for number in range(count):
        params = SamplingParams(max_tokens=steps + 60, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=0)
        prompt = list(texts.tokens(2 * block_size + number % block_size))
        request = Request(str(number), prompt, params, None, block_hasher=hasher)
        scheduler.add_request(request)


def _step(scheduler: Any, spent: dict[str, float]) -> int:
    """A step as an engine makes it, its orders packed for the workers as vLLM does it. Returns the
    number of blocks that they order to be saved."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from kvrecall.engines.vllm.wire import StepReport

    output = scheduler.schedule()
    orders = output.kv_connector_metadata
    began = time.thread_time()
    pickle.dumps(orders, pickle.HIGHEST_PROTOCOL)
    spent["pickle"] += time.thread_time() - began
    stored = {store.store_id: 1 for store in orders.stores}
    report = StepReport(stored, stored_bytes=len(stored) * _RECORD_BYTES) if stored else None
    names = list(output.num_scheduled_tokens)
    told = [scheduler.requests[name] for name in names]  # they get a token with their last one
    done = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[
            [7] if one.num_computed_tokens >= one.num_tokens else [] for one in told
        ],
        kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=report),
    )
    scheduler.update_from_output(output, done)
    return sum(len(store.copy.block_ids) for store in orders.stores)
