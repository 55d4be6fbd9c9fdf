"""For which steps vLLM replays a full graph, and that retrieval is asked and told."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, _is_compatible
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp

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
