"""A process that hosts one real vLLM engine and takes orders as lines of JSON.

``python -m kvrecall_lab.engines.host``: its first line on stdin is the set-up (arguments of
``vllm.LLM``, with the pool's settings under ``pool``), every other an order:

{"do": "ask", "id": .., "prompt": [..], "salt": .., "max_tokens": .., "logprobs": ..,
 "adapter": [name, number, path], "images": [path, ..], "samples": .., "sampling": {..},
 "priority": .., "embeds": [bool, ..]}  answers a request; ``embeds``: where embeddings are
{"do": "forget", "running": .., "pool": ..}  empties the device's prefix cache, and the pool if
                           ``pool``; if ``running``, requests start over, otherwise only an idle
                           engine does it
{"do": "change", ..}       changes the weights, as of ``kvrecall_lab.engines.changing``
{"do": "fill", "prompts": [[..], ..], "drawn": .., "spread": ..}  has the pool hold made-up KV as
                           if it had served these: zeros, or random numbers if ``drawn``;
                           ``spread``: as of ``kv.store_drawn``
{"do": "cancel", "id": .., "when": ..}  aborts a request, which is not answered; with ``when``
                           once it is in that state (``STATES``), and ``{"cancelled": id}``
{"do": "linger"}           lets no step begin, once blocks wait in the arena for room on the device
                           (``{"lingers": true}``), until the pool service was restarted
{"do": "metrics"}          asks for the counters that Prometheus would scrape
{"do": "memory"}           asks for the engine's device cache: blocks and KV groups
{"do": "kv"}               asks for the KV on the device of the request that ended last
{"do": "admissions"}       asks for the requests admitted since the last such order
{"do": "close"}            ends the process, as the end of stdin does

On stdout: ``{"ready": pid}``, the fields of an ``Answer`` for each, ``{"metrics": {name: value}}``,
``{"memory": {..}}``, ``{"kv": {layer: {token: [digest, ..]}}}``, ``{"fill": {tier: blocks}}``,
``{"admissions": [[id, start, end, tokens], ..]}``, ``{"joined": bool}`` when a pool service is
found or lost, and ``{"error": ..}`` before it ends because the engine failed. Requests that arrive
while others run are batched with them, as in a server. The laboratory uses such processes because
they can be killed at any moment and share nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from kvrecall.block import BlockKey
from kvrecall.errors import EngineError
from kvrecall.pool.base import RecallState, Verdict
from kvrecall.testing import wait_until
from kvrecall_lab.engines.kv import device_kv, joined, store_drawn

MADE_UP = "kvrecall_lab.engines.made_up"
"""A ``module`` whose connector has no pool: only requests are answered."""

_SEED = 7  # of a request for several samples
Admission = tuple[str, int, int, int]
"""Of a request: tokens that the device has, end of the prefix recalled, tokens it has so far."""

STATES = "waiting fetched waiting_for_remote_kvs prefilling decoding stored preempted".split()
"""In which a request can be aborted: not begun; its blocks on their way into the arena, or onto the
device; computed; its blocks being copied into the arena; without device blocks again."""

_SETTLING_STEPS = 100
_FILL_S = 60.0
_EMBEDDED = 500.0  # tokens by their number over this
_SECOND = 2  # log-probabilities requested for the gap to the second choice


def main(before_engine: Callable[[], None] | None = None) -> None:
    """Hosts one engine until it is closed. ``before_engine`` is called before vLLM is imported."""
    faulthandler.register(signal.SIGUSR1)  # stacks of a process that hangs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to stdout; keep that for the log
    orders = _Orders(0)
    first = orders.next_line()
    if first is None:
        return
    setup = json.loads(first)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the scheduler side lives in this process
    os.environ.update(setup.pop("env", {}))
    try:
        if before_engine is not None:
            before_engine()
        Host(setup, orders, replies).run()
    except BaseException as error:  # noqa: BLE001 - reported to the parent
        traceback.print_exc()
        _say(replies, {"error": f"{type(error).__name__}: {error}"})
        raise SystemExit(1) from None


class _Orders:
    """Lines of a file descriptor, read with or without waiting."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self._lines: list[bytes] = []
        self.ended = False

    def next_line(self) -> bytes | None:
        """Waits; None at the end."""
        while not (self._lines or self.ended):
            self._read()
        return self._lines.pop(0) if self._lines else None

    def waiting(self, block_s: float) -> list[bytes]:
        """The lines that have arrived, after waiting at most ``block_s`` for one."""
        while not self.ended and select.select([self._fd], [], [], block_s)[0]:
            self._read()
            block_s = 0.0
        lines, self._lines = self._lines, []
        return lines

    def _read(self) -> None:
        data = os.read(self._fd, 1 << 20)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._lines += lines


