"""How many long sequences an engine decodes at once in a given device cache, and how fast.

``python -m kvrecall.lab.engines.crowd`` takes a JSON object of a ``Crowd``'s fields on
standard input, and prints the figures as one. A process of its own, as retrieval is switched on by
the environment before vLLM starts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from prometheus_client import REGISTRY

from kvrecall.engines.vllm.attention.plugin import active_settings, asked_for
from kvrecall.engines.vllm.serving.app import connector_config

EXTENSION = "kvrecall.engines.vllm.attention.activity.ActivityExtension"


@dataclass(frozen=True, slots=True)
class Crowd:
    """``sequences`` different prompts of ``context`` tokens, each to decode ``decoded`` tokens, on
    a device cache of ``device_blocks`` blocks. ``pooled``: they are found in the pool, with random
    KV, so that no prompt is computed but for its last block (on vLLM's CPU platform only).
    ``options``: of vLLM, beside those given here."""

    model: str
    context: int
    decoded: int
    sequences: int
    device_blocks: int
    host_bytes: int
    pooled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gathering:
    """What was seen. ``at_once``: most sequences that decoded in one step. ``decode_seconds``:
    spent in steps that decoded and computed no prompt, ``decode_tokens`` in them.
    ``prefix_bytes``: of the prefixes found in the pool, ``loaded_bytes``: of whole blocks copied
    from it to the device."""

    at_once: int
    seconds: float
    tokens: int
    decode_seconds: float
    decode_tokens: int
    preemptions: int
    prefix_bytes: int
    loaded_bytes: int
    activity: dict[str, int]


def gather(crowd: Crowd) -> Gathering:
    """Runs the crowd through an engine of its own."""
    from vllm import LLM

    llm = LLM(
        model=crowd.model,
        enforce_eager=True,
        block_size=128,
        max_model_len=crowd.context + crowd.decoded,
        max_num_seqs=crowd.sequences,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=crowd.device_blocks,
        enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor",
        worker_extension_cls=EXTENSION,
        disable_log_stats=False,
        kv_transfer_config=connector_config(
            {"host_size": crowd.host_bytes, "load_or_compute": "load", "audit": "off"}
        ),
        **crowd.options,
    )
    try:
        return _gather(llm, crowd)
    finally:
        llm.llm_engine.engine_core.shutdown()


def _gather(llm: Any, crowd: Crowd) -> Gathering:
    from vllm import SamplingParams

    engine = llm.llm_engine
    greedy = SamplingParams(temperature=0.0, max_tokens=crowd.decoded, ignore_eos=True)
    for at in range(crowd.sequences):
        draw = Random(at)
        prompt = [draw.randrange(1, 250) for _ in range(crowd.context)]
        engine.add_request(str(at), {"prompt_token_ids": prompt}, greedy)
    prefix_bytes = _fill(llm) if crowd.pooled else 0
    seen: dict[str, int] = {}
    at_once = decode_tokens = 0
    decode_seconds = 0.0
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        new = {output.request_id: len(output.outputs[0].token_ids) for output in engine.step()}
        decoded = [key for key, count in new.items() if count > seen.get(key, 0) > 0]
        at_once = max(at_once, len(decoded))
        running = engine.engine_core.engine_core.scheduler.running
        if decoded and all(r.num_computed_tokens >= r.num_prompt_tokens for r in running):
            decode_seconds += time.perf_counter() - started
            decode_tokens += len(decoded)
        seen.update(new)
    (activity,) = llm.collective_rpc("retrieval_activity")
    return Gathering(
        at_once=at_once,
        seconds=time.perf_counter() - began,
        tokens=sum(seen.values()),
        decode_seconds=decode_seconds,
        decode_tokens=decode_tokens,
        preemptions=_preemptions(llm),
        prefix_bytes=prefix_bytes,
        loaded_bytes=_loaded_bytes(),
        activity=activity,
    )


def _fill(llm: Any) -> int:
    """Of all requests that wait. Their names there are the engine's own."""
    from kvrecall.lab.engines.filling import fill, shape_of  # needs vLLM's CPU kernel

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    connector, vllm_config = scheduler.connector, llm.llm_engine.vllm_config
    states = [connector.state_of(key) for key in scheduler.requests]
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    sparse = active_settings(vllm_config) if asked_for(os.environ) else None
    return fill(connector.pool, states, shape_of(vllm_config), layers, sparse)


def _loaded_bytes() -> int:
    """Bytes of blocks loaded, as Prometheus has them."""
    return int(
        sum(
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name == "kvrecall_loaded_bytes_total"
        )
    )


def _preemptions(llm: Any) -> int:
    return sum(
        int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )


def main() -> None:
    """Entry of the process."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler is looked at
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    crowd = Crowd(**json.load(sys.stdin))
    print(json.dumps(asdict(gather(crowd))), file=replies, flush=True)


if __name__ == "__main__":
    main()
