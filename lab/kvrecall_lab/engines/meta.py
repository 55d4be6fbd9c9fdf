"""PyTorch's ``meta`` device, which has no memory: operations and waits are counted on it. What
reads a tensor back there cannot run, and every operation is seen. For benchmarks and tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvrecall.attention.kernels import device as kernels
from kvrecall.engines.vllm import device as devices
from kvrecall.engines.vllm.device.base import Event
from kvrecall.engines.vllm.device.inline import InlineDevice, Moment

META = torch.device("meta")
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "_reshape_alias", "lift_fresh"}
"""Operations that start nothing, beside views."""


@dataclass(slots=True)
class Operations:
    """``device``: names of the operations a device is given, in order; ``waits``: of those for
    which the host waits until the device is done."""

    device: list[str] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, operations: Operations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if _is(one)]
        there = any(one.is_meta for one in given)
        if there and (name in _READS or _copies_back(name, given, kwargs)):
            self._operations.waits.append(name)
        if there and name.startswith("index") and any(_waits_as_index(one) for one in given[1:]):
            self._operations.waits.append(name)
        result = func(*args, **kwargs)
        sent = _is(result) and result.is_meta and not there and bool(given)
        if sent and not kwargs.get("non_blocking"):
            self._operations.waits.append(name)
        if (there or sent) and not func.is_view and name not in _FREE:
            self._operations.device.append(name)
        return result


_READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}


def _is(one: object) -> bool:
    return isinstance(one, torch.Tensor)


def _waits_as_index(one: torch.Tensor) -> bool:
    """A mask is counted first; an index on the host is copied from memory that is not locked."""
    return one.dtype in (torch.bool, torch.uint8) or not one.is_meta


def _copies_back(name: str, given: list[torch.Tensor], kwargs: Any) -> bool:
    if name == "_to_copy":
        return str(kwargs.get("device", "meta")) != "meta"
    return name == "copy_" and not given[0].is_meta


class MetaDevice(InlineDevice):
    """A device without memory, behind locked host memory."""

    in_step = False

    def send(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(META, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return torch.zeros(values.clone().shape, dtype=values.dtype), Moment()


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels launched within, in their order."""
    names: list[str] = []
    launch = kernels._launch

    def note(name: str, *args: Any, **sizes: Any) -> None:
        names.append(name)
        launch(name, *args, **sizes)

    with patch.object(kernels, "_launch", note):
        yield names


@contextmanager
def counting() -> Iterator[Operations]:
    """Counts what runs within on ``META``."""
    operations = Operations()
    devices.FORMS["meta"] = MetaDevice
    devices.device_of.cache_clear()
    try:
        with launches() as operations.device, _Mode(operations):
            yield operations
    finally:
        del devices.FORMS["meta"]
        devices.device_of.cache_clear()
