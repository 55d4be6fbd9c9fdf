"""What an accelerator is sent, with host memory in the place of its own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvrecall.engines.vllm.device import accelerator, driver
from kvrecall.engines.vllm.device.accelerator import AcceleratorDevice

NONE = np.arange(3)[np.zeros(3, dtype=bool)]
SENT = {
    "where a mask chose nothing": torch.from_numpy(NONE),
    "one number for many": torch.from_numpy(np.broadcast_to(np.int64(7), (1,)).copy()).expand(4),
    "one number of one": torch.tensor(7).expand(1),
    "a scalar": torch.tensor(7.5),
    "columns": torch.arange(12, dtype=torch.int32).view(3, 4).T,
    "the end of others": torch.arange(9)[5:],
}


@pytest.mark.parametrize("name", SENT)
def test_every_form_of_numbers_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's step sends what numpy and torch gave it: an H200's engine ended at the first
    store that had no block to digest anew."""
    monkeypatch.setattr(driver, "pinned", lambda count: torch.empty(count, dtype=torch.uint8))
    device, values = AcceleratorDevice(torch.device("cpu")), SENT[name]
    sent = device.send(values)
    into = torch.zeros_like(values, memory_format=torch.contiguous_format)
    assert device.send(values, into) is into
    for one in (sent, into):
        assert torch.equal(one, values)
        assert (one.dtype, one.shape) == (values.dtype, values.shape)


def test_the_ring_is_written_again_once_the_device_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest part, and no later one, is waited for."""
    monkeypatch.setattr(driver, "pinned", lambda count: torch.empty(count, dtype=torch.uint8))
    monkeypatch.setattr(accelerator, "_PART_BYTES", 128)
    device, said = AcceleratorDevice(torch.device("cpu")), list[str]()

    def record() -> object:
        number = sum(word.startswith("read") for word in said)
        said.append(f"read {number}")
        return SimpleNamespace(wait=lambda: said.append(f"wait {number}"))

    monkeypatch.setattr(device, "current", lambda: SimpleNamespace(record=record))
    for _ in range(12):
        device.send(torch.zeros(64, dtype=torch.uint8))
    assert said == ["read 0", "read 1", "read 2", "read 3", "wait 0", "read 4", "wait 1"]
