"""Patches of vLLM's workers and model runners: access to the model and to block tables on the host,
memory beside the KV cache, the time of connector calls, and seeds and adapters on a CPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import numpy.typing as npt

from kvrecall.engines.vllm.compat.patches import PATCHES, install, install_at_import, owner_of
from kvrecall.engines.vllm.compat.scheduler import parts_of
from kvrecall.engines.vllm.compat.versions import is_refused
from kvrecall.environment import SEEDS

if TYPE_CHECKING:
    import torch


def hand_orders_first(vllm_config: Any, orders_type: type) -> None:
    """Makes Model Runner V2 pass a step's orders to the connector before the step touches a device
    block or builds attention metadata, as V1 does.

    V2 itself calls ``handle_preemptions`` only just before the forward pass. It still does, so the
    connector gets the same orders twice. Dummy runs and warm-up have no orders of that type.
    """
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return
    import torch
    from vllm.distributed import kv_transfer

    def make(plain: Any) -> Any:
        @torch.inference_mode()
        def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            orders = scheduler_output.kv_connector_metadata
            are_ours = any(isinstance(one, orders_type) for one in parts_of(orders, "metadata"))
            if are_ours and kv_transfer.has_kv_transfer_group():
                kv_transfer.get_kv_transfer_group().handle_preemptions(orders)
            return plain(self, scheduler_output, *args, **kwargs)

        return execute_model

    install("orders-first", make)


class BatchBlocks(NamedTuple):
    """The device blocks of a step's requests, on the host: those of request i of the batch are row
    ``rows[i]`` of ``ids``, int32 ``[rows, blocks]``, which changes with the next step. ``prompts``:
    int32 ``[rows]``, tokens of their prompts. ``is_graph``: a graph of the whole forward pass is
    replayed for the step, so no layer's Python runs, and requests may be padded."""

    ids: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.int32]
    is_graph: bool = False

    def leading(self, requests: int, blocks: int) -> npt.NDArray[np.int32]:
        """Copies of so many ids of so many requests: ``[requests, blocks]``."""
        return self.ids[self.rows[:requests], :blocks]


step_blocks: dict[
    str, BatchBlocks
] = {}  # by layer, of the step whose metadata is about to be built


def take_batch_blocks(layer_name: str) -> BatchBlocks | None:
    """Of the step whose attention metadata is being built, in the KV group of that layer; once.
    None in dummy runs of Model Runner V2."""
    return step_blocks.pop(layer_name, None)


def follow_blocks(vllm_config: Any) -> None:
    """Makes ``take_batch_blocks`` work. To read block tables back from a device, the host would
    wait for the step that it computes."""
    if not getattr(vllm_config, "use_v2_model_runner", False):
        install("see-blocks", _seeing_tables)
        return
    tables: WeakKeyDictionary[Any, list[npt.NDArray[np.int32]]] = WeakKeyDictionary()

    def keeping(plain: Any) -> Any:
        def append_block_ids(self: Any, req_index: int, new_block_ids: Any, overwrite: Any) -> None:
            plain(self, req_index, new_block_ids, overwrite)
            if self not in tables:
                tables[self] = [np.zeros(one.gpu.shape, np.int32) for one in self.block_tables]
            ends = self.num_blocks.np[:, req_index].tolist()
            for table, end, new in zip(tables[self], ends, new_block_ids, strict=True):
                table[req_index, end - len(new) : end] = new

        return append_block_ids

    def seeing(plain: Any) -> Any:
        def prepare_attn(self: Any, input_batch: Any) -> Any:
            ids = tables.get(self.block_tables)
            if ids is not None:
                prompts = self.req_states.prompt_len.np
                _show(self, [BatchBlocks(one, input_batch.idx_mapping_np, prompts) for one in ids])
            return plain(self, input_batch)

        return prepare_attn

    install("keep-blocks", keeping)
    install("see-blocks-v2", seeing)


def _seeing_tables(plain: Any) -> Any:
    def build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch, groups = self.input_batch, range(len(self.kv_cache_config.kv_cache_groups))
        tables = [batch.block_table[group].get_numpy_array() for group in groups]
        rows = [np.arange(len(ids), dtype=np.int32) for ids in tables]
        prompts = batch.num_prompt_tokens
        _show(self, [BatchBlocks(*one, prompts) for one in zip(tables, rows, strict=True)])
        return plain(self, *args, **kwargs)

    return build_attention_metadata


def _show(runner: Any, blocks: Sequence[BatchBlocks]) -> None:
    """Those of each KV group of the step."""
    step_blocks.clear()
    for group, of_group in zip(runner.kv_cache_config.kv_cache_groups, blocks, strict=True):
        shown = of_group._replace(is_graph=_last_is_graph)
        step_blocks.update(dict.fromkeys(group.layer_names, shown))


class GraphUser(Protocol):
    """What full graphs are replayed for."""

    def hinders_graph(self, requests: int) -> bool:
        """Whether the next step, of so many requests, may not be one."""


_graph_users: WeakSet[GraphUser] = WeakSet()
_last_is_graph = False  # whether a graph is replayed for the step that was dispatched last


def decides_graphs(vllm_config: Any) -> bool:
    """Whether this vLLM has what ``follow_graphs`` replaces."""
    patch = PATCHES[_graphs_of(vllm_config)]
    try:
        return hasattr(owner_of(patch), patch.target.rpartition(":")[2].rpartition(".")[2])
    except (ImportError, AttributeError):
        return False


def _graphs_of(vllm_config: Any) -> str:
    is_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    return "full-graphs-v2" if is_v2 else "full-graphs"


