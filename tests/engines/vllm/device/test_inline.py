"""Copies on the CPU."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvrecall.engines.vllm.device import inline
from kvrecall.engines.vllm.device.base import Batch


def test_a_thread_without_a_processor_holds_no_copy_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large batch is copied by those threads that run, each part once."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    stream = inline.InlineStream()
    source = torch.randint(256, (64, 128 << 10), dtype=torch.uint8)
    target = torch.zeros_like(source)
    nbytes = source.shape[1]
    places = np.arange(len(source)) * nbytes
    batch = Batch(
        source.data_ptr() + places, target.data_ptr() + places, np.full(len(source), nbytes)
    )
    assert batch.nbytes > inline._WORTH_SHARING
    gate = threading.Event()
    busy = [stream._team.submit(gate.wait, 30.0) for _ in range(2)]
    stream.copy(batch)
    assert not any(one.done() for one in busy)
    assert torch.equal(source, target)
    gate.set()
    target.zero_()
    stream.copy(batch)
    assert torch.equal(source, target)
