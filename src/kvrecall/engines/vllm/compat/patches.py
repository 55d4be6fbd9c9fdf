"""Every place in which kvrecall replaces something of vLLM's, and how that is done.

No other package of kvrecall assigns an attribute of vLLM's (tests/engine/test_compat.py), and this
package does it only by ``install``, for a patch that the table below names.
``python -m kvrecall.engines.vllm.compat.patches docs/compat.md`` writes the table into the docs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvrecall.engines.vllm import generated_page


@dataclass(frozen=True, slots=True)
class Patch:
    """``target``: ``module:Class.attribute`` of vLLM. ``until``: what makes it needless."""

    name: str
    target: str
    does: str
    why: str
    until: str
    on_objects: bool = False
    """Whether it is set on single objects, and vLLM's class stays as it is."""


TABLE = (
    Patch(
        "reschedule",
        "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
        "Preempts requests whose blocks the workers report as lost or wrong, before the step's "
        "output of them is used; they are computed again.",
        "A connector can fail a load, and has no way to take back blocks that a running request "
        "already reads.",
        "vLLM lets a connector invalidate blocks of running requests.",
    ),
    Patch(
        "orders-first",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        "Gives the connector a step's orders before attention metadata is built. Only with Model "
        "Runner V2.",
        "V2 calls `handle_preemptions` just before the forward pass, so metadata would describe "
        "blocks that have left the device.",
        "V2 calls it before it builds metadata, as V1 does.",
    ),
    Patch(
        "show-model",
        "vllm.v1.worker.gpu_worker:Worker.get_kv_connector_handshake_metadata",
        "Shows the loaded model to the connector of the worker (of the class that `worker_cls` "
        "names).",
        "The namespace holds what limits have become in the model: rope caches, switches.",
        "vLLM passes the model to `register_kv_caches`, or hashes it.",
    ),
    Patch(
        "fingerprint-early",
        "vllm.v1.executor.abstract:Executor.__init__",
        "Begins to hash the weight files before they are loaded.",
        "Only files that are unchanged since before loading are what was loaded; and the hash is "
        "ready when the engine is.",
        "vLLM loads the connector's scheduler side before the model.",
    ),
    Patch(
        "offloadable-spec",
        "vllm.model_executor.layers.attention.attention:Attention.get_kv_cache_spec",
        "Full-attention layers get a KV cache spec whose blocks may leave the device. Only with "
        "retrieval attention.",
        "The spec registry maps specs to managers; which spec a layer has, it does not ask.",
        "vLLM lets an attention backend name its KV cache spec.",
    ),
    Patch(
        "refuse-mla",
        "vllm.model_executor.layers.attention:MLAAttention.get_kv_cache_spec",
        "Refuses layers that retrieval attention does not serve.",
        "They would be attended to densely without a word.",
        "Retrieval attention serves MLA.",
    ),
    Patch(
        "seeds",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        "Takes samples of unfinished prefills back without an offset of the generator. Only on a "
        "CPU.",
        "A CPU's generator has no offset: the first request with a `seed` and a prompt of several "
        "steps ends the engine.",
        "vLLM's CPU runner stops calling `Generator.get_offset`.",
    ),
    Patch(
        "sleep",
        "vllm.distributed.device_communicators.shm_broadcast:sched_yield",
        "Waiting processes sleep for a microsecond instead of yielding. Only on a CPU; "
        "`KVRECALL_WAITS=spin` leaves it.",
        "With few cores, spinning takes the processor from those who compute.",
        "vLLM waits by futex, or with a pause between looks.",
    ),
    Patch(
        "end-with-parent",
        "vllm.v1.engine.core:EngineCoreProc.run_engine_core",
        "The engine core ends when the server that started it is killed. Only in `kvrecall serve`; "
        "under `vllm serve` the connector watches the parent.",
        "It would stay, with its memory and the lock of the disk tier.",
        "vLLM's engine core watches its parent, as its workers do.",
    ),
    Patch(
        "end-coordinator-with-parent",
        "vllm.v1.engine.coordinator:DPCoordinatorProc.run_coordinator",
        "As `end-with-parent`, for the coordinator of data-parallel replicas.",
        "It would stay, idle.",
        "vLLM's coordinator watches its parent.",
    ),
    Patch(
        "note-outputs",
        "vllm.v1.engine.core_client:AsyncMPClient.get_output_async",
        "The server sees each step's outputs, for throughputs and batch sizes.",
        "A stat logger gets sums over the outputs of a step and not which sequences got a token.",
        "Stat loggers get the outputs.",
        on_objects=True,
    ),
    Patch(
        "recall-in-usage",
        "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.__class__",
        "A copy of each handler that vLLM has configured becomes one of our subclass of it: usage "
        "with the recall split, limits, `best_of`.",
        "Its constructor takes two dozen arguments that change from version to version.",
        "vLLM takes a handler class in its settings.",
        on_objects=True,
    ),
)

PATCHES = {patch.name: patch for patch in TABLE}

REGISTRATIONS = {
    "`register_backend` of `AttentionBackendEnum`": "retrieval attention in place of `CPU_ATTN`, "
    "`FLASH_ATTN` and `TRITON_ATTN`",
    "`KVCacheSpecRegistry.register`": "the block manager of layers whose blocks may leave the "
    "device",
    "`vllm.general_plugins` entry points": "`retrieval`, `weights`, `seeds`, `waits`",
    "`--kv-transfer-config`": "`RecallConnector`",
}
"""What goes through vLLM's own doors, for the docs."""

_NAME, _PLAIN = "kvrecall_patch", "kvrecall_plain"


def owner_of(patch: Patch) -> Any:
    """The class or module whose attribute ``patch`` replaces. ImportError or AttributeError if
    this vLLM has no such thing."""
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
    """Puts ``make(plain)`` in place of a patch's target, where ``plain`` is vLLM's own. Idempotent;
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


def as_markdown() -> str:
    """The table for docs/compat.md."""
    lines = ["| Patch | In vLLM | What it does | Why | Can go when |", "|---|---|---|---|---|"]
    for patch in TABLE:
        where = patch.target.replace(":", ".") + (" (single objects)" if patch.on_objects else "")
        lines.append(f"| `{patch.name}` | `{where}` | {patch.does} | {patch.why} | {patch.until} |")
    lines += ["", "| vLLM's own door | What goes through it |", "|---|---|"]
    lines += [f"| {door} | {what} |" for door, what in REGISTRATIONS.items()]
    return "\n".join(lines) + "\n"


BEGIN = generated_page.begin_of("kvrecall.engines.vllm.compat.patches")


if __name__ == "__main__":
    generated_page.write(sys.argv[1:], BEGIN, as_markdown())