def follow_graphs(vllm_config: Any, user: GraphUser) -> None:
    """Asks ``user`` before a full graph is chosen for a step, and tells it by ``BatchBlocks`` which
    was. A step for which one user of any data-parallel rank hinders it is not replayed on any:
    ranks agree on what this one asks for."""
    _graph_users.add(user)
    if _graphs_of(vllm_config) == "full-graphs-v2":
        install("full-graphs-v2", _dispatching)
    else:
        install("full-graphs", _determining)


def _determining(plain: Any) -> Any:
    def _determine_batch_execution_and_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_dummy = kwargs.get("force_uniform_decode") is not None
        if not is_dummy and is_hindered(kwargs["num_reqs"]):
            kwargs["force_uniform_decode"] = False
        found = plain(self, *args, **kwargs)
        _note_mode(found[0])
        return found

    return _determine_batch_execution_and_padding


def _dispatching(plain: Any) -> Any:
    def dispatch_cg_and_sync_dp(
        manager: Any, num_reqs: int, num_tokens: int, uniform: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if is_hindered(num_reqs):
            uniform = None
            kwargs.update(max_query_len=None, uniform_decode=False)
        found = plain(manager, num_reqs, num_tokens, uniform, *args, **kwargs)
        _note_mode(found[0].cg_mode)
        return found

    return dispatch_cg_and_sync_dp


def is_hindered(requests: int) -> bool:
    """Whether a step of so many requests may not be one graph."""
    return any(user.hinders_graph(requests) for user in _graph_users)


def _note_mode(mode: Any) -> None:
    global _last_is_graph
    _last_is_graph = mode.name == "FULL"


def leave_room(cache_bytes: Callable[[Any, Any, int], int]) -> None:
    """Makes workers of GPUs give to the KV cache only ``cache_bytes(vllm_config, specs, found)`` of
    the ``found`` bytes, where ``specs`` are the layers' by name. A size that the user has set
    stays."""

    def make(plain: Any) -> Any:
        def determine_available_memory(self: Any) -> int:
            found = int(plain(self))
            if self.cache_config.kv_cache_memory_bytes:
                return found
            return cache_bytes(self.vllm_config, self.get_kv_cache_spec(), found)

        return determine_available_memory

    install("leave-room", make)


def worker_class(vllm_config: Any) -> Any:
    """The class that ``worker_cls`` names; None if it is not known yet."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    name = str(vllm_config.parallel_config.worker_cls)
    return resolve_obj_by_qualname(name) if "." in name else None


def show_model(vllm_config: Any, see: Callable[[Any], None]) -> None:
    """Calls ``see(model)`` in this worker's process, with the model it has loaded, when the engine
    queries the workers' connectors. The last ``see`` counts."""
    worker = worker_class(vllm_config)
    if not hasattr(worker, "get_kv_connector_handshake_metadata"):
        return

    def make(plain: Any) -> Any:
        def get_kv_connector_handshake_metadata(self: Any) -> Any:
            model = self.get_model() if hasattr(self, "get_model") else None
            if model is not None:
                see(model)
            return plain(self)

        return get_kv_connector_handshake_metadata

    install("show-model", make, worker, renew=True)


def register_seeds() -> None:
    """The ``vllm.general_plugins`` entry point ``seeds``: acts in workers, if enabled."""
    is_worker = "Worker" in multiprocessing.current_process().name
    if is_worker and os.environ.get(SEEDS) == "1" and not is_refused():
        mend_on_cpu()


def ask_for_seeds(environ: MutableMapping[str, str]) -> None:
    """Enables it in processes started later, unless configured otherwise."""
    environ.setdefault(SEEDS, "1")


def mend_on_cpu() -> None:
    """Mends what vLLM does wrong on a CPU, in this process. No effect elsewhere.

    In a prefill of several steps vLLM 0.32 takes samples back by the offset of a generator, which
    a CPU's has not: the engine ends. Tokens without an adapter get one that others have.
    """
    from kvrecall.engines.vllm.compat.config import is_on_cpu

    if is_on_cpu():
        install("seeds", _without_offsets)
        install_at_import("base-rows", _without_adapters)


def _without_adapters(own: Callable[..., None]) -> Callable[..., None]:
    def apply_shrink(wrapper: Any, y: torch.Tensor, *args: Any) -> None:
        own(wrapper, y, *args)
        y.view(-1, y.shape[-1])[wrapper.token_lora_indices < 0] = 0.0  # what is expanded next

    return apply_shrink


def _without_offsets(own: Callable[..., Any]) -> Callable[..., Any]:
    """``own`` without access to the generators of requests that are still in prefill.

    Their generators go back to where they were after the request's last token: to the seed, or, in
    a prefill that repeats what a preemption has cost, behind what was drawn before. So tokens do
    not depend on how a prefill was chunked.
    """

    states: dict[str, torch.Tensor] = {}  # of generators, after a request's last token

    def bookkeeping(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        prefilling = np.nonzero(runner.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        held = {at: batch.generators.pop(at) for at in prefilling if at in batch.generators}
        for at, generator in held.items():
            if (drawn := states.get(batch.req_ids[at])) is None:
                generator.manual_seed(generator.initial_seed())
            else:
                generator.set_state(drawn)
        try:
            return own(runner, *args, **kwargs)
        finally:
            for ended in states.keys() - runner.requests.keys():
                del states[ended]
            for at, generator in batch.generators.items():
                states[batch.req_ids[at]] = generator.get_state()
            batch.generators.update(held)

    return bookkeeping
