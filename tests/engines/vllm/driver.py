"""A process that hosts one real vLLM engine and executes a test's orders.

Its own process, so that a test can kill it, and so that engines never share state.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.warm import begin


def main(orders: Connection, log: str, environment: Mapping[str, str]) -> None:
    """Runs an engine in this process, which has just begun; output goes to ``log``."""
    begin(log, environment)
    sys.path.insert(0, str(Path(__file__).parent))  # modules of the tests, by their names alone
    setup = json.loads(orders.recv_bytes())
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler side lives here
    if "prelude" in setup:  # a module of the tests to be imported before an engine is made
        importlib.import_module(setup.pop("prelude"))
    answer(orders, lambda: Host(setup))
    host = Host.instance
    if host is None:
        raise SystemExit(1)
    while True:
        try:
            order = json.loads(orders.recv_bytes())
        except EOFError:
            break
        name = order.pop("do")
        if name == "close":
            host.close()
            break
        answer(orders, lambda name=name, order=order: getattr(host, name)(**order))


def answer(orders: Connection, act: Callable[[], Any]) -> None:
    try:
        result = act()
        reply = {"ok": result if not isinstance(result, Host) else "ready"}
    except BaseException as error:  # noqa: BLE001 - told to the test, which judges
        traceback.print_exc()
        reply = {"error": f"{type(error).__name__}: {error}"}
    orders.send_bytes(json.dumps(reply).encode())


class Host:
    instance: Host | None = None

    def __init__(self, setup: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVEventsConfig

        pool = setup.pop("pool", None)
        transfer = None
        if pool is not None:
            # On a busy machine a load takes long: only a fault is to reach the deadline.
            pool = {"load_deadline": 120, **pool}
            transfer = {
                "kv_connector": setup.pop("connector", "RecallConnector"),
                "kv_connector_module_path": setup.pop("module", "kvrecall.engines.vllm"),
                "kv_role": "kv_both",
                "kv_connector_extra_config": pool,
            }
        options = {
            "enforce_eager": True,
            "block_size": 128,
            "disable_log_stats": False,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 28,
            "prefix_caching_hash_algo": "sha256_cbor",
            "enable_prefix_caching": True,
            **setup,
        }
        if "kv_events_config" in options:
            options["kv_events_config"] = KVEventsConfig(**options["kv_events_config"])
        self.llm = LLM(**options, kv_transfer_config=transfer)
        Host.instance = self

    # ---- orders ----

    def generate(
        self,
        prompts: list[list[int]],
        salts: list[str | None] | None = None,
        lora: list[Any] | None = None,
        loras: list[list[Any] | None] | None = None,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """``lora``: the adapter of all prompts; ``loras``: of each its own."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(**{"temperature": 0.0, "logprobs": 1, "max_tokens": 8, **sampling})
        inputs = []
        for prompt, salt in zip(prompts, salts or [None] * len(prompts), strict=True):
            item: dict[str, Any] = {"prompt_token_ids": prompt}
            if salt:
                item["cache_salt"] = salt
            inputs.append(item)
        adapter: Any = LoRARequest(*lora) if lora else None
        if loras is not None:
            adapter = [LoRARequest(*one) if one else None for one in loras]
        outputs = self.llm.generate(inputs, params, lora_request=adapter, use_tqdm=False)
        return [reply_of(output) for output in outputs]

    def beam(self, prompt: list[int], width: int, max_tokens: int) -> list[list[int]]:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens)
        (output,) = self.llm.beam_search([{"prompt_token_ids": prompt}], params)
        return [beam.tokens for beam in output.sequences]

    def settle(self) -> None:
        """Steps on while blocks of ended requests are held, as an engine's own loop does."""
        while self.engine().scheduler.has_requests():
            self.llm.llm_engine.step()

    def forget_device(self) -> bool:
        self.settle()
        return bool(self.llm.reset_prefix_cache())

    def forget_all(self) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def sleep(self, level: int, wakes: bool = True) -> None:
        """As of vLLM's sleep mode; see ``NappingWorker``."""
        self.settle()
        core = self.engine()
        core.sleep(level)
        if wakes:
            self.wake()

    def wake(self) -> None:
        assert self.engine().wake_up()

    def nap(self) -> None:
        """Gives the KV cache's memory back, and takes it again; see ``NappingWorker``."""
        self.settle()
        core = self.engine()
        core.pause_scheduler("abort")
        core.release_kv_cache_memory()
        assert core.wake_up(["kv_cache"])

    def engine(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def connector(self) -> Any:
        return self.engine().scheduler.connector

    def pool_stats(self) -> dict[str, Any]:
        stats = self.connector()._pool.stats()
        tiers = {
            tier.name: {name: getattr(tier, name) for name in tier.__slots__}
            for tier in stats.tiers
        }
        plain = {n: getattr(stats, n) for n in ("leases", "reserved", "queued_writes", "refused")}
        return {"tiers": tiers, **plain}

    def held(self) -> dict[str, list[int]]:
        """Hashes of the whole blocks in each medium, by the names that vLLM publishes."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        device = self.engine().scheduler.kv_cache_manager.block_pool.blocks
        held = {"GPU": [get_block_hash(b.block_hash) for b in device if b.block_hash is not None]}
        media = {"host": "CPU", "disk": "STORAGE"}
        for block in self.connector()._pool.admin.blocks():
            if len(block.key) == 48:
                held.setdefault(media[block.tier], []).append(block.key[16:])
        convert = maybe_convert_block_hash
        return {medium: sorted(map(convert, hashes)) for medium, hashes in held.items()}

    def log_changes(self, most: int) -> None:
        """From now on the log of the pool's changes holds so many."""
        self.connector()._events._log._log._most = most

    def replaced(self, planted: str = "") -> dict[str, str | None]:
        """See there. ``planted``: a function of vLLM's scheduler module that is replaced before."""
        from replaced import replaced
        from vllm.v1.core.sched import scheduler

        from kvrecall.nicety import nicety

        if planted:
            setattr(scheduler, planted, nicety("a plant")(getattr(scheduler, planted)))
        return replaced()

    def service(self) -> str | None:
        """Which life of the pool service the engine is joined to; None if to none."""
        from pool.inside import life_of

        return life_of(self.connector()._pool)

    def namespace(self) -> dict[str, str]:
        known = self.connector()._s.namespaces
        return dict(known.of(_Plain()).parts) if known.is_settled(_Plain()) else {}

    def flush(self, seconds: float = 60.0) -> bool:
        """Waits until all queued writes are on disk."""
        self.settle()
        end = time.monotonic() + seconds
        while self.connector()._pool.stats().queued_writes and time.monotonic() < end:
            time.sleep(0.01)
        return not self.connector()._pool.stats().queued_writes

    def abort_midway(self, prompt: list[int], after_steps: int, **sampling: Any) -> int:
        """Adds a request, steps a few times, aborts it; returns requests left in the engine."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        engine.add_request("doomed", {"prompt_token_ids": prompt}, SamplingParams(**sampling))
        for _ in range(after_steps):
            engine.step()
        engine.abort_request(["doomed"])
        for _ in range(50):
            engine.step()
            if not self.engine().scheduler.has_requests():
                break
        return len(self.engine().scheduler.requests)

    def traced_midway(self, prompt: list[int]) -> dict[str, Any]:
        """What there is of traces while a request runs."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        engine.add_request("watched", {"prompt_token_ids": prompt}, SamplingParams(max_tokens=8))
        engine.step()
        (state,) = self.connector()._s._states.values()
        names = [thread.name for thread in threading.enumerate()]
        found = {
            "request": state.id in getattr(self.connector()._traces, "open", {}),
            "headers": state.request.trace_headers,
            "threads": [one for one in names if one.startswith(("kvrecall-traces", "Otel"))],
        }
        engine.abort_request(["watched"])
        self.settle()
        return found

    def _drive(
        self,
        after_steps: int,
        act: Callable[[], None],
        prompts: list[list[int]],
        salt: str | None = None,
        lora: list[Any] | None = None,
        **sampling: Any,
    ) -> list[Any]:
        """Decodes greedily, and acts between two steps, after so many. The outputs."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        engine = self.llm.llm_engine
        greedy = SamplingParams(temperature=0.0, **sampling)
        salted = {"cache_salt": salt} if salt else {}
        for at, prompt in enumerate(prompts):
            adapter: Any = LoRARequest(*lora) if lora else None
            given: Any = {"prompt_token_ids": prompt, **salted}
            engine.add_request(str(at), given, greedy, lora_request=adapter)
        done = {}
        steps = 0
        while engine.has_unfinished_requests():
            if steps == after_steps:
                act()
            steps += 1
            done.update({one.request_id: one for one in engine.step() if one.finished})
        return [done[str(at)] for at in range(len(prompts))]

    def preempt_midway(self, after_steps: int, **how: Any) -> list[list[int]]:
        """Decodes greedily; before that step all running requests lose their blocks, and the device
        forgets its prefixes. Returns the tokens."""

        def preempt() -> None:
            try:
                self.engine().scheduler.reset_prefix_cache(reset_running_requests=True)
            except RuntimeError:  # a step under way uses their blocks
                assert self.is_ahead()
                manager = self.engine().scheduler.kv_cache_manager
                manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))

        outputs = self._drive(after_steps - 1, preempt, ignore_eos=True, **how)
        return [list(one.outputs[0].token_ids) for one in outputs]

    def trouble(self, name: str, **how: Any) -> None:
        """One of ``troubles.py``."""
        import troubles

        getattr(troubles, name)(self, **how)

    def decode_through(self, trouble: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
        """Decodes greedily; between two steps, after so many, something goes wrong."""
        act = functools.partial(self.trouble, **trouble)
        return [*map(reply_of, self._drive(act=act, logprobs=1, **how))]

    def free_blocks(self) -> int:
        """Device blocks that no request holds."""
        return int(self.engine().scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def is_ahead(self) -> bool:
        """Whether its scheduler is a step ahead of its worker."""
        return self.engine().batch_queue is not None

    def preemptions(self) -> int:
        for metric in self.llm.get_metrics():
            if metric.name == "vllm:num_preemptions":
                return int(metric.value)
        return -1

    def metrics(self) -> dict[str, float]:
        """What Prometheus would scrape, ``name`` or ``name:tier``."""
        from prometheus_client import REGISTRY

        return {
            ":".join([s.name, *(s.labels[k] for k in ("tier", "source") if k in s.labels)]): s.value
            for family in REGISTRY.collect()
            for s in family.samples
            if s.name.startswith("kvrecall") and not s.name.endswith("_created")
        }

    def rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Calls a method of vLLM's workers, or of ``worker_extension_cls``."""
        return list(self.llm.collective_rpc(method, kwargs=kwargs))

    workers = rpc

    def add_lora(self, lora: list[Any], load_inplace: bool = False) -> bool:
        from vllm.lora.request import LoRARequest

        request = LoRARequest(*lora, load_inplace=load_inplace)
        return bool(self.llm.llm_engine.add_lora(request))

    def embedded(self, tokens: list[int], mask: list[bool] | None) -> dict[str, Any]:
        """A prompt of embeddings, of which ``mask`` tells the positions that are tokens."""
        import torch
        from vllm import SamplingParams

        width = self.llm.llm_engine.model_config.get_hidden_size()
        rows = torch.zeros(len(tokens), width) + torch.tensor(tokens)[:, None] / 500
        prompt: dict[str, Any] = {"prompt_embeds": rows}
        if mask is not None:
            prompt |= {"prompt_token_ids": tokens, "prompt_is_token_ids": mask}
        greedy = SamplingParams(temperature=0.0, logprobs=1, max_tokens=8)
        (output,) = self.llm.generate(prompt, greedy, use_tqdm=False)
        return reply_of(output)

    def close(self) -> None:
        self.engine().shutdown()


class _Plain:
    lora_request = None
    cache_salt = None


def reply_of(output: Any) -> dict[str, Any]:
    completions = [
        {
            "tokens": list(one.token_ids),
            "logprobs": [
                [(token, entry.logprob) for token, entry in sorted(step.items())]
                for step in (one.logprobs or [])
            ],
        }
        for one in output.outputs
    ]
    return {
        **completions[0],
        "all": completions,
        "id": output.request_id,
        "cached": output.num_cached_tokens,
        "from": (output.kv_transfer_params or {}).get("kvrecall"),
        "miss": (output.kv_transfer_params or {}).get("kvrecall_missed"),
    }
