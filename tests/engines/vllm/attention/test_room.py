"""What retrieval takes of a GPU's memory in a life is left for it when vLLM plans the KV cache."""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_worker import Worker

from kvrecall.attention.settings import RetrievalSettings
from kvrecall.engines.vllm.attention import room
from kvrecall.engines.vllm.attention.activity import Activity
from kvrecall.engines.vllm.attention.base import KernelShape
from kvrecall.engines.vllm.attention.copies import KeptLayer, copied
from kvrecall.engines.vllm.attention.offloaded import OffloadedSequence, Records
from kvrecall.engines.vllm.attention.step import OffloadedRow
from kvrecall.engines.vllm.compat import runner
from kvrecall_lab.engines.counting import MetaDevice, SparseSteps, counting

GIB, LAYERS, LONGEST, MOST = 1 << 30, 6, 131_072, 4
SHAPE = KernelShape(32, 8, 128, 128, torch.bfloat16, "")
SETTINGS = RetrievalSettings(gate=False)


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that tensors without memory had at one time, of those made within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_meta and not func.is_view:
            storage = result.untyped_storage()
            self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self._made = {at: one for at, one in self._made.items() if not one[0].expired()}
            self.nbytes = max(self.nbytes, sum(nbytes for _, nbytes in self._made.values()))
        return result


def engine(longest: int, connector: str, **pool: Any) -> Any:
    """A worker with what it knows of its engine."""
    spec = FullAttentionSpec(128, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    specs = {f"model.layers.{at}.self_attn.attn": spec for at in range(LAYERS)}
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=longest,
                hf_text_config=SimpleNamespace(),
                get_num_attention_heads=lambda _: 32,
                get_total_num_kv_heads=lambda: 8,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=MOST),
            compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8]),
            kv_transfer_config=SimpleNamespace(
                kv_connector=connector, kv_connector_extra_config=pool
            ),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
            speculative_config=None,
        ),
        get_kv_cache_spec=lambda: specs,
    )


@pytest.mark.parametrize(
    ("longest", "connector", "pool"),
    [
        (LONGEST, "RecallConnector", {"host_size": "64GiB"}),
        (LONGEST, "RecallConnector", {"host_size": "1GiB"}),
        (LONGEST, "RecallConnector", {"backend": "service"}),
        (65_536, "RecallConnector", {}),
        (LONGEST, "", {}),
    ],
)
def test_a_life_takes_no_more_than_was_left(
    longest: int, connector: str, pool: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of digests of all blocks, sequences off the device, up to all of them and up to the pool's
    size, steps of growing batches, and copies for dense layers; and all but a twentieth of it is
    needed."""
    monkeypatch.setattr(room, "active_settings", lambda: SETTINGS)
    monkeypatch.setattr(Worker, "determine_available_memory", lambda self: 8 * GIB)
    monkeypatch.setattr(MetaDevice, "move", lambda *_: None)
    runner.leave_room(room.cache_bytes)
    worker = engine(longest, connector, **pool)
    specs = worker.get_kv_cache_spec()
    kv = sum(spec.page_size_bytes for spec in specs.values())
    blocks, rest = divmod(Worker.determine_available_memory(worker), kv)
    assert not rest
    sparse = LAYERS - SETTINGS.dense_layers
    limits = room.most_of(worker.vllm_config, SETTINGS, specs)
    most = limits.left_of(blocks)
    is_left = connector != "" and longest == LONGEST
    assert (most > 0) == is_left
    assert most <= MOST * LONGEST // 128
    if pool.get("host_size") == "1GiB":
        assert most == GIB // kv
    row = OffloadedRow(sequence(), slice(0, 1), torch.zeros(1 << 10).int(), longest, False)
    with counting(), Peak() as peak:
        steps = SparseSteps(SHAPE, SETTINGS, sparse, blocks, limits)
        dense = [
            KeptLayer(str(at), limits.pages_of, Activity()) for at in range(SETTINGS.dense_layers)
        ]
        for lengths in ([40_000], [longest] * (MOST // 2), [longest] * MOST):
            middle = sum(-(-tokens // 128) - 65 for tokens in lengths)
            steps.run(*lengths, offloaded=is_left and middle <= most)
        for one in dense if is_left else ():
            one.open(steps.cache)
            copied("0", Activity(), row, steps.cache)
    left, of_vllm = 8 * GIB - blocks * kv, [steps.cache, *chain(*steps._kept.values())]
    assert 0.95 * left < peak.nbytes - sum(one.nbytes for one in of_vllm) <= left
    worker.cache_config.kv_cache_memory_bytes = 5 * GIB
    assert Worker.determine_available_memory(worker) == 8 * GIB, "the user has set a size"


def sequence() -> OffloadedSequence:
    records = Records(np.zeros(0, dtype=np.uint8), {str(at): 0 for at in range(LAYERS)})
    return OffloadedSequence("one", 0, np.empty(0, np.int64), torch.empty(0).int(), records)
