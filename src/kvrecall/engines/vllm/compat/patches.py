"""Every place in which kvrecall replaces an attribute of vLLM, and how.

No other package of kvrecall assigns an attribute of vLLM's (test_compat.py), and this one only in
``install``, for a patch of the table below, which docs/compat.md shows.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """``target``: ``module:Class.attribute`` of vLLM. ``until``: what makes the patch obsolete."""

    name: str
    target: str
    does: str
    why: str
    until: str
    since: str = ""
    """The oldest minor version that has the target, if it is not the oldest supported one."""


TABLE = (
    Patch(
        "reschedule",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "Preempts requests whose blocks the workers report as lost or wrong, before the step's "
        "output for them is used; they are computed again. Keeps the device blocks of a failed "
        "load out of use while it may still write them.",
        "A connector can fail a load, but cannot take back blocks that a running request already "
        "reads, and vLLM frees those of a failed load at once.",
        "vLLM lets a connector invalidate blocks of running requests.",
    ),
    Patch(
        "aside",
        "vllm.v1.core.sched.scheduler:Scheduler.get_grammar_bitmask",
        "Lets the connector work in each step after it was given to the workers, and before the "
        "engine waits for them: it finds the reasons of misses.",
        "What a connector does within `schedule` delays the step.",
        "vLLM calls a connector when a step has been given to the workers.",
    ),
    Patch(
        "orders-first",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        "Gives the connector a step's orders before attention metadata is built. Only with Model "
        "Runner V2.",
        "V2 calls `handle_preemptions` behind that: metadata would describe blocks that have left.",
        "V2 calls it before it builds metadata, as V1 does.",
    ),
    Patch(
        "see-blocks",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
        "Shows a step's block tables on the host to retrieval's metadata builder. Only with "
        "retrieval attention and Model Runner V1.",
        "Builders receive them on the device; to read them there, the host would wait.",
        "Attention metadata includes block tables on the host.",
    ),
    Patch(
        "keep-blocks",
        "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
        "Keeps block tables on the host, too. Only with retrieval attention and Model Runner V2.",
        "V2 has them on the device only.",
        "Attention metadata includes block tables on the host.",
    ),
    Patch(
        "see-blocks-v2",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn",
        "Like `see-blocks`, with those that `keep-blocks` keeps.",
        "As `see-blocks`.",
        "Attention metadata includes block tables on the host.",
    ),
    Patch(
        "full-graphs",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding",
        "Replays no full graph for a step that retrieval attention cannot do in one, and notes for "
        "which steps one is replayed. Only with retrieval attention on a GPU and Model Runner V1.",
        "vLLM chooses a step's graph by the number of tokens, and does not tell the builders.",
        "Builders are asked and told.",
    ),
    Patch(
        "full-graphs-v2",
        "vllm.v1.worker.gpu.model_runner:dispatch_cg_and_sync_dp",
        "Like `full-graphs`. Only with Model Runner V2.",
        "As `full-graphs`.",
        "As `full-graphs`.",
    ),
    Patch(
        "leave-room",
        "vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        "Leaves device memory for digests. Only with retrieval attention on a GPU, and not if "
        "`--kv-cache-memory-bytes` is set.",
        "vLLM gives the KV cache all memory that is left; digests would come on top.",
        "A KV cache spec can say what a block takes beside its KV.",
    ),
    Patch(
        "show-model",
        "vllm.v1.worker.gpu_worker:Worker.get_kv_connector_handshake_metadata",
        "Gives the worker's connector access to the loaded model (for the class that `worker_cls` "
        "names).",
        "The namespace includes the effect of limits on the model: rope caches, switches.",
        "vLLM passes the model to `register_kv_caches`, or hashes it.",
    ),
    Patch(
        "see-calls",
        "vllm.v1.engine.core:EngineCore.collective_rpc",
        "Reads the weights' digest before and after a call to the workers that may write weights.",
        "`reload_weights`, weight transfer and worker extensions replace weights unannounced.",
        "vLLM tells connectors that weights changed.",
    ),
    Patch(
        "see-adapters",
        "vllm.v1.engine.core:EngineCore.add_lora",
        "Asks the workers which adapter they have loaded.",
        "As `note-adapters`; requests that follow are pooled at once.",
        "As `note-adapters`.",
    ),
    Patch(
        "see-waking",
        "vllm.v1.engine.core:EngineCore.wake_up",
        "Asks the workers whether they still have their weights.",
        "From level 2 on, sleep does not keep them.",
        "vLLM tells connectors that weights changed.",
    ),
    Patch(
        "keep-pool",
        "vllm.v1.engine.core:EngineCore._reset_caches",
        "Keeps the pool when an engine pauses or sleeps.",
        "vLLM resets the connector there, but the pool's blocks stay right, and others use them.",
        "vLLM resets connectors only when weights changed.",
    ),
    Patch(
        "note-adapters",
        "vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",
        "Fingerprints an adapter's files when a worker loads them.",
        "vLLM's block hash has an adapter's name; its files may be others when a request comes.",
        "vLLM's block hash covers an adapter's weights.",
    ),
    Patch(
        "note-weights",
        "vllm.model_executor.models.qwen2:Qwen2ForCausalLM.load_weights",
        "Notes when the loaded model loads weights again (of the model's own object).",
        "Trainers in the engine's process call it without the engine.",
        "vLLM tells connectors that weights changed.",
    ),
    Patch(
        "note-sleep",
        "vllm.v1.worker.gpu_worker:Worker.sleep",
        "Waits for copies in flight (for the class that `worker_cls` names).",
        "vLLM 0.32 unmaps the KV cache under them.",
        "vLLM 0.33 is the oldest that is supported.",
    ),
    Patch(
        "note-discard",
        "vllm.v1.worker.gpu_worker:Worker.discard",
        "Likewise, when only the KV cache is given back.",
        "As `note-sleep`.",
        "As `note-sleep`.",
        since="0.31",
    ),
    Patch(
        "note-waking",
        "vllm.v1.worker.gpu_worker:Worker.wake_up",
        "Allows copies again.",
        "As `note-sleep`.",
        "As `note-sleep`.",
    ),
    Patch(
        "fingerprint-early",
        "vllm.v1.executor.abstract:Executor.__init__",
        "Hashes the weight files before they are loaded, and notes the executor, by which workers "
        "map and page-lock the arena early.",
        "Only files that did not change since before loading are what was loaded.",
        "vLLM loads the connector's scheduler side before the model.",
    ),
    Patch(
        "match-unit",
        "vllm.v1.engine.core:resolve_kv_cache_block_sizes",
        "Sets `prefix_match_unit` where hits can end inside blocks and the user has not set it.",
        "Which units fit is known only when the KV groups are; another one ends the engine.",
        "vLLM chooses a unit itself.",
    ),
    Patch(
        "whole-replay",
        "vllm.distributed.kv_events:EventPublisherFactory._registry",
        "Replaces the `zmq` publisher of KV events by a subclass, which replays all that is stored "
        "and bounds what readers may send. Only if the engine publishes events.",
        "vLLM repeats the last batches alone, and binds ZeroMQ's sockets to the network; a "
        "publisher of another name is not allowed in `kv_events_config`.",
        "vLLM's publisher can repeat what is stored, and bounds what readers send.",
    ),
    Patch(
        "offloadable-spec",
        "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec",
        "Gives full-attention layers a KV cache spec whose blocks may leave the device; refuses "
        "layers that would be attended to densely. Only with retrieval attention.",
        "The spec registry maps specs to managers; it does not choose the spec of a layer.",
        "vLLM lets an attention backend name its KV cache spec.",
    ),
    Patch(
        "seeds",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        "Takes back samples of unfinished prefills without the generator's offset. Only on a CPU.",
        "A CPU's has none: a request with a `seed` and a prompt of several steps ends the engine.",
        "vLLM's CPU runner stops calling `Generator.get_offset`.",
    ),
    Patch(
        "base-rows",
        "vllm.lora.punica_wrapper.punica_cpu:PunicaWrapperCPU._apply_shrink",
        "Keeps adapters off tokens of requests without one. Only on a CPU.",
        "Their index is -1: in a step with others vLLM adds the adapter in the last place.",
        "vLLM's kernels for a CPU leave such tokens out.",
    ),
    Patch(
        "sleep",
        "vllm.distributed.device_communicators.shm_broadcast:sched_yield",
        "Makes waiting processes sleep for a microsecond instead of yielding. Only on a CPU; "
        "`KVRECALL_WAITS=spin` disables it.",
        "With few cores, spinning takes the processor from threads that compute.",
        "vLLM waits on a futex, or pauses between polls.",
    ),
    Patch(
        "end-with-parent",
        "vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator",
        "Ends the coordinator of data-parallel replicas when the server that started it is killed.",
        "It would keep running, idle, and loads no plug-ins, which end engine cores.",
        "vLLM's coordinator watches its parent.",
    ),
    Patch(
        "note-outputs",
        "vllm.v1.engine.core_client:AsyncMPClient.get_output_async",
        "Shows each step's outputs to the server, for throughput and batch sizes.",
        "A stat logger receives sums over the outputs of a step, not which sequences got a token.",
        "Stat loggers receive the outputs.",
    ),
)

PATCHES = {patch.name: patch for patch in TABLE}

_NAME, _PLAIN = "kvrecall_patch", "__wrapped__"
"""Attributes of a replacement; by the second its signature, which vLLM reads, is vLLM's own."""