class Host:
    """The engine and its loop."""

    def __init__(self, setup: dict[str, Any], orders: _Orders, replies: IO[str]) -> None:
        from vllm import LLM

        pool, module = setup.pop("pool", None), setup.pop("module", "kvrecall.engines.vllm")
        transfer = {
            "kv_connector": setup.pop("connector", "RecallConnector"),
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": pool,
        }
        options = {
            "enforce_eager": True,
            "block_size": 128,
            "disable_log_stats": False,
            "prefix_caching_hash_algo": "sha256_cbor",
            **setup,
        }
        self._llm = LLM(**options, kv_transfer_config=None if pool is None else transfer)
        self._engine = self._llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._orders = orders
        self._replies = replies
        self._names: dict[str, str] = {}  # the engine's request id -> the client's
        self._chains: dict[str, tuple[BlockKey, ...]] = {}
        self._started: dict[str, float] = {}  # when each was submitted
        self._first: dict[str, tuple[float, float]] = {}  # its first token, also by the CPU's time
        self._doomed: dict[str, str] = {}  # requests to be aborted, each in which state
        self._lingers = False
        self._joined: bool | None = None
        self._admissions: list[Admission] = []
        self._tables: Sequence[Sequence[int]] = ()  # device blocks of the last request that ended
        connector = self._core.scheduler.connector
        self._ours = None if module == MADE_UP else connector
        if self._ours is not None:
            _watch_admissions(self._ours, self._admissions, self._names)
            self._watch_tables(self._ours)

    def run(self) -> None:
        _say(self._replies, {"ready": os.getpid()})
        while True:
            busy = self._engine.has_unfinished_requests()
            for line in self._orders.waiting(0.0 if busy else 0.05):
                order = json.loads(line)
                name = order.pop("do")
                if name == "close":
                    return self._core.shutdown()
                if name == "forget":
                    self._forget(order.get("running", False), order.get("pool", False))
                elif name == "change":
                    from kvrecall_lab.engines.changing import change

                    change(self._llm, **order)
                    _say(self._replies, {"change": True})
                elif name == "cancel" and order["when"]:
                    self._doomed[order["id"]] = order["when"]
                elif name == "cancel":
                    self._cancel(order["id"])
                elif name == "linger":
                    self._lingers = True
                elif name == "fill":
                    _say(self._replies, {name: self._fill(**order)})
                elif name == "metrics":
                    _say(self._replies, {"metrics": _metrics()})
                elif name == "memory":
                    _say(self._replies, {"memory": memory_of(self._engine, self._core)})
                elif name == "kv":
                    _say(self._replies, {name: self._kv()})
                elif name == "admissions":
                    _say(self._replies, {name: self._admissions})
                    self._admissions.clear()
                else:
                    self._ask(**order)
            if self._orders.ended:
                return self._core.shutdown()
            self._tell_joined()
            if busy:
                if self._doomed:
                    self._cancel_doomed()
                if self._lingers:
                    self._linger()
                self._step()

    def _forget(self, running: bool, pool: bool) -> None:
        """Empties the device's prefix cache; ``running``: of running requests, too; ``pool``: and
        the pool. Blocks of a request that has just ended may still be copied, for a step or two."""
        for _ in range(_SETTLING_STEPS):
            # vLLM refuses while blocks are loaded, as a server replies; it has preempted.
            with contextlib.suppress(RuntimeError):
                if self._engine.reset_prefix_cache(running, pool):
                    return
            if self._engine.has_unfinished_requests():
                return
            self._step()

    def _ask(
        self,
        id: str,
        prompt: list[int],
        max_tokens: int,
        salt: str | None = None,
        logprobs: bool = False,
        adapter: tuple[str, int, str] | None = None,
        images: Sequence[str] = (),
        samples: int = 1,
        embeds: Sequence[bool] = (),
        sampling: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        more = dict(sampling or {})
        if "structured_outputs" in more:
            more["structured_outputs"] = StructuredOutputsParams(**more["structured_outputs"])

        item: dict[str, Any] = {"prompt_token_ids": prompt}
        if embeds:
            item = self._embedded(prompt, embeds)
        if salt:
            item["cache_salt"] = salt
        if images:
            item["multi_modal_data"] = {"image": [_picture(path) for path in images]}
        given = {
            "n": samples,
            "temperature": 0.0 if samples == 1 else 1.0,
            "seed": None if samples == 1 else _SEED,
            "max_tokens": max_tokens,
            "logprobs": _SECOND if logprobs else None,
            # Otherwise the last output is of one sample: of the one that ends last.
            "output_kind": RequestOutputKind["CUMULATIVE" if samples == 1 else "FINAL_ONLY"],
        }
        params = SamplingParams(**given | more)
        self._started[id] = time.perf_counter()
        self._first.pop(id, None)
        lora = LoRARequest(*adapter) if adapter else None
        more = {"lora_request": lora, "priority": priority}
        self._names[self._engine.add_request(id, item, params, **more)] = id

    def _embedded(self, prompt: list[int], embeds: Sequence[bool]) -> dict[str, Any]:
        """The prompt with embeddings, the same for each token, at some of its positions, or all."""
        import torch

        width = self._engine.model_config.get_hidden_size()
        rows = torch.zeros(len(prompt), width) + torch.tensor(prompt)[:, None] / _EMBEDDED
        if all(embeds):
            return {"prompt_embeds": rows}
        mask = [not one for one in embeds]
        return {
            "prompt_embeds": rows,
            "prompt_token_ids": prompt,
            "prompt_is_token_ids": mask,
        }

    def _cancel(self, id: str) -> None:
        if self._started.pop(id, None) is not None:
            self._engine.abort_request([id])

    def _cancel_doomed(self) -> None:
        """Aborts those that are in the state for which it was ordered."""
        scheduler = self._core.scheduler
        for request in list(scheduler.requests.values()):
            name = request.request_id.rpartition("_")[2].rpartition("-")[0]  # vLLM's additions
            if self._doomed.get(name, "") in states_of(request, scheduler.connector):
                _say(self._replies, {"cancelled": name, "when": self._doomed.pop(name)})
                self._cancel(name)

    def _linger(self) -> None:
        """As a step does that takes longer than a restart of the service."""
        side, pool = self._core.scheduler.connector._s, self._core.scheduler.connector._pool
        if any(any(load.offsets or ()) for load in side._matched.values()):
            self._lingers = False
            _say(self._replies, {"lingers": True})
            wait_until(lambda: not pool.is_connected)
            wait_until(lambda: pool.is_connected)

    def _fill(
        self, prompts: Sequence[list[int]], drawn: bool = False, spread: float = 0.0
    ) -> dict[str, int]:
        """Uses every chain as a request does, and saves what is missing."""
        from vllm import SamplingParams

        connector = self._core.scheduler.connector
        if not connector._started.wait(_FILL_S):
            raise EngineError("the fingerprint of the model's weights took too long")
        side = connector._s
        pool, size = side._pool, side._facts.block_size
        for prompt in prompts:
            once = SamplingParams(max_tokens=1)
            name = self._engine.add_request("fill", {"prompt_token_ids": prompt}, once)
            keys = side._state(self._core.scheduler.requests[name]).keys(len(prompt) // size)
            pool.touch(keys)
            ticket = pool.acquire(keys, _FILL_S)
            while pool.poll(ticket).state is RecallState.PENDING:
                time.sleep(0.001)
            pool.release(ticket)
            free = self._core.scheduler.kv_cache_config.num_blocks - 1
            at_once = free if drawn else max(1, len(keys))
            for at in range(0, len(keys), at_once):
                some = keys[at : at + at_once]
                slots = pool.reserve(some, keys[at - 1] if at else None)
                if drawn:
                    new = [one.offset for one in slots if one.verdict is Verdict.RESERVED]
                    self._draw(new, spread)
                pool.commit(some)
            if not pool.flush(keys, _FILL_S):
                raise EngineError("the pool is full: not all of a prompt is saved")
            self._engine.abort_request(["fill"])
        return {tier.name: tier.blocks for tier in pool.stats().tiers if tier.evictions}

    def _draw(self, offsets: Sequence[int], spread: float) -> None:
        """Fills records of the arena by way of the device, whose blocks no request may hold."""
        from kvrecall.engines.vllm.device.base import Copy
        from kvrecall.engines.vllm.wire import StepOrders, StoreOrder

        side = self._core.scheduler.connector._s
        self._engine.reset_prefix_cache()
        copy = Copy(tuple(range(1, len(offsets) + 1)), tuple(offsets))
        store = StoreOrder(-1, copy, side._auditor.origin())
        arena, sizes = side._pool.arena_handle(), side._record_bytes
        orders = StepOrders(arena, stores=[store], record_bytes=sizes)
        self._llm.collective_rpc(store_drawn, args=(orders, spread))

    def _step(self) -> None:
        outputs = self._engine.step()
        self._note_chains()
        for output in outputs:
            if output.request_id not in self._first and output.outputs[0].token_ids:
                self._first[output.request_id] = time.perf_counter(), time.process_time()
            if output.finished:
                _say(self._replies, self._answer(output))

    def _note_chains(self) -> None:
        if self._ours is None:
            return
        for request_id, name in list(self._names.items()):
            if chain := self._ours._s.saved(request_id):
                self._chains[name] = chain
            if request_id not in self._core.scheduler.requests:
                del self._names[request_id]

    def _answer(self, output: Any) -> dict[str, Any]:
        submitted = self._started.pop(output.request_id)
        first, spent = self._first.pop(output.request_id, (0.0, 0.0))
        samples = output.outputs
        keys = self._chains.pop(output.request_id, ())
        prompt = zip(output.prompt_token_ids or (), output.prompt_logprobs or (), strict=False)
        return {
            "id": output.request_id,
            "tokens": [token for one in samples for token in one.token_ids],
            "finish": samples[0].finish_reason or "",
            "sources": (output.kv_transfer_params or {}).get("kvrecall") or {},
            "keys": [key.hex() for key in keys],
            "gaps": [_gap(step) for one in samples for step in one.logprobs or ()],
            "scores": [
                step[token].logprob
                for one in samples
                for token, step in zip(one.token_ids, one.logprobs or (), strict=False)
            ],
            "cached": output.num_cached_tokens or 0,
            "prompt_scores": [step[token].logprob for token, step in prompt if step],
            "ttft_s": first - submitted,
            "decode_s": time.perf_counter() - first,
            "decode_cpu_s": time.process_time() - spent,
        }

    def _watch_tables(self, connector: Any) -> None:
        """Notes from now on where the blocks of a request are when it ends."""
        finished = connector.request_finished_all_groups

        def noted(request: Any, block_ids: Sequence[Sequence[int]]) -> Any:
            self._tables = [list(ids) for ids in block_ids]
            return finished(request, block_ids)

        connector.request_finished_all_groups = noted

    def _kv(self) -> dict[str, dict[int, list[str]]]:
        """By layer and the token behind a block, digests of its KV heads."""
        tables: dict[str, dict[int, int]] = {}
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups
        for group, ids in zip(groups, self._tables, strict=True):
            size = group.kv_cache_spec.block_size
            blocks = {(at + 1) * size: block for at, block in enumerate(ids) if block}
            tables |= dict.fromkeys(group.layer_names, blocks)
        return joined(self._llm.collective_rpc(device_kv, args=(tables,)))

    def _tell_joined(self) -> None:
        ours = self._ours
        joined = None if ours is None else getattr(ours._pool, "is_connected", False)
        if joined != self._joined:
            self._joined = joined
            _say(self._replies, {"joined": joined})


def states_of(request: Any, connector: Any) -> set[str]:
    """What happens to a request between two steps, in the words of ``STATES``."""
    status, side = request.status.name, connector._s
    found = {status.lower()}
    if request.request_id in side._matched:
        found.add("fetched")
    elif status == "RUNNING":
        found.add("decoding" if request.num_output_tokens > 1 else "prefilling")
    state = side.state_of(request.request_id)
    if state is not None and side._saver.is_reading(state):
        found.add("stored")
    return found


def _gap(step: Mapping[int, Any]) -> float:
    """The likeliest token's lead over the second, in log-probability."""
    best = sorted((entry.logprob for entry in step.values()), reverse=True)
    return float(best[0] - best[1])


def _picture(path: str) -> Any:
    from PIL import Image

    return Image.open(path).convert("RGB")


def memory_of(engine: Any, core: Any) -> dict[str, Any]:
    """The device cache of an engine in this process, from vLLM's own configuration. ``layers``:
    bytes of a block in each layer of a group."""
    config = core.scheduler.kv_cache_config
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        layers = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        first = layers[group.layer_names[0]]
        groups.append(
            {
                "kind": type(first).__name__,
                "block_size": spec.block_size,
                "window": getattr(first, "sliding_window", None) or 0,
                "chunk": getattr(first, "attention_chunk_size", None) or 0,
                "layers": [_page_bytes(layers[name]) for name in group.layer_names],
            }
        )
    scheduler = engine.vllm_config.scheduler_config
    free = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return {
        "blocks": config.num_blocks,
        "held": config.num_blocks - 1 - free,  # the null block is no request's
        "hybrid_manager": not scheduler.disable_hybrid_kv_cache_manager,
        "groups": groups,
    }


def _page_bytes(spec: Any) -> int:
    """Bytes of a layer's block without what only fills it up to the size of another's."""
    if hasattr(spec, "shapes"):  # a recurrent layer's states
        pairs = zip(spec.shapes, spec.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)
    return int(getattr(spec, "real_page_size_bytes", spec.page_size_bytes))


def _watch_admissions(connector: Any, admissions: list[Admission], names: dict[str, str]) -> None:
    """Notes from now on what the scheduler admits, at first and after a preemption."""
    starts: dict[str, int] = {}
    match, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def matched(request: Any, computed: int) -> Any:
        starts[request.request_id] = computed
        return match(request, computed)

    def taken(request: Any, blocks: Any, tokens: int) -> None:
        start = starts.pop(request.request_id, None)  # called again once the blocks are loaded
        if start is not None:
            name = names.get(request.request_id, request.request_id)
            admissions.append((name, start, start + tokens, request.num_tokens))
        allocated(request, blocks, tokens)

    connector.get_num_new_matched_tokens = matched
    connector.update_state_after_alloc = taken


def _metrics() -> dict[str, float]:
    """kvrecall's counters and gauges, ``name`` or ``name:tier``, and vLLM's of preemptions."""
    from prometheus_client import REGISTRY

    return {
        ":".join([s.name, *(s.labels[k] for k in ("tier", "source") if k in s.labels)]): s.value
        for family in REGISTRY.collect()
        for s in family.samples
        if s.name.startswith(("kvrecall", "vllm:num_preemptions"))
        and not s.name.endswith("_created")
    }


def _say(replies: IO[str], message: dict[str, Any]) -> None:
    replies.write(json.dumps(message, separators=(",", ":")) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
