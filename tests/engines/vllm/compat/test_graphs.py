"""For which steps vLLM replays a full graph, and that retrieval is asked and told."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker import dp_utils
from vllm.v1.worker.gpu import dp_utils as dp_utils_v2
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, _is_compatible
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvrecall.engines.vllm.compat import runner

GRAPHS = [
    BatchExecutionDescriptor(CUDAGraphMode.FULL, 4, 4, 1),
    BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 4, None),
]


class User:
    def hinders_graph(self, requests: int) -> bool:
        return requests == 3


@pytest.fixture
def user(monkeypatch: pytest.MonkeyPatch) -> User:
    """The only one."""
    monkeypatch.setattr(runner, "_graph_users", weakref.WeakSet())
    monkeypatch.setattr(runner, "_last_is_graph", False)
    monkeypatch.setattr(runner, "install", lambda *_: None)
    made = User()
    runner.follow_graphs(SimpleNamespace(), made)
    return made


def told() -> bool:
    """What the builder of the step's metadata is told."""
    group = SimpleNamespace(layer_names=["layer"])
    of = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[group]))
    none = np.zeros((1, 1), dtype=np.int32)
    runner._show(of, [runner.BatchBlocks(none, none[0], none[0])])
    blocks = runner.take_batch_blocks("layer")
    assert blocks is not None
    return blocks.is_graph


@pytest.mark.parametrize(("requests", "graph"), [(2, True), (3, False)])
def test_v2_replays_none_that_is_hindered(user: User, requests: int, graph: bool) -> None:
    """By vLLM's own choice among graphs. The number of tokens by which ranks agree is none."""
    asked: list[Any] = []

    def dispatch(reqs: int, tokens: int, uniform: Any, **more: Any) -> Any:
        asked.append(uniform)
        most = more["max_query_len"]
        fits = [one for one in GRAPHS if _is_compatible(one, reqs, tokens, uniform, 0, most, 1)]
        return fits[0]

    manager = SimpleNamespace(dispatch=dispatch)
    patched = runner._dispatching(dispatch_cg_and_sync_dp)
    found, _ = patched(manager, requests, requests, 1, 1, 0, max_query_len=1, uniform_decode=True)
    assert (found.cg_mode is CUDAGraphMode.FULL) is graph is told()
    assert asked == [1 if graph else None]


@pytest.mark.parametrize(
    ("requests", "forced", "graph"), [(2, None, True), (3, None, False), (3, True, True)]
)
def test_v1_replays_none_that_is_hindered(
    user: User, requests: int, forced: bool | None, graph: bool
) -> None:
    """Of dummy runs, which say what they are, it captures what it wants to."""

    def plain(_: Any, *, num_reqs: int, force_uniform_decode: bool | None = None) -> Any:
        uniform = force_uniform_decode in (None, True)
        return CUDAGraphMode.FULL if uniform else CUDAGraphMode.PIECEWISE, "batch"

    patched = runner._determining(plain)
    given = {} if forced is None else {"force_uniform_decode": forced}
    assert patched(None, num_reqs=requests, **given)[1] == "batch"
    assert told() is graph


def mode_by_v2(rank: int, requests: int) -> Any:
    """What a rank of two chooses for so many requests with a token each."""

    def dispatch(reqs: int, tokens: int, uniform: Any, **more: Any) -> Any:
        rest = uniform, 0, more["max_query_len"], 1
        return next(one for one in GRAPHS if _is_compatible(one, reqs, tokens, *rest))

    manager = SimpleNamespace(dispatch=dispatch)
    patched = runner._dispatching(dispatch_cg_and_sync_dp)
    return patched(manager, requests, requests, 1, 2, rank, max_query_len=1)[0].cg_mode


def mode_by_v1(rank: int, requests: int) -> Any:
    def dispatch(uniform_decode: bool, valid_modes: Any, **_: Any) -> Any:
        is_full = uniform_decode and CUDAGraphMode.FULL in (valid_modes or [*CUDAGraphMode])
        return CUDAGraphMode.FULL if is_full else CUDAGraphMode.PIECEWISE, BatchDescriptor(4)

    parallel = SimpleNamespace(
        data_parallel_size=2,
        data_parallel_rank=rank,
        disable_nccl_for_dp_synchronization=True,
        num_ubatches=1,
    )
    metrics = SimpleNamespace(cudagraph_metrics=False)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(parallel_config=parallel, observability_config=metrics),
        parallel_config=parallel,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        input_batch=SimpleNamespace(lora_id_to_lora_request={}),
        cudagraph_dispatcher=SimpleNamespace(dispatch=dispatch),
        uniform_decode_query_len=1,
        _is_uniform_decode=GPUModelRunner._is_uniform_decode,
    )
    given: dict[str, Any] = {"num_tokens": requests, "num_reqs": requests}
    given |= {"num_scheduled_tokens_np": np.ones(requests), "max_num_scheduled_tokens": 1}
    patched = runner._determining(GPUModelRunner._determine_batch_execution_and_padding)
    return patched(engine, **given, allow_microbatching=False)[0]


@pytest.mark.parametrize("choose", [mode_by_v1, mode_by_v2])
@pytest.mark.parametrize("requests", [(2, 2), (2, 3), (3, 2)])
def test_what_one_rank_hinders_no_rank_replays(
    user: User,
    choose: Callable[[int, int], Any],
    requests: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By vLLM's own agreement of data-parallel ranks, after which each chooses again."""
    here, store = threading.local(), dist.HashStore()
    monkeypatch.setattr(dist, "all_reduce", lambda one, group: group.allreduce([one]).wait())
    for module in (dp_utils, dp_utils_v2):
        monkeypatch.setattr(module, "get_dp_group", lambda: here.group)

    def rank(at: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        gloo = dist.ProcessGroupGloo(store, at, 2, options)
        here.group = SimpleNamespace(cpu_group=gloo, device_group=gloo, device="cpu")
        return choose(at, requests[at])

    with ThreadPoolExecutor(2) as ranks:
        found = list(ranks.map(rank, range(2)))
    wanted = CUDAGraphMode.PIECEWISE if 3 in requests else CUDAGraphMode.FULL
    assert found == [wanted] * 2
    assert told() == (3 not in requests)