def owner_of(patch: Patch) -> Any:
    """The class or module whose attribute ``patch`` replaces.

    Raises ImportError or AttributeError if this vLLM lacks it."""
    module, _, path = patch.target.partition(":")
    owner: Any = importlib.import_module(module)
    for part in path.split(".")[:-1]:
        owner = getattr(owner, part)
    return owner


def install(
    name: str,
    make: Callable[[Any], Any],
    owner: Any = None,
    renew: bool = False,
) -> None:
    """Replaces a patch's target with ``make(plain)``, where ``plain`` is vLLM's own. Idempotent;
    with ``renew`` the last call counts instead of the first.

    ``owner``: the object, or the subclass, to change instead of the class in the table.
    """
    patch = PATCHES[name]
    owner = owner_of(patch) if owner is None else owner
    attribute = patch.target.rpartition(":")[2].rpartition(".")[2]
    plain = getattr(owner, attribute)
    if getattr(plain, _NAME, None) == name:
        if not renew:
            return
        plain = getattr(plain, _PLAIN)
    made = make(plain)
    setattr(made, _NAME, name)
    setattr(made, _PLAIN, plain)
    is_static = isinstance(getattr(owner, "__dict__", {}).get(attribute), staticmethod)
    setattr(owner, attribute, staticmethod(made) if is_static else made)


def install_at_import(name: str, make: Callable[[Any], Any]) -> None:
    """As ``install``, but once vLLM imports the target's module, which may take a second."""
    module = PATCHES[name].target.partition(":")[0]
    if module in sys.modules:
        install(name, make)
    else:
        sys.meta_path.insert(0, _AtImport(module, lambda: install(name, make)))


@dataclass(frozen=True)
class _AtImport:
    """A finder of modules that acts when one is imported."""

    module: str
    act: Callable[[], None]

    def find_spec(self, fullname: str, *_: Any) -> Any:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)  # while the others look
        spec: Any = importlib.util.find_spec(fullname)
        sys.meta_path.insert(0, self)  # who looks may not import it
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            sys.meta_path.remove(self)
            self.act()

        spec.loader.exec_module = exec_module
        return spec
